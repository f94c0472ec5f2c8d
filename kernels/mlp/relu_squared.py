"""relu(X Wᵀ)² and, backward, 2 √act · (G Wᵀ), each in one kernel: the hidden activations cross memory once.

Both matrices of the MLP are stored hidden × width, so forward (W = W_in) and backward (W = W_out, G = ∂loss/∂out)
are the same product with another epilogue. Only act = relu(pre)² is kept for the backward pass, because
∂act/∂pre = 2 relu(pre) = 2 √act. Against a matrix product and an elementwise pass this saves reading and
writing tokens · hidden elements each way. Inputs may be FP8 with a scale, and act can be written in FP8 too, for
the product that follows. One H200, 49,152 tokens, 768 → 3072 (README.md): 0.38 ms where compiled PyTorch
takes 0.49; FP8 0.24 ms against 0.35; backward 0.47 ms against 0.56.

Where the weights' gradients are FP8 products as well, nothing of hidden width is bfloat16: `relu_squared_fp8` and its backward write
FP8 alone, and with it its transpose, along which those products contract: 302 MB for 49,152 tokens in place of 453 forward; backward,
where act comes in FP8, 453 in place of 755: 0.26 and 0.35 ms. A sum over tokens may take them in any order, so the transpose has the
order that costs least, `kernels.fp8.quantize.paired`: a thread holds tokens 8 apart of a tile, and as pairs of them the transposition is
one of 16-bit numbers, which `stmatrix` does on the way to shared memory: 8 instructions a thread and tile in place of 128 that store
a byte each.

The grid is persistent and walks bands of tiles; operands come through tensor descriptors (TMA).
"""

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.fp8.formats import E4M3, E5M2, paired, pairs, round_to_fp8

# (tile rows, tile columns, depth in bytes, warps, stages, programs a multiprocessor), best first, from kernels.bench --sweep; the
# first is used. Two programs a multiprocessor let one multiply while the other stores, within 113 KB of shared memory each.
CONFIGS = [(128, 256, 128, 8, 3, 1), (256, 128, 128, 8, 3, 1), (128, 128, 128, 4, 4, 1)]
# With FP8 results alone, from FP8. KB of shared memory (Triton 3.6, sm_90), of 227. Of 16 programs a multiprocessor two run and the others
# wait for one to end: collectives that hold 8 of 132 multiprocessors cost 8 and 10%, where with as many programs as fit they cost 57 and
# 75%, since whoever cannot start begins when all others are done. Alone they are within 5 and 1% of these.
FP8_CONFIGS = [(128, 128, 128, 4, 3, 16), (128, 128, 128, 4, 3, 2), (128, 256, 128, 8, 3, 1),              # 112, 112, 176
               (128, 256, 128, 8, 4, 1), (256, 128, 128, 8, 3, 1), (128, 128, 64, 4, 5, 2)]                # 224, 176, 96
FP8_BACKWARD_CONFIGS = [(128, 128, 64, 4, 5, 16), (128, 128, 64, 4, 5, 2), (128, 256, 128, 8, 3, 1),       # 104, 104, 192
                        (256, 128, 128, 8, 3, 1), (128, 128, 128, 4, 2, 2), (128, 128, 64, 8, 5, 2)]       # 192, 88, 104


def _product_reference(x: Tensor, w: Tensor, scale: Tensor | None) -> Tensor:
    product = x.float() @ w.float().mT if x.element_size() == 1 else x @ w.mT  # FP8: exact products, as in the kernel
    return product if scale is None else product * scale


def relu_squared_reference(x: Tensor, w: Tensor, scale: Tensor | None = None, act_fp8: Tensor | None = None,
                           act_scale: Tensor | None = None) -> Tensor:
    """Plain PyTorch twin of `relu_squared`."""
    act = torch.relu(_product_reference(x, w, scale)).square()
    if act_fp8 is not None:
        act_fp8.copy_(round_to_fp8(act, act_scale, act_fp8.dtype))
    return act.bfloat16() if x.element_size() == 1 else act


def relu_squared_backward_reference(grad: Tensor, w: Tensor, act: Tensor, scale: Tensor | None = None,
                                    pre_fp8: Tensor | None = None, pre_scale: Tensor | None = None) -> Tensor:
    """Plain PyTorch twin of `relu_squared_backward`."""
    grad_pre = _product_reference(grad, w, scale).to(act.dtype) * (2 * act.sqrt())
    if pre_fp8 is not None:
        pre_fp8.copy_(round_to_fp8(grad_pre, pre_scale, pre_fp8.dtype))
    return grad_pre


