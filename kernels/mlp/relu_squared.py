"""q = fp8(relu(X Wᵀ)²) and, backward, fp8(2 √act · (G Wᵀ)), each with its transpose, each in one kernel.

Both matrices of the MLP are stored (hidden, width). So forward (W = W_in) and backward (W = W_out, and G is
the gradient of the MLP's result) are the same matmul with another epilogue. Only act = relu(pre)² is kept for
the backward pass, because ∂act/∂pre = 2 relu(pre) = 2 √act.

The weight gradients sum over tokens, so they read the transposes. Those are in `paired` order
(`kernels/fp8/formats.py`). Storing a transposed tile takes 8 instructions a thread instead of 128 that store
a byte each.

The grid is persistent and walks bands of tiles. Operands come through tensor descriptors (TMA). One H200,
49,152 tokens, 768 → 3072: 265 µs forward, 355 µs backward; at a copy's bandwidth the same bytes take 81
and 117 µs.
"""
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.backend import check, multiprocessors, tl, triton
from kernels.example import Example
from kernels.fp8.formats import E4M3, E5M2, paired, pairs, round_to_fp8, rounding_slack, widened

# (tile rows, tile columns, depth in bytes, warps, stages, programs a multiprocessor), best first, from
# kernels.bench --sweep. The first is used. At the right: KB of shared memory, of 227 (Triton 3.6, sm_90).
#
# Two programs run on a multiprocessor at a time, so that one multiplies while the other stores. With 16, the
# others wait for one to end. With only 2, those whose multiprocessor a collective holds would begin when all
# others are done. With 8 of 132 multiprocessors held, 16 programs cost 8% forward and 10% backward, and 2
# cost 57% and 75%. With none held, 16 and 2 are within 5% and 1% of each other.
CONFIGS = [
    (128, 128, 128, 4, 3, 16),  # 112
    (128, 128, 128, 4, 3, 2),   # 112
    (128, 256, 128, 8, 3, 1),   # 176
    (128, 256, 128, 8, 4, 1),   # 224
    (256, 128, 128, 8, 3, 1),   # 176
    (128, 128, 64, 4, 5, 2),    # 96
]
BACKWARD_CONFIGS = [
    (128, 128, 64, 4, 5, 16),   # 104
    (128, 128, 64, 4, 5, 2),    # 104
    (128, 256, 128, 8, 3, 1),   # 192
    (256, 128, 128, 8, 3, 1),   # 192
    (128, 128, 128, 4, 2, 2),   # 88
    (128, 128, 64, 8, 5, 2),    # 104
]
# Training uses these kernels on GPUs with this much shared memory. The configurations in use need 112 KB on
# sm_90 and 120 KB on sm_100 for tiles (Triton 3.7.1), and some for barriers. GPUs with FP8 have 99 or 227 KB.
SHARED_BYTES = 121 * 1024


def exact_relu_squared(x: Tensor, w: Tensor, scale: Tensor, act_scale: Tensor) -> Tensor:
    """relu(scale · x wᵀ)² / act_scale, not rounded; in float32, or float64 if x is float64."""
    return torch.relu(widened(x) @ widened(w).mT * scale).square() / act_scale


def exact_backward(grad: Tensor, w: Tensor, act: Tensor, scale: Tensor, act_scale: Tensor,
                   pre_scale: Tensor) -> Tensor:
    """2 √(act_scale · act) · (scale · grad wᵀ) / pre_scale, not rounded; in float32, or float64 if grad is
    float64."""
    return widened(grad) @ widened(w).mT * scale * (2 * (widened(act) * act_scale).sqrt()) / pre_scale


