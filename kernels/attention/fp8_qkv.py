"""q, k, v from x, by the product X (s·W)ᵀ and `kernels.attention.qkv` as one function, whose three products are FP8, both ways.

One function because the gradient of QKV is FP8, which autograd passes on for no bfloat16 tensor: the heads' backward kernel writes it
as float8_e5m2 with its transpose, as the products for X's and W's gradients want it, and no pass reads it to round_to_fp8 it. Of X only
the transpose in FP8 is kept, half of its bytes. The scales need no state: X's rows are normed, W's largest row norm bounds its
elements, and the gradient's is a constant, for e5m2 has 30 binades. Transposes are `paired`: a sum over tokens takes any order.
Rows that all layers add to a head's values are added as in `kernels.attention.qkv`; v's gradient is theirs in bfloat16.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.output import weight_gradients
from kernels.attention.qkv import heads_backward, heads_forward, qkv_heads_reference
from kernels.attention.value_gate import value_mix, value_mix_backward
from kernels.fp8.formats import Quantized, normed_scale, paired, round_to_fp8
from kernels.fp8.matmul import product
from kernels.fp8.scales import qkv_scales, qkv_scales_reference
from kernels.fp8.weights import FP8Weight, fp8_weights, fp8_weights_reference
from kernels.mlp.fp8_mlp import to_fp8
from kernels.ngrams.shared_gradient import Term, leave

# Of QKV's gradient, for a loss summed over tokens: what is past 2^9.8 saturates, below 2^-20 it loses precision. In 120 steps of preset
# "cpu", in float32, its largest element rose from 2^-7 to 2^4, and nine in ten were past 2^-20 in every layer's Q, K and V.
GRADIENT_SCALE = 2.0 ** -6


class QKVWeight(NamedTuple):
    weight: FP8Weight
    learned_scale: Tensor  # its scale times the learned one, with which the product alone is scaled, the weight not
    x_scale: Tensor
    grad_scale: Tensor


def qkv_weight(weight: FP8Weight, learned: Tensor, width: int, fused: bool = True) -> QKVWeight:
    """With the scales that attention's input, of normed rows, and the gradient of Q, K, V have whatever they are."""
    scales = qkv_scales if fused else qkv_scales_reference
    return QKVWeight(weight, *scales(weight.scale, learned.detach(), normed_scale(width), GRADIENT_SCALE))


