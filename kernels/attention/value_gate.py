"""mix = 2σ(gate · [seen, first channels of the value row]): how much of a token's value row each head takes.

`seen` are the first channels of the token's vector x, so that the gate knows the context as well as the
token. With 6 + 6 channels and 6 heads the arithmetic is tiny; the kernels save launches and padding. One
launch each way replaces a concatenation, two thin matmuls and what surrounds them. The backward pass adds the
gradients of the few channels in place to the gradients of the whole rows. Autograd would pad the gradient of
the channels with zeros to whole rows, 75 MB a layer for 49,152 tokens in bf16, and add these. The gate's
gradient is summed by blocks of tokens in a fixed order, so repeated runs are equal bit for bit.

Value embeddings: arXiv 2410.17897 (value residuals, @Grad62304977 in the modded-nanogpt speedrun), and as
tables of their own by @KoszarskyB, who made them a record there.
"""
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.inputs import Rows, ValueRows
from kernels.backend import check, tl, triton
from kernels.embedding.rows import RowOrder, lookup, lookup_later
from kernels.example import Example

TOKENS, WARPS = 128, 4  # of a program


def value_rows(look_up: Callable, table: Tensor, order: RowOrder, gate: Tensor) -> ValueRows:
    """Each token's row of `table`, read by `look_up`. `order` is of the tokens (n,); `gate`: see `ValueRows`.

    For `embedding.lookup` nothing is read here: the kernels that make v read the table itself.
    """
    if look_up is lookup:
        return ValueRows(lookup_later(table, order), gate, Rows(table.detach(), order.index))
    return ValueRows(look_up(table, order), gate)


def value_mix_reference(seen: Tensor, rows: Tensor, gate: Tensor) -> Tensor:
    """Plain PyTorch form of `value_mix`, in seen's dtype."""
    both = torch.cat([seen, rows[:, :seen.size(1)]], dim=-1)
    return 2 * torch.sigmoid(F.linear(both, gate.type_as(seen)))


@triton.jit
def row_of(token, index_ptr, n):
    """The row of each token (TOKENS,) int64; `index_ptr` None: its own number."""
    if index_ptr is not None:
        token = tl.load(index_ptr + token, mask=token < n, other=0).to(tl.int64)
    return token


