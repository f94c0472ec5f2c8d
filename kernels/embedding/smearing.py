"""out_i = norm(x_i + m_i x_(i-1)), x = norm(rows), m_i = strength · σ(gate · x_i's first channels).

Each token's embedding gets a gated share of the previous token's, which frees the heads that only looked one
token back (@ClassicLarry, modded-nanogpt #130). norm divides a vector by its root mean square. Where a
sequence starts, nothing is added.

One pass over the rows each way: forward reads the rows and writes the result; backward reads the rows and the
result's gradient and writes the rows' gradient. torch.compile makes four passes each way, because norms stand
before and after the shift by one token. Forward reads a row with the one before it, which the cache holds.
Backward computes everything again, and goes backwards through the tokens, since the gradient of the next
token's result reaches this token. A warp holds a row in chunks of columns, so a width like 768 pads nothing.
All sums have one order. One H200, 98,304 × 768: the gradients take 190 µs, and their bytes would take 110.
"""
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EPS, check, triton
from kernels.embedding.smear_kernels import smear_backward_kernel, smear_kernel
from kernels.example import Example
from kernels.sequence import previous

# Forward (tokens a program, columns a chunk, warps); backward (runs a program, columns a chunk, warps, tokens
# a run). The first is used.
CONFIGS = [(4, 256, 4), (8, 256, 8), (16, 256, 8), (4, 1024, 8)]
BACKWARD_CONFIGS = [(2, 256, 2, 32), (1, 256, 1, 32), (4, 256, 4, 32), (4, 256, 4, 16), (4, 256, 4, 64)]


def smear_reference(rows: Tensor, is_start: Tensor, gate: Tensor | None, strength: Tensor) -> Tensor:
    """Plain PyTorch form of `smear`; without a gate the normed rows."""
    x = F.rms_norm(rows, (rows.size(-1),))
    if gate is None:
        return x
    mix = strength * torch.sigmoid(x[:, :len(gate)] @ gate.type_as(x))
    return F.rms_norm(x + mix[:, None].type_as(x) * previous(x, is_start), (rows.size(-1),))


def check_inputs(rows: Tensor, is_start: Tensor, gate: Tensor, strength: Tensor) -> None:
    dtypes = torch.bfloat16, torch.float16, torch.float32
    check(rows.ndim == 2 and rows.is_contiguous() and rows.dtype in dtypes, "rows", rows,
          "contiguous, (n, width) in bf16, fp16 or float32")
    check(is_start.shape == rows.shape[:1] and is_start.dtype == torch.bool and is_start.is_contiguous(),
          "is_start", is_start, f"contiguous bool ({len(rows)},)")
    most = min(rows.size(1), 128)
    check(gate.ndim == 1 and 0 < len(gate) <= most and gate.dtype == torch.float32 and gate.is_contiguous(),
          "gate", gate, f"contiguous float32, of at most {most} channels")
    check(strength.numel() == 1 and strength.dtype == torch.float32, "strength", strength, "one float32")


def smear_forward(rows: Tensor, is_start: Tensor, gate: Tensor, strength: Tensor,
                  tuned: tuple[int, int, int] | None = None) -> Tensor:
    """`smear` without autograd."""
    check_inputs(rows, is_start, gate, strength)
    (n, width), (tile, columns, warps), out = rows.shape, tuned or CONFIGS[0], torch.empty_like(rows)
    columns = min(columns, triton.next_power_of_2(width))
    if rows.numel():
        smear_kernel[triton.cdiv(n, tile),](
            rows, is_start, gate.type_as(rows), strength, out, n, width, len(gate), EPS,
            ROWS=tile, COLUMNS=columns, CHUNKS=triton.cdiv(width, columns), num_warps=warps)
    return out


def smear_backward(grad: Tensor, rows: Tensor, is_start: Tensor, gate: Tensor, strength: Tensor,
                   tuned: tuple[int, int, int, int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, gate and strength, from `grad`, the gradient of the result."""
    check_inputs(rows, is_start, gate, strength)
    grad, out = grad.contiguous(), torch.empty_like(rows)
    (n, width), (runs, columns, warps, run) = rows.shape, tuned or BACKWARD_CONFIGS[0]
    columns = min(columns, triton.next_power_of_2(width))
    programs = triton.cdiv(n, runs * run)
    sums = torch.empty(programs, 1 + len(gate), dtype=torch.float32, device=rows.device)
    if rows.numel():
        smear_backward_kernel[programs,](
            grad, rows, is_start, gate.type_as(rows), strength, out, sums, n, width, len(gate), EPS,
            ROWS=runs, COLUMNS=columns, CHUNKS=triton.cdiv(width, columns), RUN=run, num_warps=warps)
    total = sums.sum(0)
    return out, total[1:], total[0]


class Smear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return smear_forward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows_grad, gate_grad, strength_grad = smear_backward(grad, *ctx.saved_tensors)
        return rows_grad, None, gate_grad, strength_grad


def smear(
    rows: Tensor,  # (n, width) contiguous; bf16, fp16 or float32
    is_start: Tensor,  # (n,) bool: a sequence starts here; the first token has no predecessor in any case
    gate: Tensor | None,  # (channels,) float32, at most 128; None: nothing is added, PyTorch norms the rows
    strength: Tensor,  # 0-dim float32
) -> Tensor:
    """(n, width) like rows, of root mean square 1. Gradients for rows, gate and strength."""
    if gate is None:
        return F.rms_norm(rows, (rows.size(-1),))
    return Smear.apply(rows, is_start, gate, strength)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Forward, both ways, and backward alone, with the configurations of each kernel."""
    def inputs(n: int, width: int, channels: int) -> tuple[Tensor, ...]:
        token = torch.arange(n, device=device)  # in odd sizes sequences of one token and of four
        is_start = token % 512 == 0 if size == "real" else token % 5 < 2
        rows, grad = (torch.randn(n, width, device=device).to(dtype) for _ in range(2))
        return rows, is_start, torch.randn(channels, device=device), torch.tensor(0.5, device=device), grad

    def both_ways(function: Callable) -> Callable:
        def run(rows: Tensor, is_start: Tensor, gate: Tensor, strength: Tensor, grad: Tensor) -> tuple:
            leaves = [x.detach().requires_grad_() for x in (rows, gate, strength)]
            out = function(leaves[0], is_start, *leaves[1:])
            return out.detach(), *map(torch.atleast_1d, torch.autograd.grad(out, leaves, grad))
        return run

    def backward(*tensors: Tensor, **tuned) -> tuple[Tensor, ...]:
        return tuple(map(torch.atleast_1d, smear_backward(tensors[-1], *tensors[:-1], **tuned)))

    def backward_reference(*tensors: Tensor) -> tuple[Tensor, ...]:
        return both_ways(smear_reference)(*tensors)[1:]

    real = size == "real"
    for n, width, channels in ((16384, 768, 12), (49152, 768, 12)) if real else ((1, 16, 3), (37, 272, 12)):
        shape, once, make = f"{n:,} × {width}", 2.0 * n * width, partial(inputs, n, width, channels)
        yield Example("smear", shape, lambda make=make: make()[:-1], smear_forward, smear_reference,
                      bytes=2 * once, configs=tuple(CONFIGS))
        yield Example("smear, both ways", shape, make, smear, smear_reference, bytes=5 * once, wrap=both_ways)
        yield Example("smear's gradients alone (against both ways)", shape, make, backward,
                      backward_reference, bytes=3 * once, compile=False, configs=tuple(BACKWARD_CONFIGS))
