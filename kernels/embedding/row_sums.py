"""out[r] += Σ grad[positions[i]] over all i with rows[i] = r: the gradient of a look-up, added in place.

The positions come sorted by row, so equal rows are neighbours and form a run. Each run is summed in float32
in a fixed order and added to its row in one piece. So a program repeats bit for bit, as it would not with
atomics.

There are two launches. The first cuts the sorted positions into blocks and sums all runs of a block at once,
as one matmul: a matrix that is 1 where two positions share a row, times the block's gradients. A run that
lies within one block is then done. A run that crosses blocks leaves a sum in each of them, and the second
launch adds these up:

    sorted rows    2 2 5 5 | 5 5 5 5 | 5 7 7 9     in three blocks
    row 5          tail: 2 | head: 4 | head: 1     the tail's block adds 2 + 4 + 1 to row 5

Where rows are wide, a program of the first launch goes over all columns of its block in a loop. So it finds
the block's runs once, and loads the gradients of later columns while it sums earlier ones. One H200, 28
November 2026, both launches without the sort, 196,608 positions of real text in 50,304 bf16 rows, medians of
9, in µs:

    width                           768     640
    a program for each 64 columns   279.7   237.4
    64 at a time, loads 2 ahead     227.1   195.6    the form used
    128 at a time, loads 2 ahead    224.8   199.0
    128 at a time, loads 1 ahead    239.3   –
    128 at a time, none ahead       253.4   –

Rows of up to 128 columns have one program for each 64 columns: 786,432 positions of 16 M rows of 64 columns
then take 118.6 µs, and in a loop 152.2; of 8 M rows of 128 columns 218.0, and in a loop 224.6.

With a program for each 64 columns, 49,152 positions of 50,304 × 768 as frequent as words are took 125 µs with
the sort, and PyTorch's compiled dense gradient 203 µs. A first kernel in which one program walked each run
took 642 µs.
"""
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example

# (positions a block, columns at a time, blocks that the second launch reads at a time, warps, stages). With
# one stage a program does not loop: it has these columns alone. The first wide form and the first narrow form
# are used: their columns fill whole lines of 128 bytes. In bf16 the wide form takes 176 registers a thread on
# sm_90, so that two programs share a multiprocessor, and the narrow form 120, so that four do.
WIDE = [(64, 64, 32, 4, 3), (64, 128, 32, 4, 3), (64, 128, 32, 4, 2), (32, 64, 32, 4, 3), (64, 64, 32, 4, 2)]
NARROW = [(64, 64, 32, 4, 1), (64, 32, 32, 4, 1), (32, 128, 32, 4, 1)]
CONFIGS, MOST_NARROW = WIDE + NARROW, 128   # columns


