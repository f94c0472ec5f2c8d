"""Σ_i b_ij grad_ij for n-gram rows that all layers add to their values; Σ rows_j · grad_ij for each b_ij.

Layer i adds b_ij · rows_j to the values of head j, with the same rows in all layers and a learned scale b_ij
of its own. The gradient of the rows is therefore a sum over layers. Autograd would add layer by layer: 23
tensors would cross memory for 8 layers, and each sum would be rounded. Here each layer only stores its
gradient (`leave_gradient`). When the last layer has run, one kernel reads the rows and all gradients and
writes the sum: 10 tensors, 378 MB for 49,152 tokens, 3 heads of 128 channels and 8 layers in bf16.

What a layer stores is a view: some heads of the gradient of its values, read where it stands. Nothing is
copied, but the whole gradient, 75 MB a layer for 6 heads, lives until the last layer has run.

How the layers' kernels and this one find each other:

    forward    rows ── Share (identity) ──┬── layer 0 adds b_0 · rows
                                          ├── layer 1 adds b_1 · rows
                                          └── ...
               `share_values` makes one NGramValues a layer, all with the same list `grads`.
    backward   Each layer sets grads[layer] (`leave_gradient`) and gives autograd None for the rows.
               When all readers of the rows have run, autograd calls Share.backward, which sums `grads`.

There are no atomics: all sums have one order, and repeated runs are equal bit for bit. One H200, 8 layers,
one head of six, 49,152 tokens: 52 µs, compiled PyTorch 82 µs.
"""
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example

DTYPES = torch.bfloat16, torch.float16, torch.float32
CONFIGS = [(2048, 4), (4096, 8), (4096, 4), (8192, 8)]  # (elements a program, warps); the first is used


class NGramValues(NamedTuple):
    """What one layer adds to its first heads' values: scale[j] · rows[:, j] to the values of head j."""
    rows: Tensor  # (n, k, head_dim), contiguous, of the values' dtype; the same for all layers
    scale: Tensor  # (k,) float32, learned
    grads: list[Tensor | None] | None = None  # where each layer's kernel stores its gradient
    layer: int = 0  # this layer's place in that list


def share_values_reference(rows: Tensor, scales: Tensor) -> list[NGramValues]:
    """Plain PyTorch form of `share_values`, for `qkv_heads_reference`: autograd sums over the layers."""
    return [NGramValues(rows, scale) for scale in scales.unbind()]


