"""out[i] = table[index[i]]; backward: table.grad[r] += Σ over i with index[i] = r of grad[i], touching only those rows.

PyTorch makes a dense gradient, as long as the table and mostly zeros, and adds it to `.grad`: for a table of 377,280 × 768 that
moves 4.6 GB a micro-batch to add 75 MB. Here positions are sorted by row once for all tables that share an index; equal rows,
now side by side, are summed in float32 and added to their row in one piece, in a fixed order, so repeated runs are bit-equal,
which atomics are not. One H200, 49,152 Zipf-like positions of 50,304 × 768, with the sort: 122 µs, PyTorch's compiled dense
gradient 203 µs; of 377,280 rows 125 and 869 µs (README.md). A first kernel walked each run of equal rows alone: 642 µs.

Two launches. The first cuts the sorted positions into blocks and sums all runs of a block at once, as the product of the matrix
of which positions share a row with the block's gradients. A run that lies in one block is then done. One that crosses blocks
leaves a sum in each, as the block's head (it came in) or tail (it starts there and goes on), for the second launch to add up.

Narrow rows are looked up by `take_rows`: PyTorch starts a block of threads for each, of which 32 fit on a multiprocessor however
few numbers they move. For 262,144 rows of 64 or 384 bytes it takes 160 µs, as many as for 100 MB. Compiled it is as fast as this
kernel (README.md), but compiled anew for every number of rows.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.gradients import Gradient, gradient_of
from kernels.ngrams.row_gradients import RowGradients, enlist
from kernels.streams import beside, side_stream

# (positions a block, columns, blocks that the second launch reads at a time, warps); the first is used: chosen for
# whole lines of 128 bytes and for about 100 registers a thread on sm_90, so that four programs share a multiprocessor.
CONFIGS = [(64, 64, 32, 4), (32, 128, 32, 4), (64, 128, 32, 8), (64, 128, 32, 4), (32, 64, 32, 4), (64, 32, 32, 4), (128, 32, 32, 4)]
# (positions, columns, warps) of `take_rows`: the first is used, for up to 32 columns the second.
TAKE_CONFIGS = [(64, 64, 4), (128, 32, 4), (32, 64, 2), (128, 64, 8), (32, 128, 4), (64, 32, 2)]
NARROW = 256        # columns; of wider rows PyTorch's blocks have enough to do


class RowOrder(NamedTuple):
    """Row numbers of a table, and what the gradient walks: the same in ascending order, and the position of each."""
    index: Tensor  # (n,) int32 or int64
    rows: Tensor | None = None  # (n,) int32; None where only the twin, which needs no order, or no gradient follows
    positions: Tensor | None = None  # (n,) int64
    ready: torch.cuda.Event | None = None  # after which they are; None: now


def sort_rows(index: Tensor) -> RowOrder:
    """In int32, so that the sort needs half the radix passes of int64; `add_rows` refuses tables for which that is too short."""
    return RowOrder(index, *torch.sort(index.int(), stable=True))


def sort_beside(index: Tensor) -> RowOrder:
    """As `sort_rows`; on a GPU the dozen small kernels run beside what follows on the current stream: the backward pass alone waits.

    They begin behind all that the current stream was given before, so they may write over what earlier sorts have left there.
    """
    if not index.is_cuda:
        return sort_rows(index)
    ready = torch.cuda.Event()
    with beside(side_stream("sorts")):
        order = sort_rows(index)
        ready.record()
    return order._replace(ready=ready)


def lookup_reference(table: Tensor, order: RowOrder, grad: Gradient | RowGradients | None = None) -> Tensor:
    """Plain PyTorch twin of `embedding`."""
    return F.embedding(order.index, table)


def add_rows_reference(out: Tensor, grad: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Plain PyTorch twin of `add_rows`, in float32."""
    wide = torch.promote_types(out.dtype, torch.float32)
    sums = torch.zeros_like(out, dtype=wide).index_add_(0, rows.long(), grad[positions].to(wide))
    return out.copy_(out.to(wide) + sums)


