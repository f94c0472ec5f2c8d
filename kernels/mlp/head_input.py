"""norm(y), y = Σ last − b Σ kept: what the head reads, and its gradient, in one pass each way.

The head does not need all that an early layer put into the residual stream. So a learned share b of the
stream after that layer is subtracted (`residual.py`). Forward, the kernel of `residual_norm.py` writes n =
norm(y) alone. Backward reads n and rms(y), one number a token, instead of y:

    gradient of y = (h − mean(h · n) n) / rms(y)         for the gradient h of n, summed over its readers
    gradient of each of `last` = gradient of y
    gradient of each of `kept` = −b · gradient of y
    gradient of b = −Σ gradient of y · Σ kept            over all elements

The loss and the copy head both read n. Each has an autograd output of its own, so that this kernel adds up
their gradients while it reads them, and autograd does not in a pass of its own. No atomics are used: for b's
gradient each program sums over its rows, and torch sums over the programs. So repeated runs are bit-equal.
One H200, 49,152 × 768, one reader: 166 µs both ways, compiled PyTorch 184.
"""
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, multiprocessors, tl, triton
from kernels.example import Example, both_ways
from kernels.fp8.formats import widened
from kernels.mlp.residual import Summands, add_up, before_head_reference
from kernels.mlp.residual_gradient import check_like, given, summed
from kernels.mlp.residual_norm import launch_norm

# (tokens a tile, columns a chunk, warps, programs a multiprocessor) of backward. The first is used. This
# kernel holds as many numbers as `residual_gradient.py`'s, and has the tiles that were fastest for that one.
CONFIGS = [(8, 256, 8, 4), (8, 256, 8, 2), (4, 256, 4, 4), (4, 256, 4, 8), (2, 256, 2, 8), (8, 256, 8, 1024),
           (4, 256, 4, 1024), (1, 1024, 4, 8)]


def before_head_backward_reference(grads: tuple[Tensor, ...], out: Tensor, rms: Tensor, kept: Summands,
                                   backout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `before_head_backward`, in plain PyTorch."""
    grad, normed = add_up(tuple(map(widened, grads))), widened(out)
    y_grad = (grad - (grad * normed).mean(1, keepdim=True) * normed) / rms[:, None]
    backout_grad = -(y_grad * add_up(tuple(map(widened, kept)))).sum()
    return y_grad.type_as(out), (-backout * y_grad).type_as(out), backout_grad


@triton.jit
def residual_difference_backward_kernel(
        grads, out_ptr, rms_ptr, kept, backout_ptr, last_grad_ptr, kept_grad_ptr, sums_ptr, n, width,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    backout, products = 0.0, tl.zeros((ROWS, COLUMNS), tl.float32)
    if kept is not None:
        backout = tl.load(backout_ptr)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        start, live = row.to(tl.int64)[:, None] * width, (row < n)[:, None]
        inverse = 1 / tl.load(rms_ptr + row, mask=row < n, other=1.0)[:, None]
        along, held = tl.zeros((ROWS,), tl.float32), ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            at, inside = start + column, live & (column < width)
            normed = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
            grad = summed(grads, 0, at, inside)
            along += tl.sum(grad * normed, axis=1) / width
            kept_sum = normed       # not read: in Triton 3.6 a tuple cannot hold None
            if kept is not None:
                kept_sum = summed(kept, 0, at, inside)
            held += ((normed, grad, kept_sum),)
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            at, inside = start + column, live & (column < width)
            normed, grad, kept_sum = held[chunk]
            y_grad = (grad - along[:, None] * normed) * inverse
            tl.store(last_grad_ptr + at, y_grad.to(last_grad_ptr.dtype.element_ty), mask=inside)
            if kept is not None:
                kept_grad = (-backout * y_grad).to(kept_grad_ptr.dtype.element_ty)
                tl.store(kept_grad_ptr + at, kept_grad, mask=inside)
                products += y_grad * kept_sum
    if kept is not None:
        tl.store(sums_ptr + tl.program_id(0), -tl.sum(products))


def check_inputs(x: Tensor, kept: Summands | None, backout: Tensor, **others: Tensor) -> None:
    check_like(x, None, **others, **{f"kept[{i}]": x for i, x in enumerate(kept or ())})
    check(backout.ndim == 0 and backout.dtype == torch.float32, "backout", backout, "one float32, 0-dim")


def before_head_forward(last: Summands, kept: Summands | None, backout: Tensor) -> tuple[Tensor, Tensor]:
    """norm(y) like a summand, and rms(y) (n,) float32."""
    check_inputs(last[0], kept, backout, **{f"last[{i}]": x for i, x in enumerate(last[1:], 1)})
    return launch_norm(last, None, kept=kept, backout=backout)


def before_head_backward(
    grads: tuple[Tensor, ...],  # (n, width) each: the gradients of norm(y), one for each reader
    out: Tensor,  # (n, width): norm(y)
    rms: Tensor,  # (n,) float32
    kept: Summands | None,
    backout: Tensor,  # 0-dim float32
    tuned: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of each of `last` and of each of `kept`, like `out`, and of `backout`, 0-dim float32.

    Without `kept` the last two are None.
    """
    grads = tuple(grad.contiguous() for grad in grads)
    check_inputs(out, kept, backout, **{f"grads[{i}]": x for i, x in enumerate(grads)})
    (n, width), (tile, columns, warps, programs) = out.shape, tuned or CONFIGS[0]
    check(rms.shape == (n,) and rms.dtype == torch.float32 and rms.is_contiguous(), "rms", rms,
          f"contiguous float32 ({n},)")
    columns = min(columns, triton.next_power_of_2(width))
    programs = min(programs * multiprocessors(out), triton.cdiv(n, tile))
    last_grad, kept_grad, sums = torch.empty_like(out), None, None
    if kept is not None:
        kept_grad, sums = torch.empty_like(out), rms.new_empty(programs)
    if out.numel():
        residual_difference_backward_kernel[programs,](
            grads, out, rms, kept, backout, last_grad, kept_grad, sums, n, width, ROWS=tile, COLUMNS=columns,
            CHUNKS=triton.cdiv(width, columns), num_warps=warps)
    return last_grad, kept_grad, None if sums is None else sums.sum()


class BeforeHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backout: Tensor, count: int, *summands: Tensor) -> tuple[Tensor, Tensor]:
        """The first `count` of the summands are `last`, and the others `kept`."""
        last, kept = summands[:count], summands[count:]
        out, rms = before_head_forward(last, kept or None, backout)
        ctx.save_for_backward(out, rms, backout, *kept)
        ctx.set_materialize_grads(False)    # Without a copy head the second result has no gradient.
        ctx.count = count
        return out, out.detach()

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        out, rms, backout, *kept = ctx.saved_tensors
        last_grad, kept_grad, backout_grad = before_head_backward(
            given(grads, out), out, rms, tuple(kept) or None, backout)
        return backout_grad, None, *[last_grad] * ctx.count, *[kept_grad] * len(kept)


