"""The scales of FP8 products from max_i ‖row i‖ of their weights, and of an MLP's gradient: one pass over each, and one tiny kernel.

A row's norm bounds its elements and, by Cauchy and Schwarz, what products make of it (`kernels.mlp`). Row norms, their largest and
the arithmetic of the scales were some 25 launches a layer; here they are two each way. The largest is taken of the bit patterns of
the squares' sums, which for numbers that are not negative have the numbers' order, NaN above all: so it is exact, in any order.
"""
import torch
from torch import Tensor

from kernels.backend import check, tl, triton

# (rows a tile, warps, programs); the first is used.
CONFIGS = [(2, 4, 2048), (4, 4, 1056), (4, 8, 528), (8, 8, 528)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
APART = 4  # float32 numbers: scales start at multiples of 16 bytes, for products that want their pointers so


def scale_of(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale (0-dim float32) that brings `bound` to the largest number of `dtype`; not zero where all is zero."""
    return bound.clamp(min=1e-30) / torch.finfo(dtype).max


def largest_row_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32)).amax()


def weight_scales_twin(w_in: Tensor, w_out: Tensor) -> tuple[Tensor, ...]:
    """Plain PyTorch twin of `weight_scales`."""
    in_norm, out_norm, x_norm = largest_row_norm(w_in), largest_row_norm(w_out), w_in.size(1) ** 0.5
    act_bound = x_norm * in_norm                            # of √act
    x_scale = scale_of(torch.full_like(in_norm, x_norm), E4M3)
    in_scale, out_scale, act_scale = (scale_of(bound, E4M3) for bound in (in_norm, out_norm, act_bound.square()))
    return x_scale, in_scale, out_scale, act_scale, x_scale * in_scale, 2 * act_bound * out_norm


def gradient_scales_twin(grad: Tensor, out_scale: Tensor, pre_bound: Tensor) -> tuple[Tensor, ...]:
    """Plain PyTorch twin of `gradient_scales`."""
    grad_norm = largest_row_norm(grad)
    grad_scale = scale_of(grad_norm, E4M3)
    return grad_scale, grad_scale * out_scale, scale_of(pre_bound * grad_norm, E5M2)


def qkv_scales_twin(weight: Tensor, learned: Tensor, x_scale: float, grad_scale: float) -> tuple[Tensor, ...]:
    """Plain PyTorch twin of `qkv_scales`."""
    weight_scale = scale_of(largest_row_norm(weight), E4M3)
    return weight_scale, weight_scale * learned, torch.full_like(weight_scale, x_scale), torch.full_like(weight_scale, grad_scale)


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
def row_norms_kernel(a_ptr, b_ptr, largest_ptr, n, width, a_row, b_row,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr):
    if tl.program_id(1) == 0:
        tl.store(largest_ptr + tl.program_id(0), largest_square(a_ptr, n, width, a_row, ROWS, COLUMNS, PROGRAMS))
    else:
        tl.store(largest_ptr + PROGRAMS + tl.program_id(0), largest_square(b_ptr, n, width, b_row, ROWS, COLUMNS, PROGRAMS))


@triton.jit
def largest_norm(largest_ptr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    largest = tl.max(tl.load(largest_ptr + block, mask=block < PROGRAMS, other=0), axis=0)
    return tl.sqrt(largest.to(tl.float32, bitcast=True))


@triton.jit
def scale(bound, LIMIT: tl.constexpr):
    return tl.where(bound < 1e-30, 1e-30, bound) / LIMIT                 # keeps NaN, as a maximum would not


@triton.jit
def weight_scales_kernel(largest_ptr, scales_ptr, x_norm, E4M3_MAX: tl.constexpr, APART: tl.constexpr,
                         PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    in_norm = largest_norm(largest_ptr, PROGRAMS, BLOCK)
    out_norm = largest_norm(largest_ptr + PROGRAMS, PROGRAMS, BLOCK)
    act_bound, x_scale, in_scale = x_norm * in_norm, scale(x_norm, E4M3_MAX), scale(in_norm, E4M3_MAX)
    tl.store(scales_ptr, x_scale)
    tl.store(scales_ptr + APART, in_scale)
    tl.store(scales_ptr + 2 * APART, scale(out_norm, E4M3_MAX))
    tl.store(scales_ptr + 3 * APART, scale(act_bound * act_bound, E4M3_MAX))
    tl.store(scales_ptr + 4 * APART, x_scale * in_scale)
    tl.store(scales_ptr + 5 * APART, 2 * act_bound * out_norm)


@triton.jit
def gradient_scales_kernel(largest_ptr, scales_ptr, out_scale_ptr, pre_bound_ptr, E4M3_MAX: tl.constexpr, E5M2_MAX: tl.constexpr,
                           APART: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    grad_norm = largest_norm(largest_ptr, PROGRAMS, BLOCK)
    grad_scale = scale(grad_norm, E4M3_MAX)
    tl.store(scales_ptr, grad_scale)
    tl.store(scales_ptr + APART, grad_scale * tl.load(out_scale_ptr))
    tl.store(scales_ptr + 2 * APART, scale(tl.load(pre_bound_ptr) * grad_norm, E5M2_MAX))


@triton.jit
def qkv_scales_kernel(largest_ptr, scales_ptr, learned_ptr, x_scale, grad_scale, E4M3_MAX: tl.constexpr, APART: tl.constexpr,
                      PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    weight_scale = scale(largest_norm(largest_ptr, PROGRAMS, BLOCK), E4M3_MAX)
    tl.store(scales_ptr, weight_scale)
    tl.store(scales_ptr + APART, weight_scale * tl.load(learned_ptr))
    tl.store(scales_ptr + 2 * APART, x_scale)
    tl.store(scales_ptr + 3 * APART, grad_scale)


def _largest(a: Tensor, b: Tensor | None, tuned: tuple[int, int, int] | None) -> tuple[Tensor, dict[str, int]]:
    """Bit patterns of the largest squared row norms that each program saw, (1 or 2, programs) int32; and what reads them."""
    for name, x in (("a", a), ("b", a if b is None else b)):
        check(x.ndim == 2 and x.stride(1) == 1 and x.shape == a.shape and 0 < x.numel() and x.shape[1] <= 8192, name, x,
              "(rows, width <= 8192) with contiguous rows, not empty, both of one shape")
    rows, warps, programs = tuned or CONFIGS[0]
    matrices, programs = 1 if b is None else 2, min(programs, triton.cdiv(len(a), rows))
    largest = torch.empty(matrices, programs, dtype=torch.int32, device=a.device)
    b = a if b is None else b
    row_norms_kernel[programs, matrices](a, b, largest, *a.shape, a.stride(0), b.stride(0), ROWS=rows,
                                         COLUMNS=triton.next_power_of_2(a.shape[1]), PROGRAMS=programs, num_warps=warps)
    return largest, dict(PROGRAMS=programs, BLOCK=triton.next_power_of_2(programs), APART=APART, E4M3_MAX=torch.finfo(E4M3).max)


def weight_scales(w_in: Tensor, w_out: Tensor, tuned: tuple[int, int, int] | None = None) -> tuple[Tensor, ...]:
    """Six 0-dim float32, from w_in and w_out (hidden, width): e4m3's scales of x, whose rows are normed, of w_in, w_out and
    act = relu(x w_inᵀ)²; the product of the first two; and what, times the largest norm of a gradient's row, bounds the
    gradient before the activation.
    """
    largest, form = _largest(w_in, w_out, tuned)
    scales = torch.empty(6, APART, device=w_in.device)
    weight_scales_kernel[1,](largest, scales, w_in.size(1) ** 0.5, **form)
    return scales[:, 0].unbind()


def gradient_scales(grad: Tensor, out_scale: Tensor, pre_bound: Tensor, tuned: tuple[int, int, int] | None = None) -> tuple[Tensor, ...]:
    """Three 0-dim float32: e4m3's scale of grad (tokens, width), that times `out_scale`, and e5m2's of the gradient before the
    activation; `out_scale` and `pre_bound`: the third and the last of `weight_scales`.
    """
    largest, form = _largest(grad, None, tuned)
    scales = torch.empty(3, APART, device=grad.device)
    gradient_scales_kernel[1,](largest, scales, out_scale, pre_bound, E5M2_MAX=torch.finfo(E5M2).max, **form)
    return scales[:, 0].unbind()


def qkv_scales(weight: Tensor, learned: Tensor, x_scale: float, grad_scale: float,
               tuned: tuple[int, int, int] | None = None) -> tuple[Tensor, ...]:
    """Four 0-dim float32: e4m3's scale of weight (out, in), that times `learned`, a 0-dim float32, and the two numbers given."""
    largest, form = _largest(weight, None, tuned)
    scales = torch.empty(4, APART, device=weight.device)
    qkv_scales_kernel[1,](largest, scales, learned, x_scale, grad_scale, **form)
    return scales[:, 0].unbind()