def sum_over_layers_reference(grads: Sequence[Tensor], rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch form of `sum_over_layers`."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = sum(scale[:, None] * grad.to(wide) for scale, grad in zip(scales, grads)).to(rows.dtype)
    return total, torch.stack([(rows.to(wide) * grad).sum((0, 2)) for grad in grads]).to(scales.dtype)


@triton.jit
def shared_rows_kernel(
    grads, rows_ptr, scales_ptr, out_ptr, sums_ptr, n, grad_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):
    head, tile = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    element = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # among those of this head
    token, channel, live = element // HEAD_DIM, head * HEAD_DIM + element % HEAD_DIM, element < n * HEAD_DIM
    at, grad_at = token * (HEADS * HEAD_DIM) + channel, token * grad_stride + channel
    rows, total = tl.load(rows_ptr + at, mask=live, other=0.0).to(tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(len(grads)):
        grad = tl.load(grads[i] + grad_at, mask=live, other=0.0).to(tl.float32)
        total += tl.load(scales_ptr + i * HEADS + head) * grad
        tl.store(sums_ptr + (tile * len(grads) + i) * HEADS + head, tl.sum(rows * grad))
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)


def sum_over_layers(
    grads: Sequence[Tensor],  # one a layer, like rows: the first k heads of contiguous (n, heads, head_dim)
    rows: Tensor,  # (n, k, head_dim) bf16, fp16 or float32, contiguous
    scales: Tensor,  # (layers, k) float32, contiguous
    tuned: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ_i scales[i] grads[i], like rows, rounded once; and each head's rows · grads, summed, like scales."""
    check(rows.ndim == 3 and rows.is_contiguous() and rows.dtype in DTYPES,
          "rows", rows, "contiguous, (n, k, head_dim) in bf16, fp16 or float32")
    (n, heads, head_dim), stride = rows.shape, grads[0].stride(0)
    for i, grad in enumerate(grads):
        same_stride = n == 1 or grad.stride(0) == stride
        alike = grad.shape == rows.shape and grad.dtype == rows.dtype
        check(alike and same_stride and grad[:1].is_contiguous(), f"grads[{i}]", grad,
              f"{tuple(rows.shape)} {rows.dtype} with contiguous rows, {stride} elements apart")
    check(scales.shape == (len(grads), heads) and scales.dtype == torch.float32 and scales.is_contiguous(),
          "scales", scales, f"({len(grads)}, {heads}) float32")
    block, warps = tuned or CONFIGS[0]
    tiles = triton.cdiv(n * head_dim, block)
    out, sums = torch.empty_like(rows), scales.new_empty(tiles, *scales.shape)
    if tiles:
        shared_rows_kernel[tiles * heads,](
            tuple(grads), rows, scales, out, sums, n, stride,
            HEADS=heads, HEAD_DIM=head_dim, BLOCK=block, num_warps=warps)
    return out, sums.sum(0)


class Share(torch.autograd.Function):
    """The identity in forward. Its backward sums the gradients that the layers have stored in `grads`.

    The layers are its readers, so autograd calls its backward last, when every layer has stored its gradient.
    Autograd itself passes None, because the layers return no gradient for the rows. If something else reads
    the rows too, autograd passes that reader's gradient.
    """
    @staticmethod
    def forward(ctx, rows: Tensor, scales: Tensor, grads: list[Tensor | None]) -> Tensor:
        ctx.set_materialize_grads(False)  # None stays None: no zeros as long as the rows are made
        ctx.save_for_backward(rows, scales)
        ctx.grads = grads
        return rows

    @staticmethod
    def backward(ctx, other_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, scales = ctx.saved_tensors
        found = [grad for grad in ctx.grads if grad is not None]
        if len(found) < len(ctx.grads):  # the gradient of a layer that nothing reads is zero
            zeros = torch.zeros_like(rows)
            if found:  # rows as far apart as those of the others, for the kernel
                zeros = rows.new_zeros(len(rows), found[0].stride(0))[:, :rows[0].numel()].view_as(rows)
            found = [zeros if grad is None else grad for grad in ctx.grads]
        total, scales_grad = sum_over_layers(found, rows, scales)
        ctx.grads[:] = [None] * len(ctx.grads)  # frees memory, and a second backward pass starts anew
        return total if other_grad is None else total + other_grad, scales_grad, None


def share_values(rows: Tensor, scales: Tensor) -> list[NGramValues]:
    """What each layer passes to `qkv_heads` or `qkv_fp8`; rows (n, k, head_dim), scales (layers, k) float32.

    Only the backward passes of these two functions make the gradients of rows and scales. Any other use of an
    `NGramValues`, also by `qkv_heads_reference`, gives `scales` no gradient.
    """
    grads: list[Tensor | None] = [None] * len(scales)
    rows = Share.apply(rows, scales, grads)
    return [NGramValues(rows, scale, grads, layer) for layer, scale in enumerate(scales.detach().unbind())]


def leave_gradient(ngrams: NGramValues | None, v_grad: Tensor) -> Tensor:
    """`v_grad` (n, heads, head_dim), contiguous. A view of its first heads is stored: the rows' gradient."""
    v_grad = v_grad.contiguous()
    if ngrams is not None:
        if ngrams.grads is None:
            raise ValueError("ngrams must be from `share_values`, or its rows and scales get no gradient, "
                             "but is from `share_values_reference`")
        ngrams.grads[ngrams.layer] = v_grad[:, :ngrams.rows.size(1)]
    return v_grad


def kernel_arguments(ngrams: NGramValues | None, v: Tensor) -> tuple[Tensor | None, Tensor | None, int]:
    """The rows, the scale, and how many of the heads of v (n, heads, head_dim) get them; all checked."""
    if ngrams is None:
        return None, None, 0
    (n, heads, head_dim), rows, scale = v.shape, ngrams.rows, ngrams.scale
    fits = rows.ndim == 3 and rows.shape == (n, min(rows.size(1), heads), head_dim)
    check(fits and rows.is_contiguous() and rows.dtype == v.dtype, "ngrams.rows", rows,
          f"contiguous ({n}, k, {head_dim}) {v.dtype}, of {heads} heads at most")
    check(scale.shape == rows.shape[1:2] and scale.dtype == torch.float32 and scale.is_contiguous(),
          "ngrams.scale", scale, f"({rows.size(1)},) float32")
    return rows, scale, rows.size(1)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Of gradients that are the first heads of wider ones. They contain the rows: no sum nearly cancels."""
    def inputs(n: int, k: int, heads: int, head_dim: int, layers: int) -> tuple:
        rows = torch.randn(n, k, head_dim, device=device).to(dtype)
        grads = torch.randn(layers, n, heads, head_dim, device=device).to(dtype)[:, :, :k]
        return grads.add_(rows / 2), rows, torch.rand(layers, k, device=device) + 0.5

    def unbound(function):
        return lambda grads, rows, scales, **tuned: function(grads.unbind(), rows, scales, **tuned)

    if size == "real":
        shapes = [(n, k, 6, 128, 8) for n in (16384, 49152) for k in (1, 3)]
    else:
        shapes = [(50, 1, 1, 96, 3), (50, 2, 3, 96, 1), (37, 3, 6, 128, 11), (1, 1, 2, 16, 3)]
    for n, k, heads, head_dim, layers in shapes:
        yield Example(
            f"shared rows' gradient, {layers} layers, {k} of {heads} heads", f"{n} × {heads * head_dim}",
            lambda shape=(n, k, heads, head_dim, layers): inputs(*shape),
            unbound(sum_over_layers), unbound(sum_over_layers_reference),
            bytes=2.0 * (layers + 2) * n * k * head_dim, configs=tuple(CONFIGS))
