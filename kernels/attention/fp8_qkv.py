"""q, k, v from x as in `qkv.py`, with the matmul X (s W)ᵀ and both of its gradients in FP8 (`kernels/fp8`).

Matmul and heads are one autograd function, because autograd requires a tensor's gradient to have the tensor's
dtype: Q, K, V are bf16, and their gradient is FP8. The heads' backward kernel writes it as float8_e5m2,
together with its transpose, so that no further pass over it quantises it for the matmuls that make the
gradients of X and of W.

- For the backward pass only X's transpose in FP8 is kept, which has half the bytes of X in bf16.
- No scale needs state or a pass over activations. X's rows are normed, the largest row norm of W bounds W's
  elements, and the gradient's scale is a constant, because e5m2 has 30 binades.
- The learned scale s multiplies the result of the matmul, not W. So W is quantised once, for all
  micro-batches of a step.
- The transposes are `paired`, an order of tokens that is cheap to write. A sum over tokens may take any
  order.

One H200, 49,152 tokens, 6 heads of 128 channels, both ways: 805 µs, in bf16 with the same kernels 1,199.
Writing the gradient of Q, K, V in FP8 twice takes 174 µs where bf16 takes 144.
"""
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.example_inputs import HeadInputs, both_ways, real_sizes_from_x, sharing
from kernels.attention.inputs import HeadShape, Positions, Projection, QKVWeight, Rows, ValueRows
from kernels.attention.output import weight_gradients
from kernels.attention.qkv import Heads, project_heads, qkv_heads, qkv_heads_reference
from kernels.attention.qkv_kernels import FP8_CONFIGS, heads_backward, heads_forward
from kernels.attention.value_gate import value_mix, value_mix_backward
from kernels.example import Example
from kernels.fp8.formats import E5M2, Quantized, normed_scale, paired, round_to_fp8
from kernels.fp8.matmul import fp8_matmul
from kernels.fp8.quantize import quantize
from kernels.fp8.scales import qkv_scales
from kernels.fp8.weights import FP8Weight, fp8_weights
from kernels.ngrams.shared_gradient import NGramValues, leave_gradient, share_values, share_values_reference

# The scale of the gradient of Q, K and V, for a loss summed over tokens. Elements beyond 2^9.8 saturate, and
# those below 2^-20 lose precision. In 120 steps of preset "cpu", in float32, the gradient's largest element
# rose from 2^-7 to 2^4, and nine elements in ten were larger than 2^-20 in every layer's Q, K and V.
QKV_GRADIENT_SCALE = 2.0 ** -6


def qkv_weight(weight: FP8Weight, learned: Tensor, width: int) -> QKVWeight:
    """The weight and all scales of its matmuls, for inputs (n, width) of normed rows; `learned`: 0-dim."""
    scales = qkv_scales(weight.scale, learned.detach(), normed_scale(width), QKV_GRADIENT_SCALE)
    return QKVWeight(weight, *scales)


