"""Rows that every layer adds to its first heads' values, b_ij rows_j to head j's in layer i: their gradient Σ_i b_ij grad_ij over the
layers, and b_ij's, Σ rows_j · grad_ij.

grad_i is what layer i's kernel returns for what it added the rows to. Layers therefore only leave grad_i behind (`Term`), and when the
last has run, one kernel reads rows and all of them: 10 tensors cross memory for 8 layers, where adding layer by layer moves 23 and
rounds each sum. grad_i is some columns of the gradient of values (`kernels.attention.qkv`), read where it stands: nothing is copied, but that
gradient, 75 MB a layer for 49,152 tokens of 768 channels in bf16, lives until the last layer has run. For 3 of 6 heads of 128 channels
and 8 layers the kernel moves 378 MB.

No atomics: all sums have one order, repeated runs are bit-equal. Times: README.md.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check, tl, triton

CONFIGS = [(2048, 4), (4096, 8), (4096, 4), (8192, 8)]                   # (elements a tile, warps); the first is used


class Term(NamedTuple):
    """What one layer adds: scale[j] · rows[:, j] to the values of head j."""
    rows: Tensor  # (n, k, head_dim), the same for all layers
    scale: Tensor  # (k,) float32
    grads: list[Tensor | None] | None = None  # where each layer's kernel leaves its gradient; None from `share_reference`
    layer: int = 0  # its place there


def share_reference(rows: Tensor, scales: Tensor) -> list[Term]:
    """Plain PyTorch twin of `share`."""
    return [Term(rows, scale) for scale in scales.unbind()]


def shared_rows_reference(grads: Sequence[Tensor], rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of `shared_rows`."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = sum(scale[:, None] * grad.to(wide) for scale, grad in zip(scales, grads)).to(rows.dtype)
    return total, torch.stack([(rows.to(wide) * grad).sum((0, 2)) for grad in grads]).to(scales.dtype)


@triton.jit
def shared_rows_kernel(grads, rows_ptr, scales_ptr, out_ptr, sums_ptr, n, grad_row, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                       BLOCK: tl.constexpr):
    head, tile = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    element = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)            # of this head alone
    token, channel, live = element // HEAD_DIM, head * HEAD_DIM + element % HEAD_DIM, element < n * HEAD_DIM
    at, of_grad = token * (HEADS * HEAD_DIM) + channel, token * grad_row + channel
    rows, total = tl.load(rows_ptr + at, mask=live, other=0.0).to(tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(len(grads)):
        grad = tl.load(grads[i] + of_grad, mask=live, other=0.0).to(tl.float32)
        total += tl.load(scales_ptr + i * HEADS + head) * grad
        tl.store(sums_ptr + (tile * len(grads) + i) * HEADS + head, tl.sum(rows * grad))
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)


def shared_rows(
    grads: Sequence[Tensor],  # one or more (layers), (n, k, head_dim) like rows: first heads of contiguous (n, heads, head_dim)
    rows: Tensor,  # (n, k, head_dim) bf16, fp16 or float32, contiguous
    scales: Tensor,  # (layers, k) float32
    tuned: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ scales[i] grads[i], like rows, rounded once, and the dot products of each head's rows with its grads, like scales."""
    check(rows.ndim == 3 and rows.is_contiguous() and rows.dtype in (torch.bfloat16, torch.float16, torch.float32), "rows", rows,
          "contiguous, (n, k, head_dim) in bf16, fp16 or float32")
    (n, heads, head_dim), step = rows.shape, grads[0].stride(0)
    for i, grad in enumerate(grads):
        check(grad.shape == rows.shape and grad.dtype == rows.dtype and (n == 1 or grad.stride(0) == step) and grad[:1].is_contiguous(),
              f"grads[{i}]", grad, f"{tuple(rows.shape)} {rows.dtype} with contiguous rows, {step} elements apart")
    check(scales.shape == (len(grads), heads) and scales.dtype == torch.float32 and scales.is_contiguous(), "scales", scales,
          f"({len(grads)}, {heads}) float32")
    block, warps = tuned or CONFIGS[0]
    tiles = triton.cdiv(n * head_dim, block)
    out, sums = torch.empty_like(rows), scales.new_empty(tiles, *scales.shape)
    if tiles:
        shared_rows_kernel[tiles * heads,](tuple(grads), rows, scales, out, sums, n, step, HEADS=heads, HEAD_DIM=head_dim, BLOCK=block,
                                           num_warps=warps)
    return out, sums.sum(0)


class Share(torch.autograd.Function):
    """Identity; its backward runs when all layers have delivered for `rows`, though what they deliver is None."""
    @staticmethod
    def forward(ctx, rows: Tensor, scales: Tensor, grads: list[Tensor | None]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, scales)
        ctx.grads = grads
        return rows

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, scales = ctx.saved_tensors
        left = [grad for grad in ctx.grads if grad is not None]
        if len(left) < len(ctx.grads):                                   # layers that nothing reads
            nothing = torch.zeros_like(rows) if not left else rows.new_zeros(len(rows), left[0].stride(0))[:, :rows[0].numel()]
            left = [nothing.view_as(rows) if grad is None else grad for grad in ctx.grads]
        total, sums = shared_rows(left, rows, scales)
        ctx.grads[:] = [None] * len(ctx.grads)
        return total if grad is None else total + grad, sums, None


def share(rows: Tensor, scales: Tensor) -> list[Term]:
    """For each of the layers, whose `scales` (layers, k) float32 are, what it passes to `qkv_heads` or `fp8_qkv_heads`.

    rows (n, k, head_dim). The gradients of both come from here alone: other uses of a `Term`, also by `qkv_heads_reference`, give `scales` none.
    """
    grads: list[Tensor | None] = [None] * len(scales)
    rows = Share.apply(rows, scales, grads)
    return [Term(rows, scale, grads, layer) for layer, scale in enumerate(scales.detach().unbind())]


def of_heads(term: Term | None, v: Tensor) -> tuple[Tensor | None, Tensor | None, int]:
    """Rows and scale of the term, and of how many of the heads of v (n, heads, head_dim)."""
    if term is None:
        return None, None, 0
    (n, heads, head_dim), (rows, scale, *_) = v.shape, term
    check(rows.ndim == 3 and rows.shape == (n, min(rows.size(1), heads), head_dim) and rows.is_contiguous() and rows.dtype == v.dtype,
          "term.rows", rows, f"contiguous ({n}, k, {head_dim}) {v.dtype}, of {heads} heads at most")
    check(scale.shape == rows.shape[1:2] and scale.dtype == torch.float32 and scale.is_contiguous(), "term.scale", scale,
          f"({rows.size(1)},) float32")
    return rows, scale, rows.size(1)


def leave(term: Term | None, v_grad: Tensor) -> Tensor:
    """`v_grad` (n, heads, head_dim), contiguous, whose first heads' part is the term's gradient."""
    v_grad = v_grad.contiguous()
    if term is not None:
        if term.grads is None:
            raise ValueError("term must be from `share`, or its rows and scales get no gradient, but is from `share_reference`")
        term.grads[term.layer] = v_grad[:, :term.rows.size(1)]
    return v_grad
