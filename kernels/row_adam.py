"""Adam with β₁ = 0 on only the rows that have a gradient: v̂ ← β₂^gap v̂ + (1 − β₂) g², w ← w − lr g / √v̂.

Without a first moment a row whose gradient is zero stays where it is, so that to leave it out changes nothing: its mean square,
which would have shrunk meanwhile, is shrunk when it is next touched, by the number of updates since. For a long table of which
a step reads little the update then moves the gradient once and the rest only where something was read, where Adam's reads and
writes 28 bytes an element, always. The gradient is set to zero on the way.
"""
import math

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.master_weight import apply_update

# (elements a tile, warps), the first is used. A tile is as many whole rows as fit.
CONFIGS = [(2048, 4), (4096, 8), (4096, 4), (8192, 8)]


def row_adam_twin(weight: Tensor, lost_bits: Tensor | None, grad: Tensor, second: Tensor, last: Tensor, steps: Tensor,
                  healthy: Tensor, lr: Tensor, decay: Tensor, beta2: float, cautious: bool) -> None:
    """Update `weight` (rows, width) in place from `grad`, which ends as zero, unless not `healthy`; with it lost_bits (master_weight.py).

    `second` (rows, width) float32 is the running mean square as of the row's last update, whose number is `last` (rows,) float32;
    `steps` counts the updates. `steps`, `healthy`, `lr` and `decay` (a share of the weight, times lr) are 0-dim tensors.
    """
    steps.add_(healthy)
    touched = ((grad != 0).any(1) & healthy)[:, None]
    g = torch.where(touched, grad, 0).float()
    grown = second * (beta2 ** (steps - last))[:, None] + (1 - beta2) * g.square()
    second.copy_(torch.where(touched, grown, second))
    last.copy_(torch.where(touched[:, 0], steps, last))
    apply_update(weight, lost_bits, g / ((second / (1 - beta2 ** steps)).sqrt() + 1e-10), touched, lr, decay, cautious)
    grad.zero_()


@triton.jit
def row_adam_kernel(weight_ptr, lost_ptr, grad_ptr, second_ptr, last_ptr, steps_ptr, healthy_ptr, lr_ptr, decay_ptr, rows, width,
                    BETA2: tl.constexpr, LOG2_BETA2: tl.constexpr, CAUTIOUS: tl.constexpr, SPLIT: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    at = row[:, None] * width + column
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    read = tl.max((grad != 0).to(tl.int32), axis=1) != 0                 # NaN is not 0
    mine = inside & read[:, None]
    tl.store(grad_ptr + at, tl.zeros_like(grad), mask=mine)
    mine = mine & (tl.load(healthy_ptr) != 0)

    steps, lr, decay = tl.load(steps_ptr), tl.load(lr_ptr), tl.load(decay_ptr)
    gap = steps - tl.load(last_ptr + row, mask=read, other=0.0)
    g = grad.to(tl.float32)
    second = tl.load(second_ptr + at, mask=mine, other=0.0) * tl.exp2(gap * LOG2_BETA2)[:, None] + (1 - BETA2) * g * g
    update = g / (tl.sqrt(second / (1 - tl.exp2(steps * LOG2_BETA2))) + 1e-10)
    if SPLIT:
        high = tl.load(weight_ptr + at, mask=mine, other=0).to(tl.int32)
        low = tl.load(lost_ptr + at, mask=mine, other=0).to(tl.int32)
        master = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        master = tl.load(weight_ptr + at, mask=mine, other=0.0)
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
    tl.store(second_ptr + at, second, mask=mine)
    tl.store(last_ptr + row, tl.zeros_like(gap) + steps, mask=read & (row < rows) & (tl.load(healthy_ptr) != 0))


def row_adam(weight: Tensor, lost_bits: Tensor | None, grad: Tensor, second: Tensor, last: Tensor, steps: Tensor, healthy: Tensor,
             lr: Tensor, decay: Tensor, beta2: float, cautious: bool, tuned: tuple[int, int] = CONFIGS[0]) -> None:
    """As `row_adam_twin`, by a Triton kernel; weight in bf16 with lost bits, or in float32 without."""
    rows, width = weight.shape
    for name, tensor in (("weight", weight), ("lost_bits", lost_bits), ("grad", grad), ("second", second)):
        check(tensor is None or tensor.shape == weight.shape and tensor.is_contiguous(), name, tensor, f"({rows}, {width}), contiguous")
    split = lost_bits is not None
    check(weight.dtype == (torch.bfloat16 if split else torch.float32), "weight", weight, "bf16 with lost bits or float32 without")
    check(last.shape == (rows,) and last.dtype == second.dtype == torch.float32, "last", last, f"float32 ({rows},), as second is")
    check(0 < beta2 < 1, "second", second, f"decayed by a beta2 between 0 and 1, not {beta2}")
    steps.add_(healthy)
    columns = 1 << max(width - 1, 0).bit_length()
    tile_rows = max(tuned[0] // columns, 1)
    if rows and width:
        row_adam_kernel[triton.cdiv(rows, tile_rows),](
            weight.view(torch.int16) if split else weight, lost_bits, grad, second, last, steps, healthy, lr, decay, rows, width,
            BETA2=beta2, LOG2_BETA2=math.log2(beta2), CAUTIOUS=cautious, SPLIT=split, ROWS=tile_rows, COLUMNS=columns, num_warps=tuned[1])
