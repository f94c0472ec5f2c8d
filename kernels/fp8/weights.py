"""W / s and its transpose in e4m3, for several weights of one width, s = max_i ‖row i‖ / 448: two launches.

All micro-batches of a step multiply with the same weights, so that a layer's are quantised once a step: before, each of its three took
a pass for its norms, one for both of its FP8 forms and a kernel for scales in every micro-batch, most of them too small for a GPU.
The second launch needs no scale from elsewhere: each program takes the largest of what the first one's programs left.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.fp8.formats import E4M3
from kernels.fp8.quantize import quantize_reference, quantize_tile
from kernels.fp8.scales import APART, largest_norm, largest_row_norm, largest_squares, scale, scale_of

# (tile rows, tile columns, warps); the first is used.
CONFIGS = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8)]


class FP8Weight(NamedTuple):
    q: Tensor  # (out, in) float8_e4m3fn: the weight over `scale`
    transposed: Tensor  # (in, out)
    norm: Tensor  # 0-dim float32: the largest of a row
    scale: Tensor  # 0-dim float32


def fp8_weights_reference(weights: tuple[Tensor, ...]) -> tuple[FP8Weight, ...]:
    """Plain PyTorch twin of `fp8_weights`."""
    norms = [largest_row_norm(weight) for weight in weights]
    scales = [scale_of(norm, E4M3) for norm in norms]
    return tuple(FP8Weight(*quantize_reference(*pair), norm, pair[1]) for *pair, norm in zip(weights, scales, norms))


@triton.jit
def quantize_weights_kernel(weights, qs, transposeds, rows, x_rows, largest_ptr, numbers_ptr, columns, E4M3_MAX: tl.constexpr,
                            APART: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tl.program_id(0)
    for i in tl.static_range(len(weights)):
        if tl.program_id(1) == i:
            norm = largest_norm(largest_ptr + i * PROGRAMS, PROGRAMS, BLOCK)
            of_weight = scale(norm, E4M3_MAX)
            if tile == 0:
                tl.store(numbers_ptr + 2 * i * APART, norm)
                tl.store(numbers_ptr + (2 * i + 1) * APART, of_weight)
            quantize_tile(weights[i], qs[i], transposeds[i], of_weight, tile, rows[i], columns, x_rows[i], E4M3_MAX,
                          True, False, ROWS, COLUMNS)


def fp8_weights(
    weights: tuple[Tensor, ...],  # each (out, in) bfloat16 or float16, rows contiguous, of one width `in`, a multiple of 16
    tuned: tuple[int, int, int] | None = None,
) -> tuple[FP8Weight, ...]:
    """No gradients flow through them."""
    columns = weights[0].shape[-1]
    check(weights[0].dtype != torch.float32 or columns % 16 == 0 or not weights[0].is_cuda, "weights", weights[0],
          "in float32 of a multiple of 16 columns (kernels/quantize.py)")
    largest, form = largest_squares(weights, None)
    tile_rows, tile_columns, warps = tuned or CONFIGS[0]
    qs, transposeds = (tuple(torch.empty(*(w.shape[::step]), dtype=E4M3, device=w.device) for w in weights) for step in (1, -1))
    numbers = torch.empty(len(weights), 2, APART, device=weights[0].device)
    tiles = triton.cdiv(max(map(len, weights)), tile_rows) * triton.cdiv(columns, tile_columns)
    quantize_weights_kernel[tiles, len(weights)](
        weights, qs, transposeds, tuple(map(len, weights)), tuple(w.stride(0) for w in weights), largest, numbers, columns,
        **form, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps)
    return tuple(FP8Weight(q, transposed, *pair[:, 0].unbind()) for q, transposed, pair in zip(qs, transposeds, numbers))