@triton.jit
def load_gate_inputs(
    seen_ptr, rows_ptr, index_ptr, n, factor, seen_stride, rows_stride,
    HALF: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):
    """The tokens (TOKENS, 1), the channels (1, CHANNELS), and what the gate sees of x and of the row."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row, token = row_of(token, index_ptr, n)[:, None], token[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = (token < n) & (channel < HALF)
    seen = factor * tl.load(seen_ptr + token * seen_stride + channel, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows_ptr + row * rows_stride + channel, mask=inside, other=0.0).to(tl.float32)
    return token, channel, seen, row


@triton.jit
def value_mix_kernel(
    seen_ptr, rows_ptr, index_ptr, gate_ptr, mix_ptr, kept_ptr, n, factor, seen_stride, rows_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):
    token, channel, seen, row = load_gate_inputs(
        seen_ptr, rows_ptr, index_ptr, n, factor, seen_stride, rows_stride, HALF, CHANNELS, TOKENS)
    if kept_ptr is not None:
        kept = seen.to(kept_ptr.dtype.element_ty)
        tl.store(kept_ptr + token * HALF + channel, kept, mask=(token < n) & (channel < HALF))
    for head in tl.static_range(HEADS):
        gate = gate_ptr + 2 * HALF * head + channel
        seen_gate = tl.load(gate, mask=channel < HALF, other=0.0)
        row_gate = tl.load(gate + HALF, mask=channel < HALF, other=0.0)
        logit = tl.sum(seen * seen_gate + row * row_gate, 1, keep_dims=True)
        tl.store(mix_ptr + token * HEADS + head, 2 * tl.sigmoid(logit), mask=token < n)


@triton.jit
def value_mix_backward_kernel(
    mix_grad_ptr, mix_ptr, seen_ptr, rows_ptr, index_ptr, gate_ptr, seen_grad_ptr, rows_grad_ptr,
    gate_grad_ptr, n, strides,
    ADD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
):
    seen_stride, rows_stride, seen_grad_stride, rows_grad_stride = strides
    token, channel, seen, row = load_gate_inputs(
        seen_ptr, rows_ptr, index_ptr, n, 1.0, seen_stride, rows_stride, HALF, CHANNELS, TOKENS)
    inside = (token < n) & (channel < HALF)
    seen_grad_at = seen_grad_ptr + token * seen_grad_stride + channel
    row_grad_at = rows_grad_ptr + token * rows_grad_stride + channel
    seen_grad, row_grad = tl.zeros_like(seen), tl.load(row_grad_at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        seen_grad += tl.load(seen_grad_at, mask=inside, other=0.0).to(tl.float32)
    gate_grad_ptr += tl.program_id(0) * (2 * HALF * HEADS)
    for head in tl.static_range(HEADS):
        gate = 2 * HALF * head + channel
        mix = tl.load(mix_ptr + token * HEADS + head, mask=token < n, other=0.0)
        mix_grad = tl.load(mix_grad_ptr + token * HEADS + head, mask=token < n, other=0.0)
        logit_grad = mix_grad * mix * (1 - mix / 2)  # the derivative of 2σ is 2σ (1 − σ)
        seen_grad += logit_grad * tl.load(gate_ptr + gate, mask=channel < HALF, other=0.0)
        row_grad += logit_grad * tl.load(gate_ptr + gate + HALF, mask=channel < HALF, other=0.0)
        gate_grad = gate_grad_ptr + gate
        tl.store(gate_grad, tl.sum(logit_grad * seen, 0, keep_dims=True), mask=channel < HALF)
        tl.store(gate_grad + HALF, tl.sum(logit_grad * row, 0, keep_dims=True), mask=channel < HALF)
    tl.store(seen_grad_at, seen_grad.to(seen_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(row_grad_at, row_grad.to(rows_grad_ptr.dtype.element_ty), mask=inside)


def check_rows(rows: Rows, n: int, width: int | None = None) -> None:
    """ValueError unless there is a row of so many columns (None: of any number) for each of n tokens."""
    table, index = rows
    check(table.ndim == 2 and table.stride(1) == 1 and width in (None, table.size(1)), "value rows", table,
          f"({n if index is None else 'rows'}, {width or 'width'}) with contiguous rows")
    check(index is not None or len(table) == n, "value rows", table, f"{n} rows")
    check(index is None or index.shape == (n,) and index.is_contiguous() and not index.is_floating_point(),
          "index", index, f"({n},) integers, contiguous")


def constants(seen: Tensor, rows: Rows, gate: Tensor) -> dict[str, int]:
    """What both kernels are compiled for, after checking the shapes that they rely on."""
    check_rows(rows, len(seen))
    n, width = len(seen), rows.table.size(1)
    check(seen.ndim == 2 and len(seen) == n and 0 < seen.size(1) <= width and seen.stride(1) == 1,
          "seen", seen, f"({n}, channels) with contiguous rows of at most {width} channels")
    channels = seen.size(1)
    fits = gate.ndim == 2 and gate.size(1) == 2 * channels
    check(fits and gate.dtype == torch.float32 and gate.is_contiguous(), "gate", gate,
          f"contiguous float32 (heads, {2 * channels})")
    power_of_two = 1 << (channels - 1).bit_length()
    return dict(HEADS=len(gate), HALF=channels, CHANNELS=power_of_two, TOKENS=TOKENS, num_warps=WARPS)


def value_mix(
    seen: Tensor,  # (n, channels), rows contiguous: what the gate sees of x
    rows: Rows,  # (n, width), rows contiguous: the value rows, of which the gate sees as many channels
    gate: Tensor,  # (heads, 2 channels) float32, contiguous
    factor: float = 1.0,  # multiplies `seen`, which may be FP8
    kept: Tensor | None = None,  # (n, channels), contiguous: receives factor · seen, for the backward pass
) -> Tensor:
    """mix (n, heads) float32."""
    check(kept is None or kept.shape == seen.shape and kept.is_contiguous(), "kept", kept,
          "contiguous, shaped like seen")
    compiled_for = constants(seen, rows, gate)
    mix = torch.empty(len(seen), len(gate), dtype=torch.float32, device=seen.device)
    if len(seen):
        value_mix_kernel[triton.cdiv(len(seen), TOKENS),](
            seen, *rows, gate, mix, kept, len(seen), factor, seen.stride(0), rows.table.stride(0),
            **compiled_for)
    return mix


def value_mix_backward(
    mix_grad: Tensor,  # (n, heads) float32, contiguous
    mix: Tensor,  # (n, heads) from `value_mix`
    seen: Tensor,
    rows: Rows,
    gate: Tensor,
    rows_grad: Tensor,  # (n, width), rows contiguous: the gradient of rows is added to it in place
    seen_grad: Tensor | None = None,  # (n, channels), rows contiguous: the gradient is added to it in place
) -> tuple[Tensor, Tensor]:
    """The gradients of seen (`seen_grad`, if given) and of gate. The gradient of rows is in `rows_grad`."""
    compiled_for, n = constants(seen, rows, gate), len(seen)
    shape = n, rows.table.size(1)
    check(rows_grad.shape == shape and rows_grad.stride(1) == 1, "rows_grad", rows_grad,
          f"{shape} with contiguous rows")
    for name, tensor in (("mix_grad", mix_grad), ("mix", mix)):
        check(tensor.shape == (n, len(gate)) and tensor.is_contiguous(), name, tensor,
              f"contiguous ({n}, {len(gate)})")
    check(seen_grad is None or seen_grad.shape == seen.shape and seen_grad.stride(1) == 1,
          "seen_grad", seen_grad, f"{tuple(seen.shape)} with contiguous rows")
    add, blocks = seen_grad is not None, triton.cdiv(n, TOKENS)
    if seen_grad is None:
        seen_grad = torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)
    # Each block of tokens makes its part of the gate's gradient.
    gate_grad = torch.empty(blocks, *gate.shape, dtype=torch.float32, device=gate.device)
    if n:
        strides = tuple(x.stride(0) for x in (seen, rows.table, seen_grad, rows_grad))
        value_mix_backward_kernel[blocks,](
            mix_grad, mix, seen, *rows, gate, seen_grad, rows_grad, gate_grad, n, strides,
            ADD=add, **compiled_for)
    return seen_grad, gate_grad.sum(0)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """The mix, and its gradients where no others stand yet."""
    def inputs(n: int, heads: int, channels: int, width: int) -> tuple:
        seen = torch.randn(n, 2 * channels, device=device).to(dtype)[:, channels:]
        rows = torch.randn(n, width, device=device).to(dtype)
        gate, mix_grad = torch.randn(heads, 2 * channels, device=device), torch.randn(n, heads, device=device)
        return seen, rows, gate, mix_grad

    def kernel(seen: Tensor, rows: Tensor, gate: Tensor, mix_grad: Tensor) -> tuple[Tensor, ...]:
        mix, rows_grad = value_mix(seen, Rows(rows), gate), torch.zeros_like(rows)
        return mix, *value_mix_backward(mix_grad, mix, seen, Rows(rows), gate, rows_grad), rows_grad

    def reference(seen: Tensor, rows: Tensor, gate: Tensor, mix_grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (seen, rows, gate)]
        mix = value_mix_reference(*leaves)
        seen_grad, rows_grad, gate_grad = torch.autograd.grad(mix, leaves, mix_grad.to(mix))
        return mix.detach(), seen_grad, gate_grad, rows_grad

    shapes = [(49152, 6, 6, 768)] if size == "real" else [(1, 1, 1, 3), (300, 3, 6, 18), (128, 6, 8, 24)]
    for n, heads, channels, width in shapes:
        yield Example(
            "gate of value rows, both ways", f"{n} × {heads}, 2 × {channels} channels",
            lambda shape=(n, heads, channels, width): inputs(*shape), kernel, reference,
            bytes=n * (8.0 * heads + 10.0 * channels + 4.0 * width), slack=1e-7)
