"""q = fp8(x / scale) and qᵀ in one read of x, saturated; NaN stays NaN.

FP8 matmuls need both (see `formats.py`). The kernel moves 2 bytes in and 2 out for each bfloat16 element; a
quantisation and then a transposed copy of its result move 3 in and 2 out. One H200, 49,152 × 3072: 0.156 ms
(91% of the copy bandwidth), compiled PyTorch 0.247 ms. With qᵀ in `paired` order, 49,152 × 768: 0.040 ms.
"""
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.fp8.formats import E4M3, E5M2, paired, round_to_fp8

# (tile rows, tile columns, warps), best first, from kernels.bench --sweep. The first is used.
CONFIGS = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8)]


def quantize_reference(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3, both: bool = True,
                       in_pairs: bool = False) -> tuple[Tensor, Tensor | None]:
    """As `quantize`, in plain PyTorch."""
    q = round_to_fp8(x, scale, dtype)
    if not both:
        return q, None
    return q, paired(q.mT) if in_pairs else q.mT.contiguous()


@triton.jit
def quantize_tile(x_ptr, q_ptr, transposed_ptr, scale, tile, rows, columns, x_row, limit,
                  BOTH: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write one tile of q and, if BOTH, of its transpose."""
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


@triton.jit
def quantize_kernel(x_ptr, q_ptr, transposed_ptr, scale_ptr, rows, columns, x_row, limit,
                    BOTH: tl.constexpr, PAIRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    quantize_tile(x_ptr, q_ptr, transposed_ptr, tl.load(scale_ptr), tl.program_id(0), rows, columns, x_row,
                  limit, BOTH, PAIRED, ROWS, COLUMNS)


def check_no_ptxas_bug(name: str, x: Tensor) -> None:
    """ptxas 12.8 drops a conversion whose result is stored byte by byte and packed as well, so such an x is
    refused."""
    check(x.dtype != torch.float32 or x.shape[1] % 16 == 0 or not x.is_cuda, name, x,
          "bfloat16, or of a multiple of 16 columns, or quantised without a transpose (ptxas 12.8 errs here)")


def quantize(
    x: Tensor,  # (rows, columns), rows contiguous; bfloat16, float16 or float32
    scale: Tensor,  # one float32 on the device; x ≈ scale · q
    dtype: torch.dtype = E4M3,
    both: bool = True,  # False: only q, and None for its transpose
    in_pairs: bool = False,  # qᵀ in `paired` order; rows must be a multiple of 16
    tuned: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(q, qᵀ), both contiguous: (rows, columns) and (columns, rows) of `dtype`."""
    check(x.ndim == 2 and x.stride(1) == 1, "x", x, "(rows, columns) with contiguous rows")
    if both:
        check_no_ptxas_bug("x", x)
    check(not in_pairs or both and len(x) % 16 == 0, "x", x,
          "of a multiple of 16 rows and quantised both ways, to be paired")
    check(scale.numel() == 1 and scale.dtype == torch.float32, "scale", scale, "one float32")
    tile_rows, tile_columns, warps = tuned or CONFIGS[0]
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    transposed = torch.empty(x.shape[::-1], dtype=dtype, device=x.device) if both else None
    grid = (triton.cdiv(len(x), tile_rows) * triton.cdiv(x.shape[1], tile_columns),)
    if x.numel():
        quantize_kernel[grid](
            x, q, transposed, scale, *x.shape, x.stride(0), torch.finfo(dtype).max, BOTH=both,
            PAIRED=in_pairs, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps)
    return q, transposed


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """With and without a transpose. The inputs of odd examples are exact in FP8, because the interpreter
    rounds poorly."""
    def inputs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, columns, device=device).to(dtype), torch.tensor(4 / 448, device=device)

    def exact_in_fp8(rows: int, columns: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
        x = (torch.randn(rows, columns + 5, device=device) * 50).to(fp8).float() * 0.25
        return x.to(dtype)[:, 2:-3], torch.tensor(0.25, device=device)

    def exact(x: Tensor, scale: Tensor, in_pairs: bool = False, both: bool = True, **_) -> tuple[Tensor, ...]:
        q = x / scale
        return (q, paired(q.mT) if in_pairs else q.mT) if both else (q,)

    def example(name: str, shape: tuple[int, int], make: Callable[[], tuple], **options) -> Example:
        return Example(
            name, "{:,} × {:,}".format(*shape), make, partial(quantize, **options),
            partial(quantize_reference, **options), 0.0, 4.0 * shape[0] * shape[1],
            exact=partial(exact, **options), configs=CONFIGS)

    if size == "real":
        for shape in ((49152, 768), (49152, 3072), (50304, 768)):
            yield example("quantise and transpose", shape, partial(inputs, *shape))
        return
    odd, pairs = (71, 133), (112, 130)
    yield example("quantise and transpose", odd, partial(exact_in_fp8, *odd, E4M3))
    yield example("quantise, transpose in pairs", pairs, partial(exact_in_fp8, *pairs, E4M3), in_pairs=True)
    yield example("quantise alone", odd, partial(exact_in_fp8, *odd, E5M2), dtype=E5M2, both=False)
