"""y = a Σ summands gives c y and norm(y) = y / rms(y), in one pass.

This is what `residual.py` has in plain PyTorch, for readers that do not want FP8. Each summand is read once.
norm(y) is made of the float32 sum, not of one rounded to bfloat16. A warp holds a row in chunks of columns,
so a width like 768 pads nothing, and the sum of a row's squares needs no other warp. All of a row is loaded
before anything is stored, because the compiler moves no load ahead of a store.

The kernel also makes what the head reads, for which y is a difference of sums (`head_input.py`). `SumAndNorm`
is the autograd function around this kernel, and around the one that writes FP8 (`residual_fp8.py`). One H200,
49,152 × 768: two summands take 74 µs, as compiled PyTorch does; for two readers, both ways, 175 and not 197.
"""
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from kernels.backend import EPS, tl, triton
from kernels.example import Example, both_ways
from kernels.mlp.residual import Summands, mlp_input_reference, norm_fork_reference
from kernels.mlp.residual_gradient import check_like, given, residual_backward, summed

# (tokens a program, columns a chunk, warps). The first is used. A chunk is 16 bytes of bfloat16 a thread.
CONFIGS = [(4, 256, 4), (8, 256, 8), (2, 256, 2), (8, 256, 4), (4, 1024, 4)]


@triton.jit
def residual_norm_kernel(summands, kept, scales_ptr, backout_ptr, out_ptr, norm_ptr, rms_ptr, n, width, eps,
                         ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    a, c, backout = 1.0, 1.0, 0.0
    if scales_ptr is not None:
        a, c = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    if kept is not None:
        backout = tl.load(backout_ptr)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start, live = row.to(tl.int64)[:, None] * width, (row < n)[:, None]
    squares, held = tl.zeros((ROWS,), tl.float32), ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at, inside = start + column, live & (column < width)
        y = a * summed(summands, 0, at, inside)
        if kept is not None:
            y -= backout * summed(kept, 0, at, inside)
        squares += tl.sum(y * y, axis=1)
        held += (y,)
    rms = tl.sqrt(squares / width + eps)
    tl.store(rms_ptr + row, rms, mask=row < n)
    inverse = (1 / rms)[:, None]
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at, inside = start + column, live & (column < width)
        if out_ptr is not None:
            tl.store(out_ptr + at, (c * held[chunk]).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(norm_ptr + at, (held[chunk] * inverse).to(norm_ptr.dtype.element_ty), mask=inside)


def launch_norm(
    summands: Summands,
    out: Tensor | None,  # like a summand: gets c y
    scales: Tensor | None = None,  # (2,) float32: a and c; None: 1 and 1
    kept: Summands | None = None,  # their sum times `backout`, 0-dim float32, is subtracted
    backout: Tensor | None = None,
    tuned: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """norm(y) like a summand, and rms(y) (n,) float32. The arguments are not checked here."""
    (n, width), (tile, columns, warps) = summands[0].shape, tuned or CONFIGS[0]
    columns = min(columns, triton.next_power_of_2(width))
    normed, rms = torch.empty_like(summands[0]), summands[0].new_empty(n, dtype=torch.float32)
    if normed.numel():
        residual_norm_kernel[triton.cdiv(n, tile),](
            tuple(summands), kept, scales, backout, out, normed, rms, n, width, EPS, ROWS=tile,
            COLUMNS=columns, CHUNKS=triton.cdiv(width, columns), num_warps=warps)
    return normed, rms


def sum_and_norm(
    summands: Summands,  # each (n, width) and contiguous
    scales: Tensor | None = None,  # (2,) float32: a and c; None: 1 and 1
    tuned: tuple[int, int, int] | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """c y like a summand, or None if it is the only summand itself; norm(y) likewise; rms(y) (n,) float32."""
    check_like(summands[0], scales, **{f"summands[{i}]": x for i, x in enumerate(summands[1:], 1)})
    out = torch.empty_like(summands[0]) if summands[1:] or scales is not None else None
    return out, *launch_norm(summands, out, scales, tuned=tuned)


class SumAndNorm(torch.autograd.Function):
    """`launch` is `sum_and_norm`, or `sum_and_norm_fp8`, which has two results for the norm.

    Results: c y; c y again, for a later reader; the norm as `launch` made it, without a gradient; and for
    each reader of the norm a tensor that takes the reader's gradient. This tensor is the norm again or, for a
    norm in FP8, a stand-in.
    """
    @staticmethod
    def forward(ctx, launch: Callable, scales: Tensor | None, readers: int,
                *summands: Tensor) -> tuple[Tensor, ...]:
        out, *normed, rms = launch(summands, scales)
        out = summands[0] if out is None else out
        ctx.save_for_backward(out, rms, scales)
        ctx.mark_non_differentiable(*normed)
        # Otherwise autograd would make gradients of the norm: 75 MB of zeros that no kernel reads.
        ctx.set_materialize_grads(False)
        ctx.count = len(summands)
        taker = normed[0] if normed[0].dtype == out.dtype else out.new_empty(()).expand_as(out)
        return out, out.detach(), *normed, *(taker.detach() for _ in range(readers))

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        out, rms, scales = ctx.saved_tensors
        grad, sums = residual_backward(given(grads[:2], out), given(grads[2:], out), out, rms, scales)
        return None, sums, None, *[grad] * ctx.count


def mlp_input(summands: Summands, scales: Tensor) -> tuple[Tensor, Tensor]:
    """As `mlp_input_reference`. Backward reads the first result: do not write over it."""
    x, _, _, normed = SumAndNorm.apply(sum_and_norm, scales, 1, *summands)
    return x, normed


def norm_fork(summands: Summands, readers: int = 1) -> tuple[Tensor, ...]:
    """As `norm_fork_reference`. Each result is an autograd output of its own; equal ones share memory."""
    x, again, _, *copies = SumAndNorm.apply(sum_and_norm, None, readers, *summands)
    return *copies, x, again


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """What an MLP reads, as in training; and for two readers of a stream without scales, both ways.

    The latter's sum has one reader, as most sums have.
    """
    def inputs(n: int, width: int, count: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(n, width, device=device).to(dtype) for _ in range(count))

    def scaled(n: int, width: int, count: int) -> tuple[Summands, Tensor]:
        return inputs(n, width, count), torch.tensor([1.05, 0.95], device=device)

    def kernel(summands: Summands, scales: Tensor, **tuned) -> tuple[Tensor, Tensor]:
        return sum_and_norm(summands, scales, **tuned)[:2]

    def fork(function: Callable) -> Callable:
        return lambda *summands: function(summands, 2)[:-1]

    real, odd = ((16384, 768, 2), (49152, 768, 2)), ((1, 16, 1), (13, 528, 2), (37, 133, 3))
    for n, width, count in real if size == "real" else odd:
        shape, once = f"{n:,} × {width}", 2.0 * n * width
        yield Example("residual's sum and norm", shape, partial(scaled, n, width, count), kernel,
                      mlp_input_reference, bytes=(count + 2) * once, configs=tuple(CONFIGS))
        yield Example("residual's sum and norm for 2 readers, both ways", shape,
                      partial(inputs, n, width, count), fork(norm_fork), fork(norm_fork_reference),
                      bytes=(count + 7) * once,
                      wrap=partial(both_ways, gradients=cache(partial(inputs, n, width, 3)),
                                   wanted=tuple(range(count))))
