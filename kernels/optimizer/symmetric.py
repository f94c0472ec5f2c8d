"""A = X Xᵀ, P = aI + bA + cAA and aI + bP + cQ + PQ where P and Q commute, batched, computing one triangle of tiles and mirroring it.

Half the FLOP (m·m·k instead of 2·m·m·k) and an output that equals its transpose bit for bit. XᵀX needs no
transposed copy: pass `x.mT`, the kernel follows the strides. The first product can also sum |A| along its
rows, which is what AOL preconditioning needs (newton_schulz.py). One H200: 1.7–1.8 times torch's rate at 4096² and
8192², for 1 to 32 of 768 rows A 0.8–1.3 and P 1.4–1.7 times; at 2048² 1.0 and 1.1 (README.md).
"""

import torch
from torch import Tensor

from kernels.backend import check, tl, triton

# (tile, depth, warps, stages), from kernels.bench --sweep. The first is used: with three stages and 128 registers a thread two
# programs share a multiprocessor. The second is where a row's elements are not contiguous (XᵀX), the third where there are fewer than FEW
# of the first's tiles, or twice as many with short sums: they would leave many of an H200's 132 multiprocessors idle.
CONFIGS = [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 4), (128, 64, 4, 4)]
FEW = 64


def gram_reference(x: Tensor) -> Tensor:
    """Plain PyTorch twin of `gram`."""
    return x @ x.mT


def polynomial_reference(a_matrix: Tensor, a: float, b: float, c: float) -> Tensor:
    """Plain PyTorch twin of `polynomial`."""
    out = torch.baddbmm(a_matrix, a_matrix, a_matrix, beta=b, alpha=c)
    out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out


@triton.jit
def triangle_tile(index):
    """Row and column of tile `index` of a lower triangle in row-major order."""
    row = ((tl.sqrt(8.0 * index + 1.0) - 1.0) * 0.5).to(tl.int32)  # exact up to 2000 rows of tiles
    return row, index - row * (row + 1) // 2


@triton.jit
def grouped_triangle_tile(index, tiles, GROUP: tl.constexpr):
    """The same tiles in bands of GROUP rows walked column by column: neighbours in time share operands in L2."""
    row, _ = triangle_tile(index)
    first = row // GROUP * GROUP
    height = min(GROUP, tiles - first)
    index -= first * (first + 1) // 2
    in_corner = index >= first * height  # the band is a rectangle, then a small triangle on the diagonal
    corner_row, corner_column = triangle_tile(max(index - first * height, 0))
    row = first + tl.where(in_corner, corner_row, index % height)
    return row, tl.where(in_corner, first + corner_column, index // height)


@triton.jit
def symmetric_kernel(x_ptr, y_ptr, out_ptr, sums_ptr, column_scale_ptr, m, k, x_batch, x_row, x_column, a, b, c, d,
                     POLYNOMIAL: tl.constexpr, ROW_SUMS: tl.constexpr, SCALED: tl.constexpr, MIXED: tl.constexpr,
                     TILE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):
    tiles = tl.cdiv(m, TILE)
    triangle = tiles * (tiles + 1) // 2
    batch = (tl.program_id(0) // triangle).to(tl.int64)
    i, j = grouped_triangle_tile(tl.program_id(0) % triangle, tiles, GROUP)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)

    x_ptr += batch * x_batch
    if y_ptr is None:  # a second pointer to the same costs registers, which then spill
        y_ptr = x_ptr
    else:
        y_ptr += batch * x_batch
    left = x_ptr + (rows % m)[:, None] * x_row + depth[None, :] * x_column  # past the end: any row, not stored
    right = y_ptr + (columns % m)[None, :] * x_row + depth[:, None] * x_column
    product = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, k, DEPTH):
        inside = depth < k - start
        product = tl.dot(tl.load(left, mask=inside[None, :], other=0.0),
                         tl.load(right, mask=inside[:, None], other=0.0), product, input_precision="ieee")
        left += DEPTH * x_column
        right += DEPTH * x_column

    inside = (rows < m)[:, None] & (columns < m)[None, :]
    if ROW_SUMS:  # sums[batch, tile, row]: each entry is written by exactly one program, so runs repeat bit for bit
        sums_ptr += batch * tiles * m
        size = tl.where(inside, tl.abs(product), 0.0)
        tl.store(sums_ptr + j * m + rows, tl.sum(size, 1), mask=rows < m)
        if i != j:
            tl.store(sums_ptr + i * m + columns, tl.sum(size, 0), mask=columns < m)
    if POLYNOMIAL:
        tile = rows[:, None] * x_row + columns[None, :] * x_column
        product = b * tl.load(x_ptr + tile, mask=inside, other=0.0).to(tl.float32) + c * product
        product += tl.where(rows[:, None] == columns[None, :], a, 0.0)
        if MIXED:
            product += d * tl.load(y_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    mirrored = product
    if SCALED:
        column_scale_ptr += batch * m
        product *= tl.load(column_scale_ptr + columns, mask=columns < m, other=0.0)[None, :]
        mirrored *= tl.load(column_scale_ptr + rows, mask=rows < m, other=0.0)[:, None]
    out_ptr += batch * m * m
    product = product.to(out_ptr.dtype.element_ty)
    mirrored = mirrored.to(out_ptr.dtype.element_ty)
    if i == j:
        product = tl.where(rows[:, None] >= columns[None, :], product, tl.trans(mirrored))
    tl.store(out_ptr + rows[:, None] * m + columns[None, :], product, mask=inside)
    if i != j:  # in a branch after the other store: as its `else`, ptxas waits for every single wgmma
        tl.store(out_ptr + columns[None, :] * m + rows[:, None], mirrored, mask=inside)


def _triangle(x: Tensor, tile: int) -> int:
    """How many tiles the lower triangles of all products have."""
    tiles = triton.cdiv(x.shape[1], tile)
    return x.shape[0] * tiles * (tiles + 1) // 2


def _config(x: Tensor) -> tuple[int, int, int, int]:
    few = FEW if x.shape[2] > x.shape[1] else 2 * FEW
    return CONFIGS[2 if _triangle(x, CONFIGS[0][0]) < few else 0 if x.stride(2) == 1 else 1]


def _launch(x: Tensor, y: Tensor | None, coefficients: tuple[float, ...] | None, sums: Tensor | None, scale: Tensor | None,
            dtype: torch.dtype | None, tuned: tuple[int, int, int, int] | None) -> Tensor:
    batch, m, k = x.shape
    tile, depth, warps, stages = tuned or _config(x)
    out = torch.empty(batch, m, m, dtype=dtype or x.dtype, device=x.device)
    if out.numel():
        symmetric_kernel[_triangle(x, tile),](
            x, y, out, sums, scale, m, k, *x.stride(), *(coefficients or (0.0, 0.0, 1.0, 0.0)), POLYNOMIAL=coefficients is not None,
            ROW_SUMS=sums is not None, SCALED=scale is not None, MIXED=bool(coefficients and coefficients[3]),
            TILE=tile, DEPTH=depth, GROUP=8, num_warps=warps, num_stages=stages, maxnreg=128 if warps == 8 else None)
    return out


def _check(x: Tensor) -> None:
    fits = x.ndim == 3 and sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:])) < 2**31
    check(fits, "x", x, "(batch, m, k) with less than 2**31 elements from a matrix's first to its last")
    check(x.dtype in (torch.bfloat16, torch.float16, torch.float32), "x", x, "bfloat16, float16 or float32")


