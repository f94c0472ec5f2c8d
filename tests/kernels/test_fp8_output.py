"""Attention's output projection in FP8: its matmul and both gradients, scales from a sample of rows."""
from functools import partial

import pytest
import torch
from checks import DEVICE, assert_as_exact_as_pytorch, error, random, refused

from kernels.attention import fp8_output
from kernels.attention.fp8_output import output_fp8, output_fp8_reference, sample
from kernels.example import in_double
from kernels.fp8.formats import E4M3
from kernels.fp8.quantize import quantize_reference
from kernels.fp8.scales import output_scales_reference
from kernels.fp8.weights import fp8_weights, fp8_weights_reference
from kernels.gradients import Gradient

pytestmark = pytest.mark.usefixtures("large_tiles")
ON_CPU = DEVICE.type == "cpu"
# What the kernels are replaced by, so that the same sequence runs in plain PyTorch.
REFERENCES = {"quantize": quantize_reference, "output_scales": output_scales_reference,
              "fp8_weights": fp8_weights_reference}


def inputs_of(
    n: int, inner: int, width: int, dtype: torch.dtype = torch.bfloat16, learned: float = 0.6,
) -> list[torch.Tensor]:
    """y, weight, scale, and a gradient of the result; rows of y and of the gradient differ by up to 2^6."""
    fall = torch.logspace(-6, 0, n, 2, device=DEVICE)[:, None]
    y, grad = (random(n, columns, dtype=torch.float32) * fall for columns in (inner, width))
    weight = random(width, inner, dtype=torch.float32) * 0.05
    return [y.flip(0).to(dtype), weight.to(dtype), torch.tensor(learned, device=DEVICE), grad.to(dtype)]


def results(function, y, weight, scale, grad) -> list[torch.Tensor]:
    """The result and the gradients of y, weight and scale."""
    leaves = [leaf.detach().requires_grad_() for leaf in (y, weight, scale)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def in_plain_pytorch(*inputs) -> list[torch.Tensor]:
    """As `results(output_fp8, …)`, by the kernels' references."""
    with pytest.MonkeyPatch.context() as patch:
        for name, reference in REFERENCES.items():
            patch.setattr(fp8_output, name, reference)
        return results(output_fp8, *inputs)


# ---- Numbers -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n, inner, width, learned", [
    (16, 16, 16, 0.6), (80, 48, 32, -0.7), (144, 64, 96, 3.0)])