@triton.jit
def take_rows_kernel(out_ptr, table_ptr, index_ptr, n, width, table_row, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr):
    column_tiles = tl.cdiv(width, COLUMNS)
    i = tl.program_id(0) // column_tiles * POSITIONS + tl.arange(0, POSITIONS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.load(index_ptr + i, mask=i < n, other=0).to(tl.int64)
    inside = (i < n)[:, None] & (column < width)
    taken = tl.load(table_ptr + row[:, None] * table_row + column, mask=inside)
    tl.store(out_ptr + i.to(tl.int64)[:, None] * width + column, taken, mask=inside)


def take_rows(
    table: Tensor,  # (rows, width) with contiguous rows
    index: Tensor,  # (n,) int32 or int64, contiguous; not checked to be rows of the table
    tuned: tuple[int, int, int] | None = None,
) -> Tensor:
    """table[index], (n, width)."""
    check(table.ndim == 2 and table.stride(1) == 1, "table", table, "a matrix with contiguous rows")
    check(index.ndim == 1 and index.is_contiguous() and not index.is_floating_point(), "index", index, "(n,) integers, contiguous")
    (n,), width = index.shape, table.shape[1]
    out = torch.empty(n, width, dtype=table.dtype, device=table.device)
    if out.numel():
        positions, columns, warps = tuned or TAKE_CONFIGS[1 if width <= 32 else 0]
        take_rows_kernel[triton.cdiv(n, positions) * triton.cdiv(width, columns),](
            out, table, index, n, width, table.stride(0), POSITIONS=positions, COLUMNS=columns, num_warps=warps)
    return out


@triton.jit
def add_blocks_kernel(out_ptr, grad_ptr, rows_ptr, positions_ptr, edges_ptr, n, width, out_row, grad_row,
                      POSITIONS: tl.constexpr, COLUMNS: tl.constexpr):
    column_tiles = tl.cdiv(width, COLUMNS)
    block = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    i = block * POSITIONS + tl.arange(0, POSITIONS)
    row = tl.load(rows_ptr + i, mask=i < n, other=-1)
    before = tl.load(rows_ptr + i - 1, mask=(0 < i) & (i < n), other=-1)
    after = tl.load(rows_ptr + (block + 1) * POSITIONS, mask=(block + 1) * POSITIONS < n, other=-1)   # the next block's first
    position = tl.load(positions_ptr + i, mask=i < n, other=0).to(tl.int64)
    starts = (row != before) & (i < n)
    head = (row == before) & (i % POSITIONS == 0) & (i < n)
    tail = starts & (row == after)
    whole = starts & (row != after)

    inside = column < width
    at = out_ptr + row.to(tl.int64)[:, None] * out_row + column
    grads = tl.load(grad_ptr + position[:, None] * grad_row + column, mask=(i < n)[:, None] & inside, other=0.0)
    old = tl.load(at, mask=whole[:, None] & inside, other=0.0)
    # Row i of the product is the sum of i's run. Each term is 1 or 0 times a gradient, so exact; 0 × inf is NaN, though, and a
    # gradient that is not finite spoils the sums of its whole block.
    sums = tl.dot((row[:, None] == row[None, :]).to(grads.dtype), grads, input_precision="ieee")
    tl.store(at, (old.to(tl.float32) + sums).to(out_ptr.dtype.element_ty), mask=whole[:, None] & inside)
    edge = edges_ptr + 2 * block.to(tl.int64) * width + tl.where(tail, width, 0)[:, None] + column
    tl.store(edge, sums, mask=(head | tail)[:, None] & inside)


