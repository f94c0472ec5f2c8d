"""Σ_i b_ij grad_ij for n-gram rows that all layers add to their values; Σ rows_j · grad_ij for each b_ij.

Layer i adds b_ij · rows_j to the values of head j, with the same rows in all layers and a learned scale b_ij
of its own, which a gate may multiply for each token (`row_gate.py`). The gradient of the rows is therefore a
sum over layers. Added up layer by layer, as autograd does it, 23 tensors cross memory for 8 layers, and each
sum is rounded. Here each layer only stores its gradient (`values.py`), and when the last has run, one
kernel reads the rows and all of them: 10 tensors, 378 MB for 49,152 tokens, 3 heads of 128 channels and 8
layers in bf16. It computes the gates once more and makes their gradients, too.

There are no atomics: all sums have one order, and repeated runs are equal bit for bit. One H200, 8 layers,
one head of six, 49,152 tokens: 52 µs, compiled PyTorch 82 µs.
"""
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.ngrams.row_gate import row_scale_reference

DTYPES = torch.bfloat16, torch.float16, torch.float32
CONFIGS = [(2048, 4), (4096, 8), (4096, 4), (8192, 8)]  # (elements a program, warps); the first is used


def sum_over_layers_reference(
    grads: Sequence[Tensor], rows: Tensor, scales: Tensor, gates: Tensor | None = None,
    seen: Sequence[Tensor] = (),
) -> tuple[Tensor | None, ...]:
    """Plain PyTorch form of `sum_over_layers`: autograd on the sum of rows times scales."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    leaves = [x if x is None else x.detach().to(wide).requires_grad_() for x in (rows, scales, gates)]
    with torch.enable_grad():
        each = leaves[1] if gates is None else map(
            row_scale_reference, seen, [leaves[0]] * len(seen), leaves[1], leaves[2])
        added = [scale[..., None] * leaves[0] for scale in each]
    wanted = [x for x in leaves if x is not None]
    found = torch.autograd.grad(added, wanted, [grad.to(wide) for grad in grads])
    found = [x.to(like.dtype) for x, like in zip(found, (rows, scales, gates))]
    return *found, *[None] * (3 - len(found))


@triton.jit
def shared_rows_kernel(
    grads, seen, rows_ptr, scales_ptr, gates_ptr, out_ptr, sums_ptr, n, grad_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head, tile = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    token = (tile.to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel, few = tl.arange(0, HEAD_DIM)[None, :], tl.arange(0, CHANNELS)[None, :]
    live = token < n
    at = (token * HEADS + head) * HEAD_DIM + channel
    rows = tl.load(rows_ptr + at, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros((TOKENS, HEAD_DIM), tl.float32)
    # This program's part of the scales' gradients, then that of the gates'.
    sums_ptr += tile * (len(grads) * HEADS * (1 + 2 * HALF))
    for i in tl.static_range(len(grads)):
        place = i * HEADS + head
        grad_at = token * grad_stride + head * HEAD_DIM + channel
        grad = tl.load(grads[i] + grad_at, mask=live, other=0.0).to(tl.float32)
        scale, scale_grad = tl.load(scales_ptr + place), tl.sum(rows * grad, 1, keep_dims=True)
        if HALF:
            gate = gates_ptr + place * (2 * HALF)
            of_token = tl.load(gate + few, mask=few < HALF, other=0.0)
            of_row = tl.load(gate + HALF + channel, mask=channel < HALF, other=0.0)
            x = tl.load(seen[i] + token * HALF + few, mask=live & (few < HALF), other=0.0).to(tl.float32)
            logit = tl.sum(x * of_token, 1, keep_dims=True) + tl.sum(rows * of_row, 1, keep_dims=True)
            share = 2 * tl.sigmoid(logit)
            logit_grad = scale_grad * scale * share * (1 - share / 2)   # the derivative of 2σ is 2σ (1 − σ)
            total += scale * share * grad + logit_grad * of_row
            scale_grad *= share
            sums = sums_ptr + len(grads) * HEADS + place * (2 * HALF)
            tl.store(sums + few, tl.sum(logit_grad * x, 0, keep_dims=True), mask=few < HALF)
            tl.store(sums + HALF + channel, tl.sum(logit_grad * rows, 0, keep_dims=True), mask=channel < HALF)
        else:
            total += scale * grad
        tl.store(sums_ptr + place, tl.sum(scale_grad))
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)


def sum_over_layers(
    grads: Sequence[Tensor],  # one a layer, like rows: the first k heads of contiguous (n, heads, head_dim)
    rows: Tensor,  # (n, k, head_dim) bf16, fp16 or float32, contiguous; head_dim: a power of two
    scales: Tensor,  # (layers, k) float32, contiguous
    gates: Tensor | None = None,  # (layers, k, 2 channels) float32, contiguous; None: no gates
    seen: Sequence[Tensor] = (),  # with gates one a layer: (n, channels), contiguous
    tuned: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of rows, rounded once, of scales and of gates (None without): sums over the layers.

    Layer i adds s rows[:, j] to the values of head j. s is scales[i, j], or `row_scale` for each token.
    """
    check(rows.ndim == 3 and rows.is_contiguous() and rows.dtype in DTYPES,
          "rows", rows, "contiguous, (n, k, head_dim) in bf16, fp16 or float32")
    (n, heads, head_dim), stride = rows.shape, grads[0].stride(0)
    check(head_dim & head_dim - 1 == 0, "rows", rows, "(n, k, head_dim), head_dim a power of two")
    for i, grad in enumerate(grads):
        same_stride = n == 1 or grad.stride(0) == stride
        alike = grad.shape == rows.shape and grad.dtype == rows.dtype
        check(alike and same_stride and grad[:1].is_contiguous(), f"grads[{i}]", grad,
              f"{tuple(rows.shape)} {rows.dtype} with contiguous rows, {stride} elements apart")
    check(scales.shape == (len(grads), heads) and scales.dtype == torch.float32 and scales.is_contiguous(),
          "scales", scales, f"({len(grads)}, {heads}) float32")
    half = 0 if gates is None else gates.size(-1) // 2
    if gates is not None:
        check(gates.shape == (*scales.shape, 2 * half) and gates.dtype == torch.float32
              and gates.is_contiguous() and 0 < half <= head_dim, "gates", gates,
              f"contiguous float32 ({len(grads)}, {heads}, 2 channels)")
        for i, x in enumerate(seen):
            check(x.shape == (n, half) and x.is_contiguous(), f"seen[{i}]", x, f"contiguous ({n}, {half})")
    elements, warps = tuned or CONFIGS[0]
    tokens = max(elements // head_dim, 1)
    tiles = triton.cdiv(n, tokens)
    out, sums = torch.empty_like(rows), scales.new_empty(tiles, scales.numel() * (1 + 2 * half))
    if tiles:
        shared_rows_kernel[tiles * heads,](
            tuple(grads), tuple(seen or grads), rows, scales, gates, out, sums, n, stride, HEADS=heads,
            HEAD_DIM=head_dim, HALF=half, CHANNELS=triton.next_power_of_2(max(half, 1)), TOKENS=tokens,
            num_warps=warps)
    of_scales, of_gates = sums.sum(0).tensor_split([scales.numel()])
    return out, of_scales.view_as(scales), None if gates is None else of_gates.view_as(gates)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Of gradients that are the first heads of wider ones. They contain the rows: no sum nearly cancels."""
    def inputs(n: int, k: int, heads: int, head_dim: int, layers: int, half: int) -> tuple:
        rows = torch.randn(n, k, head_dim, device=device).to(dtype)
        grads = torch.randn(layers, n, heads, head_dim, device=device).to(dtype)[:, :, :k]
        given = grads.add_(rows / 2), rows, torch.rand(layers, k, device=device) + 0.5
        seen = torch.rand(layers, n, half, device=device).to(dtype)
        return *given, *((torch.rand(layers, k, 2 * half, device=device) / 4, seen) if half else ())

    def unbound(function):
        def run(grads, rows, scales, gates=None, seen=None, **tuned):
            seen = () if seen is None else seen.unbind()
            found = function(grads.unbind(), rows, scales, gates, seen, **tuned)
            return found if gates is not None else found[:2]
        return run

    if size == "real":
        shapes = [(n, k, 6, 128, 8, 0) for n in (16384, 49152) for k in (1, 3)]
        shapes += [(98304, 5, 6, 128, 7, half) for half in (0, 6)]
    else:
        shapes = [(50, 1, 1, 64, 3, 0), (50, 2, 3, 64, 1, 6), (37, 3, 6, 128, 11, 0), (37, 3, 6, 128, 4, 5),
                  (1, 1, 2, 16, 3, 1)]
    for shape in shapes:
        n, k, heads, head_dim, layers, half = shape
        yield Example(
            f"shared rows' gradient, {layers} layers, {k} of {heads} heads" + ", gates" * bool(half),
            f"{n} × {heads * head_dim}", partial(inputs, *shape), unbound(sum_over_layers),
            unbound(sum_over_layers_reference), compile=not half,
            bytes=2.0 * (layers + 2) * n * k * head_dim, configs=tuple(CONFIGS))