def add_rows_reference(out: Tensor, grad: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Plain PyTorch form of `add_rows`, which sums in float32 (float64 if out is float64)."""
    wide = torch.promote_types(out.dtype, torch.float32)
    sums = torch.zeros_like(out, dtype=wide).index_add_(0, rows.long(), grad[positions].to(wide))
    return out.copy_(out.to(wide) + sums)


@triton.jit
def add_blocks_kernel(out_ptr, grad_ptr, rows_ptr, positions_ptr, edges_ptr, n, width, out_stride,
                      grad_stride, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, TURNS: tl.constexpr,
                      STAGES: tl.constexpr):
    parts = tl.cdiv(width, TURNS * COLUMNS)
    block, first = tl.program_id(0) // parts, tl.program_id(0) % parts * (TURNS * COLUMNS)
    i = block * POSITIONS + tl.arange(0, POSITIONS)
    row = tl.load(rows_ptr + i, mask=i < n, other=-1)
    before = tl.load(rows_ptr + i - 1, mask=(0 < i) & (i < n), other=-1)
    next_block = (block + 1) * POSITIONS
    after = tl.load(rows_ptr + next_block, mask=next_block < n, other=-1)  # the first row of the next block
    position = tl.load(positions_ptr + i, mask=i < n, other=0).to(tl.int64)
    starts = (row != before) & (i < n)  # a run starts here
    head = (row == before) & (i % POSITIONS == 0) & (i < n)  # a run that came in from the block before
    tail = starts & (row == after)  # a run that starts here and goes on in the next block
    whole = starts & (row != after)

    # Row i of the matmul below is the sum of i's run. Each term is 1 or 0 times a gradient, and so exact. But
    # 0 × inf is NaN: a gradient that is not finite spoils the sums of its whole block.
    same = (row[:, None] == row[None, :]).to(grad_ptr.dtype.element_ty)
    grad_rows = grad_ptr + position[:, None] * grad_stride
    out_rows = out_ptr + row.to(tl.int64)[:, None] * out_stride
    edge_rows = edges_ptr + 2 * block.to(tl.int64) * width + tl.where(tail, width, 0)[:, None]
    # Loads may run ahead of stores: no turn reads columns that another one writes.
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        column = first + turn * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = column < width
        grads = tl.load(grad_rows + column, mask=(i < n)[:, None] & inside, other=0.0)
        old = tl.load(out_rows + column, mask=whole[:, None] & inside, other=0.0)
        sums = tl.dot(same, grads, input_precision="ieee")
        new = (old.to(tl.float32) + sums).to(out_ptr.dtype.element_ty)
        tl.store(out_rows + column, new, mask=whole[:, None] & inside)
        tl.store(edge_rows + column, sums, mask=(head | tail)[:, None] & inside)


@triton.jit
def add_crossing_kernel(out_ptr, rows_ptr, edges_ptr, blocks, width, out_stride,
                        POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    # This program adds the run that starts in its block and goes on in the next one, if there is such a run.
    block = tl.program_id(0).to(tl.int64)
    next_rows = rows_ptr + (block + 1) * POSITIONS
    before = tl.load(next_rows - POSITIONS - 1, mask=block > 0, other=-1)
    row, after = tl.load(next_rows - 1), tl.load(next_rows)
    if (row == after) & (row != before):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        total = tl.load(edges_ptr + (2 * block + 1) * width + column, mask=inside, other=0.0)
        count = CHUNK
        while count == CHUNK:  # a chunk in which every block continues the run may not be the last
            ahead = block + 1 + tl.arange(0, CHUNK)
            same = tl.load(rows_ptr + ahead * POSITIONS, mask=ahead < blocks, other=-1) == row
            heads = edges_ptr + 2 * ahead[:, None] * width + column[None, :]
            total += tl.sum(tl.load(heads, mask=same[:, None] & inside[None, :], other=0.0), axis=0)
            count = tl.sum(same.to(tl.int32))
            block += CHUNK
        at = out_ptr + row.to(tl.int64) * out_stride + column
        old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (old + total).to(out_ptr.dtype.element_ty), mask=inside)


def add_rows(
    out: Tensor,  # (rows, width) with contiguous rows, at most 2³⁰ of them: added to in place
    grad: Tensor,  # (m, width) bf16, fp16 or float32, with contiguous rows
    rows: Tensor,  # (n,) row numbers, equal ones side by side: from `sort_rows` or `enlist`; not checked
    positions: Tensor,  # (n,) which row of `grad` belongs to each of them
    tuned: tuple[int, int, int, int, int] | None = None,
    once: bool = True,  # each row of `grad` is added once: m = n. Else `positions` are not checked.
) -> Tensor:
    """out[rows[i]] += grad[positions[i]] for all i, summed in float32 and rounded once; returns out."""
    for name, tensor in (("out", out), ("grad", grad)):
        check(tensor.ndim == 2 and tensor.stride(1) == 1, name, tensor, "a matrix with contiguous rows")
        check(len(tensor) <= 2 ** 30, name, tensor, "of at most 2³⁰ rows")
    fits = grad.shape[1] == out.shape[1] and (len(grad) == len(rows) or not once)
    check(fits, "grad", grad, f"({len(rows)}, {out.shape[1]})" + ", or of other rows" * (not once))
    check(grad.dtype in (torch.bfloat16, torch.float16, torch.float32), "grad", grad, "bf16, fp16 or float32")
    check(positions.shape == rows.shape and rows.is_contiguous() and positions.is_contiguous(), "rows", rows,
          "as long as positions, and both contiguous")
    if not rows.numel():
        return out
    n, width = len(rows), grad.shape[1]
    block, columns, chunk, warps, stages = tuned or (NARROW if width <= MOST_NARROW else WIDE)[0]
    blocks, column_tiles = triton.cdiv(n, block), triton.cdiv(width, columns)
    turns = column_tiles if stages > 1 else 1
    # The head and the tail of each block, if it has them.
    edges = torch.empty(blocks, 2, width, dtype=torch.float32, device=out.device)
    add_blocks_kernel[blocks * triton.cdiv(column_tiles, turns),](
        out, grad, rows, positions, edges, n, width, out.stride(0), grad.stride(0),
        POSITIONS=block, COLUMNS=columns, TURNS=turns, STAGES=stages, num_warps=warps)
    if blocks > 1:
        add_crossing_kernel[blocks - 1, column_tiles](
            out, rows, edges, blocks, width, out.stride(0),
            POSITIONS=block, COLUMNS=columns, CHUNK=chunk, num_warps=warps)
    return out


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Gradients of look-ups, with the sort: the k-th row is read about as often as 1/k, as words are."""
    def inputs(n: int, rows: int, width: int) -> tuple[Tensor, ...]:
        index = (rows ** torch.rand(n, device=device)).long() - 1
        return *(torch.randn(length, width, device=device).to(dtype) for length in (rows, n)), index

    def with_sort(function, out: Tensor, grad: Tensor, index: Tensor, **tuned) -> Tensor:
        return function(out, grad, *torch.sort(index.int(), stable=True), **tuned)

    def dense(out: Tensor, grad: Tensor, index: Tensor) -> Tensor:
        return out.add_(torch.ops.aten.embedding_dense_backward(grad, index, len(out), -1, False))

    if size == "real":
        shapes = [(n, rows, 768) for rows in (50304, 377280) for n in (16384, 49152)]
        shapes += [(n, 33554432, 32) for n in (196608, 589824)]
    else:
        shapes = [(1, 1, 1), (70, 5, 40), (200, 300, 70), (130, 1, 33), (150, 20, 272)]
    for n, rows, width in shapes:
        yield Example(
            "gradient of a look-up, with the sort", f"{n:,} of {rows:,} × {width}",
            partial(inputs, n, rows, width), partial(with_sort, add_rows),
            partial(with_sort, add_rows_reference), bytes=6.0 * n * width, baseline=dense,
            configs=tuple(CONFIGS))
