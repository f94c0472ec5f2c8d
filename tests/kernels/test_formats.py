"""The order of pairs, and rounding to FP8."""
import pytest
import torch
from checks import DEVICE, random

from kernels.fp8.formats import E4M3, E5M2, paired, round_to_fp8


def test_a_matmul_does_not_depend_on_the_order_of_pairs():
    a, b = random(5, 64, dtype=torch.float64), random(7, 64, dtype=torch.float64)
    assert not torch.equal(paired(a), a)
    order = [16 * group + i + j for group in (0, 1) for i in range(8) for j in (0, 8)]
    assert paired(torch.arange(32)[None]).tolist()[0] == order
    torch.testing.assert_close(paired(a) @ paired(b).T, a @ b.T)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_saturates_and_keeps_nan(dtype):
    limit = torch.finfo(dtype).max
    x = torch.tensor([0.0, 1.0, 3 * limit, -float("inf"), float("nan")], device=DEVICE)
    q = round_to_fp8(x, 2.0, dtype).float()
    assert q[:4].tolist() == [0.0, 0.5, limit, -limit] and q[4].isnan()
