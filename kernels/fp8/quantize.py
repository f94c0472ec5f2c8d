"""q = fp8(x / scale) and qᵀ in one read of x: FP8 products contract along contiguous memory, so training needs both.

Saturating; NaN stays NaN. Optionally raises `amax` to max |x|, from which the next step's scale can be set. Moves
2 bytes in and 2 out an element; quantisation and a transposed copy of its result move 3 in and 2 out. One H200,
49,152 × 3072: 0.156 ms (91% of the copy bandwidth), compiled PyTorch 0.247 ms. In `paired` order, 49,152 × 768, 0.040 ms.
"""

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.fp8.formats import paired

# (tile rows, tile columns, warps), best first, from kernels.bench --sweep; the first is used.
CONFIGS = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8)]


def quantize_reference(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn,
                       in_pairs: bool = False) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of `quantize`."""
    limit = torch.finfo(dtype).max
    q = (x.to(torch.promote_types(x.dtype, torch.float32)) / scale).clamp(-limit, limit).to(dtype)
    return q, paired(q.mT) if in_pairs else q.mT.contiguous()


@triton.jit
def quantize_tile(x_ptr, q_ptr, transposed_ptr, scale, tile, rows, columns, x_row, limit,
                  BOTH: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantise a tile both or one way; returns what it was."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    row = (tile // column_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    q = tl.clamp(x / scale, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + row * columns + column, q, mask=inside)
    if PAIRED:
        q = tl.reshape(tl.permute(tl.reshape(q, (ROWS // 16, 2, 8, COLUMNS)), (0, 2, 1, 3)), (ROWS, COLUMNS))
    if BOTH:
        tl.store(transposed_ptr + column * rows + row, q, mask=inside)
    return x


@triton.jit
def quantize_kernel(x_ptr, q_ptr, transposed_ptr, scale_ptr, amax_ptr, rows, columns, x_row, limit,
                    AMAX: tl.constexpr, BOTH: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    x = quantize_tile(x_ptr, q_ptr, transposed_ptr, tl.load(scale_ptr), tl.program_id(0), rows, columns, x_row, limit,
                      BOTH, PAIRED, ROWS, COLUMNS)
    if AMAX:
        tl.atomic_max(amax_ptr, tl.max(tl.abs(x)))


def quantize(
    x: Tensor,  # (rows, columns), rows contiguous; bfloat16, float16 or float32
    scale: Tensor,  # one float32 on the device; x ≈ scale · q
    dtype: torch.dtype = torch.float8_e4m3fn,
    amax: Tensor | None = None,  # one float32 on the device, raised to max |x|
    both: bool = True,  # False: only q, and None for its transpose
    in_pairs: bool = False,  # the transpose in `paired` order
    tuned: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(q, qᵀ), both contiguous: (rows, columns) and (columns, rows) of `dtype`."""
    check(x.ndim == 2 and x.stride(1) == 1, "x", x, "(rows, columns) with contiguous rows")
    check(not both or x.dtype != torch.float32 or x.shape[1] % 16 == 0 or not x.is_cuda, "x", x,
          "in float32 of a multiple of 16 columns, or quantised one way: ptxas 12.8 loses what is stored byte by byte and packed as well")
    check(not in_pairs or both and len(x) % 16 == 0, "x", x, "of a multiple of 16 rows and quantised both ways, to be paired")
    for name, tensor in (("scale", scale), ("amax", amax)):
        check(tensor is None or tensor.numel() == 1 and tensor.dtype == torch.float32, name, tensor, "one float32")
    tile_rows, tile_columns, warps = tuned or CONFIGS[0]
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    transposed = torch.empty(x.shape[::-1], dtype=dtype, device=x.device) if both else None
    grid = (triton.cdiv(len(x), tile_rows) * triton.cdiv(x.shape[1], tile_columns),)
    if x.numel():
        quantize_kernel[grid](x, q, transposed, scale, amax, *x.shape, x.stride(0), torch.finfo(dtype).max,
                              AMAX=amax is not None, BOTH=both, PAIRED=in_pairs, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps)
    return q, transposed
