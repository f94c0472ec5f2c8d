"""Adam with β₁ = 0 on only the rows that have a gradient: v̂ ← β₂^gap v̂ + (1 − β₂) g², w ← w − lr g / √v̂.

Without a first moment a row whose gradient is zero stays where it is, so that to leave it out changes nothing: its mean square,
which would have shrunk meanwhile, is shrunk when it is next touched, by the number of updates since. For a long table of which
a step reads little the update then moves 20 bytes an element of the rows touched, gradient and its zeroing included, and one
byte a row of all others, where Adam's moves 28 bytes an element, always.

Which rows have a gradient is not looked up in the gradients, which are as long as the table, but in one mark a row, which
whoever adds to a row sets (`add_rows` in embedding.py, which `embedding` has do it where the table has `marked_rows`). A mark
may be set for nothing, for a row read whose gradient is all zero: it costs the row's reading and changes no bit. None may be
missing: an unmarked row keeps its gradient, for a later update.

Neighbouring columns may share a mean square, that of all their gradients: a row seen once then moves along its gradient and not along
its signs, and of 10 bytes an element, gradient included, 4 are spared.
"""
import math

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.master_weight import apply_update

# (rows whose marks a program reads, elements a tile, warps). A tile is as many whole rows as fit: one row of 192 a warp leaves no
# tile half empty, needs no barrier, and 28 such programs, of 72 registers a thread, share a multiprocessor of sm_90. The first is
# used; the second for tables of LONG rows or more, of which a step reads so few that most of the time would go to starting programs.
CONFIGS = [(64, 256, 1), (1024, 256, 4), (32, 256, 1), (128, 256, 1), (64, 512, 2), (256, 256, 1), (512, 256, 2), (1024, 512, 4),
           (2048, 512, 4), (2048, 1024, 8), (4096, 1024, 8)]
LONG = 2 ** 24