class FP8Heads(torch.autograd.Function):
    """Autograd sees only tensors that are arguments themselves, so those in NamedTuples come twice."""
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, scale: Tensor, value_rows: Tensor | None, gate: Tensor | None,
        ngram_rows: Tensor | None, rows: Rows | None, x8: tuple[Tensor, ...], projection: Projection,
        positions: Positions, ngrams: NGramValues | None, shape: HeadShape,
    ) -> Heads:
        (weight8, weight8_transposed, *_), learned_scale, x_scale, grad_scale = projection.fp8
        seen = mix = None
        if rows is not None:  # the gate sees x, or what FP8 left of it
            first = (x8[0] if x8 else x)[:, :gate.size(1) // 2]
            seen = torch.empty(first.shape, dtype=x.dtype, device=x.device)
            mix = value_mix(first, rows, gate, normed_scale(x.size(1)) if x8 else 1.0, seen)
        x8, x8_transposed = x8 or quantize(x, x_scale, both=True, in_pairs=True)
        qkv = fp8_matmul(x8, weight8.T, x_scale, learned_scale, fast=True).type_as(x)
        ctx.save_for_backward(
            qkv, *positions, *(rows or (None, None)), gate, mix, seen, x8_transposed, weight,
            weight8_transposed, scale, x_scale, grad_scale, learned_scale)
        ctx.grad, ctx.ngrams, ctx.shape = projection.grad, ngrams, shape
        return heads_forward(qkv, positions, rows, mix, ngrams, shape)

    @staticmethod
    def backward(ctx, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, cos, sin, is_start, table, index, gate, mix, seen, x8_transposed, weight, weight8_transposed,
         scale, x_scale, grad_scale, learned_scale) = ctx.saved_tensors
        grads, gate_grad = (q_grad, k_grad, leave_gradient(ctx.ngrams, v_grad)), None
        positions, rows = Positions(cos, sin, is_start), None if table is None else Rows(table, index)
        grad8, rows_grad, mix_grad, grad8_transposed = heads_backward(
            grads, qkv, positions, rows, mix, ctx.shape, grad_scale)
        x_grad = fp8_matmul(grad8, weight8_transposed.T, grad_scale, learned_scale, fast=False).type_as(qkv)
        if seen is not None:  # add seen's gradient to x's, which was just made and which nobody else holds
            channels_grad = x_grad[:, :seen.size(1)]
            _, gate_grad = value_mix_backward(mix_grad, mix, seen, rows, gate, rows_grad, channels_grad)
        scaled_grad = fp8_matmul(grad8_transposed, x8_transposed.T, grad_scale, x_scale, fast=False)
        # Q and K are normed, so only V depends on the scale: the scale's gradient comes from V's rows alone.
        first_value_row = len(weight) - v_grad.size(1) * v_grad.size(2)
        of_weight = weight_gradients(ctx.grad, scaled_grad, weight, scale, first_value_row)
        return x_grad, *of_weight, rows_grad, gate_grad, *[None] * 7


def qkv_fp8_reference(
    x: Tensor,
    projection: Projection,
    positions: Positions,
    value: ValueRows | None,
    ngrams: NGramValues | None,
    shape: HeadShape,
) -> Heads:
    """Plain PyTorch form of `qkv_fp8`, in x's dtype; its `ngrams` come from `share_values_reference`."""
    seen = None if value is None else x[:, :value.gate.size(1) // 2]
    qkv = F.linear(x, projection.weight * projection.scale)
    return qkv_heads_reference(qkv, positions, seen, value, ngrams, shape)


def qkv_fp8(
    x: Tensor | Quantized,  # (n, width) bf16, normed rows; the gate sees what FP8 left of a `Quantized`
    projection: Projection,  # its `fp8` is made where it is None
    positions: Positions,
    value: ValueRows | None,  # None: no value embedding in this layer
    ngrams: NGramValues | None,  # from `share_values`; None: no n-grams
    shape: HeadShape,
) -> Heads:
    """q, k (n, heads, qk_dim) and v (n, heads, head_dim), contiguous, of x's dtype.

    n, width and the number of the weight's rows are multiples of 16. Gradients for x, weight, scale, the
    value's rows and gate, and through `ngrams`.
    """
    x, *x8 = x if isinstance(x, Quantized) else (x,)
    weight, scale, _, fp8 = projection
    if fp8 is None:
        weight8, = fp8_weights((weight.detach(),))
        projection = projection._replace(fp8=qkv_weight(weight8, scale, weight.size(1)))
    value_rows, gate, rows = (None,) * 3 if value is None else (value.rows, value.gate, value.source)
    ngram_rows = None if ngrams is None else ngrams.rows
    return FP8Heads.apply(x, weight, scale, value_rows, gate, ngram_rows, rows, tuple(x8), projection,
                          positions, ngrams, shape)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """The gradient of Q, K and V in FP8; and everything from x, as near to float64 as FP8 comes."""
    yield from gradient_examples(size, device, dtype)
    slack = 0.2 if device.type == "cpu" else 0.1  # FP8 rounds operands by some 3%; the interpreter truncates
    reference = sharing(qkv_fp8_reference, share_values_reference)
    baseline = sharing(partial(project_heads, qkv_heads), share_values)
    if size == "real":
        sizes = real_sizes_from_x(device, dtype)
    else:
        sizes = [HeadInputs(n, heads, qk_dim, head_dim, device, dtype, True, value, ngrams, table=table)
                 for n, heads, qk_dim, head_dim, value, ngrams, table in (
                     (80, 2, 32, 32, False, 0, 0), (112, 2, 16, 32, True, 0, 0), (48, 3, 32, 16, True, 2, 9),
                     (16, 1, 16, 16, False, 1, 0))]
    for inputs in sizes:
        n = inputs.tokens
        yield Example(
            "attention's inputs, both ways, FP8 (against bf16)", inputs.from_x_size, inputs.from_x,
            sharing(qkv_fp8, share_values), reference, flop=6.0 * n * inputs.width * inputs.columns,
            bytes=n * (10.0 * inputs.columns + 8.0 * inputs.width),  # without value rows and their gradients
            rate=2, baseline=baseline, wrap=both_ways, compile=False, slack=slack)


def gradient_examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """The gradient of Q, K and V in FP8 and its transpose, against the kernel that writes it in bf16."""
    fp8_scale = torch.tensor(QKV_GRADIENT_SCALE, device=device)

    def kernel(qkv, positions, shape, grads, tuned=None, scale=fp8_scale) -> tuple[Tensor, Tensor | None]:
        grad, _, _, transposed = heads_backward(grads, qkv, positions, None, None, shape, scale, tuned)
        return grad, transposed

    def unrounded(qkv, positions, shape, grads) -> Tensor:
        *_, grad = both_ways(qkv_heads_reference)(qkv, positions, None, None, None, shape, grads)
        return grad

    def reference(*inputs) -> tuple[Tensor, Tensor]:
        grad = round_to_fp8(unrounded(*inputs), fp8_scale, E5M2)
        return grad, paired(grad.T)

    def exact(*inputs) -> tuple[Tensor, Tensor]:
        grad = unrounded(*inputs) / fp8_scale
        return grad, paired(grad.T)

    if size == "real":
        sizes = [HeadInputs(n, 6, qk_dim, 128, device, dtype, True)
                 for qk_dim, n in ((128, 16384), (128, 49152), (64, 49152))]
    else:
        sizes = [HeadInputs(n, heads, *dims, device, dtype, key_offset, starts=(0, 7, 8, 20))
                 for n, heads, dims in ((16, 1, (16, 16)), (80, 3, (16, 32)), (48, 2, (32, 16)))
                 for key_offset in (False, True)]
    slack = 0.15 if device.type == "cpu" else 1e-6  # the interpreter truncates
    for inputs in sizes:
        yield Example(
            "gradient of QKV in FP8, both ways (against bf16)", str(inputs),
            lambda x=inputs: (x.random(x.tokens, x.columns), x.positions(), x.shape, x.gradients()),
            kernel, reference,
            bytes=4.0 * inputs.tokens * inputs.heads * (3 * inputs.qk_dim + inputs.head_dim), exact=exact,
            baseline=partial(kernel, scale=None), compile=False, slack=slack, configs=tuple(FP8_CONFIGS))