def heads_backward_reference(grads: tuple[Tensor, ...], qkv: Tensor, tables: tuple[Tensor, ...], value: tuple[Tensor | None, ...],
                        form: tuple, scale: Tensor) -> tuple[Tensor | None, ...]:
    """From the gradients of q, k, v: that of qkv over `scale` in FP8, and its paired transpose; those of `value`."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in (qkv, *value)]
    with torch.enable_grad():
        out = qkv_heads_reference(leaves[0], *tables, *leaves[1:], *form)
    found = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], grads))
    grad, *value_grads = (x if x is None else next(found) for x in leaves)
    grad8 = round_to_fp8(grad, scale, torch.float8_e5m2)
    return grad8, paired(grad8.T), *value_grads


class FP8Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, is_start: Tensor, value_row: Tensor | None,
                value_gate: Tensor | None, qk_dim: int, head_dim: int, key_offset: bool, term: Term | None,
                into: Tensor | None, quantized: QKVWeight, fused: bool, x8: tuple[Tensor, ...], *_: Tensor) -> tuple[Tensor, ...]:
        (weight8, weight8_transposed, *_), weight_scale_learned, x_scale, grad_scale = quantized
        seen, mix = None, None
        if value_row is not None:
            columns, factor = (x8[0] if x8 else x)[:, :value_gate.size(1) // 2], normed_scale(x.size(1)) if x8 else 1.0
            if fused:
                seen = torch.empty(columns.shape, dtype=x.dtype, device=x.device)
                mix = value_mix(columns, value_row, value_gate, factor, seen)
            else:
                seen = columns.to(x.dtype) * factor
        x8, x8_transposed = x8 or to_fp8(x, x_scale, fused, True, in_pairs=True)
        qkv = product(x8, weight8.T, x_scale, weight_scale_learned, fast=True).type_as(x)
        tables, form = (cos, sin, is_start), (qk_dim, head_dim, key_offset)
        ctx.save_for_backward(qkv, *tables, value_row, value_gate, mix, seen, x8_transposed, weight, weight8_transposed, scale,
                              x_scale, grad_scale, weight_scale_learned)
        ctx.form, ctx.fused, ctx.into, ctx.term = form, fused, into, term
        if fused:
            heads = heads_forward(qkv, *tables, value_row, mix, *form, term)
        else:
            heads = qkv_heads_reference(qkv, *tables, seen, value_row, value_gate, *form, term)
        return heads

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, *tables, value_row, value_gate, mix, seen, x8_transposed, weight, weight8_transposed, scale, x_scale, grad_scale,
         weight_scale_learned) = ctx.saved_tensors
        grads, gate_grad = (*grads[:2], leave(ctx.term, grads[2])), None
        if ctx.fused:
            grad8, row_grad, mix_grad, transposed = heads_backward(*grads, qkv, *tables, value_row, mix, *ctx.form, scale=grad_scale)
        else:
            grad8, transposed, seen_grad, row_grad, gate_grad = heads_backward_reference(
                grads, qkv, tables, (seen, value_row, value_gate), ctx.form, grad_scale)
        x_grad = product(grad8, weight8_transposed.T, grad_scale, weight_scale_learned, fast=False).type_as(qkv)
        if seen is not None:                                             # added to x's, which nobody else holds yet (kernels/linear.py)
            columns = x_grad[:, :seen.size(1)]
            if ctx.fused:
                _, gate_grad = value_mix_backward(mix_grad, mix, seen, value_row, value_gate, row_grad, columns)
            else:
                columns += seen_grad
        of_product = product(transposed, x8_transposed.T, grad_scale, x_scale, fast=False)       # of s·W
        values = len(weight) - grads[2][0].numel()                       # from here on; Q and K, which are normed, do not depend on the scale
        of_weight = weight_gradients(ctx.into, of_product, weight, scale, ctx.fused, values)
        return x_grad, *of_weight, None, None, None, row_grad, gate_grad, *[None] * 9


def fp8_heads(x: Tensor | Quantized, weight: Tensor, scale: Tensor, *arguments, term: Term | None, into: Tensor | None,
              quantized: QKVWeight | None, fused: bool) -> tuple[Tensor, ...]:
    x, *x8 = x if isinstance(x, Quantized) else (x,)
    if quantized is None:
        quantized = qkv_weight(*(fp8_weights if fused else fp8_weights_reference)((weight.detach(),)), scale, weight.size(1), fused)
    return FP8Heads.apply(x, weight, scale, *arguments, term, into, quantized, fused, tuple(x8), None if term is None else term.rows)


def fp8_qkv_heads_reference(x: Tensor, weight: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, is_start: Tensor, value_row: Tensor | None,
                       value_gate: Tensor | None, qk_dim: int, head_dim: int, key_offset: bool, term: Term | None = None,
                       fp8: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Plain form of `fp8_qkv_heads`, in x's dtype, with a term from `share_reference`; with `fp8` its products alone are FP8, to compare the
    kernels with, the term from `share` and x may be a `Quantized`."""
    if fp8:
        return fp8_heads(x, weight, scale, cos, sin, is_start, value_row, value_gate, qk_dim, head_dim, key_offset,
                         term=term, into=None, quantized=None, fused=False)
    seen = None if value_row is None else x[:, :value_gate.size(1) // 2]
    qkv = F.linear(x, weight * scale)
    return qkv_heads_reference(qkv, cos, sin, is_start, seen, value_row, value_gate, qk_dim, head_dim, key_offset, term)


def fp8_qkv_heads(
    x: Tensor | Quantized,  # (n, width) bf16, normed rows
    weight: Tensor,  # (heads (2 qk_dim + head_dim), width) like x: Q, K, V, each (out, in)
    scale: Tensor,  # 0-dim float32, learned: multiplies weight
    cos: Tensor,  # from here on to value_gate as `qkv_heads` takes it
    sin: Tensor,
    is_start: Tensor,
    value_row: Tensor | None,
    value_gate: Tensor | None,  # (heads, 2 channels): it sees as many of x's first channels and of value_row's
    qk_dim: int,
    head_dim: int,
    key_offset: bool,
    term: Term | None = None,  # as `qkv_heads` takes it
    into: Tensor | None = None,  # like weight: its gradient is added here, in place of being returned
    quantized: QKVWeight | None = None,  # weight and scale for the products, where they are at hand; else they are made
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (n, heads, qk_dim) and v (n, heads, head_dim), contiguous, of x's dtype. Of a `Quantized` x the gates see what FP8 left.

    n, width and the length of weight are multiples of 16. Gradients for x, weight, scale, value_row, value_gate and through the term.
    """
    return fp8_heads(x, weight, scale, cos, sin, is_start, value_row, value_gate, qk_dim, head_dim, key_offset,
                     term=term, into=into, quantized=quantized, fused=True)