def before_head(last: Summands, kept: Summands | None, backout: Tensor) -> tuple[Tensor, Tensor]:
    """As `before_head_reference`. Both results lie in one memory. Backward reads it: do not write over it."""
    return BeforeHead.apply(backout, len(last), *last, *(kept or ()))


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Two summands less a share of an earlier one, as in training, both ways; and backward alone.

    Each result is read, as with a copy head.
    """
    def inputs(n: int, width: int, count: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(n, width, device=device).to(dtype) for _ in range(count))

    def to_norm(n: int, width: int) -> tuple[Tensor, ...]:
        return *inputs(n, width, 3), torch.tensor(0.5, device=device)

    def of_norm(n: int, width: int, kept: int) -> tuple:
        *grads, out = inputs(n, width, 3)
        rms, kept = torch.rand(n, device=device) + 0.5, inputs(n, width, kept)
        return tuple(grads), F.rms_norm(out, (width,)), rms, kept, torch.tensor(0.5, device=device)

    def of_three(function: Callable) -> Callable:
        return lambda x, update, kept, backout: function((x, update), (kept,), backout)

    real, odd = ((16384, 768, 1), (49152, 768, 1)), ((1, 16, 1), (13, 528, 2), (37, 133, 3))
    for n, width, kept in real if size == "real" else odd:
        shape, once = f"{n:,} × {width}", 2.0 * n * width
        yield Example("what the head reads, both ways", shape, partial(to_norm, n, width),
                      of_three(before_head), of_three(before_head_reference), bytes=10 * once,
                      wrap=partial(both_ways, gradients=cache(partial(inputs, n, width, 2)),
                                   wanted=(0, 1, 2, 3)))
        yield Example("what the head reads, gradients alone", f"{shape}, {kept} kept",
                      partial(of_norm, n, width, kept), before_head_backward, before_head_backward_reference,
                      bytes=(5 + kept) * once, configs=tuple(CONFIGS))