def relu_squared_fp8_reference(x: Tensor, w: Tensor, scale: Tensor,
                               act_scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `relu_squared_fp8`, in plain PyTorch."""
    act = round_to_fp8(exact_relu_squared(x, w, scale, act_scale), 1.0, E4M3)
    return act, paired(act.T)


def relu_squared_backward_fp8_reference(grad: Tensor, w: Tensor, act: Tensor, scale: Tensor,
                                        act_scale: Tensor, pre_scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `relu_squared_backward_fp8`, in plain PyTorch."""
    pre = round_to_fp8(exact_backward(grad, w, act, scale, act_scale, pre_scale), 1.0, E5M2)
    return pre, paired(pre.T)


@triton.jit
def finish(result, factor, act_desc, fp8_desc, transposed_desc, row, column, LIMIT: tl.constexpr):
    """Apply the epilogue to a tile; store it in FP8, also transposed. `act_desc` is None in forward."""
    result *= factor
    if act_desc is not None:
        result *= tl.sqrt(act_desc.load([row, column]).to(tl.float32))
    else:
        result = tl.maximum(result, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result *= result
    if LIMIT is not None:  # a GPU's conversion saturates, the interpreter's does not
        result = tl.clamp(result, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    fp8_desc.store([row, column], result.to(fp8_desc.dtype))
    in_pairs = pairs(result, fp8_desc.dtype, result.shape[0], result.shape[1])
    transposed_desc.store([column, row // 2], in_pairs.T)


@triton.jit
def product_kernel(x_desc, w_desc, act_desc, act_scale_ptr, fp8_desc, transposed_desc, scale_ptr,
                   fp8_scale_ptr, tokens, hidden, width, LIMIT: tl.constexpr, PROGRAMS: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    GROUP: tl.constexpr = 8     # A band of 8 rows of tiles is walked column by column, for the L2 cache.
    row_tiles, column_tiles = tl.cdiv(tokens, ROWS), tl.cdiv(hidden, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        first = tile // (GROUP * column_tiles) * GROUP
        height = min(GROUP, row_tiles - first)
        row = (first + tile % (GROUP * column_tiles) % height) * ROWS
        column = tile % (GROUP * column_tiles) // height * COLUMNS
        result = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, DEPTH):
            result = tl.dot(x_desc.load([row, start]), w_desc.load([column, start]).T, result,
                             input_precision="ieee")
        # All scales are one factor. Forward squares the factor too, so it has the root of the output's scale.
        factor = tl.load(scale_ptr)
        to_fp8 = 1 / tl.load(fp8_scale_ptr)
        if act_desc is not None:
            factor *= 2
            factor *= tl.sqrt(tl.load(act_scale_ptr))
            factor *= to_fp8
        else:
            factor *= tl.sqrt(to_fp8)
        # Storing a tile in two halves needs half the shared memory, which leaves room for a deeper pipeline.
        halves = tl.permute(tl.reshape(result, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        finish(left, factor, act_desc, fp8_desc, transposed_desc, row, column, LIMIT)
        column += COLUMNS // 2
        finish(right, factor, act_desc, fp8_desc, transposed_desc, row, column, LIMIT)


def check_inputs(x: Tensor, w: Tensor, act: Tensor | None, scales: tuple[Tensor, ...]) -> None:
    tokens, width = x.shape
    check(x.element_size() == 1, "x", x, "FP8")
    check(tokens % 16 == 0, "x", x, "of a multiple of 16 tokens, which are contiguous in its transpose")
    for name, tensor in (("x", x), ("w", w), ("act", act)):
        if tensor is not None:
            row_bytes, start = tensor.stride(0) * tensor.element_size(), tensor.data_ptr()
            aligned = row_bytes % 16 == start % 16 == 0
            check(tensor.ndim == 2 and tensor.stride(1) == 1 and aligned, name, tensor,
                  "a matrix of contiguous rows that start at multiples of 16 bytes")
    check(w.shape[1] == width and w.dtype == x.dtype, "w", w, f"(hidden, {width}) of {x.dtype}")
    check(len(w) % 16 == 0, "w", w, "such that hidden is a multiple of 16")
    check(act is None or act.shape == (tokens, len(w)) and act.dtype == E4M3, "act", act,
          f"({tokens}, {len(w)}) in float8_e4m3fn")
    for scale in scales:
        check(scale.numel() == 1 and scale.dtype == torch.float32, "scale", scale, "one float32")


def launch(x: Tensor, w: Tensor, scale: Tensor, fp8_scale: Tensor, dtype: torch.dtype, tuned: tuple[int, ...],
           act: Tensor | None = None, act_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel, forward if act is None: the result over `fp8_scale` in `dtype`, and its transpose."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, columns, depth, warps, stages, resident = tuned
    out = torch.empty(len(x), len(w), dtype=dtype, device=x.device)
    transposed = torch.empty(len(w), len(x), dtype=dtype, device=x.device)
    if not len(x):
        return out, transposed

    def tiled(tensor: Tensor | None, *block: int) -> TensorDescriptor | None:
        return tensor if tensor is None else TensorDescriptor.from_tensor(tensor, list(block))

    tiles = triton.cdiv(len(x), rows) * triton.cdiv(len(w), columns)
    programs = resident * multiprocessors(x) if x.is_cuda else 4
    product_kernel[(min(programs, tiles),)](
        tiled(x, rows, depth), tiled(w, columns, depth), tiled(act, rows, columns // 2), act_scale,
        tiled(out, rows, columns // 2), tiled(transposed.view(torch.int16), columns // 2, rows // 2),
        scale, fp8_scale, len(x), len(w), x.shape[1],
        LIMIT=None if x.is_cuda else torch.finfo(dtype).max, PROGRAMS=programs,
        ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages)
    return out, transposed


def relu_squared_fp8(
    x: Tensor,  # (tokens, width) float8_e4m3fn, tokens a multiple of 16
    w: Tensor,  # (hidden, width) float8_e4m3fn, hidden a multiple of 16
    scale: Tensor,  # one float32: the product of the scales of x and w
    act_scale: Tensor,  # one float32
    tuned: tuple[int, int, int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(q, paired(qᵀ)), contiguous, q (tokens, hidden) = relu(scale · x wᵀ)² / act_scale in float8_e4m3fn,
    saturated."""
    check_inputs(x, w, None, (scale, act_scale))
    return launch(x, w, scale, act_scale, E4M3, tuned or CONFIGS[0])


def relu_squared_backward_fp8(
    grad: Tensor,  # (tokens, width) float8_e4m3fn: the gradient of act @ w
    w: Tensor,  # (hidden, width) float8_e4m3fn: the matrix that maps act to the output
    act: Tensor,  # (tokens, hidden) float8_e4m3fn, from `relu_squared_fp8`
    scale: Tensor,  # one float32: the product of the scales of grad and w
    act_scale: Tensor,  # one float32
    pre_scale: Tensor,  # one float32
    tuned: tuple[int, int, int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(q, paired(qᵀ)), contiguous, q = 2 √(act_scale · act) · (scale · grad wᵀ) / pre_scale in float8_e5m2,
    saturated."""
    check_inputs(grad, w, act, (scale, pre_scale, act_scale))
    return launch(grad, w, scale, pre_scale, E5M2, tuned or BACKWARD_CONFIGS[0], act, act_scale)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """With scales that saturate nothing."""
    def inputs(tokens: int, width: int, hidden: int, backward: bool) -> tuple[Tensor, ...]:
        x, w = (torch.randn(rows, width, device=device).to(E4M3) for rows in (tokens, hidden))
        act = torch.randn(tokens, hidden, device=device).relu().square().to(E4M3)
        scale, act_scale, pre_scale = (torch.tensor(number, device=device) for number in (0.02, 0.05, 1e-3))
        return (x, w, act, scale, act_scale, pre_scale) if backward else (x, w, scale, act_scale)

    def both(function, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        q = function(*tensors)
        return q, paired(q.T)

    real = ((16384, 768, 3072), (49152, 768, 3072))
    for shape in real if size == "real" else ((16, 16, 16), (144, 48, 272)):
        tokens, width, hidden = shape
        every = size == "real" or tokens == 144      # The interpreter takes its time for each configuration.
        common = dict(shape="{:,} × {} × {}".format(*shape), flop=2.0 * tokens * width * hidden, rate=2,
                      slack=rounding_slack(device))
        yield Example(
            "MLP relu² from FP8 to FP8 and its transpose", inputs=partial(inputs, *shape, False),
            kernel=relu_squared_fp8, reference=relu_squared_fp8_reference,
            bytes=tokens * (width + 2.0 * hidden), exact=partial(both, exact_relu_squared),
            configs=CONFIGS if every else (), **common)
        yield Example(
            "MLP relu² backward from FP8 to FP8 and its transpose", inputs=partial(inputs, *shape, True),
            kernel=relu_squared_backward_fp8, reference=relu_squared_backward_fp8_reference,
            bytes=tokens * (width + 3.0 * hidden), exact=partial(both, exact_backward),
            configs=BACKWARD_CONFIGS if every else (), **common)
