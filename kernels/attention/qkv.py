"""From the Q, K, V matmul to attention. For each token and head

    q = rotate(norm(Q))
    k = rotate(norm(K))
    v = V + mix · value row + scale · n-gram row

norm(x) = x / √(mean x² + eps), without a weight ("QK-norm"). With a key offset k takes its channels without a
position from the token before; where a sequence starts, these channels are zero. A gate makes mix = 2σ(gate ·
[seen, first channels of the value row]). Only the first heads get n-gram rows.

As two Triton kernels (`qkv_kernels.py`) this is one pass over memory each way, where compiled PyTorch takes
several. One H200, 49,152 tokens, 6 heads of 128 channels in bf16, forward and backward: 257 µs against 473;
with the key offset 259 against 602; with value rows 338 against 612.

QK-norm: arXiv 2010.04245, brought to the modded-nanogpt speedrun by @Grad62304977. Key offset: @ClassicLarry,
modded-nanogpt#169. Value rows: see `value_gate.py`.
"""
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.example_inputs import HeadInputs, both_ways, real_sizes, real_sizes_from_x, sharing
from kernels.attention.inputs import HeadShape, Positions, Projection, Rows, ValueRows
from kernels.attention.output import scaled_linear
from kernels.attention.qkv_kernels import CONFIGS, heads_backward, heads_forward
from kernels.attention.rotary import rotate
from kernels.attention.value_gate import value_mix, value_mix_backward, value_mix_reference
from kernels.backend import EPS
from kernels.example import Example
from kernels.ngrams.shared_gradient import NGramValues, leave_gradient, share_values, share_values_reference

ODD_STARTS = 0, 7, 8, 20  # of sequences, in examples
Heads = tuple[Tensor, Tensor, Tensor]  # q, k (n, heads, qk_dim) and v (n, heads, head_dim)


def qkv_heads_reference(
    qkv: Tensor,
    positions: Positions,
    seen: Tensor | None,
    value: ValueRows | None,
    ngrams: NGramValues | None,
    shape: HeadShape,
) -> Heads:
    """Plain PyTorch form of `qkv_heads`; its `ngrams` come from `share_values_reference`."""
    qk_dim, head_dim, key_offset = shape
    cos, sin, is_start = positions
    dims = qk_dim, qk_dim, head_dim
    heads = qkv.size(1) // sum(dims)
    parts = qkv.split([heads * dim for dim in dims], 1)
    q, k, v = (part.unflatten(1, (heads, dim)) for part, dim in zip(parts, dims))
    q, k = (rotate(F.rms_norm(part, (qk_dim,), eps=EPS), cos, sin) for part in (q, k))
    if key_offset:
        rotary = 2 * cos.size(-1)
        before = F.pad(k[:-1, :, rotary:], (0, 0, 0, 0, 1, 0))
        k = torch.cat([k[..., :rotary], before.masked_fill(is_start[:, None, None], 0)], dim=-1)
    if value is not None:
        rows = value.rows
        if value.where is not None:
            rows = rows + F.embedding(value.where.index, value.where.table)
        v = v + value_mix_reference(seen, rows, value.gate)[..., None] * rows.view_as(v)
    if ngrams is not None:
        first, others = v.split([ngrams.rows.size(1), heads - ngrams.rows.size(1)], 1)
        v = torch.cat([(first + ngrams.scale[:, None] * ngrams.rows).type_as(v), others], 1)
    return q, k, v.contiguous()


