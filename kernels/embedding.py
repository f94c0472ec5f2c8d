"""out[i] = table[index[i]]; backward: table.grad[r] += Σ over i with index[i] = r of grad[i], touching only those rows.

PyTorch makes a dense gradient, as long as the table and mostly zeros, and adds it to `.grad`: for a table of 377,280 × 768 that
moves 4.6 GB a micro-batch to add 75 MB. Here positions are sorted by row once for all tables that share an index; each run of
equal rows is summed in float32 and added to its row in one piece, so repeated runs are bit-equal, which atomics are not.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton


class Sorted(NamedTuple):
    """Row numbers of a table, and what the gradient walks: the same in ascending order, and the position of each."""
    index: Tensor  # (n,) int32 or int64
    rows: Tensor  # (n,)
    positions: Tensor  # (n,) int64


def sort_rows(index: Tensor) -> Sorted:
    return Sorted(index, *torch.sort(index, stable=True))


def embedding_twin(table: Tensor, order: Sorted) -> Tensor:
    """Plain PyTorch twin of `embedding`."""
    return F.embedding(order.index, table)


def add_rows_reference(out: Tensor, grad: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Plain PyTorch twin of `add_rows`, in float32."""
    wide = torch.promote_types(out.dtype, torch.float32)
    sums = torch.zeros_like(out, dtype=wide).index_add_(0, rows.long(), grad[positions].to(wide))
    return out.copy_(out.to(wide) + sums)


@triton.jit
def add_rows_kernel(out_ptr, grad_ptr, rows_ptr, positions_ptr, n, width, out_row, grad_row,
                    STARTS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    # This program adds the runs that start at its STARTS positions, however far beyond them they reach.
    start = tl.program_id(0) * STARTS
    end = tl.minimum(start + STARTS, n)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    ahead = tl.arange(0, CHUNK)
    before = tl.load(rows_ptr + start - 1, mask=start > 0, other=-1)
    row = tl.load(rows_ptr + start)
    while (start < end) & (row == before):                               # the tail of a run of the program before
        start += 1
        row = tl.load(rows_ptr + start, mask=start < n, other=-1)
    while start < end:
        total = tl.zeros((COLUMNS,), tl.float32)
        count = CHUNK
        while count == CHUNK:                                            # a full chunk may not be the last
            same = tl.load(rows_ptr + start + ahead, mask=start + ahead < n, other=-1) == row
            position = tl.load(positions_ptr + start + ahead, mask=same, other=0).to(tl.int64)
            grads = tl.load(grad_ptr + position[:, None] * grad_row + column[None, :], mask=same[:, None] & inside[None, :], other=0.0)
            total += tl.sum(grads.to(tl.float32), axis=0)
            count = tl.sum(same.to(tl.int32))
            start += count
        at = out_ptr + row.to(tl.int64) * out_row + column
        tl.store(at, (tl.load(at, mask=inside, other=0.0).to(tl.float32) + total).to(out_ptr.dtype.element_ty), mask=inside)
        row = tl.load(rows_ptr + start, mask=start < n, other=-1)


def add_rows(
    out: Tensor,  # (rows, width), added to in place
    grad: Tensor,  # (n, width)
    rows: Tensor,  # (n,) ascending row numbers, from `sort_rows`
    positions: Tensor,  # (n,) which row of `grad` belongs to each of them
    tuned: tuple[int, int, int, int] = (32, 32, 256, 4),  # positions a program, rows a chunk, columns, warps
) -> Tensor:
    """out[rows[i]] += grad[positions[i]] for all i, summed in float32, rounded once a call; returns out."""
    for name, tensor in (("out", out), ("grad", grad)):
        check(tensor.ndim == 2 and tensor.stride(1) == 1, name, tensor, "a matrix with contiguous rows")
    check(grad.shape == (len(rows), out.shape[1]), "grad", grad, f"({len(rows)}, {out.shape[1]})")
    check(positions.shape == rows.shape and rows.is_contiguous() and positions.is_contiguous(), "rows", rows, "as long as positions, contiguous")
    starts, chunk, columns, warps = tuned
    if grad.numel():
        add_rows_kernel[triton.cdiv(len(rows), starts), triton.cdiv(grad.shape[1], columns)](
            out, grad, rows, positions, len(rows), grad.shape[1], out.stride(0), grad.stride(0),
            STARTS=starts, CHUNK=chunk, COLUMNS=columns, num_warps=warps)
    return out


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table: Tensor, order: Sorted) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(order.rows, order.positions)
        return F.embedding(order.index, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, ...]:
        if ctx.table.grad is None:
            ctx.table.grad = torch.zeros_like(ctx.table)
        add_rows(ctx.table.grad, grad, *ctx.saved_tensors)
        return None, None


def embedding(table: Tensor, order: Sorted) -> Tensor:
    """Rows (n, width) of `table` (rows, width), a leaf, by `sort_rows(index)`.

    The gradient is added to `table.grad` by the backward pass itself: it is not among what `torch.autograd.grad` returns, and
    hooks on the table do not see it.
    """
    return Embedding.apply(table, order)