def relu_squared_fp8_reference(x: Tensor, w: Tensor, scale: Tensor, act_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of `relu_squared_fp8`."""
    act = round_to_fp8(torch.relu(_product_reference(x, w, scale)).square(), act_scale, E4M3)
    return act, paired(act.T)


def relu_squared_backward_fp8_reference(grad: Tensor, w: Tensor, act: Tensor, scale: Tensor, act_scale: Tensor,
                                        pre_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of `relu_squared_backward_fp8`."""
    pre = round_to_fp8(_product_reference(grad, w, scale) * (2 * (act.float() * act_scale).sqrt()), pre_scale, E5M2)
    return pre, paired(pre.T)


@triton.jit
def finish(product, factor, act_desc, out_desc, fp8_desc, transposed_desc, to_fp8, row, column, LIMIT: tl.constexpr):
    """Apply the epilogue to a tile and store it: as it is, in FP8, and that transposed in pairs; what is None is not there."""
    product *= factor
    if act_desc is not None:
        product *= tl.sqrt(act_desc.load([row, column]).to(tl.float32))
    else:
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
        product *= product
    if out_desc is not None:
        out_desc.store([row, column], product.to(out_desc.dtype))
        if fp8_desc is not None:
            product *= to_fp8
    if fp8_desc is not None:
        if LIMIT is not None:  # a GPU's conversion saturates, the interpreter's does not
            product = tl.clamp(product, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        fp8_desc.store([row, column], product.to(fp8_desc.dtype))
        if transposed_desc is not None:
            transposed_desc.store([column, row // 2], pairs(product, fp8_desc.dtype, product.shape[0], product.shape[1]).T)


@triton.jit
def product_kernel(x_desc, w_desc, act_desc, act_scale_ptr, out_desc, fp8_desc, transposed_desc, scale_ptr, fp8_scale_ptr,
                   tokens, hidden, width, LIMIT: tl.constexpr, PROGRAMS: tl.constexpr,
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
        # Scales as one factor, which multiplies before the square; of FP8 alone theirs is in it.
        factor, to_fp8 = 1.0, 1.0
        if scale_ptr is not None:
            factor = tl.load(scale_ptr)
        if fp8_desc is not None:
            to_fp8 = 1 / tl.load(fp8_scale_ptr)
        if act_desc is not None:
            factor *= 2
            if act_scale_ptr is not None:
                factor *= tl.sqrt(tl.load(act_scale_ptr))
            if out_desc is None:
                factor *= to_fp8
        elif out_desc is None:
            factor *= tl.sqrt(to_fp8)
        # In two halves, which need half the shared memory: what is saved deepens the pipeline.
        halves = tl.permute(tl.reshape(product, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        finish(left, factor, act_desc, out_desc, fp8_desc, transposed_desc, to_fp8, row, column, LIMIT)
        column += COLUMNS // 2
        finish(right, factor, act_desc, out_desc, fp8_desc, transposed_desc, to_fp8, row, column, LIMIT)


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


def _launch(x: Tensor, w: Tensor, scale: Tensor | None, fp8_scale: Tensor | None, tuned: tuple, act: Tensor | None = None,
            act_scale: Tensor | None = None, out: Tensor | None = None, fp8: Tensor | None = None,
            transposed: Tensor | None = None) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not len(x):
        return
    rows, columns, depth, warps, stages, resident = tuned
    depth //= x.element_size()
    tiles = triton.cdiv(len(x), rows) * triton.cdiv(len(w), columns)
    programs = resident * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    transposed = None if transposed is None else transposed.view(torch.int16)                         # pairs of tokens

    def tiled(tensor: Tensor | None, *block: int):
        return tensor if tensor is None else TensorDescriptor.from_tensor(tensor, list(block))

    product_kernel[(min(programs, tiles),)](
        tiled(x, rows, depth), tiled(w, columns, depth), tiled(act, rows, columns // 2), act_scale,
        tiled(out, rows, columns // 2), tiled(fp8, rows, columns // 2), tiled(transposed, columns // 2, rows // 2),
        scale, fp8_scale, len(x), len(w), x.shape[1],
        LIMIT=None if fp8 is None or fp8.is_cuda else torch.finfo(fp8.dtype).max, PROGRAMS=programs,
        ROWS=rows, COLUMNS=columns, DEPTH=depth, GROUP=8, num_warps=warps, num_stages=stages)


def relu_squared(
    x: Tensor,  # (tokens, width), bfloat16, float16, float32 or float8_e4m3fn
    w: Tensor,  # (hidden, width), of the same dtype
    scale: Tensor | None = None,  # one float32: the product of the scales of FP8 inputs
    act_fp8: Tensor | None = None,  # (tokens, hidden) FP8: receives act / act_scale, saturated
    act_scale: Tensor | None = None,  # one float32
    tuned: tuple[int, int, int, int, int, int] | None = None,
) -> Tensor:
    """act = relu(scale · x wᵀ)², (tokens, hidden) in x's dtype, or bfloat16 for FP8 inputs."""
    _check(x, w, None, act_fp8, (scale, act_scale))
    out = torch.empty(len(x), len(w), dtype=x.dtype if x.element_size() > 1 else torch.bfloat16, device=x.device)
    _launch(x, w, scale, act_scale, tuned or CONFIGS[0], out=out, fp8=act_fp8)
    return out


def relu_squared_backward(
    grad: Tensor,  # (tokens, width): ∂loss/∂(act @ w)
    w: Tensor,  # (hidden, width): the matrix that maps act to the output
    act: Tensor,  # (tokens, hidden), from `relu_squared`
    scale: Tensor | None = None,
    pre_fp8: Tensor | None = None,  # (tokens, hidden) FP8: receives the result / pre_scale, saturated
    pre_scale: Tensor | None = None,
    tuned: tuple[int, int, int, int, int, int] | None = None,
) -> Tensor:
    """∂loss/∂pre = 2 √act · (scale · grad wᵀ), (tokens, hidden), where act = relu(pre)²."""
    _check(grad, w, act, pre_fp8, (scale, pre_scale))
    out = torch.empty(len(grad), len(w), dtype=grad.dtype if grad.element_size() > 1 else torch.bfloat16, device=grad.device)
    _launch(grad, w, scale, pre_scale, tuned or CONFIGS[0], act=act, out=out, fp8=pre_fp8)
    return out


def _both(x: Tensor, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for a (tokens, hidden) result and its transpose."""
    check(x.element_size() == 1, "x", x, "FP8")
    check(len(x) % 16 == 0, "x", x, "such that tokens, which are contiguous in its transpose, are a multiple of 16")
    return tuple(torch.empty(shape, dtype=dtype, device=x.device) for shape in ((len(x), len(w)), (len(w), len(x))))


def relu_squared_fp8(
    x: Tensor,  # (tokens, width) float8_e4m3fn, tokens a multiple of 16
    w: Tensor,  # (hidden, width) float8_e4m3fn, hidden a multiple of 16
    scale: Tensor,  # one float32: the product of their scales
    act_scale: Tensor,  # one float32
    tuned: tuple[int, int, int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(q, paired(qᵀ)), contiguous, q (tokens, hidden) = relu(scale · x wᵀ)² / act_scale in float8_e4m3fn, saturated."""
    act, transposed = _both(x, w, E4M3)
    _check(x, w, None, act, (scale, act_scale))
    _launch(x, w, scale, act_scale, tuned or FP8_CONFIGS[0], fp8=act, transposed=transposed)
    return act, transposed


def relu_squared_backward_fp8(
    grad: Tensor,  # (tokens, width) float8_e4m3fn: ∂loss/∂(act @ w)
    w: Tensor,  # (hidden, width) float8_e4m3fn: the matrix that maps act to the output
    act: Tensor,  # (tokens, hidden) float8_e4m3fn, from `relu_squared_fp8`
    scale: Tensor,  # one float32: the product of the scales of grad and w
    act_scale: Tensor,  # one float32
    pre_scale: Tensor,  # one float32
    tuned: tuple[int, int, int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(q, paired(qᵀ)), contiguous, q (tokens, hidden) = 2 √(act_scale · act) · (scale · grad wᵀ) / pre_scale in float8_e5m2, saturated."""
    check(act.dtype == E4M3, "act", act, "float8_e4m3fn")
    pre, transposed = _both(grad, w, E5M2)
    _check(grad, w, act, pre, (scale, pre_scale, act_scale))
    _launch(grad, w, scale, pre_scale, tuned or FP8_BACKWARD_CONFIGS[0], act=act, act_scale=act_scale, fp8=pre, transposed=transposed)
    return pre, transposed
