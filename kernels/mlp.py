"""relu(X Wᵀ)² and, backward, 2 √act · (G Wᵀ), each in one kernel: the hidden activations cross memory once.

Both matrices of the MLP are stored hidden × width, so forward (W = W_in) and backward (W = W_out, G = ∂loss/∂out)
are the same product with another epilogue. Only act = relu(pre)² is kept for the backward pass, because
∂act/∂pre = 2 relu(pre) = 2 √act. Against a matrix product and an elementwise pass this saves reading and
writing tokens · hidden elements each way. Inputs may be FP8 with a scale, and act can be written in FP8 too, for
the product that follows. One H200, 49,152 tokens, 768 → 3072 (README.md): 0.38 ms where compiled PyTorch
takes 0.49; FP8 0.24 ms against 0.35; backward 0.47 ms against 0.56; the whole `mlp` both ways 2.16 ms against 2.34, in FP8 1.83.

The grid is persistent and walks bands of tiles; operands come through tensor descriptors (TMA).

`mlp` is the whole sub-layer, residual + relu(X W_inᵀ)² W_out with its gradients, and writes over the residual: the last product
adds to it where it stands, and no pass reads two activations and writes a third for the sum (in FP8, whose product cannot add,
one still does). `mlp_twin` is its plain form, which leaves the residual as it is. In FP8 the products forward and those of the
input's gradient are FP8, the weights' gradients stay bfloat16. Its scales (`kernels.fp8_scales`) need no state and no pass of their
own over the hidden activations: a row's norm bounds its elements and, by Cauchy and Schwarz, what products make of it. Such a bound
lies 5 to 15 binades above a typical element, and FP8 keeps its relative precision over 15 (e4m3) or 30 (e5m2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.fp8_linear import product, quantise
from kernels.fp8_scales import gradient_scales, gradient_scales_twin, weight_scales, weight_scales_twin
from kernels.quantize import quantize

# (tile rows, tile columns, depth in bytes, warps, stages), best first, from kernels.bench --sweep; the first is used.
CONFIGS = [(128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (128, 128, 128, 4, 4)]


def _product_reference(x: Tensor, w: Tensor, scale: Tensor | None) -> Tensor:
    product = x.float() @ w.float().mT if x.element_size() == 1 else x @ w.mT  # FP8: exact products, as in the kernel
    return product if scale is None else product * scale


def relu_squared_reference(x: Tensor, w: Tensor, scale: Tensor | None = None, act_fp8: Tensor | None = None,
                           act_scale: Tensor | None = None) -> Tensor:
    """Plain PyTorch twin of `relu_squared`."""
    act = torch.relu(_product_reference(x, w, scale)).square()
    if act_fp8 is not None:
        act_fp8.copy_(quantise(act, act_scale, act_fp8.dtype))
    return act.bfloat16() if x.element_size() == 1 else act


def relu_squared_backward_reference(grad: Tensor, w: Tensor, act: Tensor, scale: Tensor | None = None,
                                    pre_fp8: Tensor | None = None, pre_scale: Tensor | None = None) -> Tensor:
    """Plain PyTorch twin of `relu_squared_backward`."""
    grad_pre = _product_reference(grad, w, scale).to(act.dtype) * (2 * act.sqrt())
    if pre_fp8 is not None:
        pre_fp8.copy_(quantise(grad_pre, pre_scale, pre_fp8.dtype))
    return grad_pre


@triton.jit
def finish(product, act_desc, out_desc, fp8_desc, fp8_scale_ptr, row, column,
           BACKWARD: tl.constexpr, QUANTIZE: tl.constexpr, LIMIT: tl.constexpr):
    """Apply the epilogue to a tile and store it."""
    if BACKWARD:
        product *= 2 * tl.sqrt(act_desc.load([row, column]).to(tl.float32))
    else:
        product = tl.where(product < 0, 0.0, product)  # keeps NaN, as a maximum would not
        product *= product
    out_desc.store([row, column], product.to(out_desc.dtype))
    if QUANTIZE:
        product = tl.clamp(product / tl.load(fp8_scale_ptr), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        fp8_desc.store([row, column], product.to(fp8_desc.dtype))


@triton.jit
def product_kernel(x_desc, w_desc, act_desc, out_desc, fp8_desc, scale_ptr, fp8_scale_ptr, tokens, hidden, width,
                   BACKWARD: tl.constexpr, SCALED: tl.constexpr, QUANTIZE: tl.constexpr, LIMIT: tl.constexpr,
                   PROGRAMS: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):
    row_tiles, column_tiles = tl.cdiv(tokens, ROWS), tl.cdiv(hidden, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        first = tile // (GROUP * column_tiles) * GROUP
        height = min(GROUP, row_tiles - first)
        row = (first + tile % (GROUP * column_tiles) % height) * ROWS
        column = tile % (GROUP * column_tiles) // height * COLUMNS
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, DEPTH):
            product = tl.dot(x_desc.load([row, start]), w_desc.load([column, start]).T, product,
                             input_precision="ieee")
        if SCALED:
            product *= tl.load(scale_ptr)
        # In two halves, which need half the shared memory: what is saved deepens the pipeline.
        halves = tl.permute(tl.reshape(product, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        finish(left, act_desc, out_desc, fp8_desc, fp8_scale_ptr, row, column, BACKWARD, QUANTIZE, LIMIT)
        column += COLUMNS // 2
        finish(right, act_desc, out_desc, fp8_desc, fp8_scale_ptr, row, column, BACKWARD, QUANTIZE, LIMIT)


def _check(x: Tensor, w: Tensor, act: Tensor | None, fp8: Tensor | None, scales: tuple[Tensor | None, ...]) -> None:
    tokens, width = x.shape
    for name, tensor in (("x", x), ("w", w), ("act", act), ("fp8", fp8)):
        if tensor is not None:
            row = tensor.stride(0) * tensor.element_size()
            check(tensor.ndim == 2 and tensor.stride(1) == 1 and row % 16 == tensor.data_ptr() % 16 == 0, name, tensor,
                  "a matrix of contiguous rows that start at multiples of 16 bytes")
    check(w.shape[1] == width and w.dtype == x.dtype, "w", w, f"(hidden, {width}) of {x.dtype}")
    check(len(w) % 8 == 0, "w", w, "such that hidden is a multiple of 8")
    for name, tensor in (("act", act), ("fp8", fp8)):
        check(tensor is None or tensor.shape == (tokens, len(w)), name, tensor, f"({tokens}, {len(w)})")
    for scale in scales:
        check(scale is None or scale.numel() == 1 and scale.dtype == torch.float32, "scale", scale, "one float32")
    check((fp8 is None) == (scales[1] is None), "x", x, "given with both or neither of the FP8 output and its scale")


def _launch(x: Tensor, w: Tensor, act: Tensor | None, scale: Tensor | None, fp8: Tensor | None,
            fp8_scale: Tensor | None, tuned: tuple | None) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    _check(x, w, act, fp8, (scale, fp8_scale))
    rows, columns, depth, warps, stages = tuned or CONFIGS[0]
    depth //= x.element_size()
    out = torch.empty(len(x), len(w), dtype=x.dtype if x.element_size() > 1 else torch.bfloat16, device=x.device)
    tiles = triton.cdiv(len(x), rows) * triton.cdiv(len(w), columns)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4

    def half_tiles(tensor: Tensor | None):
        return tensor if tensor is None else TensorDescriptor.from_tensor(tensor, [rows, columns // 2])

    if len(x):
        product_kernel[(min(programs, tiles),)](
            TensorDescriptor.from_tensor(x, [rows, depth]), TensorDescriptor.from_tensor(w, [columns, depth]),
            half_tiles(act), half_tiles(out), half_tiles(fp8), scale, fp8_scale, len(x), len(w), x.shape[1],
            BACKWARD=act is not None, SCALED=scale is not None, QUANTIZE=fp8 is not None,
            LIMIT=0.0 if fp8 is None else torch.finfo(fp8.dtype).max, PROGRAMS=programs,
            ROWS=rows, COLUMNS=columns, DEPTH=depth, GROUP=8, num_warps=warps, num_stages=stages)
    return out


def relu_squared(
    x: Tensor,  # (tokens, width), bfloat16, float16, float32 or float8_e4m3fn
    w: Tensor,  # (hidden, width), of the same dtype
    scale: Tensor | None = None,  # one float32: the product of the scales of FP8 inputs
    act_fp8: Tensor | None = None,  # (tokens, hidden) FP8: receives act / act_scale, saturated
    act_scale: Tensor | None = None,  # one float32
    tuned: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """act = relu(scale · x wᵀ)², (tokens, hidden) in x's dtype, or bfloat16 for FP8 inputs."""
    return _launch(x, w, None, scale, act_fp8, act_scale, tuned)