class QKVHeads(torch.autograd.Function):
    """Autograd sees only tensors that are arguments themselves, so forward gets the rows of `ngrams` and of a
    value twice.

    Backward returns None for the n-gram rows. `leave_gradient` stores this layer's gradient of them, and
    `share_values` sums the gradients of all layers.
    """
    @staticmethod
    def forward(
        ctx, qkv: Tensor, seen: Tensor | None, value_rows: Tensor | None, gate: Tensor | None,
        ngram_rows: Tensor | None, rows: Rows | None, positions: Positions, ngrams: NGramValues | None,
        shape: HeadShape, tuned,
    ) -> Heads:
        mix = None if rows is None else value_mix(seen, rows, gate)
        ctx.save_for_backward(qkv, *positions, *(rows or (None, None)), mix, seen, gate)
        ctx.ngrams, ctx.shape, ctx.tuned = ngrams, shape, tuned
        return heads_forward(qkv, positions, rows, mix, ngrams, shape, tuned)

    @staticmethod
    def backward(ctx, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, is_start, table, index, mix, seen, gate = ctx.saved_tensors
        grads = q_grad, k_grad, leave_gradient(ctx.ngrams, v_grad)
        positions, seen_grad, gate_grad = Positions(cos, sin, is_start), None, None
        rows = None if table is None else Rows(table, index)
        qkv_grad, rows_grad, mix_grad, _ = heads_backward(
            grads, qkv, positions, rows, mix, ctx.shape, tuned=ctx.tuned)
        if rows_grad is not None:
            seen_grad, gate_grad = value_mix_backward(mix_grad, mix, seen, rows, gate, rows_grad)
        return qkv_grad, seen_grad, rows_grad, gate_grad, None, None, None, None, None, None


def qkv_heads(
    qkv: Tensor,  # (n, heads (2 qk_dim + head_dim)) bf16, fp16 or float32, contiguous: each token's Q, K, V
    positions: Positions,
    seen: Tensor | None,  # (n, channels): what the gate of `value` sees of the token; None without `value`
    value: ValueRows | None,  # None: no value embedding in this layer
    ngrams: NGramValues | None,  # from `share_values`; None: no n-grams
    shape: HeadShape,
    tuned: tuple[int, int] | None = None,  # of both kernels
) -> Heads:
    """q, k (n, heads, qk_dim) and v (n, heads, head_dim), contiguous, of qkv's dtype.

    Gradients for qkv, seen, the value's rows and gate, and through `ngrams`.
    """
    value_rows, gate, rows = (None,) * 3 if value is None else (value.rows, value.gate, value.source)
    ngram_rows = None if ngrams is None else ngrams.rows
    return QKVHeads.apply(qkv, seen, value_rows, gate, ngram_rows, rows, positions, ngrams, shape, tuned)


def project_heads(
    heads: Callable[..., Heads],  # `qkv_heads`, or `qkv_heads_reference` as it is or compiled
    x: Tensor,  # (n, width): the normed residual
    projection: Projection,  # of x's dtype; its `fp8` is not read
    positions: Positions,
    value: ValueRows | None,
    ngrams: NGramValues | None,
    shape: HeadShape,
) -> Heads:
    """q, k, v as from `qkv_heads`. Gradients for x, weight, scale, the value's, and through `ngrams`."""
    channels = 0 if value is None else value.gate.size(1) // 2
    qkv, seen = scaled_linear(x, projection.weight, projection.scale, channels, projection.grad)
    return heads(qkv, positions, None if value is None else seen, value, ngrams, shape)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """From Q, K, V; and in training's sizes from x, with the matmul in bf16."""
    shared, plain = sharing(qkv_heads, share_values), sharing(qkv_heads_reference, share_values_reference)
    for inputs in real_sizes(device, dtype) if size == "real" else odd_sizes(device, dtype):
        moved = 10 * inputs.qk_dim + (7 if inputs.value else 4) * inputs.head_dim  # numbers a token and head
        every = size == "real" or inputs.tokens == 9 and inputs.value and inputs.key_offset
        yield Example(
            "from QKV to attention, both ways", str(inputs), inputs.from_qkv, shared, plain, wrap=both_ways,
            bytes=2.0 * inputs.tokens * inputs.heads * moved, configs=tuple(CONFIGS) if every else (),
            slack=1e-5 if inputs.ngrams else 1e-6)  # the n-gram scale's gradient is a long sum
    for inputs in real_sizes_from_x(device, dtype) if size == "real" else ():
        yield Example(
            "attention's inputs, both ways, bf16", inputs.from_x_size, inputs.from_x,
            partial(project_heads, qkv_heads), partial(project_heads, qkv_heads_reference),
            flop=6.0 * inputs.tokens * inputs.width * inputs.columns,
            bytes=inputs.tokens * (10.0 * inputs.columns + 8.0 * inputs.width),  # without value rows
            wrap=both_ways, compile=False)


def odd_sizes(device: torch.device, dtype: torch.dtype) -> Iterator[HeadInputs]:
    for key_offset in (False, True):
        for value in (False, True):
            for n, heads, qk_dim, head_dim, share in (
                (37, 2, 32, 32, 0.5), (1, 1, 16, 16, 1.0), (9, 3, 32, 32, 0.375), (37, 2, 16, 32, 0.5),
                (9, 3, 32, 16, 0.75),
            ):
                yield HeadInputs(
                    n, heads, qk_dim, head_dim, device, dtype, key_offset, value, 0, share, ODD_STARTS)
    for n, heads, qk_dim, head_dim, ngrams, table in ((21, 2, 16, 32, 1, 0), (9, 3, 32, 16, 3, 5)):
        yield HeadInputs(n, heads, qk_dim, head_dim, device, dtype, True, True, ngrams, starts=ODD_STARTS,
                         table=table)
