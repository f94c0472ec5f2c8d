"""The linear layer with a learned scale: its formulas, and where its gradients go."""
import pytest
import torch
from checks import DEVICE, DTYPES, random

from kernels.attention.output import (
    add_scaled,
    add_scaled_reference,
    scaled_linear,
    scaled_linear_reference,
    weight_gradients,
)
from kernels.gradients import Gradient


@pytest.mark.parametrize("count", [0, 3, 8])
@pytest.mark.parametrize("into", [False, True])
def test_scaled_linear_is_its_reference(count, into):
    """Also where x has other readers, a result has none, or a gradient is expanded or somebody else's."""
    dtype = torch.float32 if DEVICE.type == "cuda" else torch.float64  # of the kernels' arithmetic, or exact
    x, weight = (random(n, 8).to(dtype).requires_grad_() for n in (5, 20))
    scales = [torch.tensor(s, dtype=dtype, device=DEVICE, requires_grad=True) for s in (0.5, -2.0)]
    rows, channels_grad, results = (slice(12), slice(-8, None)), random(5, count).to(dtype), []
    kept = channels_grad.clone()
    for function in (scaled_linear_reference, scaled_linear):
        weight.grad, stream = torch.ones_like(weight), 1 * x  # three layers read it, and the residual
        (qkv, channels), (other, _), (unread, alone) = (
            function(stream, weight[r], s, count, Gradient(weight.grad[r]) if into else None)
            for r, s in zip(rows + rows[1:], scales + scales[1:]))
        outs = stream, qkv, channels, other, alone
        grads = (torch.ones_like(stream), qkv.new_ones(()).expand_as(qkv), channels_grad,
                 other.detach().sin(), channels_grad)
        torch.autograd.backward(outs, grads)
        results.append([*outs, x.grad, weight.grad, *(s.grad for s in scales)])
        x.grad = weight.grad = scales[0].grad = scales[1].grad = None
        assert grads[0].eq(1).all() and torch.equal(channels_grad, kept)
    for plain, ours in zip(*results):
        torch.testing.assert_close(ours, plain)


def test_the_first_gradient_is_written_and_later_ones_are_added():
    """Writing over anything is adding to zeros; and what autograd gets without a buffer is the same."""
    x, weight, scale = random(6, 8), random(20, 8), torch.tensor(0.7, device=DEVICE)
    written, added = torch.full_like(weight, torch.nan), torch.zeros_like(weight)
    found = []
    for grad in (Gradient(written, accumulate=False), Gradient(added, accumulate=True), None):
        leaves = [leaf.detach().requires_grad_() for leaf in (x, weight, scale)]
        y, _ = scaled_linear(*leaves, 0, grad)
        found.append(torch.autograd.grad(y, leaves, y.detach().sin(), allow_unused=True))
    assert found[0][1] is None and found[1][1] is None
    assert torch.equal(written, added) and torch.equal(written, found[2][1])
    assert all(torch.equal(a[i], b[i]) for a, b in zip(found, found[1:]) for i in (0, 2))
    once = written.clone()
    weight_gradients(Gradient(written), once, weight, torch.ones_like(scale))
    torch.testing.assert_close(written, 2 * once)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (130, 70), (96, 768)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_scaled_weight(shape, dtype, accumulate):
    """Added in place or written, and the scale's summed from a row on."""
    out, scaled_grad, weight = (random(*shape, dtype=dtype) for _ in range(3))
    scale, first = torch.tensor(1.7, device=DEVICE), shape[0] // 3
    exact = (out.double() if accumulate else 0) + scale.double() * scaled_grad.double()
    ours, plain = out.clone(), out.clone()
    sums = [f(x, scaled_grad, weight, scale, first, accumulate)
            for f, x in ((add_scaled, ours), (add_scaled_reference, plain))]
    ours_error, plain_error = ((x.double() - exact).norm() / exact.norm() for x in (ours, plain))
    assert ours.dtype == dtype and ours_error <= 2 * plain_error + 1e-7
    assert abs(sums[0] - sums[1]) <= 1e-5 * (weight * scaled_grad).float().norm() + 1e-6
    again = out.clone()
    assert torch.equal(add_scaled(again, scaled_grad, weight, scale, first, accumulate), sums[0])
    assert torch.equal(again, ours)
    whole = add_scaled(out.clone(), scaled_grad, weight, scale, 0, accumulate)
    assert first == 0 or not torch.equal(sums[0], whole)
    with pytest.raises(ValueError, match="scaled_grad must be"):
        add_scaled(out, scaled_grad[:-1], weight, scale)
