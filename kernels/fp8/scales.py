"""The scales of FP8 products from max_i ‖row i‖ of their weights, and of an MLP's gradient: one pass over that, and one tiny kernel.

A row's norm bounds its elements and, by Cauchy and Schwarz, what products make of it (`kernels.mlp.fp8_mlp`). Row norms, their largest and
the arithmetic of the scales were some 25 launches a layer; here a gradient's are two, and `kernels.fp8.weights` has the weights'.
The largest is taken of the bit patterns of the squares' sums, which for numbers that are not negative have the numbers' order, NaN
above all: so it is exact, in any order.
"""
import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.fp8.formats import E4M3, E5M2

# (rows a tile, warps, programs); the first is used.
CONFIGS = [(2, 4, 2048), (4, 4, 1056), (4, 8, 528), (8, 8, 528)]
APART = 4  # float32 numbers: scales start at multiples of 16 bytes, for products that want their pointers so


def scale_of(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale (0-dim float32) that brings `bound` to the largest number of `dtype`; not zero where all is zero."""
    return bound.clamp(min=1e-30) / torch.finfo(dtype).max


def largest_row_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32)).amax()


def mlp_scales_reference(in_norm: Tensor, out_norm: Tensor, width: int) -> tuple[Tensor, ...]:
    """Plain PyTorch twin of `mlp_scales`."""
    act_bound, x_scale = width**0.5 * in_norm, scale_of(torch.full_like(in_norm, width**0.5), E4M3)      # the first of √act
    return x_scale, scale_of(act_bound.square(), E4M3), x_scale * scale_of(in_norm, E4M3), 2 * act_bound * out_norm


def gradient_scales_reference(grad: Tensor, out_scale: Tensor, pre_bound: Tensor) -> tuple[Tensor, ...]:
    """Plain PyTorch twin of `gradient_scales`."""
    grad_norm = largest_row_norm(grad)
    grad_scale = scale_of(grad_norm, E4M3)
    return grad_scale, grad_scale * out_scale, scale_of(pre_bound * grad_norm, E5M2)


def qkv_scales_reference(weight_scale: Tensor, learned: Tensor, x_scale: float, grad_scale: float) -> tuple[Tensor, ...]:
    """Plain PyTorch twin of `qkv_scales`."""
    return weight_scale * learned, torch.full_like(weight_scale, x_scale), torch.full_like(weight_scale, grad_scale)


@triton.jit
def largest_square(x_ptr, n, width, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr):
    """The largest sum of squares among this program's rows, as its bit pattern."""
    column, largest = tl.arange(0, COLUMNS)[None, :], tl.zeros((ROWS,), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), PROGRAMS):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        x = tl.load(x_ptr + row * x_row + column, mask=(row < n) & (column < width), other=0.0).to(tl.float32)
        bits = tl.sum(x * x, axis=1).to(tl.int32, bitcast=True) & 0x7FFFFFFF             # without the sign that a NaN may have
        largest = tl.maximum(largest, bits)
    return tl.max(largest, axis=0)


@triton.jit
def row_norms_kernel(matrices, rows, x_rows, largest_ptr, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr):
    for i in tl.static_range(len(matrices)):
        if tl.program_id(1) == i:
            largest = largest_square(matrices[i], rows[i], width, x_rows[i], ROWS, COLUMNS, PROGRAMS)
            tl.store(largest_ptr + i * PROGRAMS + tl.program_id(0), largest)


