"""q = fp8(W / s) and qᵀ, with s = max_i ‖row i of W‖ / 448, for several weights of one width in two launches.

All micro-batches of a step multiply by the same weights, so a layer's weights are quantised once a step. The
first launch takes the row norms of all weights. In the second launch each program takes the largest of the
norms that the first launch left. So no kernel between the two has to make a scale. Three weights used to take
nine launches in every micro-batch, most of them too small for a GPU. A step of the three stages went from
46.0 to 44.5, from 93.5 to 92.3 and from 139.8 to 136.2 ms on one H200. On four, where a step has one
micro-batch, it takes as long as before.
"""
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import tl, triton
from kernels.example import Example
from kernels.fp8.formats import E4M3, rounding_slack
from kernels.fp8.quantize import check_no_ptxas_bug, quantize_reference, quantize_tile
from kernels.fp8.scales import APART, largest_norm, largest_row_norm, largest_squares, scale, scale_of

# (tile rows, tile columns, warps). The first is used.
CONFIGS = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8)]


class FP8Weight(NamedTuple):
    """A weight (out, in) in e4m3, both ways."""
    q: Tensor  # (out, in) float8_e4m3fn: the weight over `scale`
    transposed: Tensor  # (in, out), not `paired`
    norm: Tensor  # 0-dim float32: the largest norm of a row
    scale: Tensor  # 0-dim float32: norm / 448


def fp8_weights_reference(weights: tuple[Tensor, ...]) -> tuple[FP8Weight, ...]:
    """As `fp8_weights`, in plain PyTorch."""
    norms = [largest_row_norm(weight) for weight in weights]
    scales = [scale_of(norm, E4M3) for norm in norms]
    both_ways = [quantize_reference(weight, s) for weight, s in zip(weights, scales)]
    return tuple(FP8Weight(*q, norm, s) for q, norm, s in zip(both_ways, norms, scales))


@triton.jit
def quantize_weights_kernel(weights, qs, transposeds, rows, x_rows, largest_ptr, numbers_ptr, columns,
                            E4M3_MAX: tl.constexpr, APART: tl.constexpr, PROGRAMS: tl.constexpr,
                            BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tl.program_id(0)
    for i in tl.static_range(len(weights)):
        if tl.program_id(1) == i:
            norm = largest_norm(largest_ptr + i * PROGRAMS, PROGRAMS, BLOCK)
            weight_scale = scale(norm, E4M3_MAX)
            if tile == 0:
                tl.store(numbers_ptr + 2 * i * APART, norm)
                tl.store(numbers_ptr + (2 * i + 1) * APART, weight_scale)
            quantize_tile(weights[i], qs[i], transposeds[i], weight_scale, tile, rows[i], columns, x_rows[i],
                          E4M3_MAX, True, False, ROWS, COLUMNS)


def fp8_weights(
    weights: tuple[Tensor, ...],  # each (out, in) bf16 or fp16, rows contiguous, of one width `in`
    tuned: tuple[int, int, int] | None = None,
) -> tuple[FP8Weight, ...]:
    """The weights in FP8. No gradient flows through them."""
    columns = weights[0].shape[-1]
    check_no_ptxas_bug("weights", weights[0])
    largest, form = largest_squares(weights, None)
    tile_rows, tile_columns, warps = tuned or CONFIGS[0]
    qs = tuple(torch.empty(w.shape, dtype=E4M3, device=w.device) for w in weights)
    transposeds = tuple(torch.empty(w.shape[::-1], dtype=E4M3, device=w.device) for w in weights)
    numbers = torch.empty(len(weights), 2, APART, device=weights[0].device)
    tiles = triton.cdiv(max(map(len, weights)), tile_rows) * triton.cdiv(columns, tile_columns)
    rows, x_rows = tuple(map(len, weights)), tuple(w.stride(0) for w in weights)
    quantize_weights_kernel[tiles, len(weights)](
        weights, qs, transposeds, rows, x_rows, largest, numbers, columns,
        **form, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps)
    norms_and_scales = (pair[:, 0].unbind() for pair in numbers)
    return tuple(FP8Weight(q, transposed, *pair)
                 for q, transposed, pair in zip(qs, transposeds, norms_and_scales))


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """A layer's weights: Q, K and V, MLP-in and MLP-out."""
    rows, width = ((1536, 3072, 3072), 768) if size == "real" else ((70, 25, 130), 48)

    def inputs() -> tuple[Tensor, ...]:
        return tuple(torch.randn(n, width, device=device).to(dtype) for n in rows)

    def quantized(function: Callable) -> Callable:
        def run(*weights: Tensor, **tuned) -> tuple[Tensor, ...]:
            return tuple(x for weight in function(weights, **tuned) for x in (weight.q, weight.transposed))
        return run

    def exact(*weights: Tensor) -> tuple[Tensor, ...]:
        scaled = [weight / scale_of(largest_row_norm(weight), E4M3) for weight in weights]
        return tuple(x for weight in scaled for x in (weight, weight.T))

    shape = f"({' + '.join(map(str, rows))}) × {width}"
    yield Example(
        "a layer's weights in FP8, both ways", shape, inputs, fp8_weights, fp8_weights_reference, 0.0,
        6.0 * sum(rows) * width, exact=exact, wrap=quantized, configs=CONFIGS, slack=rounding_slack(device))
