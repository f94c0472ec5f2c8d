"""grads[place[r]] = the gradient of row r, for a table so long that a gradient of all rows has no room.

A step reads some hundred thousand rows of a table of up to 2³⁰. Before a backward pass adds to the
gradients of rows, `enlist` lists these rows. `grads` has a place for each row that can be read between two
updates. A row keeps its place until an update has taken its gradient (kernels/optimizer/sparse_adam.py):

    place   0 0 2 0 0 1 0 3 …     one int32 a row of the table; 0: no gradient
    rows      5 2 7               the rows with a gradient, k = 1, 2, 3
    grads     g g g               their gradients

The list costs 4 bytes a row of the table. A dense gradient would cost 2 bytes for each of a row's numbers, 64
bytes for the 32 columns that each of four GPUs holds, and a pass over the whole table at every update. An
atomic counter hands out places, so a row's place depends on timing, but its gradient does not.
"""
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example


class RowGradients(NamedTuple):
    """The gradient of a table of which few rows have one. These are listed, each once, in any order."""
    grads: Tensor  # (capacity + 1, width): [k]: of the k-th row listed; [0]: of rows without room
    rows: Tensor  # (capacity + 1,) int32: the k-th row listed, k = 1 ... count
    count: Tensor  # (1,) int32: how many rows are listed; more than the capacity if that was too small
    place: Tensor  # (rows of the table,) int32: k of each row; 0 for rows without a gradient


def no_gradients(table: Tensor, capacity: int) -> RowGradients:
    """An empty list for a table (rows, width), with room for `capacity` rows."""
    capacity = min(capacity, len(table))
    sizes = (capacity + 1, torch.int32), (1, torch.int32), (len(table), torch.int32)
    numbers = (torch.zeros(size, dtype=dtype, device=table.device) for size, dtype in sizes)
    return RowGradients(table.new_zeros(capacity + 1, table.shape[1]), *numbers)


def enlist_reference(rows: Tensor, gradients: RowGradients) -> Tensor:
    """Plain PyTorch form of `enlist`."""
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
    new = (row != before) & (i < n)  # the first of a run of equal rows, which one program alone has
    new = new & (tl.load(place_ptr + row, mask=new, other=1) == 0)
    number = tl.cumsum(new.to(tl.int32), 0)
    k = tl.atomic_add(count_ptr, tl.max(number, axis=0)) + number
    new = new & (k <= capacity)
    tl.store(listed_ptr + k, row, mask=new)
    tl.store(place_ptr + row, k, mask=new)


def enlist(
    rows: Tensor,  # (n,) int32 rows of the table, contiguous, equal ones side by side; not checked to be rows
    gradients: RowGradients,  # these rows join it, while there is room
) -> Tensor:
    """Where in `gradients.grads` each of these rows has its gradient, (n,) int32; 0 if there was no room."""
    check(rows.ndim == 1 and rows.is_contiguous() and rows.dtype == torch.int32, "rows", rows,
          "(n,) int32, contiguous")
    _, listed, count, place = gradients
    if len(rows):
        enlist_kernel[triton.cdiv(len(rows), 1024),](
            rows, listed, count, place, len(rows), len(listed) - 1, POSITIONS=1024)
    return place.index_select(0, rows)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """List rows, then read back which row stands at each place: a result that does not depend on timing."""
    def inputs(n: int, rows: int, width: int) -> tuple:
        read = torch.randint(rows, (n,), device=device, dtype=torch.int32).sort().values
        return read, no_gradients(torch.empty(rows, width, device=device, dtype=dtype), n)

    def listed(function, read: Tensor, gradients: RowGradients) -> Tensor:
        return gradients.rows[function(read, gradients).long()]

    shapes = [(262144, 33554432, 32)] if size == "real" else [(1, 1, 1), (70, 300, 32), (3000, 900, 3)]
    for n, rows, width in shapes:
        yield Example(
            "list the rows that have a gradient", f"{n:,} of {rows:,}", partial(inputs, n, rows, width),
            partial(listed, enlist), partial(listed, enlist_reference), bytes=16.0 * n, compile=False)
