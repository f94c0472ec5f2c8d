"""One pass over all states that a run kept: keys are evened out and given the cell of the nearest centre.

    key ← norm(key · root)        cell = argmax_c key · centre_c

PyTorch takes nine kernels for this and writes all products, 2 KB a key.
"""
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EPS, check, tl, triton
from kernels.example import Example

PART = 2 ** 16      # keys at a time in PyTorch
CONFIGS = [(64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3)]   # (keys, centres, warps, stages); the first
STEP = 64           # channels at a time, for the whole root would take half of the shared memory


def settle_reference(keys: Tensor, root: Tensor, centres: Tensor) -> Tensor:
    """Plain PyTorch form of `settle`."""
    cells = torch.empty(len(keys), dtype=torch.int32, device=keys.device)
    for part, own in zip(keys.split(PART), cells.split(PART)):
        part.copy_(F.rms_norm(part.to(root.dtype) @ root, root.shape[1:], eps=EPS))
        own.copy_((part.to(root.dtype) @ centres.to(root.dtype).T).argmax(1))
    return cells


@triton.jit
def settle_kernel(keys_ptr, root_ptr, centres_ptr, cells_ptr, n, cells, eps, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr):
    row, channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    keys_ptr += row.to(tl.int64)[:, None] * CHANNELS
    x = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in tl.range(0, CHANNELS, STEP):
        own = start + tl.arange(0, STEP)
        part = tl.load(keys_ptr + own[None, :], mask=row[:, None] < n, other=0.0)
        root = tl.load(root_ptr + own[:, None] * CHANNELS + channel[None, :])
        x = tl.dot(part.to(root.dtype), root, x, input_precision="ieee")
    x *= tl.rsqrt(tl.sum(x * x, 1) / CHANNELS + eps)[:, None]
    keys = x.to(keys_ptr.dtype.element_ty)
    tl.store(keys_ptr + channel[None, :], keys, mask=row[:, None] < n)
    most, cell = tl.full((ROWS,), -float("inf"), tl.float32), tl.zeros((ROWS,), tl.int32)
    for start in tl.range(0, cells, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        centres = tl.load(centres_ptr + column[:, None] * CHANNELS + channel[None, :],
                          mask=column[:, None] < cells, other=0.0)
        products = tl.dot(keys, tl.trans(centres), input_precision="ieee")
        products = tl.where(column[None, :] < cells, products, -float("inf"))
        best, place = tl.max(products, 1, return_indices=True)
        cell = tl.where(best > most, start + place, cell)
        most = tl.maximum(best, most)
    tl.store(cells_ptr + row, cell, mask=row < n)


def settle(keys: Tensor, root: Tensor, centres: Tensor,
           tuned: tuple[int, int, int, int] = CONFIGS[0]) -> Tensor:
    """The cell (n,) int32 of each key. The keys are replaced by the evened ones.

    `keys` (n, d) and `centres` (cells, d): of one dtype, FP8 too; d a power of two. `root` (d, d).
    """
    n, channels = keys.shape
    check(channels >= 16 and channels & (channels - 1) == 0 and keys.is_contiguous(), "keys", keys,
          "contiguous, of 16, 32, … channels")
    check(root.shape == (channels, channels) and root.is_contiguous(), "root", root,
          f"contiguous ({channels}, {channels})")
    check(centres.dtype == keys.dtype and centres.shape[1:] == keys.shape[1:] and centres.is_contiguous(),
          "centres", centres, f"contiguous {keys.dtype} (cells, {channels})")
    rows, columns, warps, stages = tuned
    cells = torch.empty(n, dtype=torch.int32, device=keys.device)
    if n:
        settle_kernel[triton.cdiv(n, rows),](
            keys, root, centres, cells, n, len(centres), EPS, ROWS=rows, COLUMNS=columns, CHANNELS=channels,
            STEP=min(STEP, channels), STAGES=stages, num_warps=warps)
    return cells


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Keys, and the products with their centres: two centres may be as near but for rounding."""
    def inputs(n: int, cells: int, channels: int, kind: torch.dtype) -> tuple:
        keys, centres = (F.rms_norm(torch.randn(x, channels, device=device), (channels,)).to(kind)
                         for x in (n, cells))
        root = torch.eye(channels, device=device) + 0.3 * torch.randn(channels, channels, device=device)
        return keys, root.to(torch.bfloat16 if kind.itemsize == 1 else kind), centres

    def judged(function, keys: Tensor, root: Tensor, centres: Tensor, **settings) -> tuple[Tensor, Tensor]:
        cells = function(keys, root, centres, **settings)
        wide = torch.promote_types(root.dtype, torch.float32)
        return keys.to(wide), (keys.to(wide) * centres.to(wide)[cells]).sum(1)

    real = size == "real"
    for n, cells, channels in [(4_194_304, 1024, 256)] if real else [(150, 40, 16), (70, 130, 128)]:
        kind = torch.float8_e4m3fn if real else dtype
        yield Example(
            "keys evened out, and their cells", f"{n:,} × {cells:,} × {channels}",
            partial(inputs, n, cells, channels, kind), partial(judged, settle),
            partial(judged, settle_reference),
            flop=2.0 * n * channels * (channels + cells), rate=2.0 if real else 1.0,
            check_inputs=partial(inputs, 4096, cells, channels, kind) if real else None, compile=False,
            configs=tuple(CONFIGS))
