"""out[i] = table[index[i]], with a gradient that touches only the rows that were read.

PyTorch makes a dense gradient, as long as the table and mostly zeros, and adds it to `.grad`: for a table of
377,280 × 768 that moves 4.6 GB a micro-batch to add 75 MB. Here the positions are sorted by row, once for all
tables that share an index, and `row_sums.py` adds the gradients to only the rows that were read. One H200,
49,152 positions of 50,304 × 768, with the sort: 125 µs, PyTorch's compiled dense gradient 203 µs; of 377,280
rows 127 and 871 µs.

Narrow rows are looked up by a kernel, `take_rows`. PyTorch starts a block of threads for each row, and a
multiprocessor holds 32 blocks, however few numbers they move: 160 µs for 262,144 rows, whether of 64 or of
384 bytes.
"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.embedding.row_sums import add_rows
from kernels.example import Example
from kernels.gradients import Gradient, gradient_of
from kernels.ngrams.row_gradients import RowGradients, enlist
from kernels.streams import beside, side_stream

# (positions a program, columns a program, warps). The first is used; for up to 32 columns the second.
CONFIGS = [(64, 64, 4), (128, 32, 4), (32, 64, 2), (128, 64, 8), (32, 128, 4), (64, 32, 2)]
NARROW = 256  # columns; for wider rows PyTorch's blocks have enough to do


class RowOrder(NamedTuple):
    """Row numbers to look up, and the same numbers in ascending order, which the gradient needs."""
    index: Tensor  # (n,) int32 or int64, as they are looked up
    rows: Tensor | None = None  # (n,) int32, ascending; None from `unsorted`
    positions: Tensor | None = None  # (n,) int64: where in `index` each of `rows` stands
    ready: torch.cuda.Event | None = None  # rows and positions are complete after it; None: they are already


def sort_rows(index: Tensor) -> RowOrder:
    """The order of index (n,), sorted now.

    The numbers are sorted as int32, which takes half as many radix passes as int64. `add_rows` refuses tables
    that are too long for that.
    """
    return RowOrder(index, *torch.sort(index.int(), stable=True))


def sort_beside(index: Tensor) -> RowOrder:
    """As `sort_rows`; on a GPU the sort's dozen small kernels run on a stream of their own.

    Only the backward pass waits for them. They begin after everything that is queued on the current stream,
    so they may write over the memory of earlier sorts.
    """
    if index.device.type != "cuda":
        return sort_rows(index)
    ready = torch.cuda.Event()
    with beside(side_stream("sorts")):
        order = sort_rows(index)
        ready.record()
    return order._replace(ready=ready)


def unsorted(index: Tensor) -> RowOrder:
    """Only the index: for references, and where no gradient follows."""
    return RowOrder(index)


@triton.jit
def take_rows_kernel(out_ptr, table_ptr, index_ptr, n, width, table_stride,
                     POSITIONS: tl.constexpr, COLUMNS: tl.constexpr):
    column_tiles = tl.cdiv(width, COLUMNS)
    i = tl.program_id(0) // column_tiles * POSITIONS + tl.arange(0, POSITIONS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.load(index_ptr + i, mask=i < n, other=0).to(tl.int64)
    inside = (i < n)[:, None] & (column < width)
    taken = tl.load(table_ptr + row[:, None] * table_stride + column, mask=inside)
    tl.store(out_ptr + i.to(tl.int64)[:, None] * width + column, taken, mask=inside)


def take_rows(
    table: Tensor,  # (rows, width) with contiguous rows
    index: Tensor,  # (n,) int32 or int64, contiguous; not checked to be rows of the table
    tuned: tuple[int, int, int] | None = None,
    empty: Callable[..., Tensor] = torch.empty,  # makes the memory of the result
) -> Tensor:
    """table[index], (n, width).

    torch.compile makes a kernel that is as fast (this one has 0.86 to 1.03 times its speed), but it
    specialises on the number of rows and compiles again for every new one. This kernel is compiled once.
    """
    check(table.ndim == 2 and table.stride(1) == 1, "table", table, "a matrix with contiguous rows")
    check(index.ndim == 1 and index.is_contiguous() and not index.is_floating_point(), "index", index,
          "(n,) integers, contiguous")
    (n,), width = index.shape, table.shape[1]
    out = empty(n, width, dtype=table.dtype, device=table.device)
    if out.numel():
        positions, columns, warps = tuned or CONFIGS[1 if width <= 32 else 0]
        take_rows_kernel[triton.cdiv(n, positions) * triton.cdiv(width, columns),](
            out, table, index, n, width, table.stride(0),
            POSITIONS=positions, COLUMNS=columns, num_warps=warps)
    return out


def list_rows(order: RowOrder, gradients: RowGradients) -> RowOrder:
    """Give each row a place among the `gradients`; in the result `rows` are these places.

    The listing runs on the stream that sorted the rows: that of the sorts, or the current one.
    """
    with beside(side_stream("sorts") if order.ready else None):
        places = enlist(order.rows, gradients)
        if order.ready:
            order.ready.record()
    return order._replace(rows=places)


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, order: RowOrder, grad: Gradient | RowGradients | None,
                empty: Callable) -> Tensor:
        if isinstance(grad, RowGradients) and order.rows is not None:
            order = list_rows(order, grad)
        # The index is kept too, because the sort may still be reading it.
        ctx.table, ctx.order, ctx.grad = table, order, grad
        if table.shape[1] > NARROW:
            return F.embedding(order.index, table)
        # Autograd marks what is returned, so that is not the tensor that `empty` may hand out again.
        return take_rows(table, order.index, empty=empty).detach()

    @staticmethod
    def backward(ctx, rows_grad: Tensor) -> tuple[None, ...]:
        _, rows, positions, ready = ctx.order
        if rows is None:
            raise ValueError("order must be from `sort_rows` or `sort_beside` for a gradient, not `unsorted`")
        if ready is not None:
            ready.wait()
        if isinstance(ctx.grad, RowGradients):
            buffer = ctx.grad.grads
        else:
            buffer, accumulate = gradient_of(ctx.table) if ctx.grad is None else ctx.grad
            if not accumulate:
                buffer.zero_()
        add_rows(buffer, rows_grad.contiguous(), rows, positions)
        return None, None, None, None


class LookupLater(Lookup):
    @staticmethod
    def forward(ctx, table: Tensor, order: RowOrder) -> Tensor:
        ctx.table, ctx.order, ctx.grad = table, order, None
        return table.new_zeros(1).expand(len(order.index), table.size(1))

    @staticmethod
    def backward(ctx, rows_grad: Tensor) -> tuple[None, ...]:
        return Lookup.backward(ctx, rows_grad)[:2]


def lookup_later(table: Tensor, order: RowOrder) -> Tensor:
    """Zeros (n, width), of which only one is in memory: a kernel reads the rows from the table itself.

    The gradient of the zeros is that of the rows, and goes where `lookup` would bring it.
    """
    check(table.is_leaf, "table", table, "a leaf, which gets the gradient")
    return LookupLater.apply(table, order)


def lookup(
    table: Tensor,  # (rows, width) with contiguous rows, at most 2³⁰ of them
    order: RowOrder,  # of (n,) row numbers
    grad: Gradient | RowGradients | None = None,
    empty: Callable[..., Tensor] = torch.empty,
) -> Tensor:
    """The rows (n, width) of the table that order.index names.

    `empty`, called like torch.empty, makes the memory for rows of up to NARROW columns.
    The backward pass adds the gradient to `grad` itself: torch.autograd.grad does not return it, and hooks on
    the table do not see it. With None it is added to `table.grad`, and the table must be a leaf. With
    `RowGradients`, for tables so long that a gradient of all rows has no room, the rows are listed first and
    the gradient is added to the list (kernels/ngrams/row_gradients.py).
    """
    check(grad is not None or table.is_leaf, "table", table,
          "a leaf, or `grad` must say where its gradient goes")
    return Lookup.apply(table, order, grad, empty)


def lookup_reference(table: Tensor, order: RowOrder, *_) -> Tensor:
    """Plain PyTorch form of `lookup`, in its own memory. Its gradient is dense and goes by autograd."""
    return F.embedding(order.index, table)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Rows of narrow tables, by random numbers."""
    def inputs(n: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
        table = torch.randn(rows, width, device=device).to(dtype)
        return table, torch.randint(rows, (n,), device=device)

    if size == "real":
        tables = (33554432, 32), (1572864, 192)
        shapes = [(n, rows, width) for rows, width in tables for n in (65536, 196608)]
    else:
        shapes = [(1, 1, 1), (70, 300, 32), (200, 5, 70), (130, 9, 192), (65, 40, 256)]
    for n, rows, width in shapes:
        yield Example(
            "rows of a narrow table", f"{n:,} of {rows:,} × {width}", partial(inputs, n, rows, width),
            take_rows, lambda table, index: F.embedding(index, table), bytes=4.0 * n * width,
            configs=tuple(CONFIGS))