@triton.jit
def add_crossing_kernel(out_ptr, rows_ptr, edges_ptr, blocks, width, out_row,
                        POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    # This program adds the run that starts in its block and goes on in the next, if one does.
    block = tl.program_id(0).to(tl.int64)
    next_rows = rows_ptr + (block + 1) * POSITIONS
    before = tl.load(next_rows - POSITIONS - 1, mask=block > 0, other=-1)
    row, after = tl.load(next_rows - 1), tl.load(next_rows)
    if (row == after) & (row != before):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        total = tl.load(edges_ptr + (2 * block + 1) * width + column, mask=inside, other=0.0)
        count = CHUNK
        while count == CHUNK:                                            # a full chunk may not be the last
            ahead = block + 1 + tl.arange(0, CHUNK)
            same = tl.load(rows_ptr + ahead * POSITIONS, mask=ahead < blocks, other=-1) == row
            heads = edges_ptr + 2 * ahead[:, None] * width + column[None, :]
            total += tl.sum(tl.load(heads, mask=same[:, None] & inside[None, :], other=0.0), axis=0)
            count = tl.sum(same.to(tl.int32))
            block += CHUNK
        at = out_ptr + row.to(tl.int64) * out_row + column
        tl.store(at, (tl.load(at, mask=inside, other=0.0).to(tl.float32) + total).to(out_ptr.dtype.element_ty), mask=inside)


def add_rows(
    out: Tensor,  # (rows, width), added to in place
    grad: Tensor,  # (n, width) bf16, fp16 or float32
    rows: Tensor,  # (n,) row numbers, equal ones side by side: from `sort_rows` or `enlist`
    positions: Tensor,  # (n,) which row of `grad` belongs to each of them
    tuned: tuple[int, int, int, int] = CONFIGS[0],
) -> Tensor:
    """out[rows[i]] += grad[positions[i]] for all i, summed in float32, rounded once a call; returns out."""
    for name, tensor in (("out", out), ("grad", grad)):
        check(tensor.ndim == 2 and tensor.stride(1) == 1, name, tensor, "a matrix with contiguous rows")
        check(len(tensor) <= 2 ** 30, name, tensor, "of at most 2³⁰ rows")
    check(grad.shape == (len(rows), out.shape[1]), "grad", grad, f"({len(rows)}, {out.shape[1]})")
    check(grad.dtype in (torch.bfloat16, torch.float16, torch.float32), "grad", grad, "bf16, fp16 or float32")
    check(positions.shape == rows.shape and rows.is_contiguous() and positions.is_contiguous(), "rows", rows, "as long as positions, contiguous")
    if not grad.numel():
        return out
    n, width, (block, columns, chunk, warps) = len(rows), grad.shape[1], tuned
    blocks, column_tiles = triton.cdiv(n, block), triton.cdiv(width, columns)
    edges = torch.empty(blocks, 2, width, dtype=torch.float32, device=out.device)      # head and tail of each block, if it has them
    add_blocks_kernel[blocks * column_tiles,](
        out, grad, rows, positions, edges, n, width, out.stride(0), grad.stride(0), POSITIONS=block, COLUMNS=columns, num_warps=warps)
    if blocks > 1:
        add_crossing_kernel[blocks - 1, column_tiles](
            out, rows, edges, blocks, width, out.stride(0), POSITIONS=block, COLUMNS=columns, CHUNK=chunk, num_warps=warps)
    return out


def enlist_beside(order: RowOrder, gradients: RowGradients) -> RowOrder:
    """With places in `gradients` for rows; beside the current stream if that is where the sort is."""
    with beside(side_stream("sorts") if order.ready else None):
        places = enlist(order.rows, gradients)
        if order.ready:
            order.ready.record()
    return order._replace(rows=places)


class Lookup(torch.autograd.Function):
    """The rows; a backward pass that adds their gradients where they belong and returns none."""

    @staticmethod
    def forward(ctx, table: Tensor, order: RowOrder, grad: Gradient | RowGradients) -> Tensor:
        if isinstance(grad, RowGradients):
            order = enlist_beside(order, grad) if order.rows is not None else order
            grad = Gradient(grad.grads)
        ctx.grad, ctx.order = grad, order                                # the index as well: the sort may still be reading it
        return take_rows(table, order.index) if table.shape[1] <= NARROW else F.embedding(order.index, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, ...]:
        _, rows, positions, ready = ctx.order
        if ready is not None:
            ready.wait()
        if not ctx.grad.accumulate:
            ctx.grad.buffer.zero_()
        add_rows(ctx.grad.buffer, grad, rows, positions)
        return None, None, None


def lookup(table: Tensor, order: RowOrder, grad: Gradient | RowGradients | None = None) -> Tensor:
    """Rows (n, width) of `table` (rows, width), a leaf, by `sort_rows(index)`."""
    return Lookup.apply(table, order, gradient_of(table) if grad is None else grad)


def unsorted(index: Tensor) -> RowOrder:
    return RowOrder(index)


def already_sorted(index: Tensor) -> RowOrder:
    return RowOrder(index, index, torch.arange(len(index), device=index.device))
