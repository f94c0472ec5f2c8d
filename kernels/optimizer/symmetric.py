"""A = X Xᵀ, aI + bA + cAA, and aI + bP + cQ + PQ of P, Q that commute: one triangle of tiles, mirrored.

This saves half the FLOP (m·m·k instead of 2·m·m·k), and the output equals its transpose bit for bit. XᵀX
needs no transposed copy: pass `x.mT`, and the kernel follows the strides. The first matmul can also sum |A|
along its rows, which is what AOL's normalisation needs (orthogonalize.py). All matrices come in batches.

One H200: 1.7 to 1.8 times torch's speed at 4096² and 8192². For 1 to 32 matrices of 768 rows, X Xᵀ has 0.8 to
1.3 and the polynomial 1.4 to 1.7 times torch's speed, at 2048² 1.0 and 1.1 times (kernels/README.md). In the
speedrun, @byronxu99 first used symmetric matmuls for Muon (record 27); these kernels are our own.
"""
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example

# (tile, depth, warps, stages), timed by `kernels.bench --sweep`. The first is the usual one: with three
# stages and 128 registers a thread, two programs share a multiprocessor. The second is for rows whose
# elements are not contiguous (XᵀX). The third is for fewer than FEW tiles of the first's size, or 2 FEW if
# sums are short. So few would leave many of an H200's 132 multiprocessors idle.
CONFIGS = [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 4), (128, 64, 4, 4)]
FEW = 64
Tuned = tuple[int, int, int, int]


def gram_reference(x: Tensor) -> Tensor:
    """Plain PyTorch form of `gram`."""
    return x @ x.mT


def polynomial_reference(a_matrix: Tensor, a: float, b: float, c: float,
                         column_scale: Tensor | None = None) -> Tensor:
    """Plain PyTorch form of `polynomial`."""
    out = torch.baddbmm(a_matrix, a_matrix, a_matrix, beta=b, alpha=c)
    out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out if column_scale is None else (out * column_scale[:, None]).to(out.dtype)


def commuting_product_reference(p: Tensor, q: Tensor, a: float = 0.0, b: float = 0.0, c: float = 0.0,
                                column_scale: Tensor | None = None) -> Tensor:
    """Plain PyTorch form of `commuting_product`."""
    out = b * p + c * q + p @ q
    out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out if column_scale is None else (out * column_scale[:, None]).to(out.dtype)


@triton.jit
def triangle_tile(index):
    """Row and column of tile `index` of a lower triangle in row-major order."""
    row = ((tl.sqrt(8.0 * index + 1.0) - 1.0) * 0.5).to(tl.int32)  # This is exact up to 2000 rows of tiles.
    return row, index - row * (row + 1) // 2


