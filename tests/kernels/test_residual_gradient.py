"""The gradient of a residual stream's summands and scales."""
import pytest
import torch
from checks import DEVICE, error, random, refused

from kernels.mlp.residual import mlp_input_reference
from kernels.mlp.residual_fp8 import sum_and_norm_fp8
from kernels.mlp.residual_gradient import CONFIGS, residual_backward


@pytest.mark.parametrize("tuned, c", [*((tuned, 1.3) for tuned in CONFIGS), (None, -0.7), (None, 0.0)])
def test_it_is_the_gradient_that_autograd_finds(tuned, c):
    """In rows that no whole number of chunks fills. If c is 0, c y says nothing of y: the gradients are
    finite, and as if y were 0."""
    x, out_grad, norm_grad = (random(16, 528) for _ in range(3))
    scales = torch.tensor([0.9, c], device=DEVICE)
    out, _, _, rms = sum_and_norm_fp8((x, 3 * x), scales)
    found, scale_grads = residual_backward((out_grad,), (norm_grad,), out, rms, scales, tuned)
    if not c:
        torch.testing.assert_close(found, (0.9 * norm_grad / rms[:, None]).type_as(x))
        assert scale_grads.eq(0).all()
        return
    leaves = [tensor.double().requires_grad_() for tensor in (x, 3 * x, scales)]
    outs = mlp_input_reference(leaves[:2], leaves[2])
    grads = out_grad.double(), norm_grad.double()
    wanted, same, wanted_scale_grads = torch.autograd.grad(outs, leaves, grads)
    tolerance = 1e-6 if DEVICE.type == "cpu" else 1e-2
    assert torch.equal(wanted, same) and error(found, wanted) < tolerance
    assert error(scale_grads, wanted_scale_grads) < 100 * tolerance


def test_it_refuses_what_it_cannot_do():
    x, rms, two = random(6, 8), torch.ones(6, device=DEVICE), torch.ones(2, device=DEVICE)
    refused(("x", lambda: residual_backward((x,), (x,), x.double(), rms)),
            ("x", lambda: residual_backward((x,), (x,), x.T, rms)),
            (r"out_grads\[0\]", lambda: residual_backward((x[:5], x), (x,), x, rms)),
            (r"norm_grads\[1\]", lambda: residual_backward((x,), (x, x.double()), x, rms)),
            ("scales", lambda: residual_backward((x,), (x,), x, rms, two[:1])),
            ("rms", lambda: residual_backward((x,), (x,), x, torch.stack([rms, rms], 1)[:, 0])))
    assert residual_backward((x[:0],), (x[:0],), x[:0], rms[:0], two)[0].shape == (0, 8)