def _check_square(a_matrix: Tensor, column_scale: Tensor | None) -> None:
    _check(a_matrix)
    check(a_matrix.shape[1] == a_matrix.shape[2], "a_matrix", a_matrix, "square")
    if column_scale is not None:
        check(column_scale.shape == a_matrix.shape[:2] and column_scale.is_contiguous()
              and column_scale.dtype == torch.float32, "column_scale", column_scale, "contiguous (batch, m) float32")


def gram(
    x: Tensor,  # (batch, m, k), any strides: pass y.mT for YᵀY
    dtype: torch.dtype | None = None,
    tuned: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """A = X Xᵀ, (batch, m, m) in `dtype`, x's if None, accumulated in float32."""
    _check(x)
    return _launch(x, None, None, None, None, dtype, tuned)


def gram_with_row_sums(
    x: Tensor, dtype: torch.dtype | None = None, tuned: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """A = X Xᵀ as `gram` and float32 partial sums (batch, parts, m): summed over the parts, row i of |A|."""
    _check(x)
    tuned = tuned or _config(x)
    sums = torch.empty(len(x), triton.cdiv(x.shape[1], tuned[0]), x.shape[1], dtype=torch.float32, device=x.device)
    return _launch(x, None, None, sums, None, dtype, tuned), sums


def polynomial(
    a_matrix: Tensor,  # (batch, m, m), symmetric: the caller's promise
    a: float, b: float, c: float,
    column_scale: Tensor | None = None,  # (batch, m) float32
    dtype: torch.dtype | None = None,
    tuned: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """aI + bA + cAA for symmetric A, in `dtype`; with `column_scale` s, (aI + bA + cAA)·diag(s), no longer symmetric."""
    _check_square(a_matrix, column_scale)
    return _launch(a_matrix, None, (a, b, c, 0.0), None, column_scale, dtype, tuned)


def product(
    p: Tensor,  # (batch, m, m), contiguous and symmetric, as q
    q: Tensor,  # like p, with p q = q p: the caller's promise, as that of two polynomials in one matrix
    a: float = 0.0, b: float = 0.0, c: float = 0.0,
    column_scale: Tensor | None = None,  # (batch, m) float32
    dtype: torch.dtype | None = None,
    tuned: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """aI + bP + cQ + PQ in `dtype`, symmetric as well; with `column_scale` s that times diag(s), no longer symmetric."""
    _check_square(p, column_scale)
    check(p.is_contiguous(), "p", p, "contiguous")
    check(q.shape == p.shape and q.dtype == p.dtype and q.is_contiguous(), "q", q, "like p")
    return _launch(p, q, (a, b, 1.0, c), None, column_scale, dtype, tuned)
