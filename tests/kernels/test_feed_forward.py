"""The MLP in FP8: against float64, against the same in plain PyTorch, and where its gradients go."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checks import DEVICE, assert_as_exact_as_pytorch, error, random

from kernels.fp8.quantize import quantize_reference
from kernels.fp8.scales import gradient_scales_reference, mlp_scales_reference
from kernels.fp8.weights import fp8_weights, fp8_weights_reference
from kernels.gradients import Gradient
from kernels.mlp import feed_forward
from kernels.mlp.feed_forward import feed_forward_fp8, feed_forward_reference, feed_forward_weights
from kernels.mlp.relu_squared import relu_squared_backward_fp8_reference, relu_squared_fp8_reference

pytestmark = pytest.mark.usefixtures("large_tiles")
# What the kernels of the FP8 form are replaced by, so that the same sequence runs in plain PyTorch.
REFERENCES = {
    "quantize": quantize_reference, "fp8_weights": fp8_weights_reference, "mlp_scales": mlp_scales_reference,
    "gradient_scales": gradient_scales_reference, "relu_squared_fp8": relu_squared_fp8_reference,
    "relu_squared_backward_fp8": relu_squared_backward_fp8_reference}


def in_fp8(x, w_in, w_out):
    return feed_forward_fp8(x, w_in, w_out, None, None)


def both_ways(function, x, w_in, w_out, grad) -> list[torch.Tensor]:
    """The result, and the gradients of x and of the weights."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, w_in, w_out)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def in_plain_pytorch(*inputs) -> list[torch.Tensor]:
    """As `both_ways(in_fp8, …)`, by the kernels' references."""
    with pytest.MonkeyPatch.context() as patch:
        for name, reference in REFERENCES.items():
            patch.setattr(feed_forward, name, reference)
        return both_ways(in_fp8, *inputs)


def mlp_inputs(tokens: int, width: int, hidden: int) -> list[torch.Tensor]:
    """Normed tokens, weights of usual sizes and a gradient whose tokens differ by up to 2 ** 6."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    x = F.rms_norm(random(tokens, width, dtype=torch.float32), (width,))
    sizes = torch.logspace(-6, 0, tokens, 2, device=DEVICE)[:, None]
    grad = random(tokens, width, dtype=torch.float32) * sizes
    weights = [random(hidden, width, dtype=torch.float32) * size for size in (0.02, 0.05)]
    return [tensor.to(dtype) for tensor in (x, *weights, grad)]


def test_as_near_to_full_precision_as_its_reference():
    """And near; no scale of the gradient or of a weight is too small or too large."""
    inputs = mlp_inputs(144, 64, 96)
    exact = both_ways(feed_forward_reference, *[tensor.double() for tensor in inputs])
    results = both_ways(in_fp8, *inputs)
    slack = 0.1 if DEVICE.type == "cpu" else 0       # The interpreter's rounding is poor.
    for ours, plain, wanted in zip(results, in_plain_pytorch(*inputs), exact, strict=True):
        assert error(plain, wanted) < 0.1
        assert_as_exact_as_pytorch(ours, plain, wanted, slack)
    x, w_in, w_out, grad = inputs
    for power in (-40, 20):
        with_this_grad = both_ways(in_fp8, x, w_in, w_out, grad * 2.0**power)
        for scaled, once in zip(with_this_grad[1:], results[1:], strict=True):
            assert error(scaled, once.double() * 2.0**power) < 1e-3
        out = both_ways(in_fp8, x, w_in, w_out * 2.0**power, grad)[0]
        assert error(out, results[0].double() * 2.0**power) < 1e-3


def test_zeros_give_zeros_and_nothing_infinite():
    x, w_in, w_out, grad = mlp_inputs(48, 64, 96)
    nothing_out, nothing_in = torch.zeros_like(w_out), torch.zeros_like(w_in)
    for tensor in both_ways(in_fp8, x, w_in, nothing_out, grad)[:3]:
        assert tensor.eq(0).all()
    for tensor in (*both_ways(in_fp8, x, w_in, w_out, torch.zeros_like(grad))[1:],
                   *both_ways(in_fp8, x, nothing_in, w_out, grad)):
        assert tensor.isfinite().all()


def test_gradients_in_fp8_are_off_by_what_was_measured():
    """W_in's 8.1% and W_out's 5.8%; with bfloat16 gradients of FP8 activations it would be 5.3% and 4.4%."""
    inputs = mlp_inputs(512, 64, 96)
    exact = both_ways(feed_forward_reference, *[tensor.double() for tensor in inputs])
    plain = in_plain_pytorch(*inputs)
    for limit, ours, wanted in zip((0.088, 0.1, 0.075), plain[1:], exact[1:], strict=True):
        assert error(ours, wanted) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_go_where_they_are_told(dtype):
    """Returned, added to a buffer or written over it: the same bits, as autograd adds them too.

    But in float32 a GPU multiplies by the scale and adds at once, and rounds once.
    """
    same = torch.equal
    if dtype == torch.float32 and torch.cuda.is_available():
        same = partial(torch.allclose, rtol=1e-6, atol=1e-7)
    x, *weights, grad = (tensor.to(dtype) for tensor in mlp_inputs(48, 64, 96))
    w_in, w_out = (weight.requires_grad_() for weight in weights)
    first = [random(*w_in.shape).to(dtype) for _ in range(2)]
    results = []
    for accumulate in (None, True, False):
        w_in.grad, w_out.grad = (tensor.clone() for tensor in first)
        buffers = w_in.grad, w_out.grad
        grads = None if accumulate is None else tuple(Gradient(buffer, accumulate) for buffer in buffers)
        leaf = x.clone().requires_grad_()
        feed_forward_fp8(leaf, w_in, w_out, grads, None).backward(grad)
        assert grads is None or w_in.grad is buffers[0] and w_out.grad is buffers[1]
        results.append((leaf.grad, w_in.grad, w_out.grad))
    by_autograd, added, written = results
    assert all(map(same, by_autograd, added)) and torch.equal(written[0], added[0])
    for start, total, alone in zip(first, added[1:], written[1:], strict=True):
        assert same(start + alone, total) and alone.any()


def test_weights_quantised_beforehand_give_the_same_bits():
    x, w_in, w_out, grad = mlp_inputs(48, 32, 64)
    fp8 = feed_forward_weights(*fp8_weights((w_in, w_out)), 32)
    made = both_ways(lambda *args: feed_forward_fp8(*args, None, fp8), x, w_in, w_out, grad)
    assert all(map(torch.equal, made, both_ways(in_fp8, x, w_in, w_out, grad)))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no NaN in FP8")
@pytest.mark.parametrize("which, bad", [
    ("x", float("nan")),                    # A normed row holds no infinity: its norm makes it NaN.
    *((which, bad) for which in ("w_in", "w_out", "grad") for bad in (float("nan"), float("inf")))])
def test_nan_and_inf_reach_the_weight_gradients(which, bad):
    inputs = dict(zip(("x", "w_in", "w_out", "grad"), mlp_inputs(48, 64, 96)))
    inputs[which][3, 5] = bad
    results = both_ways(in_fp8, *inputs.values())
    assert not all(tensor.isfinite().all() for tensor in results[2:])