@triton.jit
def grouped_triangle_tile(index, tiles, GROUP: tl.constexpr):
    """The triangle in bands of GROUP rows, column by column: tiles near in time share operands in L2."""
    row, _ = triangle_tile(index)
    first = row // GROUP * GROUP
    height = min(GROUP, tiles - first)
    index -= first * (first + 1) // 2
    in_corner = index >= first * height  # The band is a rectangle, then a small triangle on the diagonal.
    corner_row, corner_column = triangle_tile(max(index - first * height, 0))
    row = first + tl.where(in_corner, corner_row, index % height)
    return row, tl.where(in_corner, first + corner_column, index // height)


@triton.jit
def symmetric_kernel(x_ptr, y_ptr, out_ptr, sums_ptr, column_scale_ptr, m, k, x_batch, x_row, x_column,
                     a, b, c, d, POLYNOMIAL: tl.constexpr, ROW_SUMS: tl.constexpr, SCALED: tl.constexpr,
                     MIXED: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):
    tiles = tl.cdiv(m, TILE)
    triangle = tiles * (tiles + 1) // 2
    batch = (tl.program_id(0) // triangle).to(tl.int64)
    i, j = grouped_triangle_tile(tl.program_id(0) % triangle, tiles, GROUP)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)

    x_ptr += batch * x_batch
    if y_ptr is None:  # A second pointer to the same matrix would cost registers, which then spill.
        y_ptr = x_ptr
    else:
        y_ptr += batch * x_batch
    left = x_ptr + (rows % m)[:, None] * x_row + depth[None, :] * x_column  # Rows past the end: not stored.
    right = y_ptr + (columns % m)[None, :] * x_row + depth[:, None] * x_column
    acc = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, k, DEPTH):
        inside = depth < k - start
        acc = tl.dot(tl.load(left, mask=inside[None, :], other=0.0),
                         tl.load(right, mask=inside[:, None], other=0.0), acc, input_precision="ieee")
        left += DEPTH * x_column
        right += DEPTH * x_column

    inside = (rows < m)[:, None] & (columns < m)[None, :]
    if ROW_SUMS:  # One program writes each entry of sums[batch, tile, row], so runs repeat bit for bit.
        sums_ptr += batch * tiles * m
        size = tl.where(inside, tl.abs(acc), 0.0)
        tl.store(sums_ptr + j * m + rows, tl.sum(size, 1), mask=rows < m)
        if i != j:
            tl.store(sums_ptr + i * m + columns, tl.sum(size, 0), mask=columns < m)
    if POLYNOMIAL:
        tile = rows[:, None] * x_row + columns[None, :] * x_column
        acc = b * tl.load(x_ptr + tile, mask=inside, other=0.0).to(tl.float32) + c * acc
        acc += tl.where(rows[:, None] == columns[None, :], a, 0.0)
        if MIXED:
            acc += d * tl.load(y_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    mirrored = acc
    if SCALED:
        column_scale_ptr += batch * m
        acc *= tl.load(column_scale_ptr + columns, mask=columns < m, other=0.0)[None, :]
        mirrored *= tl.load(column_scale_ptr + rows, mask=rows < m, other=0.0)[:, None]
    out_ptr += batch * m * m
    acc = acc.to(out_ptr.dtype.element_ty)
    mirrored = mirrored.to(out_ptr.dtype.element_ty)
    if i == j:
        acc = tl.where(rows[:, None] >= columns[None, :], acc, tl.trans(mirrored))
    tl.store(out_ptr + rows[:, None] * m + columns[None, :], acc, mask=inside)
    if i != j:  # As the `else` of the branch above, it would make ptxas wait for every single wgmma.
        tl.store(out_ptr + columns[None, :] * m + rows[:, None], mirrored, mask=inside)


def _triangle(x: Tensor, tile: int) -> int:
    """How many tiles the lower triangles of the whole batch have."""
    tiles = triton.cdiv(x.shape[1], tile)
    return x.shape[0] * tiles * (tiles + 1) // 2


def _config(x: Tensor) -> Tuned:
    few = FEW if x.shape[2] > x.shape[1] else 2 * FEW
    return CONFIGS[2 if _triangle(x, CONFIGS[0][0]) < few else 0 if x.stride(2) == 1 else 1]


def _launch(x: Tensor, y: Tensor | None, coefficients: tuple[float, ...] | None, sums: Tensor | None,
            scale: Tensor | None, dtype: torch.dtype | None, tuned: Tuned | None) -> Tensor:
    batch, m, k = x.shape
    tile, depth, warps, stages = tuned or _config(x)
    out = torch.empty(batch, m, m, dtype=dtype or x.dtype, device=x.device)
    if out.numel():
        symmetric_kernel[_triangle(x, tile),](
            x, y, out, sums, scale, m, k, *x.stride(), *(coefficients or (0.0, 0.0, 1.0, 0.0)),
            POLYNOMIAL=coefficients is not None, ROW_SUMS=sums is not None, SCALED=scale is not None,
            MIXED=bool(coefficients and coefficients[3]), TILE=tile, DEPTH=depth, GROUP=8,
            num_warps=warps, num_stages=stages, maxnreg=128 if warps == 8 else None)
    return out


def _check_batch(x: Tensor) -> None:
    fits = x.ndim == 3 and sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:])) < 2**31
    check(fits and x.shape[1] ** 2 < 2**31, "x", x, "(batch, m, k) with less than 2**31 elements from a "
          "matrix's first to its last, and m * m less than that")
    check(x.dtype in (torch.bfloat16, torch.float16, torch.float32), "x", x, "bfloat16, float16 or float32")


def _check_square(a_matrix: Tensor, column_scale: Tensor | None) -> None:
    _check_batch(a_matrix)
    check(a_matrix.shape[1] == a_matrix.shape[2], "a_matrix", a_matrix, "square")
    if column_scale is not None:
        fits = column_scale.shape == a_matrix.shape[:2] and column_scale.is_contiguous()
        check(fits and column_scale.dtype == torch.float32, "column_scale", column_scale,
              "contiguous (batch, m) float32")


def gram(x: Tensor, dtype: torch.dtype | None = None, tuned: Tuned | None = None) -> Tensor:
    """A = X Xᵀ, (batch, m, m) in `dtype` (None: that of x), of x (batch, m, k), summed in float32.

    The strides of x may be any: pass y.mT for YᵀY.
    """
    _check_batch(x)
    return _launch(x, None, None, None, None, dtype, tuned)


