"""Q, K, V in FP8: the matmul, both of its gradients, and the gradient of Q, K, V that a kernel quantises."""
from dataclasses import replace

import pytest
import torch
from checks import DEVICE, assert_as_exact_as_pytorch, error, random, same_bits

import kernels.attention.fp8_qkv
from kernels.attention.example_inputs import HeadInputs
from kernels.attention.fp8_qkv import QKV_GRADIENT_SCALE, qkv_fp8, qkv_fp8_reference
from kernels.attention.inputs import Positions, Projection, QKVWeight, ValueRows
from kernels.attention.qkv import qkv_heads_reference
from kernels.attention.qkv_kernels import CONFIGS, FP8_CONFIGS, heads_backward
from kernels.attention.value_gate import value_mix
from kernels.example import in_double
from kernels.fp8.formats import E5M2, Quantized, normed_scale, paired, round_to_fp8
from kernels.fp8.matmul import fp8_matmul
from kernels.fp8.quantize import quantize_reference
from kernels.fp8.scales import qkv_scales_reference
from kernels.fp8.weights import fp8_weights_reference
from kernels.gradients import Gradient
from kernels.mlp.residual import norm_fork_reference
from kernels.mlp.residual_fp8 import norm_fork_fp8
from kernels.ngrams.shared_gradient import leave_gradient, share_values, sum_over_layers_reference

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # FP8 quantises no float16 here
ON_CPU = DEVICE.type == "cpu"

# ---- The same in plain PyTorch with FP8 matmuls, to compare with -------------------------------------------

def plain_heads_backward(grads, qkv, positions, seen, value, shape, scale):
    """Those of qkv over `scale` in FP8 with its paired transpose, of seen, and of value rows and gate."""
    leaves = [x.detach().requires_grad_() for x in (qkv, seen, *(value or ())[:2]) if x is not None]
    with torch.enable_grad():
        qkv, seen, value = leaves[0], *((leaves[1], ValueRows(*leaves[2:])) if value else (None, None))
        out = qkv_heads_reference(qkv, positions, seen, value, None, shape)
    grad, *value_grads = torch.autograd.grad(out, leaves, grads)
    grad8 = round_to_fp8(grad, scale, E5M2)
    return grad8, paired(grad8.T), value_grads or [None] * 3


