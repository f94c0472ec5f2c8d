"""X ← (aI + bA + cA²) X with A = X Xᵀ, a few times: the orthogonal polar factor U Vᵀ of X = U S Vᵀ.

A and the polynomial P = aI + bA + cA² are symmetric: half their FLOP are saved (symmetric.py). Adding aI
to P in its epilogue, instead of aX to PX, makes the last product a plain matrix product that reads each X
once; in bfloat16 that rounds no worse. Normalisation is free of passes over X: the diagonal scale s is
computed from the first A, which is rescaled on both sides (m·m elements), and X's own scaling is folded into
the first P as P·diag(s).

Of an X more than twice as long as wide each second step works on m·m matrices alone: A ← PAP = aW + EW with W = PA = aA + EA and
E = bA + cA², products that commute and so are symmetric, and X is read for two steps at once. P's aI is never rounded: of a matrix
that one direction dominates, as gradients do, P is 8 for all others and 1 for that one, and the ±0.016 that bfloat16 leaves of 8
undo it (training diverged). All m·m matrices but the one that meets X are float16: their singular values lie in [0, 1.3] and it is
their last bits that count. Two steps at once are then as near to the polar factor as one by one; three are not.

- "aol" (Prach and Lampert, arXiv 2208.03160): s_i = (Σ_j |A_ij|)^-½. Bounds the largest singular value by 1
  with little slack, at the price of a slightly different direction: polar(diag(s) X).
- "frobenius": s = 1 / (1.02 ‖X‖_F) for all rows.

One H200, 4 × 3072 × 768: 190 µs with 4 steps after AOL, 246 µs with 5 plain ones, compiled plain PyTorch with 5 steps 391 µs
(README.md), whatever their coefficients. On the momentum of a training run 5 plain steps come nearer to the polar factor.
"""

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.optimizer.coefficients import Triple, lower_end, polar_express
from kernels.optimizer.symmetric import gram, gram_with_row_sums, polynomial, product

SAFETY = 1.02  # on the Frobenius norm: rounding must not push a singular value past 1


def newton_schulz_reference(
    x: Tensor, triples: tuple[Triple, ...] = polar_express(4, lower_end("aol", 4)), normalisation: str = "aol",
) -> Tensor:
    """Plain PyTorch twin of `newton_schulz`, step by step as in the papers."""
    v = x.mT if x.shape[-2] > x.shape[-1] else x
    dtype = torch.promote_types(x.dtype, torch.float32)
    if normalisation == "aol":
        square = (v @ v.mT).abs().sum(-1, keepdim=True, dtype=dtype)
    else:
        square = SAFETY**2 * v.to(dtype).square().sum((-2, -1), keepdim=True)
    v = (v * torch.where(square > 0, square.rsqrt(), 0)).to(x.dtype)
    for a, b, c in triples:
        gram_matrix = v @ v.mT
        v = a * v + (b * gram_matrix + c * (gram_matrix @ gram_matrix)) @ v
    return v.mT if x.shape[-2] > x.shape[-1] else v


@triton.jit
def rescale_kernel(a_ptr, out_ptr, squares_ptr, scale_ptr, m, parts, TILE: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    squares_ptr += batch * parts * m
    row_square = tl.zeros((TILE,), tl.float32)
    column_square = tl.zeros((TILE,), tl.float32)
    for part in range(parts):
        row_square += tl.load(squares_ptr + part * m + rows, mask=rows < m, other=0.0)
        column_square += tl.load(squares_ptr + part * m + columns, mask=columns < m, other=0.0)
    row_scale = tl.where(row_square > 0, tl.rsqrt(row_square), 0.0)
    column_scale = tl.where(column_square > 0, tl.rsqrt(column_square), 0.0)
    if tl.program_id(2) == 0:
        tl.store(scale_ptr + batch * m + rows, row_scale, mask=rows < m)
    tile = batch * m * m + rows[:, None] * m + columns[None, :]
    inside = (rows < m)[:, None] & (columns < m)[None, :]
    # s_i·s_j first: a product that commutes, so that A stays symmetric bit for bit.
    scaled = tl.load(a_ptr + tile, mask=inside, other=0.0).to(tl.float32) * (row_scale[:, None] * column_scale[None, :])
    tl.store(out_ptr + tile, scaled.to(out_ptr.dtype.element_ty), mask=inside)


def rescale(
    a_matrix: Tensor,  # (batch, m, m) contiguous
    squares: Tensor,  # (batch, parts, m) float32 contiguous; their sum over the parts is s^-2
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """diag(s) A diag(s) in `dtype` and s, (batch, m) float32, with s = 0 where the sum is 0."""
    batch, m, _ = a_matrix.shape
    out = torch.empty_like(a_matrix, dtype=dtype)
    scale = torch.empty(batch, m, dtype=torch.float32, device=a_matrix.device)
    grid = (batch, triton.cdiv(m, 64), triton.cdiv(m, 64))
    rescale_kernel[grid](a_matrix, out, squares, scale, m, squares.shape[1], TILE=64, num_warps=4)
    return out, scale


def normalised_gram(wide: Tensor, normalisation: str, unscaled: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A of diag(s) X in `dtype`, rounded to `unscaled` before, and s (batch, m)."""
    if normalisation == "aol":
        return rescale(*gram_with_row_sums(wide, unscaled), dtype)
    a_matrix = gram(wide, unscaled)
    trace = a_matrix.diagonal(dim1=1, dim2=2).sum(-1, dtype=torch.float32)
    return rescale(a_matrix, (SAFETY**2 * trace)[:, None, None].expand(-1, 1, wide.shape[1]).contiguous(), dtype)


def newton_schulz(
    x: Tensor,  # (..., m, n), wide or tall, any strides; bfloat16, float16 or float32
    triples: tuple[Triple, ...] = polar_express(4, lower_end("aol", 4)),  # with "frobenius": polar_express(5)
    normalisation: str = "aol",
) -> Tensor:
    """The orthogonal polar factor of each matrix, like x in shape and dtype; zero rows stay zero.

    Raises ValueError for an unknown normalisation, no triple, or an x that is no batch of matrices.
    """
    if normalisation not in ("aol", "frobenius") or not triples:
        raise ValueError(f'normalisation must be "aol" or "frobenius", with one triple or more; '
                         f"found {normalisation!r} and {len(triples)} triples")
    check(x.ndim >= 2, "x", x, "(..., m, n)")
    if x.numel() == 0:
        return torch.empty_like(x)
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.reshape(-1, *shape[-2:])
    exact = torch.float16 if x.dtype == torch.bfloat16 else x.dtype
    at_once = 2 if max(shape[-2:]) > 2 * min(shape[-2:]) else 1
    for first in range(0, len(triples), at_once):
        wide = x.mT if tall else x
        if first > 0:
            a_matrix, scale = gram(wide, exact), None
        else:
            a_matrix, scale = normalised_gram(wide, normalisation, x.dtype if at_once == 1 else torch.float32, exact)
        (a, b, c), *second = triples[first:first + at_once]
        if second:
            [(a2, b2, c2)] = second
            e = polynomial(a_matrix, 0.0, b, c)                          # P = aI + E
            pa = product(e, a_matrix, c=a)
            e2 = polynomial(product(e, pa, c=a), 0.0, b2, c2)
            p = product(e2, e, a * a2, a, a2, scale, x.dtype)            # (a2 I + E2)(aI + E)
        else:
            p = polynomial(a_matrix, a, b, c, scale, x.dtype)
        x = x @ p.mT if tall else p @ x
    return x.view(shape)
