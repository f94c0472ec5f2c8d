"""mix = 2σ([seen, row's first channels]·gateᵀ): how much of a value row each head adds to its values; (n, heads) from 2 × 6 channels.

One launch each way, a block of tokens a program, in place of a concatenation, two thin products and what is around them. The
backward pass adds to a gradient of `row` that is there already, and perhaps to one of what `seen` is part of: autograd would pad
their few channels with zeros to whole rows, of which a training step has 75 MB a layer, and add those. The gate's gradient is
summed by blocks, in a fixed order.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton

TOKENS, WARPS = 128, 4          # a program


def value_mix_reference(seen: Tensor, row: Tensor, gate: Tensor) -> Tensor:
    """Plain PyTorch twin of `value_mix`, in seen's dtype."""
    both = torch.cat([seen, row[:, :seen.size(1)]], dim=-1)
    return 2 * torch.sigmoid(F.linear(both, gate.type_as(seen)))


@triton.jit
def load_seen(seen_ptr, row_ptr, n, factor, seen_row, row_row, HALF: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr):
    """This program's tokens and the channels, as (TOKENS, 1) and (1, CHANNELS), and what the gates see of both, float32."""
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = (token < n) & (channel < HALF)
    seen = factor * tl.load(seen_ptr + token * seen_row + channel, mask=inside, other=0.0).to(tl.float32)
    return token, channel, seen, tl.load(row_ptr + token * row_row + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def value_mix_kernel(seen_ptr, row_ptr, gate_ptr, mix_ptr, kept_ptr, n, factor, seen_row, row_row,
                     HEADS: tl.constexpr, HALF: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr):
    token, channel, seen, row = load_seen(seen_ptr, row_ptr, n, factor, seen_row, row_row, HALF, CHANNELS, TOKENS)
    if kept_ptr is not None:
        tl.store(kept_ptr + token * HALF + channel, seen.to(kept_ptr.dtype.element_ty), mask=(token < n) & (channel < HALF))
    for head in tl.static_range(HEADS):
        gate = gate_ptr + 2 * HALF * head + channel
        first, second = tl.load(gate, mask=channel < HALF, other=0.0), tl.load(gate + HALF, mask=channel < HALF, other=0.0)
        logit = tl.sum(seen * first + row * second, 1, keep_dims=True)
        tl.store(mix_ptr + token * HEADS + head, 2 * tl.sigmoid(logit), mask=token < n)


@triton.jit
def value_mix_backward_kernel(mix_grad_ptr, mix_ptr, seen_ptr, row_ptr, gate_ptr, seen_grad_ptr, row_grad_ptr, gate_grad_ptr,
                              n, seen_row, row_row, seen_grad_row, row_grad_row, ADD: tl.constexpr,
                              HEADS: tl.constexpr, HALF: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr):
    token, channel, seen, row = load_seen(seen_ptr, row_ptr, n, 1.0, seen_row, row_row, HALF, CHANNELS, TOKENS)
    inside = (token < n) & (channel < HALF)
    seen_grads, row_grads = seen_grad_ptr + token * seen_grad_row + channel, row_grad_ptr + token * row_grad_row + channel
    seen_grad, row_grad = tl.zeros_like(seen), tl.load(row_grads, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        seen_grad += tl.load(seen_grads, mask=inside, other=0.0).to(tl.float32)
    gate_grad_ptr += tl.program_id(0) * (2 * HALF * HEADS)
    for head in tl.static_range(HEADS):
        gate = 2 * HALF * head + channel
        mix = tl.load(mix_ptr + token * HEADS + head, mask=token < n, other=0.0)
        grad = tl.load(mix_grad_ptr + token * HEADS + head, mask=token < n, other=0.0) * mix * (1 - mix / 2)       # of the logit
        seen_grad += grad * tl.load(gate_ptr + gate, mask=channel < HALF, other=0.0)
        row_grad += grad * tl.load(gate_ptr + gate + HALF, mask=channel < HALF, other=0.0)
        tl.store(gate_grad_ptr + gate, tl.sum(grad * seen, 0, keep_dims=True), mask=channel < HALF)
        tl.store(gate_grad_ptr + gate + HALF, tl.sum(grad * row, 0, keep_dims=True), mask=channel < HALF)
    tl.store(seen_grads, seen_grad.to(seen_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(row_grads, row_grad.to(row_grad_ptr.dtype.element_ty), mask=inside)


def _check(seen: Tensor, row: Tensor, gate: Tensor) -> dict:
    check(row.ndim == 2 and row.stride(1) == 1, "value_row", row, "(n, width) with contiguous rows")
    check(seen.ndim == 2 and len(seen) == len(row) and 0 < seen.size(1) <= row.size(1) and seen.stride(1) == 1, "seen", seen,
          f"({len(row)}, channels) with contiguous rows of at most {row.size(1)} channels")
    check(gate.ndim == 2 and gate.size(1) == 2 * seen.size(1) and gate.dtype == torch.float32 and gate.is_contiguous(), "value_gate", gate,
          f"contiguous float32 (heads, {2 * seen.size(1)})")
    return dict(HEADS=len(gate), HALF=seen.size(1), CHANNELS=1 << (seen.size(1) - 1).bit_length(), TOKENS=TOKENS, num_warps=WARPS)


def value_mix(
    seen: Tensor,  # (n, channels), rows contiguous: what the gates see of the token
    row: Tensor,  # (n, width), rows contiguous: its value row, of which they see as many channels
    gate: Tensor,  # (heads, 2 channels) float32
    factor: float = 1.0,  # multiplies `seen`, which may be FP8
    kept: Tensor | None = None,  # (n, channels), contiguous: receives factor · seen
) -> Tensor:
    """(n, heads) float32."""
    check(kept is None or kept.shape == seen.shape and kept.is_contiguous(), "kept", kept, "contiguous, shaped like seen")
    form, mix = _check(seen, row, gate), torch.empty(len(seen), len(gate), dtype=torch.float32, device=seen.device)
    if len(seen):
        value_mix_kernel[triton.cdiv(len(seen), TOKENS),](
            seen, row, gate, mix, kept, len(seen), factor, seen.stride(0), row.stride(0), **form)
    return mix


def value_mix_backward(
    mix_grad: Tensor,  # (n, heads) float32, contiguous
    mix: Tensor,  # (n, heads) from `value_mix`
    seen: Tensor,
    row: Tensor,
    gate: Tensor,
    row_grad: Tensor,  # (n, width), rows contiguous: added to in place
    into: Tensor | None = None,  # (n, channels), rows contiguous: seen's is added to it in place
) -> tuple[Tensor, Tensor]:
    """The gradients of seen, or `into`, and gate; and row's added to `row_grad`."""
    form, blocks = _check(seen, row, gate), triton.cdiv(len(seen), TOKENS)
    check(row_grad.shape == row.shape and row_grad.stride(1) == 1, "row_grad", row_grad, f"{tuple(row.shape)} with contiguous rows")
    for name, tensor in (("mix_grad", mix_grad), ("mix", mix)):
        check(tensor.shape == (len(seen), len(gate)) and tensor.is_contiguous(), name, tensor, f"contiguous ({len(seen)}, {len(gate)})")
    check(into is None or into.shape == seen.shape and into.stride(1) == 1, "into", into, f"{tuple(seen.shape)} with contiguous rows")
    seen_grad = torch.empty(seen.shape, dtype=seen.dtype, device=seen.device) if into is None else into
    gate_grad = torch.empty(blocks, *gate.shape, dtype=torch.float32, device=gate.device)              # each block's part
    if len(seen):
        value_mix_backward_kernel[blocks,](mix_grad, mix, seen, row, gate, seen_grad, row_grad, gate_grad, len(seen),
                                           seen.stride(0), row.stride(0), seen_grad.stride(0), row_grad.stride(0),
                                           ADD=into is not None, **form)
    return seen_grad, gate_grad.sum(0)