@triton.jit
def largest_norm(largest_ptr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    largest = tl.max(tl.load(largest_ptr + block, mask=block < PROGRAMS, other=0), axis=0)
    return tl.sqrt(largest.to(tl.float32, bitcast=True))


@triton.jit
def scale(bound, LIMIT: tl.constexpr):
    return tl.where(bound < 1e-30, 1e-30, bound) / LIMIT                 # keeps NaN, as a maximum would not


@triton.jit
def mlp_scales_kernel(in_norm_ptr, out_norm_ptr, scales_ptr, x_norm, E4M3_MAX: tl.constexpr, APART: tl.constexpr):
    in_norm = tl.load(in_norm_ptr)
    act_bound, x_scale = x_norm * in_norm, scale(x_norm, E4M3_MAX)
    tl.store(scales_ptr, x_scale)
    tl.store(scales_ptr + APART, scale(act_bound * act_bound, E4M3_MAX))
    tl.store(scales_ptr + 2 * APART, x_scale * scale(in_norm, E4M3_MAX))
    tl.store(scales_ptr + 3 * APART, 2 * act_bound * tl.load(out_norm_ptr))


@triton.jit
def gradient_scales_kernel(largest_ptr, scales_ptr, out_scale_ptr, pre_bound_ptr, E4M3_MAX: tl.constexpr, E5M2_MAX: tl.constexpr,
                           APART: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    grad_norm = largest_norm(largest_ptr, PROGRAMS, BLOCK)
    grad_scale = scale(grad_norm, E4M3_MAX)
    tl.store(scales_ptr, grad_scale)
    tl.store(scales_ptr + APART, grad_scale * tl.load(out_scale_ptr))
    tl.store(scales_ptr + 2 * APART, scale(tl.load(pre_bound_ptr) * grad_norm, E5M2_MAX))


@triton.jit
def qkv_scales_kernel(weight_scale_ptr, learned_ptr, scales_ptr, x_scale, grad_scale, APART: tl.constexpr):
    tl.store(scales_ptr, tl.load(weight_scale_ptr) * tl.load(learned_ptr))
    tl.store(scales_ptr + APART, x_scale)
    tl.store(scales_ptr + 2 * APART, grad_scale)


def largest_squares(matrices: tuple[Tensor, ...], tuned: tuple[int, int, int] | None) -> tuple[Tensor, dict[str, int]]:
    """Bit patterns of the largest squared row norms that each program saw, (matrices, programs) int32; and what reads them."""
    width = matrices[0].shape[-1]
    for x in matrices:
        check(x.ndim == 2 and x.stride(1) == 1 and x.numel() > 0 and x.shape[1] == width <= 8192 and x.dtype == matrices[0].dtype, "x", x,
              "(rows, width <= 8192) with contiguous rows, not empty, of one width and dtype with the others")
    rows, warps, programs = tuned or CONFIGS[0]
    programs = min(programs, triton.cdiv(max(map(len, matrices)), rows))
    largest = torch.empty(len(matrices), programs, dtype=torch.int32, device=matrices[0].device)
    row_norms_kernel[programs, len(matrices)](
        matrices, tuple(map(len, matrices)), tuple(x.stride(0) for x in matrices), largest, width, ROWS=rows,
        COLUMNS=triton.next_power_of_2(width), PROGRAMS=programs, num_warps=warps)
    return largest, dict(PROGRAMS=programs, BLOCK=triton.next_power_of_2(programs), APART=APART, E4M3_MAX=torch.finfo(E4M3).max)


def mlp_scales(in_norm: Tensor, out_norm: Tensor, width: int) -> tuple[Tensor, ...]:
    """Four 0-dim float32, from the largest row norms of w_in and w_out (hidden, width): e4m3's scale of x, whose rows are normed, and of
    act = relu(x w_inᵀ)²; the first times w_in's; and what, times the largest norm of a gradient's row, bounds the gradient before
    the activation.
    """
    scales = torch.empty(4, APART, device=in_norm.device)
    mlp_scales_kernel[1,](in_norm, out_norm, scales, width**0.5, E4M3_MAX=torch.finfo(E4M3).max, APART=APART)
    return scales[:, 0].unbind()


def gradient_scales(grad: Tensor, out_scale: Tensor, pre_bound: Tensor, tuned: tuple[int, int, int] | None = None) -> tuple[Tensor, ...]:
    """Three 0-dim float32: e4m3's scale of grad (tokens, width), that times `out_scale`, w_out's, and e5m2's of the gradient before the
    activation; `pre_bound`: the last of `mlp_scales`.
    """
    largest, form = largest_squares((grad,), tuned)
    scales = torch.empty(3, APART, device=grad.device)
    gradient_scales_kernel[1,](largest, scales, out_scale, pre_bound, E5M2_MAX=torch.finfo(E5M2).max, **form)
    return scales[:, 0].unbind()


def qkv_scales(weight_scale: Tensor, learned: Tensor, x_scale: float, grad_scale: float) -> tuple[Tensor, ...]:
    """Three 0-dim float32: the scale of a weight times `learned`, a 0-dim float32, and the two numbers given."""
    scales = torch.empty(3, APART, device=learned.device)
    qkv_scales_kernel[1,](weight_scale, learned, scales, x_scale, grad_scale, APART=APART)
    return scales[:, 0].unbind()
