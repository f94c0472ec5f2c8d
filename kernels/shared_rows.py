"""Rows that every layer adds to a head's values, times a scalar b_i: their gradient Σ b_i grad_i over layers, and b_i's, Σ rows · grad_i.

grad_i is what layer i's kernel returns for what it added the rows to. Layers therefore only leave grad_i behind (`Term`), and when the
last has run, one kernel reads rows and all of them: 13 tensors cross memory for 11 layers, where adding layer by layer moves 32 and
rounds each sum. (8 layers: 10 and 23.) The tensors are as wide as a head, and grad_i is some columns of the gradient of values
(`kernels.qkv`), read where it stands: nothing is copied, but that gradient, 75 MB a layer for 49,152 tokens of 768 channels in bf16, lives
until the last layer has run. For 8 layers of heads of 128 channels the kernel moves 126 MB.

No atomics: all sums have one order, repeated runs are bit-equal. Times: README.md.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check, tl, triton

CONFIGS = [(2048, 4), (4096, 8), (4096, 4), (8192, 8)]                   # (elements a tile, warps); the first is used


class Term(NamedTuple):
    """What one layer adds: scale · rows."""
    rows: Tensor  # (n, width), the same for all layers
    scale: Tensor  # 0-dim float32
    grads: list[Tensor | None] | None = None  # where each layer's kernel leaves its gradient; None from `share_twin`
    layer: int = 0  # its place there


def share_twin(rows: Tensor, scales: Tensor) -> list[Term]:
    """Plain PyTorch twin of `share`."""
    return [Term(rows, scale) for scale in scales.unbind()]


def shared_rows_reference(grads: Sequence[Tensor], rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of `shared_rows`."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = sum(scale * grad.to(wide) for scale, grad in zip(scales, grads)).to(rows.dtype)
    return total, torch.stack([(rows.to(wide) * grad).sum() for grad in grads]).to(scales.dtype)


@triton.jit
def shared_rows_kernel(grads, rows_ptr, scales_ptr, out_ptr, sums_ptr, size, grad_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(rows_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    total, of_grad = tl.zeros((BLOCK,), tl.float32), at // WIDTH * grad_row + at % WIDTH
    for i in tl.static_range(len(grads)):
        grad = tl.load(grads[i] + of_grad, mask=at < size, other=0.0).to(tl.float32)
        total += tl.load(scales_ptr + i) * grad
        tl.store(sums_ptr + tl.program_id(0) * len(grads) + i, tl.sum(rows * grad))
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def shared_rows(
    grads: Sequence[Tensor],  # k, one or more, (n, width) like rows, or columns of contiguous tensors of one width
    rows: Tensor,  # (n, width) bf16, fp16 or float32, contiguous
    scales: Tensor,  # (k,) float32
    tuned: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ scales[i] grads[i], like rows, rounded once, and the dot products of rows with each of grads, (k,) float32."""
    check(rows.ndim == 2 and rows.is_contiguous() and rows.dtype in (torch.bfloat16, torch.float16, torch.float32), "rows", rows,
          "contiguous, (n, width) in bf16, fp16 or float32")
    n, width = rows.shape
    step = grads[0].stride(0)
    for i, grad in enumerate(grads):
        check(grad.shape == rows.shape and grad.dtype == rows.dtype and grad.stride(1) == 1 and (n == 1 or grad.stride(0) == step),
              f"grads[{i}]", grad, f"({n}, {width}) {rows.dtype} with contiguous rows, {step} elements apart")
    check(scales.shape == (len(grads),) and scales.dtype == torch.float32 and scales.is_contiguous(), "scales", scales,
          f"({len(grads)},) float32")
    block, warps = tuned or CONFIGS[0]
    tiles = triton.cdiv(rows.numel(), block)
    out, sums = torch.empty_like(rows), scales.new_empty(tiles, len(grads))
    if tiles:
        shared_rows_kernel[tiles,](tuple(grads), rows, scales, out, sums, rows.numel(), step, WIDTH=width, BLOCK=block, num_warps=warps)
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
            nothing = torch.zeros_like(rows) if not left else rows.new_zeros(len(rows), left[0].stride(0))[:, :rows.size(1)]
            left = [nothing if grad is None else grad for grad in ctx.grads]
        total, sums = shared_rows(left, rows, scales)
        ctx.grads[:] = [None] * len(ctx.grads)
        return total if grad is None else total + grad, sums, None


def share(rows: Tensor, scales: Tensor) -> list[Term]:
    """For each of the layers, whose `scales` (layers,) float32 are, what it passes to `qkv_heads` or `fp8_qkv_heads`; rows (n, head_dim).

    The gradients of both come from here alone: other uses of a `Term`, also by `qkv_heads_twin`, give `scales` none.
    """
    grads: list[Tensor | None] = [None] * len(scales)
    rows = Share.apply(rows, scales, grads)
    return [Term(rows, scale, grads, layer) for layer, scale in enumerate(scales.detach().unbind())]


def of_heads(terms: tuple[Term, ...], v: Tensor) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """Rows and scales of terms, None where there are none, of which the i-th is added to the i-th head of v (n, heads, head_dim)."""
    n, heads, head_dim = v.shape
    for i, (rows, scale, *_) in enumerate(terms):
        check(i < heads and rows.shape == (n, head_dim) and rows.is_contiguous() and rows.dtype == v.dtype, f"terms[{i}].rows", rows,
              f"contiguous ({n}, {head_dim}) {v.dtype}, and one for each of {heads} heads at most")
        check(scale.numel() == 1 and scale.dtype == torch.float32, f"terms[{i}].scale", scale, "one float32")
    return tuple(zip(*[term[:2] for term in terms])) or (None, None)


def leave_heads(left: Sequence[tuple], v_grad: Tensor) -> Tensor:
    """`v_grad` (n, heads, head_dim), contiguous, whose i-th head's part is the i-th term's gradient; `left`: terms' `grads`, `layer`."""
    v_grad = v_grad.contiguous()
    for head, (grads, layer) in enumerate(left):
        if grads is None:
            raise ValueError("terms must be from `share`, or their rows and scales get no gradient, but are from `share_twin`")
        grads[layer] = v_grad[:, head]
    return v_grad