def relu_squared_backward(
    grad: Tensor,  # (tokens, width): ∂loss/∂(act @ w)
    w: Tensor,  # (hidden, width): the matrix that maps act to the output
    act: Tensor,  # (tokens, hidden), from `relu_squared`
    scale: Tensor | None = None,
    pre_fp8: Tensor | None = None,  # (tokens, hidden) FP8: receives the result / pre_scale, saturated
    pre_scale: Tensor | None = None,
    tuned: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """∂loss/∂pre = 2 √act · (scale · grad wᵀ), (tokens, hidden), where act = relu(pre)²."""
    return _launch(grad, w, act, scale, pre_fp8, pre_scale, tuned)


class MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        act = relu_squared(x, w_in)
        ctx.save_for_backward(x, w_in, w_out, act)
        ctx.mark_dirty(residual)
        return residual.addmm_(act, w_out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        x, w_in, w_out, act = ctx.saved_tensors
        grad = grad.contiguous()
        grad_pre = relu_squared_backward(grad, w_out, act)
        return grad, grad_pre @ w_in, grad_pre.T @ x, act.T @ grad


def to_fp8(x: Tensor, scale: Tensor, fused: bool, both: bool) -> tuple[Tensor, Tensor | None]:
    """x / scale in e4m3 and, if `both`, its transpose, each contiguous."""
    if fused:
        return quantize(x, scale, both=both)
    q = quantise(x, scale, torch.float8_e4m3fn)
    return q, q.T.contiguous() if both else None


class FP8MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, fused: bool) -> Tensor:
        x_scale, in_scale, out_scale, act_scale, pre_scale, grad_bound = (weight_scales if fused else weight_scales_twin)(w_in, w_out)
        (x8, _), (in8, in8_transposed) = to_fp8(x, x_scale, fused, False), to_fp8(w_in, in_scale, fused, True)
        out8, out8_transposed = to_fp8(w_out, out_scale, fused, True)
        act8 = torch.empty(len(x), len(w_in), dtype=x8.dtype, device=x.device)
        act = (relu_squared if fused else relu_squared_reference)(x8, in8, pre_scale, act8, act_scale)
        ctx.fused = fused
        ctx.save_for_backward(x.type_as(act), act, in8_transposed, out8, in_scale, out_scale, grad_bound)
        out = product(act8, out8_transposed.T, act_scale, out_scale, fast=True)
        if not fused:
            return residual + out
        ctx.mark_dirty(residual)
        return residual.add_(out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, act, in8_transposed, out8, in_scale, out_scale, bound = ctx.saved_tensors
        grad = grad.contiguous()
        scales = gradient_scales if ctx.fused else gradient_scales_twin
        grad_scale, product_scale, pre_scale = scales(grad, out_scale, bound)
        grad8, _ = to_fp8(grad, grad_scale, ctx.fused, False)
        pre8 = torch.empty(act.shape, dtype=torch.float8_e5m2, device=x.device)
        backward = relu_squared_backward if ctx.fused else relu_squared_backward_reference
        grad_pre = backward(grad8, out8, act, product_scale, pre8, pre_scale)
        grad_x = product(pre8, in8_transposed.T, pre_scale, in_scale, fast=False)
        return grad, grad_x, grad_pre.T @ x, act.T @ grad.type_as(act), None


def has_mlp(device: torch.device) -> bool:
    """Hopper and Blackwell servers: the tiles take up to 226 KB of shared memory, which other GPUs do not have."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def mlp_twin(residual: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, fp8: bool) -> Tensor:
    """residual + relu(x w_inᵀ)² w_out: residual and x (tokens, width), x in FP8 with normed rows; w_in, w_out (hidden, width).

    Its FP8 form multiplies in float32 where the kernel is fused: it is there to compare with, not to be fast.
    """
    if fp8:
        return FP8MLP.apply(residual, x, w_in, w_out, False)
    return residual + F.relu(F.linear(x, w_in)).square() @ w_out


def mlp(residual: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, fp8: bool) -> Tensor:
    """As `mlp_twin`, by Triton kernels and over `residual`; in FP8 tokens, width and hidden are multiples of 16."""
    return FP8MLP.apply(residual, x, w_in, w_out, True) if fp8 else MLP.apply(residual, x, w_in, w_out)