def test_output_fp8_is_as_near_to_full_precision_as_plain_fp8(n, inner, width, learned, dtype):
    """And near it; and four times the gradient brings four times the gradients."""
    inputs = inputs_of(n, inner, width, dtype, learned)
    *others, grad = inputs
    exact = results(output_fp8_reference, *in_double(tuple(inputs)))
    plain, ours = in_plain_pytorch(*inputs), results(output_fp8, *inputs)
    larger = results(output_fp8, *others, 4 * grad)
    slack = 0.1 if ON_CPU else 1e-3  # the interpreter truncates
    for x, like in zip(ours, (grad, *others), strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape
    for fused, theirs, right, four in zip(ours[:3], plain, exact, larger):
        assert error(theirs, right) < 0.1
        assert_as_exact_as_pytorch(fused, theirs, right, slack)
        assert error(four, fused.double() * (1 if fused is ours[0] else 4)) < 1e-2
    # The scale's gradient is a sum in which much cancels.
    terms = (others[1].double().norm() * exact[2].norm() / abs(learned)).item()
    assert abs(plain[3] - exact[3]) < 0.02 * terms and abs(ours[3] - exact[3]) < (0.02 + slack / 4) * terms
    assert abs(larger[3] - 4 * ours[3]) < 0.01 * terms


def test_output_fp8_of_zeros_and_by_a_scale_of_zero_is_zero():
    """And nothing is infinite. A scale of zero still gets a gradient, or it could never leave zero."""
    y, weight, scale, grad = inputs_of(48, 32, 64)
    for i in range(4):
        inputs = [y, weight, scale, grad]
        inputs[i] = torch.zeros_like(inputs[i])
        out, *grads = results(output_fp8, *inputs)
        assert all(x.isfinite().all() for x in (out, *grads))
        assert out.any() == (i == 3) and [bool(x.any()) for x in grads] == [i == 0, i == 1, i == 2]


def test_an_expanded_gradient_is_one_in_full():
    *inputs, grad = inputs_of(48, 32, 64)
    one = grad[:1, :1]
    expanded, full = (results(output_fp8, *inputs, x) for x in (one.expand(48, 64), one.repeat(48, 64)))
    assert all(map(torch.equal, expanded, full))


# ---- Scales from a sample of rows --------------------------------------------------------------------------

@pytest.mark.parametrize("n, count, step", [
    (98304, 4096, 24), (49152, 4096, 12), (16400, 4100, 4), (8176, 8176, 1), (16, 16, 1)])
def test_some_4096_rows_at_equal_distances_are_sampled(n, count, step):
    assert sample(torch.arange(n)[:, None])[:, 0].tolist() == list(range(0, n, step)) and n <= count * step


def test_an_element_that_no_sampled_row_bounds_saturates(monkeypatch):
    """In y and in the gradient: the results are those of inputs that were clipped, and no other changes."""
    monkeypatch.setattr(fp8_output, "SAMPLED", 16)
    y, weight, scale, grad = inputs_of(48, 32, 64)  # rows 0, 3, 6, … are sampled
    clipped = []
    for x in (y, grad):
        limit = x[::3].float().norm(dim=1).max()
        x[7, 5], x[8, 2] = 64 * limit, -1e30
        clipped.append(x.float().clamp(-limit, limit))
    found = results(output_fp8, y, weight, scale, grad)
    wanted = results(output_fp8, clipped[0].bfloat16(), weight, scale, clipped[1].bfloat16())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.isfinite().all() and error(ours, theirs.double()) < 0.02  # bf16 rounds what is clipped
    assert torch.equal(found[0][:7], wanted[0][:7]) and torch.equal(found[1][9:], wanted[1][9:])
    y[9, 5] = 64 * y[7, 5]  # sampled: now it sets the scale, and smaller ones are in range
    assert error(results(output_fp8, y, weight, scale, grad)[0][7], (
        y[7].double() @ weight.double().T * scale)) < 0.15


@pytest.mark.parametrize("row", [9, 10])
@pytest.mark.parametrize("which", ["y", "grad"])
def test_a_nan_stays_one(monkeypatch, row, which):
    """A sampled one reaches everything by way of the scale, another one its row and the weight's gradient.

    On a CPU by the references, because the interpreter has no NaN in FP8.
    """
    monkeypatch.setattr(fp8_output, "SAMPLED", 16)
    inputs = inputs_of(48, 32, 64)
    inputs[0 if which == "y" else 3][row, 5] = float("nan")
    run = in_plain_pytorch if ON_CPU else partial(results, output_fp8)
    out, y_grad, weight_grad, scale_grad = run(*inputs)
    bad, good = (out, y_grad) if which == "y" else (y_grad, out)
    sampled = row % 3 == 0
    wrong = bad.isnan().any(1).nonzero().flatten().tolist()
    assert wrong == (list(range(48)) if sampled else [row]) and bad[row].isnan().all()
    assert good.isfinite().all() and weight_grad.isnan().any() and scale_grad.isnan()


# ---- What it reads and leaves ------------------------------------------------------------------------------

@pytest.mark.parametrize("accumulate", [False, True])
def test_output_fp8_fills_its_weights_gradient(accumulate):
    """Autograd is given none, and the other gradients are the same to the bit."""
    y, weight, scale, out_grad = inputs_of(48, 32, 64)
    leaves = [leaf.detach().requires_grad_() for leaf in (y, weight, scale)]

    def gradients(grad):
        return torch.autograd.grad(output_fp8(*leaves, grad), leaves, out_grad, allow_unused=True)

    buffer = torch.ones_like(weight) if accumulate else torch.full_like(weight, torch.nan)
    returned, filled = gradients(None), gradients(Gradient(buffer, accumulate))
    assert filled[1] is None and torch.equal(filled[0], returned[0]) and torch.equal(filled[2], returned[2])
    assert error(buffer, accumulate + returned[1].double()) < torch.finfo(buffer.dtype).eps
    assert accumulate or torch.equal(buffer, returned[1])


def test_a_weight_in_fp8_is_used_as_it_is_given(monkeypatch):
    """Nothing is quantised again, and the weight itself serves the gradient of its scale alone."""
    y, weight, scale, grad = inputs_of(48, 32, 64)
    made, = fp8_weights((weight,))
    expected = results(output_fp8, y, weight, scale, grad)
    monkeypatch.delattr(fp8_output, "fp8_weights")
    found = results(partial(output_fp8, fp8=made), y, torch.full_like(weight, torch.nan), scale, grad)
    assert all(map(torch.equal, found[:3], expected)) and found[3].isnan()
    again = results(partial(output_fp8, fp8=made), y, weight, scale, grad)
    assert all(map(torch.equal, again, expected))


def test_of_y_only_its_transpose_in_fp8_is_kept():
    y, weight, scale, _ = inputs_of(80, 32, 64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output_fp8(y.requires_grad_(), weight, scale)
    of_tokens = [x for x in kept if 80 in x.shape]
    assert [(x.shape, x.dtype) for x in of_tokens] == [((32, 80), E4M3)]
    assert sum(x.numel() for x in kept) == 32 * 80 + 2 * weight.numel() + 3  # both weights and three scales


def test_output_fp8_refuses_what_it_cannot_do():
    y, weight, scale, _ = inputs_of(48, 32, 64)
    refused(("y", lambda: output_fp8(y[:40], weight, scale)),
            ("y", lambda: output_fp8(y[:0], weight, scale)),
            ("y", lambda: output_fp8(y[:, :24], weight[:, :24], scale)),
            ("y", lambda: output_fp8(y.view(48, 2, 16), weight, scale)),
            ("y", lambda: output_fp8(random(32, 48).T, weight, scale)),
            ("weight", lambda: output_fp8(y, weight[:40], scale)),
            ("weight", lambda: output_fp8(y, weight[:, :16], scale)),
            ("weight", lambda: output_fp8(y, weight.float(), scale)),
            ("scale", lambda: output_fp8(y, weight, scale.double())),
            ("scale", lambda: output_fp8(y, weight, scale[None])))
