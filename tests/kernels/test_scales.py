"""Scales from row norms."""
import pytest
import torch
from checks import DEVICE, random, refused

from kernels.fp8.scales import (
    CONFIGS,
    gradient_scales,
    gradient_scales_reference,
    mlp_scales,
    mlp_scales_reference,
    qkv_scales,
    qkv_scales_reference,
)

ONE, BOUND = torch.tensor(0.7, device=DEVICE), torch.tensor(3.0, device=DEVICE)


@pytest.mark.parametrize("tuned", CONFIGS)
@pytest.mark.parametrize("rows, width", [(1, 1), (11, 40), (70, 33)])
def test_scales_are_their_references_whatever_the_matrix_holds(rows, width, tuned):
    """Of zeros, of slices of rows, and of NaN and infinities of either sign. No gradient's scale is zero."""
    for bad in (None, 0.0, float("inf"), float("nan"), -float("inf"), -float("nan")):
        w_in, w_out = random(rows, width + 3)[:, :width] * 0.02, random(rows, width) * 1e3
        if bad is not None:
            w_in[rows // 2, -1] = bad
            w_out *= bad == 0.0          # all zero, or zero times what is not finite
        norms = [x.float().norm(dim=1).amax() for x in (w_in, w_out)]
        pairs = [(gradient_scales(x, ONE, BOUND, tuned), gradient_scales_reference(x, ONE, BOUND))
                 for x in (w_in, w_out)]
        pairs += [(mlp_scales(*norms, width), mlp_scales_reference(*norms, width))]
        pairs += [(qkv_scales(x, ONE, 0.3, 0.4), qkv_scales_reference(x, ONE, 0.3, 0.4)) for x in norms]
        for ours, theirs in pairs:
            assert all(scale.shape == () and scale.data_ptr() % 16 == 0 for scale in ours)
            found, wanted = torch.stack(ours), torch.stack(theirs)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0, equal_nan=True)
        assert all(scale != 0 for ours, _ in pairs[:2] for scale in ours)


def test_gradient_scales_refuse_what_they_cannot_do():
    x = random(6, 8)
    refused(("x", lambda: gradient_scales(x.T, ONE, BOUND)),
            ("x", lambda: gradient_scales(x[:0], ONE, BOUND)))
