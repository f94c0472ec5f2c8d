"""Adam with β₁ = 0 on the rows that have a gradient: v̂ ← β₂^gap v̂ + (1 − β₂) g², w ← w − lr g / √v̂.

Without a first moment, a row whose gradient is zero stays where it is, so leaving it out changes no weight.
But each update would have shrunk the row's mean square. The kernel makes up for that when the row is next
touched, by the number of updates since the last one (the gap). The gradient is that of the listed rows alone
(kernels/ngrams/row_gradients.py). For a long table the update then moves 16 bytes for each element of those
rows, including the gradient's zeroing, where dense Adam moves 28 bytes for each element of the table. A
listed row whose gradient is all zero is read, but no bit of it changes.

Neighbouring columns may share a mean square (a block, as in Adam-mini, arXiv 2406.16793). A row that is seen
once then moves along its gradient and not along the gradient's signs. The mean squares, which make half of
the 16 bytes, nearly disappear.

A weight in bfloat16 is its own master and is rounded at each update. Rarely read rows move by a full step or
not at all, so mantissa bits would not matter, but they would double the table. Whole runs on two H200s end at
3.2692 with these bits and at 3.2683 without. One H200, 400,000 rows read of 33,554,432 × 32: 247 µs, where a
compiled update of the whole table takes 5,308.
"""
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.ngrams.row_gradients import RowGradients, enlist, no_gradients
from kernels.optimizer.master_weight import Master, Rule, apply_update, moved_by

# (elements a tile, warps). A tile is as many whole rows as fit. The first is used.
CONFIGS = [(1024, 4), (256, 1), (512, 2), (512, 4), (2048, 8), (128, 1)]


def row_adam_reference(weight: Tensor, grad: Tensor, second: Tensor, last: Tensor, steps: Tensor, rule: Rule,
                       beta2: float) -> None:
    """Update `weight` (rows, width) in place if `rule.finite`. `grad`, like it, ends as zero.

    `second` (rows, width / block) float32 is the running mean square of each block of columns, as of the
    row's last update. `last` (rows,) float32 is the number of that update, and `steps` (0-dim float32) counts
    all updates. On a CPU the rows that have a gradient are gathered first. On a GPU the host would have to
    wait for that.
    """
    if not weight.is_cpu:
        return update_rows(weight, grad, second, last, steps, rule, beta2)
    touched = (grad != 0).any(1).nonzero()[:, 0]
    rows = [x[touched] for x in (weight, grad, second, last)]
    update_rows(*rows, steps, rule, beta2)
    for whole, part in zip((weight, grad, second, last), rows):
        whole[touched] = part


