"""Adam with β₁ = 0 on only the rows that have a gradient: v̂ ← β₂^gap v̂ + (1 − β₂) g², w ← w − lr g / √v̂.

Without a first moment a row whose gradient is zero stays where it is, so that to leave it out changes nothing: its mean square,
which would have shrunk meanwhile, is shrunk when it is next touched, by the number of updates since. The gradient is that of the rows
listed alone (row_gradients.py): of a long table the update then moves 16 bytes an element of those, the gradient's zeroing
included, where Adam's moves 28 bytes an element, always. A row may be listed for nothing, whose gradient is all zero: it costs
the row's reading and changes no bit.

Neighbouring columns may share a mean square, that of all their gradients: a row seen once then moves along its gradient and not along
its signs, and of 16 bytes nearly 8 are spared.

A weight in bfloat16 is its own master, rounded at each update: the rows of a table that is read now and then move by the whole rate or not
at all, and 50 billion more numbers of 16 bits would take the room of as many weights (two H200s, whole runs: 3.2692 with them, 3.2683 without).
"""
import math

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.ngrams.row_gradients import RowGradients
from kernels.optimizer.master_weight import apply_update

# (elements a tile, warps). A tile is as many whole rows as fit. The first is used.
CONFIGS = [(1024, 4), (256, 1), (512, 2), (512, 4), (2048, 8), (128, 1)]


def row_adam_reference(weight: Tensor, grad: Tensor, second: Tensor, last: Tensor, steps: Tensor, finite: Tensor, lr: Tensor, decay: Tensor,
                  beta2: float, cautious: bool) -> None:
    """Update `weight` (rows, width) in place from `grad`, which ends as zero, unless not `finite`.

    `second` (rows, width / block) float32 is the running mean square, of a block of columns each, as of the row's last update, whose
    number is `last` (rows,) float32; `steps` counts the updates. `steps`, `finite`, `lr` and `decay` (a share of the weight, times lr) are 0-dim tensors.
    """
    steps.add_(finite)
    moved = ((grad != 0).any(1) & finite)[:, None]
    g = torch.where(moved, grad, 0).float()
    squares = g.square().unflatten(1, (second.shape[1], -1)).mean(2)
    grown = second * (beta2 ** (steps - last))[:, None] + (1 - beta2) * squares
    second.copy_(torch.where(moved, grown, second))
    last.copy_(torch.where(moved[:, 0], steps, last))
    root = ((second / (1 - beta2 ** steps)).sqrt() + 1e-10).repeat_interleave(weight.shape[1] // second.shape[1], 1)
    apply_update(weight, None, g / root, moved, lr, decay, cautious)
    grad.zero_()


@triton.jit
def row_adam_kernel(weight_ptr, grads_ptr, listed_ptr, count_ptr, place_ptr, second_ptr, last_ptr, steps_ptr, finite_ptr,
                    lr_ptr, decay_ptr, capacity, width, BETA2: tl.constexpr, LOG2_BETA2: tl.constexpr, CAUTIOUS: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    first, count = 1 + tl.program_id(0) * ROWS, tl.minimum(tl.load(count_ptr), capacity)
    if first <= count:
        k = first + tl.arange(0, ROWS)
        wanted = k <= count
        row = tl.load(listed_ptr + k, mask=wanted, other=0).to(tl.int64)
        tl.store(place_ptr + row, tl.zeros_like(k), mask=wanted)
        steps, lr, decay, finite = tl.load(steps_ptr), tl.load(lr_ptr), tl.load(decay_ptr), tl.load(finite_ptr) != 0
        column = tl.arange(0, COLUMNS)[None, :]
        at = row[:, None] * width + column
        mine = wanted[:, None] & (column < width)
        at_grad = grads_ptr + k.to(tl.int64)[:, None] * width + column
        grad = tl.load(at_grad, mask=mine, other=0.0)
        block = tl.arange(0, BLOCKS)[None, :]
        at_second, has_second = row[:, None] * (width // BLOCK) + block, wanted[:, None] & (block < width // BLOCK)
        second = tl.load(second_ptr + at_second, mask=has_second, other=0.0)
        weight = tl.load(weight_ptr + at, mask=mine, other=0.0).to(tl.float32)
        gap = steps - tl.load(last_ptr + row, mask=wanted, other=0.0)
        tl.store(at_grad, tl.zeros_like(grad), mask=mine)

        moved = (tl.max((grad != 0).to(tl.int32), axis=1) != 0) & finite             # NaN is not 0
        mine = mine & moved[:, None]
        g = tl.reshape(grad.to(tl.float32), (ROWS, BLOCKS, BLOCK))
        second = second * tl.exp2(gap * LOG2_BETA2)[:, None] + (1 - BETA2) * (tl.sum(g * g, 2) / BLOCK)
        root = tl.sqrt(second / (1 - tl.exp2(steps * LOG2_BETA2))) + 1e-10
        update = tl.reshape(g / root[:, :, None], (ROWS, COLUMNS))
        decayed = decay * weight
        if CAUTIOUS:
            decayed = tl.where(update * weight > 0, decayed, 0.0)
        weight -= lr * (update + decayed)
        tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty), mask=mine)
        tl.store(second_ptr + at_second, second, mask=has_second & moved[:, None])
        tl.store(last_ptr + row, tl.zeros_like(gap) + steps, mask=moved)


def row_adam(weight: Tensor, gradients: RowGradients, second: Tensor, last: Tensor, steps: Tensor, finite: Tensor, lr: Tensor, decay: Tensor,
             beta2: float, cautious: bool, tuned: tuple[int, int] = CONFIGS[0]) -> None:
    """As `row_adam_reference`, by a Triton kernel, from the gradients of the rows listed, of which there are then none."""
    (rows, width), (grads, listed, count, place) = weight.shape, gradients
    check(weight.is_contiguous() and weight.dtype in (torch.bfloat16, torch.float32), "weight", weight, "bf16 or float32, contiguous")
    check(second.ndim == 2 and len(second) == rows and second.is_contiguous(), "second", second, f"({rows}, blocks), contiguous")
    block = width // max(second.shape[1], 1)
    check(block * second.shape[1] == width and block & (block - 1) == 0, "second", second, f"of blocks of 2ⁿ of the {width} columns")
    check(rows <= 2 ** 30, "weight", weight, "of at most 2³⁰ rows")
    check(last.shape == (rows,) and last.dtype == second.dtype == torch.float32, "last", last, f"float32 ({rows},), as second is")
    check(place.shape == (rows,), "place", place, f"({rows},)")
    check(grads.shape == (len(listed), width) and grads.is_contiguous(), "grads", grads, f"({len(listed)}, {width}), contiguous")
    check(0 < beta2 < 1, "second", second, f"decayed by a beta2 between 0 and 1, not {beta2}")
    steps.add_(finite)
    (elements, warps), columns, capacity = tuned, 1 << max(width - 1, 0).bit_length(), len(listed) - 1
    a_tile = max(elements // columns, 1)
    if rows and width:
        row_adam_kernel[triton.cdiv(capacity, a_tile),](
            weight, grads, listed, count, place, second, last, steps, finite, lr, decay, capacity, width, BETA2=beta2,
            LOG2_BETA2=math.log2(beta2), CAUTIOUS=cautious, ROWS=a_tile, COLUMNS=columns, BLOCK=block, num_warps=warps)
    count.zero_()
