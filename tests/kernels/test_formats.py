"""The order of pairs, and rounding to FP8."""
import pytest
import torch
from checks import DEVICE, random

from kernels.fp8.formats import E4M3, E5M2, normed_scale, paired, round_to_fp8


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


def test_no_element_of_a_normed_row_saturates():
    x = torch.zeros(1, 48, device=DEVICE)
    x[0, 7] = 1e4
    normed = torch.nn.functional.rms_norm(x, (48,))
    assert round_to_fp8(normed, normed_scale(48), E4M3).float().max() == 448
    assert (normed / normed_scale(48)).max() <= 448 * (1 + 1e-6)
