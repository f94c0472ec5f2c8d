"""X ← (aI + bA + cA²) X with A = X Xᵀ, a few times: the orthogonal polar factor U Vᵀ of X = U S Vᵀ.

This is the Newton–Schulz iteration of Muon (Keller Jordan et al., after Bernstein and Newhouse, arXiv
2409.20325), with the coefficients of Polar Express (coefficients.py). A and the polynomial P = aI + bA + cA²
are symmetric, so half of their FLOP are saved (symmetric.py). Adding aI to P in its epilogue, instead of aX
to PX, makes the last step a plain matmul that reads each X once; in bfloat16 that rounds no worse. The
normalisation makes no pass over X: the diagonal scale s is computed from the first A, which is rescaled on
both sides (m·m elements), and X's own scaling is folded into the first P as P·diag(s).

If X is more than twice as long as wide, two steps are taken at once: every second step works on m·m matrices
alone, and X is read once for both. The next A is PAP = aW + EW with E = bA + cA² and W = PA = aA + EA; these
matrices commute, so their products are symmetric. P = aI + E is never stored, and so never rounded. In a
matrix that one direction dominates, as in gradients, P is 8 for all other directions and 1 for the dominant
one. Then bfloat16 rounds each 8 by up to ±0.016, which undoes the dominant direction, and training diverged.
All m·m matrices but the one that multiplies X are float16, because their singular values lie in [0, 1.3] and
their last bits matter. So two steps at once come as near to the polar factor as two single steps; three at
once do not.

Two normalisations bring the singular values into [0, 1]:

- "frobenius", with 5 steps: s = 1 / (1.02 ‖X‖_F) for all rows.
- "aol" (Prach and Lampert, arXiv 2208.03160; for Muon: Turbo-Muon, Boissin et al., arXiv 2512.04632), which
  training uses, with 4 steps: s_i = (Σ_j |A_ij|)^-½. It bounds the largest singular value by 1 with little
  slack, which saves a step, but slightly turns the direction: the result is polar(diag(s) X). On the momentum
  of a training run, 5 plain steps come nearer to the polar factor; a whole run ends equally well with either
  (kernels/README.md).

One H200, 4 × 3072 × 768: 246 µs with 5 plain steps and 190 µs with 4 steps after AOL. The plain PyTorch form
with 5 steps takes 391 µs when compiled. The times do not depend on the coefficients.
"""
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.optimizer.coefficients import Triple, lower_end, polar_express
from kernels.optimizer.symmetric import commuting_product, gram, gram_with_row_sums, polynomial

SAFETY = 1.02  # The Frobenius norm is multiplied by this, so that rounding pushes no singular value past 1.
PLAIN_5 = polar_express(5, lower_end("frobenius", 5))  # the published coefficients


def newton_schulz_reference(x: Tensor, triples: tuple[Triple, ...] = PLAIN_5,
                            normalisation: str = "frobenius") -> Tensor:
    """Plain PyTorch form of `newton_schulz`, step by step as in the papers."""
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
    unscaled = tl.load(a_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    # The two scales are multiplied first. s_i·s_j is the same number as s_j·s_i, so A stays symmetric bit for
    # bit.
    scaled = unscaled * (row_scale[:, None] * column_scale[None, :])
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


def normalised_gram(wide: Tensor, normalisation: str, unscaled: torch.dtype,
                    dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A of diag(s) X in `dtype`, and s (batch, m) float32. A is rounded to `unscaled` before it is scaled."""
    if normalisation == "aol":
        return rescale(*gram_with_row_sums(wide, unscaled), dtype)
    a_matrix = gram(wide, unscaled)
    trace = a_matrix.diagonal(dim1=1, dim2=2).sum(-1, dtype=torch.float32)
    squares = (SAFETY**2 * trace)[:, None, None].expand(-1, 1, wide.shape[1]).contiguous()
    return rescale(a_matrix, squares, dtype)


def newton_schulz(
    x: Tensor,  # (..., m, n), wide or tall, any strides; bfloat16, float16 or float32
    triples: tuple[Triple, ...] = PLAIN_5,  # for "aol": polar_express(4, lower_end("aol", 4))
    normalisation: str = "frobenius",
) -> Tensor:
    """The orthogonal polar factor of each matrix, like x in shape and dtype. Rows of zeros stay zero.

    Raises ValueError if the normalisation is unknown, if there is no triple, or if x is not a batch of
    matrices.
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
            unscaled = x.dtype if at_once == 1 else torch.float32
            a_matrix, scale = normalised_gram(wide, normalisation, unscaled, exact)
        (a, b, c), *second = triples[first:first + at_once]
        if second:
            [(a2, b2, c2)] = second
            e = polynomial(a_matrix, 0.0, b, c)                             # P = aI + E
            w = commuting_product(e, a_matrix, c=a)                         # W = PA = EA + aA
            e2 = polynomial(commuting_product(e, w, c=a), 0.0, b2, c2)      # of the next A = PW
            p = commuting_product(e2, e, a * a2, a, a2, scale, x.dtype)     # (a2 I + E2)(aI + E)
        else:
            p = polynomial(a_matrix, a, b, c, scale, x.dtype)
        x = x @ p.mT if tall else p @ x
    return x.view(shape)


def _real_examples(batch: int, m: int, n: int, methods: dict, form: dict) -> Iterator[Example]:
    flop = 2.0 * batch * (2 * m * n * n + n**3)  # of one step
    for name, (triples, normalisation) in methods.items():
        how = dict(triples=triples, normalisation=normalisation)
        yield Example(f"orthogonalise, {name} (against plain 5)", f"{batch} × {m} × {n}",
                      lambda: (torch.randn(batch, m, n, **form),), partial(newton_schulz, **how),
                      partial(newton_schulz_reference, **how), flop * len(triples), 4.0 * batch * m * n,
                      baseline=newton_schulz_reference)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Batches of 768 × 768 and 3072 × 768 as in training, and larger matrices; or small ones of any form."""
    methods = {"AOL 4": (polar_express(4, lower_end("aol", 4)), "aol"),
               "AOL 5": (polar_express(5, lower_end("aol", 5)), "aol"), "plain 5": (PLAIN_5, "frobenius")}
    form = dict(device=device, dtype=dtype)
    if size == "real":
        for shape in ((4, 3072, 768), (22, 3072, 768), (16, 768, 768), (40, 768, 768), (1, 4096, 4096)):
            yield from _real_examples(*shape, methods, form)
        del methods["AOL 5"]
        for shape in ((1, 3072, 768), (8, 3072, 768), (32, 3072, 768), (1, 768, 768), (4, 768, 768),
                      (8, 768, 768), (32, 768, 768), (1, 2048, 2048), (1, 8192, 8192)):
            yield from _real_examples(*shape, methods, form)
        return
    del methods["AOL 5"]
    for shape in ((2, 130, 70), (3, 33, 129), (2, 150, 40), (1, 1, 9)):
        # A matrix with one row or column has one singular value, which is 1. There the terms of the first
        # polynomial cancel, and chance decides their rounding error.
        slack = 100 * torch.finfo(dtype).eps if min(shape) == 1 else 1e-6
        for name, (triples, normalisation) in methods.items():
            how = dict(triples=triples[:3], normalisation=normalisation)  # three steps launch every kernel
            yield Example(f"orthogonalise, {name[:-2]}, 3 steps", "{} × {} × {}".format(*shape),
                          lambda shape=shape: (torch.randn(shape, device=device).to(dtype),),
                          partial(newton_schulz, **how), partial(newton_schulz_reference, **how), slack=slack)