def gram_with_row_sums(x: Tensor, dtype: torch.dtype | None = None,
                       tuned: Tuned | None = None) -> tuple[Tensor, Tensor]:
    """A = X Xᵀ as `gram` and float32 partial sums (batch, parts, m), which add up to |A|'s row sums."""
    _check_batch(x)
    tuned = tuned or _config(x)
    parts = triton.cdiv(x.shape[1], tuned[0])
    sums = torch.empty(len(x), parts, x.shape[1], dtype=torch.float32, device=x.device)
    return _launch(x, None, None, sums, None, dtype, tuned), sums


def polynomial(
    a_matrix: Tensor,  # (batch, m, m), symmetric, which is not checked
    a: float, b: float, c: float,
    column_scale: Tensor | None = None,  # (batch, m) float32
    dtype: torch.dtype | None = None, tuned: Tuned | None = None) -> Tensor:
    """aI + bA + cAA in `dtype`; with a `column_scale` s, times diag(s), which is no longer symmetric."""
    _check_square(a_matrix, column_scale)
    return _launch(a_matrix, None, (a, b, c, 0.0), None, column_scale, dtype, tuned)


def commuting_product(
    p: Tensor,  # (batch, m, m), contiguous and symmetric
    q: Tensor,  # like p, and p q = q p, as of two polynomials of one matrix; neither is checked
    a: float = 0.0, b: float = 0.0, c: float = 0.0,
    column_scale: Tensor | None = None,  # (batch, m) float32
    dtype: torch.dtype | None = None, tuned: Tuned | None = None) -> Tensor:
    """aI + bP + cQ + PQ in `dtype`; with a `column_scale` s, times diag(s), which is no longer symmetric."""
    _check_square(p, column_scale)
    check(p.is_contiguous(), "p", p, "contiguous")
    check(q.shape == p.shape and q.dtype == p.dtype and q.is_contiguous(), "q", q, "like p")
    return _launch(p, q, (a, b, 1.0, c), None, column_scale, dtype, tuned)


def _real_examples(batch: int, m: int, n: int, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Of matrices that lie in memory as (m, n) and are seen as wide ones."""
    def x() -> Tensor:
        made = torch.randn(batch, m, n, device=device, dtype=dtype)
        return made.mT if m > n else made

    def a() -> Tensor:
        return gram(x()) / n

    shape, flop, area = f"{batch} × {m} × {n}", 2.0 * batch * m * n * n, 2.0 * batch * n * n
    yield Example("gram " + ("XᵀX" if m > n else "XXᵀ"), shape, lambda: (x(),), gram, gram_reference, flop,
                  2.0 * batch * m * n + area, compile=False, configs=CONFIGS)
    if m == n:
        yield Example("polynomial", shape, lambda: (a(), 3.9, -2.8, 0.5), polynomial, polynomial_reference,
                      flop, 2 * area, configs=CONFIGS)
        yield Example("product PQ of what commutes", shape, lambda: (a(),) * 2, commuting_product, torch.bmm,
                      flop, 3 * area, compile=False, configs=CONFIGS)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """The matmuls of Newton–Schulz, at the shapes of training and larger or where no tile fits."""
    if size == "real":
        for m, n in ((768, 768), (3072, 768)):
            for batch in (1, 4, 8, 32):
                yield from _real_examples(batch, m, n, device, dtype)
        for n in (2048, 4096, 8192):
            yield from _real_examples(1, n, n, device, dtype)
        return
    for batch, m, k in ((3, 130, 70), (2, 65, 129), (1, 1, 9)):
        def x(shape: tuple = (batch, m, k)) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        def a(shape: tuple = (2, m, m)) -> Tensor:
            return gram(x(shape)) / shape[1]

        shape, configs = f"{batch} × {m} × {k}", CONFIGS if m > 128 else ()
        numbers = 3.5, 2.0, -2.0, torch.rand(2, m, device=device)
        yield Example("gram", shape, lambda x=x: (x(),), gram, gram_reference, configs=configs)
        yield Example("gram of the transpose", shape, lambda x=x: (x().mT,), gram, gram_reference)
        yield Example("polynomial", shape, lambda a=a, n=numbers: (a(), *n), polynomial, polynomial_reference,
                      configs=configs)
        yield Example("commuting product", shape, lambda a=a, n=numbers: (p := a(), p, *n), commuting_product,
                      commuting_product_reference)