def row_adam_twin(weight: Tensor, lost_bits: Tensor | None, grad: Tensor, second: Tensor, last: Tensor, marked: Tensor,
                  steps: Tensor, healthy: Tensor, lr: Tensor, decay: Tensor, beta2: float, cautious: bool) -> None:
    """Update `weight` (rows, width) in place from `grad`, which ends as zero, unless not `healthy`; with it lost_bits (master_weight.py).

    `second` (rows, width / block) float32 is the running mean square, of a block of columns each, as of the row's last update, whose
    number is `last` (rows,) float32; `steps` counts the updates. `steps`, `healthy`, `lr` and `decay` (a share of the weight, times lr) are 0-dim tensors.
    `marked` (rows,) bool ends as False; which rows are touched this twin sees in the gradients.
    """
    steps.add_(healthy)
    touched = ((grad != 0).any(1) & healthy)[:, None]
    g = torch.where(touched, grad, 0).float()
    squares = g.square().unflatten(1, (second.shape[1], -1)).mean(2)
    grown = second * (beta2 ** (steps - last))[:, None] + (1 - beta2) * squares
    second.copy_(torch.where(touched, grown, second))
    last.copy_(torch.where(touched[:, 0], steps, last))
    root = ((second / (1 - beta2 ** steps)).sqrt() + 1e-10).repeat_interleave(weight.shape[1] // second.shape[1], 1)
    apply_update(weight, lost_bits, g / root, touched, lr, decay, cautious)
    grad.zero_()
    marked.zero_()


@triton.jit
def row_adam_kernel(weight_ptr, lost_ptr, grad_ptr, second_ptr, last_ptr, marked_ptr, steps_ptr, healthy_ptr, lr_ptr, decay_ptr,
                    rows, width, BETA2: tl.constexpr, LOG2_BETA2: tl.constexpr, CAUTIOUS: tl.constexpr, SPLIT: tl.constexpr,
                    MARKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    mark = tl.program_id(0) * MARKS + tl.arange(0, MARKS)
    marked = tl.load(marked_ptr + mark, mask=mark < rows, other=0) != 0
    tl.store(marked_ptr + mark, tl.zeros_like(marked), mask=marked)
    number = tl.where(marked, tl.cumsum(marked.to(tl.int32), 0), 0)      # the marked rows count from 1
    count = tl.max(number, axis=0)
    steps, lr, decay, healthy = tl.load(steps_ptr), tl.load(lr_ptr), tl.load(decay_ptr), tl.load(healthy_ptr) != 0
    column = tl.arange(0, COLUMNS)[None, :]
    for done in range(0, count, ROWS):                                   # a tile is the next ROWS marked ones, wherever they lie
        wanted = done + 1 + tl.arange(0, ROWS)
        row = tl.sum(tl.where(number[None, :] == wanted[:, None], mark[None, :], 0), axis=1).to(tl.int64)
        at = row[:, None] * width + column
        mine = (wanted <= count)[:, None] & (column < width)
        grad = tl.load(grad_ptr + at, mask=mine, other=0.0)
        block = tl.arange(0, BLOCKS)[None, :]
        at_second, has_second = row[:, None] * (width // BLOCK) + block, (wanted <= count)[:, None] & (block < width // BLOCK)
        second = tl.load(second_ptr + at_second, mask=has_second, other=0.0)
        if SPLIT:
            high = tl.load(weight_ptr + at, mask=mine, other=0).to(tl.int32)
            low = tl.load(lost_ptr + at, mask=mine, other=0).to(tl.int32)
            master = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
        else:
            master = tl.load(weight_ptr + at, mask=mine, other=0.0)
        gap = steps - tl.load(last_ptr + row, mask=wanted <= count, other=0.0)
        tl.store(grad_ptr + at, tl.zeros_like(grad), mask=mine)

        touched = (tl.max((grad != 0).to(tl.int32), axis=1) != 0) & healthy           # NaN is not 0
        mine = mine & touched[:, None]
        g = tl.reshape(grad.to(tl.float32), (ROWS, BLOCKS, BLOCK))
        second = second * tl.exp2(gap * LOG2_BETA2)[:, None] + (1 - BETA2) * (tl.sum(g * g, 2) / BLOCK)
        root = tl.sqrt(second / (1 - tl.exp2(steps * LOG2_BETA2))) + 1e-10
        update = tl.reshape(g / root[:, :, None], (ROWS, COLUMNS))
        decayed = decay * master
        if CAUTIOUS:
            decayed = tl.where(update * master > 0, decayed, 0.0)
        master -= lr * (update + decayed)
        if SPLIT:
            bits = master.to(tl.int32, bitcast=True)
            tl.store(weight_ptr + at, (bits >> 16).to(tl.int16), mask=mine)
            tl.store(lost_ptr + at, bits.to(tl.int16), mask=mine)
        else:
            tl.store(weight_ptr + at, master, mask=mine)
        tl.store(second_ptr + at_second, second, mask=has_second & touched[:, None])
        tl.store(last_ptr + row, tl.zeros_like(gap) + steps, mask=touched)


def row_adam(weight: Tensor, lost_bits: Tensor | None, grad: Tensor, second: Tensor, last: Tensor, marked: Tensor, steps: Tensor,
             healthy: Tensor, lr: Tensor, decay: Tensor, beta2: float, cautious: bool, tuned: tuple[int, int, int] | None = None) -> None:
    """As `row_adam_twin`, by a Triton kernel; weight in bf16 with lost bits, or in float32 without.

    `marked` is True for every row that has a gradient; no other row's gradient is read, or becomes zero.
    """
    rows, width = weight.shape
    for name, tensor in (("weight", weight), ("lost_bits", lost_bits), ("grad", grad)):
        check(tensor is None or tensor.shape == weight.shape and tensor.is_contiguous(), name, tensor, f"({rows}, {width}), contiguous")
    check(second.ndim == 2 and len(second) == rows and second.is_contiguous(), "second", second, f"({rows}, blocks), contiguous")
    block = width // max(second.shape[1], 1)
    check(block * second.shape[1] == width and block & (block - 1) == 0, "second", second, f"of blocks of 2ⁿ of the {width} columns")
    split = lost_bits is not None
    check(weight.dtype == (torch.bfloat16 if split else torch.float32), "weight", weight, "bf16 with lost bits or float32 without")
    check(rows <= 2 ** 30, "weight", weight, "of at most 2³⁰ rows")
    check(last.shape == (rows,) and last.dtype == second.dtype == torch.float32, "last", last, f"float32 ({rows},), as second is")
    check(marked.shape == (rows,) and marked.dtype == torch.bool and marked.is_contiguous(), "marked", marked, f"bool ({rows},)")
    check(0 < beta2 < 1, "second", second, f"decayed by a beta2 between 0 and 1, not {beta2}")
    steps.add_(healthy)
    (marks, elements, warps), columns = tuned or CONFIGS[rows >= LONG], 1 << max(width - 1, 0).bit_length()
    if rows and width:
        row_adam_kernel[triton.cdiv(rows, marks),](
            weight.view(torch.int16) if split else weight, lost_bits, grad, second, last, marked, steps, healthy, lr, decay, rows, width,
            BETA2=beta2, LOG2_BETA2=math.log2(beta2), CAUTIOUS=cautious, SPLIT=split,
            MARKS=marks, ROWS=max(elements // columns, 1), COLUMNS=columns, BLOCK=block, num_warps=warps)
