"""scale = bound / 448 (e4m3) or bound / 57,344 (e5m2), with bounds from max_i ‖row i‖ of weights and
gradients.

`formats.py` says why a row's norm is enough. Row norms, their maximum and the arithmetic on scalars were some
25 launches a layer in PyTorch. Here a gradient takes two: a pass over its rows, and one tiny kernel that
makes three scales of it. One H200, 49,152 × 768: 21.9 µs, compiled PyTorch 36.3 µs; training looks at 4,096
of these rows, which takes 3.7 µs.

The maximum is taken over bit patterns. Read as integers, the bit patterns of non-negative floats have the
order of the floats, and NaN is above all numbers. So the maximum is exact, in any order of the programs, and
a NaN is not lost.
"""
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.fp8.formats import E4M3, E5M2, widened

# (rows a tile, warps, programs). The first is used.
CONFIGS = [(2, 4, 2048), (4, 4, 1056), (4, 8, 528), (8, 8, 528)]
APART = 4  # float32 numbers between scales: a matmul wants each at a multiple of 16 bytes


def scale_of(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale (0-dim) that brings `bound` to the largest number of `dtype`. It is never zero."""
    return bound.clamp(min=1e-30) / torch.finfo(dtype).max


def largest_row_norm(x: Tensor) -> Tensor:
    """max_i ‖x[i]‖, 0-dim, computed in float32 (float64 if x is float64)."""
    return torch.linalg.vector_norm(widened(x), dim=1).amax()


def mlp_scales_reference(in_norm: Tensor, out_norm: Tensor, width: int) -> tuple[Tensor, ...]:
    """As `mlp_scales`, in plain PyTorch."""
    x_norm = torch.full_like(in_norm, width**0.5)
    pre_bound, x_scale = x_norm * in_norm, scale_of(x_norm, E4M3)
    act_scale, pre_scale = scale_of(pre_bound.square(), E4M3), x_scale * scale_of(in_norm, E4M3)
    return x_scale, act_scale, pre_scale, 2 * pre_bound * out_norm


def gradient_scales_reference(grad: Tensor, out_scale: Tensor, grad_bound: Tensor) -> tuple[Tensor, ...]:
    """As `gradient_scales`, in plain PyTorch."""
    grad_norm = largest_row_norm(grad)
    grad_scale = scale_of(grad_norm, E4M3)
    return grad_scale, grad_scale * out_scale, scale_of(grad_bound * grad_norm, E5M2)


def qkv_scales_reference(weight_scale: Tensor, learned: Tensor, x_scale: float,
                         grad_scale: float) -> tuple[Tensor, ...]:
    """As `qkv_scales`, in plain PyTorch."""
    constants = (torch.full_like(weight_scale, number) for number in (x_scale, grad_scale))
    return weight_scale * learned, *constants


@triton.jit
def largest_square(x_ptr, n, width, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr):
    """The largest sum of squares among this program's rows, as its bit pattern."""
    column, largest = tl.arange(0, COLUMNS)[None, :], tl.zeros((ROWS,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), PROGRAMS):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        x = tl.load(x_ptr + row * x_row + column, mask=(row < n) & (column < width), other=0.0).to(tl.float32)
        bits = tl.sum(x * x, axis=1).to(tl.int32, bitcast=True) & 0x7FFFFFFF     # drops a NaN's sign
        largest = tl.maximum(largest, bits)
    return tl.max(largest, axis=0)


@triton.jit
def row_norms_kernel(matrices, rows, x_rows, largest_ptr, width,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr):
    for i in tl.static_range(len(matrices)):
        if tl.program_id(1) == i:
            largest = largest_square(matrices[i], rows[i], width, x_rows[i], ROWS, COLUMNS, PROGRAMS)
            tl.store(largest_ptr + i * PROGRAMS + tl.program_id(0), largest)


@triton.jit
def largest_norm(largest_ptr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest norm, from the bit patterns that the programs of `row_norms_kernel` left for one matrix."""
    block = tl.arange(0, BLOCK)
    largest = tl.max(tl.load(largest_ptr + block, mask=block < PROGRAMS, other=0), axis=0)
    return tl.sqrt(largest.to(tl.float32, bitcast=True))


@triton.jit
def scale(bound, LIMIT: tl.constexpr):
    """As `scale_of`. A NaN stays one, which `tl.maximum` would not grant."""
    return tl.where(bound < 1e-30, 1e-30, bound) / LIMIT


@triton.jit
def mlp_scales_kernel(in_norm_ptr, out_norm_ptr, scales_ptr, x_norm,
                      E4M3_MAX: tl.constexpr, APART: tl.constexpr):
    in_norm = tl.load(in_norm_ptr)
    pre_bound, x_scale = x_norm * in_norm, scale(x_norm, E4M3_MAX)
    tl.store(scales_ptr, x_scale)
    tl.store(scales_ptr + APART, scale(pre_bound * pre_bound, E4M3_MAX))
    tl.store(scales_ptr + 2 * APART, x_scale * scale(in_norm, E4M3_MAX))
    tl.store(scales_ptr + 3 * APART, 2 * pre_bound * tl.load(out_norm_ptr))


@triton.jit
def gradient_scales_kernel(largest_ptr, scales_ptr, out_scale_ptr, grad_bound_ptr,
                           E4M3_MAX: tl.constexpr, E5M2_MAX: tl.constexpr, APART: tl.constexpr,
                           PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    grad_norm = largest_norm(largest_ptr, PROGRAMS, BLOCK)
    grad_scale = scale(grad_norm, E4M3_MAX)
    tl.store(scales_ptr, grad_scale)
    tl.store(scales_ptr + APART, grad_scale * tl.load(out_scale_ptr))
    tl.store(scales_ptr + 2 * APART, scale(tl.load(grad_bound_ptr) * grad_norm, E5M2_MAX))


@triton.jit
def qkv_scales_kernel(weight_scale_ptr, learned_ptr, scales_ptr, x_scale, grad_scale, APART: tl.constexpr):
    tl.store(scales_ptr, tl.load(weight_scale_ptr) * tl.load(learned_ptr))
    tl.store(scales_ptr + APART, x_scale)
    tl.store(scales_ptr + 2 * APART, grad_scale)


def largest_squares(matrices: tuple[Tensor, ...],
                    tuned: tuple[int, int, int] | None) -> tuple[Tensor, dict[str, int]]:
    """Bit patterns of the largest squared row norm that each program saw, (matrices, programs) int32.

    And the constexprs of a kernel that calls `largest_norm` on them.
    """
    width, dtype = matrices[0].shape[-1], matrices[0].dtype
    for x in matrices:
        rows_lie_well = x.ndim == 2 and x.stride(1) == 1 and x.numel() > 0
        check(rows_lie_well and x.shape[1] == width <= 8192 and x.dtype == dtype, "x", x,
              "(rows, width <= 8192) with contiguous rows, not empty, of one width and dtype with the others")
    rows, warps, programs = tuned or CONFIGS[0]
    programs = min(programs, triton.cdiv(max(map(len, matrices)), rows))
    largest = torch.empty(len(matrices), programs, dtype=torch.int32, device=matrices[0].device)
    row_norms_kernel[programs, len(matrices)](
        matrices, tuple(map(len, matrices)), tuple(x.stride(0) for x in matrices), largest, width, ROWS=rows,
        COLUMNS=triton.next_power_of_2(width), PROGRAMS=programs, num_warps=warps)
    block = triton.next_power_of_2(programs)
    return largest, dict(PROGRAMS=programs, BLOCK=block, APART=APART, E4M3_MAX=torch.finfo(E4M3).max)


def mlp_scales(in_norm: Tensor, out_norm: Tensor, width: int) -> tuple[Tensor, ...]:
    """Four 0-dim float32, from the largest row norms of w_in and w_out (hidden, width), for normed rows x:

    the scale of x; the scale of act = relu(x w_inᵀ)²; the scale of x times that of w_in; and the most that an
    element of the gradient before the activation can be, if the rows of the incoming gradient have norms of
    at most 1.
    """
    scales = torch.empty(4, APART, device=in_norm.device)
    mlp_scales_kernel[1,](in_norm, out_norm, scales, width**0.5, E4M3_MAX=torch.finfo(E4M3).max, APART=APART)
    return scales[:, 0].unbind()


def gradient_scales(
    grad: Tensor,  # (rows, width), rows contiguous: the gradient of an MLP's result, or some of its rows
    out_scale: Tensor,  # 0-dim float32: w_out's scale
    grad_bound: Tensor,  # 0-dim float32: the last of `mlp_scales`
    tuned: tuple[int, int, int] | None = None,
) -> tuple[Tensor, ...]:
    """Three 0-dim float32: the scale of grad in e4m3; this scale times w_out's; the scale in e5m2 of the
    gradient before the activation."""
    largest, form = largest_squares((grad,), tuned)
    scales = torch.empty(3, APART, device=grad.device)
    gradient_scales_kernel[1,](largest, scales, out_scale, grad_bound, E5M2_MAX=torch.finfo(E5M2).max, **form)
    return scales[:, 0].unbind()


def qkv_scales(weight_scale: Tensor, learned: Tensor, x_scale: float,
               grad_scale: float) -> tuple[Tensor, ...]:
    """Three 0-dim float32: a weight's scale times `learned` (0-dim float32), and the two numbers given."""
    scales = torch.empty(3, APART, device=learned.device)
    qkv_scales_kernel[1,](weight_scale, learned, scales, x_scale, grad_scale, APART=APART)
    return scales[:, 0].unbind()


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Scales of a gradient; in odd sizes also those that are made of a few numbers."""
    def inputs(n: int, width: int) -> tuple[Tensor, ...]:
        grad = torch.randn(n, width + 3, device=device).to(dtype)[:, :width]
        return grad, torch.tensor(0.01, device=device), torch.tensor(9.0, device=device)

    def numbers() -> tuple[Tensor, Tensor]:
        return torch.tensor(0.7, device=device), torch.tensor(3.0, device=device)

    def stacked(function: Callable) -> Callable:
        return lambda *args, **options: torch.stack(function(*args, **options))

    for n, width in ((49152, 768),) if size == "real" else ((1, 1), (11, 40), (70, 33)):
        yield Example(
            "FP8 scales of a gradient", f"{n:,} × {width}", partial(inputs, n, width), gradient_scales,
            gradient_scales_reference, 0.0, 2.0 * n * width, configs=CONFIGS, wrap=stacked)
    if size == "odd":
        yield Example("FP8 scales of an MLP", "2 norms", numbers, partial(mlp_scales, width=9),
                      partial(mlp_scales_reference, width=9), wrap=stacked)
        constants = dict(x_scale=0.3, grad_scale=0.4)
        yield Example("FP8 scales of Q, K, V", "2 numbers", numbers, partial(qkv_scales, **constants),
                      partial(qkv_scales_reference, **constants), wrap=stacked)
