"""scale · 2σ(gate · [seen, first channels of the row]): how much of its n-gram row each head takes.

A hashed row may be another n-gram's, and a row that was read once or twice says little. So each layer and
head weighs the row of each token. `seen` are the first channels of the token's normed vector, which tell what
the context made of the token; the row's own first channels can tell what it is worth. σ starts at a half, so
that at first the learned scale alone counts. A gate by the context is Engram's (Cheng et al., arXiv
2601.07372), which compares the whole vector with the row; this form is that of value embeddings
(`kernels/attention/value_gate.py`).

The gate takes `seen` as it is: no gradient goes from a gate to the vector. So the backward pass of a layer
has nothing to do for it, and the gradients of all layers' gates are made together (`shared_gradient.py`).
"""
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.fp8.formats import Quantized, normed_scale

CONFIGS = [(128, 4), (64, 4), (256, 8)]  # (tokens, warps) of a program; the first is used


def row_scale_reference(seen: Tensor, rows: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    """Plain PyTorch form of `row_scale`."""
    of_token, of_row = gate.chunk(2, 1)
    logit = F.linear(seen.type_as(gate), of_token)
    logit = logit + (rows[..., :seen.size(1)].type_as(gate) * of_row).sum(-1)
    return scale * (2 * torch.sigmoid(logit))


@triton.jit
def row_scale_kernel(
    seen_ptr, rows_ptr, scale_ptr, gate_ptr, out_ptr, kept_ptr, n, factor, seen_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = (token < n) & (channel < HALF)
    seen = factor * tl.load(seen_ptr + token * seen_stride + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(kept_ptr + token * HALF + channel, seen.to(kept_ptr.dtype.element_ty), mask=inside)
    for head in tl.static_range(HEADS):
        row = tl.load(rows_ptr + (token * HEADS + head) * HEAD_DIM + channel, mask=inside, other=0.0)
        gate = gate_ptr + 2 * HALF * head + channel
        of_token = tl.load(gate, mask=channel < HALF, other=0.0)
        of_row = tl.load(gate + HALF, mask=channel < HALF, other=0.0)
        logit = tl.sum(seen * of_token + row.to(tl.float32) * of_row, 1, keep_dims=True)
        scale = tl.load(scale_ptr + head) * (2 * tl.sigmoid(logit))
        tl.store(out_ptr + token * HEADS + head, scale, mask=token < n)


def row_scale(
    seen: Tensor,  # (n, channels), rows contiguous: what the gate sees of each token; it may be FP8
    rows: Tensor,  # (n, k, head_dim), contiguous: of which the gate sees as many channels
    scale: Tensor,  # (k,) float32, contiguous
    gate: Tensor,  # (k, 2 channels) float32, contiguous
    factor: float = 1.0,  # multiplies `seen`
    tuned: tuple[int, int] = CONFIGS[0],
) -> tuple[Tensor, Tensor]:
    """The scale (n, k) float32 of each token's rows; and factor · seen, contiguous, of the rows' dtype."""
    check(rows.ndim == 3 and rows.is_contiguous(), "rows", rows, "contiguous (n, k, head_dim)")
    (n, heads, head_dim), (tokens, warps) = rows.shape, tuned
    fits = seen.ndim == 2 and len(seen) == n and 0 < seen.size(1) <= head_dim and seen.stride(1) == 1
    check(fits, "seen", seen, f"({n}, channels) with contiguous rows of at most {head_dim} channels")
    half = seen.size(1)
    for name, x, shape in (("scale", scale, (heads,)), ("gate", gate, (heads, 2 * half))):
        check(x.shape == shape and x.dtype == torch.float32 and x.is_contiguous(), name, x,
              f"contiguous float32 {shape}")
    out = torch.empty(n, heads, dtype=torch.float32, device=rows.device)
    kept = torch.empty(n, half, dtype=rows.dtype, device=rows.device)
    if n:
        row_scale_kernel[triton.cdiv(n, tokens),](
            seen, rows, scale, gate, out, kept, n, factor, seen.stride(0), HEADS=heads, HEAD_DIM=head_dim,
            HALF=half, CHANNELS=triton.next_power_of_2(half), TOKENS=tokens, num_warps=warps)
    return out, kept


def first_channels(x: Tensor | Quantized, count: int) -> tuple[Tensor, float]:
    """The first `count` channels of normed rows x, without a gradient, and what to multiply them with."""
    if isinstance(x, Quantized):
        return x.q[:, :count], normed_scale(x.q.size(1))
    return x.detach()[:, :count], 1.0


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    def inputs(n: int, k: int, head_dim: int, half: int) -> tuple[Tensor, ...]:
        seen = torch.randn(n, 3 * half, device=device).to(dtype)[:, half:2 * half]
        rows = torch.randn(n, k, head_dim, device=device).to(dtype)
        return seen, rows, torch.rand(k, device=device) + 0.5, torch.randn(k, 2 * half, device=device)

    def reference(seen: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return row_scale_reference(seen, *others), seen.contiguous()

    real = ((49152, 5, 128, 6), (98304, 5, 128, 6))
    for shape in real if size == "real" else ((1, 1, 16, 1), (131, 2, 16, 6), (130, 5, 32, 8)):
        n, k, head_dim, half = shape
        yield Example(
            "scale of each token's n-gram rows", f"{n:,} × {k}, 2 × {half} channels",
            partial(inputs, *shape), row_scale, reference, bytes=n * (4.0 * k + 4 * half + 2 * half * k),
            configs=tuple(CONFIGS))