class PlainFP8Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scale, value_rows, gate, x8, positions, ngrams, shape, _):
        weight8, = fp8_weights_reference((weight,))
        learned, x_scale, grad_scale = qkv_scales_reference(
            weight8.scale, scale, normed_scale(x.size(1)), QKV_GRADIENT_SCALE)
        seen = value = None
        if value_rows is not None:
            first = (x8[0] if x8 else x)[:, :gate.size(1) // 2]
            factor = normed_scale(x.size(1)) if x8 else 1.0
            seen, value = first.to(x.dtype) * factor, ValueRows(value_rows, gate)
        x8, x8_transposed = x8 or quantize_reference(x, x_scale, in_pairs=True)
        qkv = fp8_matmul(x8, weight8.q.T, x_scale, learned, fast=True).type_as(x)
        ctx.heads = qkv, positions, seen, value, shape
        ctx.matmul = weight, weight8, scale, x8_transposed, learned, x_scale, grad_scale
        ctx.ngrams = ngrams
        return qkv_heads_reference(qkv, positions, seen, value, ngrams, shape)

    @staticmethod
    def backward(ctx, *grads):
        weight, weight8, scale, x8_transposed, learned, x_scale, grad_scale = ctx.matmul
        grads = *grads[:2], leave_gradient(ctx.ngrams, grads[2])
        grad8, transposed, value_grads = plain_heads_backward(grads, *ctx.heads, grad_scale)
        seen_grad, rows_grad, gate_grad = value_grads
        x_grad = fp8_matmul(grad8, weight8.transposed.T, grad_scale, learned, fast=False).type_as(weight)
        if seen_grad is not None:
            x_grad[:, :seen_grad.size(1)] += seen_grad
        scaled_grad = fp8_matmul(transposed, x8_transposed.T, grad_scale, x_scale, fast=False).float()
        values = slice(len(weight) - grads[2][0].numel(), None)
        scale_grad = (weight[values].float() * scaled_grad[values]).sum()
        weight_grad = (scale * scaled_grad).type_as(weight)
        return x_grad, weight_grad, scale_grad, rows_grad, gate_grad, None, None, None, None, None


def plain_qkv_fp8(x, projection, positions, value, ngrams, shape):
    x, *x8 = x if isinstance(x, Quantized) else (x,)
    tensors = x, projection.weight, projection.scale, *(value or (None, None))[:2]
    ngram_rows = None if ngrams is None else ngrams.rows
    return PlainFP8Heads.apply(*tensors, x8, positions, ngrams, shape, ngram_rows)


# ---- The gradient of Q, K, V in FP8 ------------------------------------------------------------------------

def sized(n: int, heads: int, dims: tuple[int, int], value: bool, key_offset: bool = True) -> HeadInputs:
    return HeadInputs(n, heads, *dims, DEVICE, DTYPE, key_offset, value, starts=(0, 7, 8, 20))


@pytest.mark.parametrize("key_offset", [False, True])
@pytest.mark.parametrize("n, heads, dims", [(16, 1, (16, 16)), (80, 3, (16, 32)), (48, 2, (32, 16))])
def test_gradient_of_qkv_in_fp8_both_ways(n, heads, dims, key_offset):
    """Rows and transpose hold the same bits, near the reference's, and every one of them is written."""
    scale = torch.tensor(2.0 ** -12, device=DEVICE)
    qkv, positions, seen, value, _, shape, grads = sized(n, heads, dims, True, key_offset).from_qkv()
    inputs = qkv * 0.3, positions, value.source, value_mix(seen, value.source, value.gate), shape
    grad, *others, nothing = heads_backward(grads, *inputs)
    plain, plain_transposed, _ = plain_heads_backward(grads, inputs[0], positions, seen, value, shape, scale)
    assert nothing is None and same_bits(plain_transposed, paired(plain.T))
    for tuned in FP8_CONFIGS if n == 80 else FP8_CONFIGS[:1]:
        grad8, *same, transposed = heads_backward(grads, *inputs, scale, tuned)
        assert grad8.dtype == transposed.dtype == torch.float8_e5m2 and grad8.shape == qkv.shape
        assert same_bits(transposed, paired(grad8.T))
        assert error(grad8.float(), plain.double()) < 0.15  # the interpreter truncates
        for a, b in zip(others, same):  # sums in another order, except in the interpreter
            assert torch.equal(a, b) if ON_CPU else error(b, a.double()) < 1e-3
    if not ON_CPU:  # the bf16 gradient's error is that of its own rounding, which the FP8 one does not have
        exact = grad.double() / scale
        assert error(grad8, exact) < 1.05 * error(round_to_fp8(grad, scale, torch.float8_e5m2), exact)
    largest = heads_backward([x * 2 ** 20 for x in grads], *inputs, scale)[0].float().abs().max()
    assert largest == torch.finfo(torch.float8_e5m2).max  # saturated


@pytest.mark.skipif(ON_CPU, reason="the interpreter has no NaN in FP8")
def test_nan_reaches_the_gradient_of_qkv_in_fp8():
    scale = torch.tensor(QKV_GRADIENT_SCALE, device=DEVICE)
    size = sized(48, 2, (16, 32), False)
    qkv, positions, *_ = size.from_qkv()
    for i in range(3):
        grads = size.gradients()
        grads[i][5, 1, 3] = float("nan")
        grad8, _, _, transposed = heads_backward(grads, qkv, positions, None, None, size.shape, scale)
        rows = grad8.float().isnan().any(1).nonzero().flatten().tolist()
        assert rows == [5] and transposed.float().isnan().any() and same_bits(transposed, paired(grad8.T))


# ---- The whole operation -----------------------------------------------------------------------------------

def inputs_of(size: HeadInputs) -> list:
    """What `qkv_fp8` takes, and gradients of its results that differ from token to token by up to 2^6."""
    x, projection, *others, grads = size.from_x()
    projection = Projection(projection.weight * 2.5, torch.tensor(0.6, device=DEVICE))
    fall = torch.logspace(-6, 0, size.tokens, 2, device=DEVICE)[:, None, None]
    return [x, projection, *others, tuple((grad * 0.1 * fall).to(DTYPE) for grad in grads)]


def results(function, x, projection, positions, value, ngrams, shape, grads) -> list[torch.Tensor]:
    """q, k, v and the gradients of x, weight, scale, and of the value's rows and gate where they are."""
    weight, scale, *_ = projection
    leaves = [leaf.detach().requires_grad_() for leaf in (x, weight, scale, *(value or ())[:2])]
    value = ValueRows(*leaves[3:]) if value else None
    out = function(leaves[0], Projection(*leaves[1:3]), positions, value, ngrams, shape)
    assert all(y.is_contiguous() for y in out)
    found = torch.autograd.grad(out, leaves, [g.to(y) for g, y in zip(grads, out)])
    return [*(y.detach() for y in out), *found]


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("n, heads, dims", [(80, 2, (32, 32)), (112, 1, (16, 32)), (48, 3, (32, 16))])
def test_qkv_fp8_is_as_near_to_full_precision_as_plain_fp8(n, heads, dims, value):
    """And near it; and four times the gradient brings four times the gradients."""
    inputs = inputs_of(sized(n, heads, dims, value))
    *others, grads = inputs
    exact = results(qkv_fp8_reference, *in_double(tuple(inputs)))
    plain, ours = results(plain_qkv_fp8, *inputs), results(qkv_fp8, *inputs)
    larger = results(qkv_fp8, *others, [4 * g for g in grads])
    slack = 0.15 if ON_CPU else 1e-3  # the interpreter truncates
    values = slice(-heads * dims[1], None)
    for i, (fused, theirs, right, four) in enumerate(zip(ours, plain, exact, larger, strict=True)):
        if i == 5:  # the scale's gradient, a sum in which much cancels
            terms = (others[1].weight[values].double().norm() * exact[4][values].norm()).item()
            assert abs(theirs - right) < 0.02 * terms and abs(fused - right) < (0.02 + slack / 4) * terms
        else:
            assert error(theirs, right) < 0.1
            assert_as_exact_as_pytorch(fused, theirs, right, slack)
            assert error(four, fused.double() * (1 if i < 3 else 4)) < 1e-2


@pytest.mark.parametrize("accumulate", [False, True])
def test_qkv_fp8_fills_its_weights_gradient(accumulate):
    """Autograd is given none, and the other gradients are the same to the bit."""
    x, projection, positions, _, _, shape, grads = inputs_of(sized(48, 2, (16, 32), False))
    leaves = x, weight, scale = [leaf.detach().requires_grad_() for leaf in (x, *projection[:2])]

    def gradients(grad):
        out = qkv_fp8(x, Projection(weight, scale, grad), positions, None, None, shape)
        return torch.autograd.grad(out, leaves, [g.type_as(x) for g in grads], allow_unused=True)

    buffer = torch.ones_like(weight)
    returned, filled = gradients(None), gradients(Gradient(buffer, accumulate))
    assert filled[1] is None and torch.equal(filled[0], returned[0]) and torch.equal(filled[2], returned[2])
    assert error(buffer, accumulate + returned[1].double()) < torch.finfo(buffer.dtype).eps
    assert accumulate or torch.equal(buffer, returned[1])


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("value", [False, True])
def test_ngram_rows_in_qkv_fp8(value):
    """They change their head's values alone and no other gradient; theirs is that of v."""
    size = sized(48, 2, (16, 32), value)
    x, projection, positions, value_rows, _, shape, grads = inputs_of(size)
    grads = [*grads, *inputs_of(size)[-1]]  # of two layers
    rows, scales, found_by = random(48, 1, 32, dtype=DTYPE), torch.randn(2, 1, device=DEVICE), []
    expected = sum_over_layers_reference(
        [grads[i][:, :1].double() for i in (2, 5)], rows.double(), scales.double())
    for function in (qkv_fp8, qkv_fp8, plain_qkv_fp8):
        leaves = [leaf.detach().clone().requires_grad_() for leaf in (rows, scales, projection.weight)]
        both = []
        for shared in (share_values(*leaves[:2]), (None, None)):
            outs = [function(x, projection._replace(weight=leaves[2]), positions, value_rows, ngrams, shape)
                    for ngrams in shared]
            found = torch.autograd.grad(sum(outs, ()), leaves, grads, allow_unused=True)
            both.append(([y.detach() for y in outs[1]], found))
        (with_rows, found), (without, (*_, weight_grad)) = both
        assert torch.equal(found[2], weight_grad) and all(map(torch.equal, with_rows[:2], without[:2]))
        assert torch.equal(with_rows[2][:, 1:], without[2][:, 1:])
        added = (with_rows[2] - without[2])[:, :1]
        assert error(added, scales[1].double() * rows.double()) < (1e-5 if ON_CPU else 2e-2)
        for grad, right, limit in zip(found, expected, (1e-6 if ON_CPU else 1e-2, 1e-5)):
            assert error(grad, right) < limit
        found_by.append([*with_rows, *found])
    assert all(map(torch.equal, *found_by[:2]))


def test_qkv_fp8_scales_the_matmul_and_not_the_weight(monkeypatch):
    """With PyTorch's rounding the results are the plain form's; the learned scale may be negative or zero."""
    def quantize(x, scale, both, in_pairs):
        return quantize_reference(x, scale, in_pairs=in_pairs)

    monkeypatch.setattr(kernels.attention.fp8_qkv, "quantize", quantize)
    monkeypatch.setattr(kernels.attention.fp8_qkv, "fp8_weights", fp8_weights_reference)
    x, projection, *others = inputs_of(sized(48, 2, (16, 32), True))
    for number in (0.6, -0.7, 0.0):
        scaled = projection._replace(scale=torch.tensor(number, device=DEVICE))
        plain, ours = (results(function, x, scaled, *others) for function in (plain_qkv_fp8, qkv_fp8))
        for fused, theirs in zip(ours[:3], plain[:3]):
            torch.testing.assert_close(fused, theirs, atol=1e-5 if ON_CPU else 1e-2, rtol=1e-2)
        assert all(x.isfinite().all() for x in ours)
        assert bool(ours[4].any()) == (number != 0) and ours[5] != 0


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("count", [1, 2])
def test_qkv_fp8_of_an_input_normed_into_fp8(count):
    """Two layers read one norm: as by way of the norm in bf16, except for v, whose gates see x in FP8."""
    x, projection, positions, value, _, shape, grads = inputs_of(sized(112, 2, (16, 32), True))
    summands, found = [y * 3 for y in (x, x.flip(0))[:count]], []
    for fork in (norm_fork_reference, norm_fork_fp8):
        leaves = [y.detach().clone().requires_grad_() for y in (*summands, projection.weight)]
        normed, total, _ = fork(tuple(leaves[:count]))
        outs = [qkv_fp8(normed, Projection(leaves[-1], scale), positions, value, None, shape)
                for scale in (projection.scale, 2 * projection.scale)]
        outs, wanted = [*outs[0], *outs[1], total], [*grads, *grads, total.detach()]
        given = [g.to(y) for g, y in zip(wanted, outs)]
        found.append([y.detach() for y in outs] + list(torch.autograd.grad(outs, leaves, given)))
    for i, (plain, ours) in enumerate(zip(*found, strict=True)):
        limits = (0.15, 2e-3) if ON_CPU else (0.05, 0.03)  # the interpreter truncates; a GPU rounds only once
        assert ours.dtype == plain.dtype and error(ours, plain.double()) < limits[i not in (2, 5)], i


def test_a_weight_in_fp8_is_used_as_it_is_given():
    """Its scales come with it, and nothing is quantised again."""
    x, projection, *others, _ = inputs_of(sized(48, 2, (16, 32), False))
    weight8, = fp8_weights_reference((projection.weight,))
    x_scale = normed_scale(x.size(1))
    scales = qkv_scales_reference(weight8.scale, projection.scale, x_scale, QKV_GRADIENT_SCALE)
    made = projection._replace(fp8=QKVWeight(weight8, *scales))
    elsewhere = made._replace(weight=torch.full_like(projection.weight, float("nan")))
    assert all(map(torch.equal, qkv_fp8(x, made, *others), qkv_fp8(x, elsewhere, *others)))


def test_qkv_fp8_refuses_what_it_cannot_do():
    size = sized(48, 2, (16, 32), False, key_offset=False)
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        qkv_fp8(*inputs_of(replace(size, tokens=40))[:-1])
    qkv, positions, *_, grads = size.from_qkv()
    scale = torch.tensor(1.0, device=DEVICE)
    for tuned, wrong in ((CONFIGS[0], scale), (None, scale.double()), (None, scale.repeat(2))):
        with pytest.raises(ValueError, match="gradient in FP8"):
            heads_backward(grads, qkv, Positions(*positions), None, None, size.shape, wrong, tuned)