def update_rows(weight: Tensor, grad: Tensor, second: Tensor, last: Tensor, steps: Tensor, rule: Rule,
                beta2: float) -> None:
    """The update of `row_adam_reference` for all rows, of which those without a gradient stay as they are."""
    steps.add_(rule.finite)
    moved = ((grad != 0).any(1) & rule.finite)[:, None]
    g = torch.where(moved, grad, 0).float()
    squares = g.square().unflatten(1, (second.shape[1], -1)).mean(2)
    grown = second * (beta2 ** (steps - last))[:, None] + (1 - beta2) * squares
    second.copy_(torch.where(moved, grown, second))
    last.copy_(torch.where(moved[:, 0], steps, last))
    root = (second / (1 - beta2 ** steps)).sqrt() + 1e-10
    root = root.repeat_interleave(weight.shape[1] // second.shape[1], 1)
    apply_update(Master(weight, None), g / root, Rule(moved, rule.lr, rule.decay, rule.cautious))
    grad.zero_()


@triton.jit
def row_adam_kernel(weight_ptr, grads_ptr, listed_ptr, count_ptr, place_ptr, second_ptr, last_ptr, steps_ptr,
                    finite_ptr, lr_ptr, decay_ptr, capacity, width, BETA2: tl.constexpr,
                    LOG2_BETA2: tl.constexpr, CAUTIOUS: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    first, count = 1 + tl.program_id(0) * ROWS, tl.minimum(tl.load(count_ptr), capacity)
    if first <= count:
        k = first + tl.arange(0, ROWS)
        wanted = k <= count
        row = tl.load(listed_ptr + k, mask=wanted, other=0).to(tl.int64)
        tl.store(place_ptr + row, tl.zeros_like(k), mask=wanted)
        steps, lr, decay = tl.load(steps_ptr), tl.load(lr_ptr), tl.load(decay_ptr)
        finite = tl.load(finite_ptr) != 0
        column = tl.arange(0, COLUMNS)[None, :]
        at = row[:, None] * width + column
        mine = wanted[:, None] & (column < width)
        at_grad = grads_ptr + k.to(tl.int64)[:, None] * width + column
        grad = tl.load(at_grad, mask=mine, other=0.0)
        block = tl.arange(0, BLOCKS)[None, :]
        at_second = row[:, None] * (width // BLOCK) + block
        has_second = wanted[:, None] & (block < width // BLOCK)
        second = tl.load(second_ptr + at_second, mask=has_second, other=0.0)
        weight = tl.load(weight_ptr + at, mask=mine, other=0.0).to(tl.float32)
        gap = steps - tl.load(last_ptr + row, mask=wanted, other=0.0)
        tl.store(at_grad, tl.zeros_like(grad), mask=mine)

        moved = (tl.max((grad != 0).to(tl.int32), axis=1) != 0) & finite  # NaN is not 0.
        mine = mine & moved[:, None]
        g = tl.reshape(grad.to(tl.float32), (ROWS, BLOCKS, BLOCK))
        second = second * tl.exp2(gap * LOG2_BETA2)[:, None] + (1 - BETA2) * (tl.sum(g * g, 2) / BLOCK)
        root = tl.sqrt(second / (1 - tl.exp2(steps * LOG2_BETA2))) + 1e-10
        update = tl.reshape(g / root[:, :, None], (ROWS, COLUMNS))
        weight = moved_by(weight, update, lr, decay, CAUTIOUS)
        tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty), mask=mine)
        tl.store(second_ptr + at_second, second, mask=has_second & moved[:, None])
        tl.store(last_ptr + row, tl.zeros_like(gap) + steps, mask=moved)


def row_adam(weight: Tensor, gradients: RowGradients, second: Tensor, last: Tensor, steps: Tensor, rule: Rule,
             beta2: float, tuned: tuple[int, int] = CONFIGS[0]) -> None:
    """`row_adam_reference` as a Triton kernel, from the gradients of the listed rows. It empties the list."""
    (rows, width), (grads, listed, count, place) = weight.shape, gradients
    fits = weight.is_contiguous() and weight.dtype in (torch.bfloat16, torch.float32)
    check(fits, "weight", weight, "bf16 or float32, contiguous")
    check(rows <= 2**30, "weight", weight, "of at most 2³⁰ rows")
    fits = second.ndim == 2 and len(second) == rows and second.is_contiguous()
    check(fits, "second", second, f"({rows}, blocks), contiguous")
    block = width // max(second.shape[1], 1)
    fits = block * second.shape[1] == width and block & (block - 1) == 0
    check(fits, "second", second, f"of blocks of 2ⁿ of the {width} columns")
    check(0 < beta2 < 1, "second", second, f"decayed by a beta2 between 0 and 1, not {beta2}")
    fits = last.shape == (rows,) and last.dtype == second.dtype == torch.float32
    check(fits, "last", last, f"float32 ({rows},), as second is")
    check(place.shape == (rows,), "place", place, f"({rows},)")
    fits = grads.shape == (len(listed), width) and grads.is_contiguous()
    check(fits, "grads", grads, f"({len(listed)}, {width}), contiguous")
    steps.add_(rule.finite)
    (elements, warps), columns, capacity = tuned, 1 << max(width - 1, 0).bit_length(), len(listed) - 1
    rows_a_tile = max(elements // columns, 1)
    if rows and width:
        row_adam_kernel[triton.cdiv(capacity, rows_a_tile),](
            weight, grads, listed, count, place, second, last, steps, rule.finite, rule.lr, rule.decay,
            capacity, width, BETA2=beta2, LOG2_BETA2=math.log2(beta2), CAUTIOUS=rule.cautious,
            ROWS=rows_a_tile, COLUMNS=columns, BLOCK=block, num_warps=warps)
    count.zero_()


def _list_and_update(state: tuple[Tensor, ...], rule: Rule, index: Tensor, grad: Tensor,
                     gradients: RowGradients, tuned: tuple[int, int] = CONFIGS[0]) -> Tensor:
    """What a step does: list the rows, copy their gradients to their places, and update."""
    gradients.grads.index_copy_(0, enlist(index.int(), gradients).long(), grad)
    weight, *others = state
    row_adam(weight, gradients, *others, rule, 0.95, tuned)
    return weight


def _update_all(state: tuple[Tensor, ...], rule: Rule, index: Tensor, grad: Tensor,
                gradients: RowGradients) -> Tensor:
    weight, *others = state
    dense = torch.zeros_like(weight).index_copy_(0, index, grad)
    row_adam_reference(weight, dense, *others, rule, 0.95)
    return weight


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Long tables of which a step reads some rows, or small ones with blocks of every kind."""
    def inputs(rows: int, read: int, width: int, block: int) -> tuple:
        index = torch.randint(rows, (read,), device=device).unique()
        weight, grad = (torch.randn(n, width, device=device, dtype=dtype) for n in (rows, len(index)))
        second, last = torch.rand(rows, width // block, device=device), torch.zeros(rows, device=device)
        finite, lr, decay, steps = (torch.tensor(number, device=device) for number in (True, 0.01, 0.1, 9.0))
        rule = Rule(finite, lr, decay, cautious=True)
        return (weight, second, last, steps), rule, index, grad, no_gradients(weight, read)

    name = "Adam on the rows read, listed and with a copy of their gradients"
    real = ((377280, 100_000, 192, 1), (1509120, 100_000, 192, 1), (1509120, 400_000, 192, 1),
            (6291456, 100_000, 192, 16), (33554432, 100_000, 32, 16), (33554432, 400_000, 32, 16))
    odd = ((150, 71, 128, 16), (37, 20, 24, 1), (1, 1, 1, 1))
    for rows, read, width, block in (real if size == "real" else odd):
        touched = rows * (1 - (1 - 1 / rows) ** read)
        shape, make = f"{read:,} of {rows:,} × {width} / {block}", partial(inputs, rows, read, width, block)
        yield Example(name, shape, make, _list_and_update, _update_all,
                      bytes=(12.0 + 8.0 / block) * width * touched, configs=CONFIGS)
