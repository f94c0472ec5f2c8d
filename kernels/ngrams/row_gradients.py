"""grads[place[r]] = the gradient of row r, of a table so long that a gradient of all rows has no room.

A step reads some hundred thousand rows of a table of up to 2³⁰. Whoever is about to add to rows of its gradient lists them (`enlist`): each
gets a place among as many rows of gradients as two steps can read, and keeps it until an update has taken it (row_adam.py). The list costs
the table 4 bytes a row, its gradient would cost 2 a number. Places are dealt out by an atomic counter: which row gets which
hangs on timing, what is added to it does not.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check, tl, triton


class RowGradients(NamedTuple):
    """The gradient of a table most of whose rows have none: of the rows that were read alone, each once, in any order."""
    grads: Tensor  # (capacity + 1, width): [k] of the k-th row listed, all zero where there is none; [0] of rows without room, never read
    rows: Tensor  # (capacity + 1,) int32: the k-th row listed, k = 1 ... count
    count: Tensor  # (1,) int32; more than the capacity if it did not do
    place: Tensor  # (rows of the table,) int32: k of each row; 0 of those without a gradient


def no_gradients(table: Tensor, capacity: int) -> RowGradients:
    """None of the table's rows (rows, width) has one yet; there is room for so many."""
    capacity = min(capacity, len(table))
    sizes = (capacity + 1, torch.int32), (1, torch.int32), (len(table), torch.int32)
    return RowGradients(table.new_zeros(capacity + 1, table.shape[1]),
                        *(torch.zeros(size, dtype=dtype, device=table.device) for size, dtype in sizes))


def enlist_reference(rows: Tensor, gradients: RowGradients) -> Tensor:
    """Plain PyTorch twin of `enlist`."""
    (_, listed, count, place), new = gradients, rows.unique()
    new = new[place[new.long()] == 0]
    k = count + torch.arange(1, len(new) + 1, device=rows.device)
    k, new = (x[:max(len(listed) - 1 - int(count), 0)] for x in (k, new))
    listed[k], place[new.long()] = new.to(listed.dtype), k.to(place.dtype)
    count += len(new)
    return place[rows.long()]


@triton.jit
def enlist_kernel(rows_ptr, listed_ptr, count_ptr, place_ptr, n, capacity, POSITIONS: tl.constexpr):
    i = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    row = tl.load(rows_ptr + i, mask=i < n, other=-1)
    before = tl.load(rows_ptr + i - 1, mask=(0 < i) & (i < n), other=-1)
    new = (row != before) & (i < n)                                      # each run starts in one program
    new = new & (tl.load(place_ptr + row, mask=new, other=1) == 0)
    number = tl.cumsum(new.to(tl.int32), 0)
    k = tl.atomic_add(count_ptr, tl.max(number, axis=0)) + number
    new = new & (k <= capacity)
    tl.store(listed_ptr + k, row, mask=new)
    tl.store(place_ptr + row, k, mask=new)


def enlist(
    rows: Tensor,  # (n,) int32 rows of the table, equal ones side by side, contiguous; not checked to be rows of it
    gradients: RowGradients,  # joined by these rows, while there is room
) -> Tensor:
    """Where in `gradients.grads` each of these rows has its gradient, (n,) int32."""
    check(rows.ndim == 1 and rows.is_contiguous() and rows.dtype == torch.int32, "rows", rows, "(n,) int32, contiguous")
    _, listed, count, place = gradients
    if len(rows):
        enlist_kernel[triton.cdiv(len(rows), 1024),](rows, listed, count, place, len(rows), len(listed) - 1, POSITIONS=1024)
    return place.index_select(0, rows)
