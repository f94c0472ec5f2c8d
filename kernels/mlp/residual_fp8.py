"""y = a Σ summands gives c y, and q = fp8(y / rms(y) / scale) with its transpose, in one pass.

FP8 matmuls read q and qᵀ instead of norm(y), and the norm's own backward gets y from c y, which is stored
anyway. So norm(y) is never written in bfloat16: 75 MB for 49,152 × 768 that no kernel writes and reads again.
q is made of the float32 norm, not of one rounded to bfloat16. Its scale is a constant, because no element of
a normed row passes √width, so nothing saturates. One H200, 49,152 × 768: 99.7 µs, where a norm and a
quantisation took 132 and a copy of as many bytes takes 89.

qᵀ is in `paired` order (`kernels/fp8/formats.py`). A thread therefore loads the same columns of two tokens
that are 8 apart, and packs them into 16-bit numbers. Only these numbers, 8 KB, go through shared memory. A
whole row is held in float32 from its sum to its norm, in chunks of columns, so that a width like 768 needs no
padding.
"""
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from kernels.backend import EPS, check, tl, triton
from kernels.example import Example
from kernels.fp8.formats import E4M3, Quantized, normed_scale, packed, paired, rounding_slack, widened
from kernels.fp8.quantize import quantize, quantize_reference
from kernels.mlp.residual import Summands, add_up, mlp_input_reference
from kernels.mlp.residual_gradient import check_like, summed
from kernels.mlp.residual_norm import SumAndNorm

# (tokens a program, warps, most registers a thread). Tokens are a multiple of 16; 32 fill a sector of a
# transposed row. The first is used; for rows longer than LONG the last, which holds 2,048 columns. At the
# right: registers a thread for width 768 and three summands (Triton 3.6, sm_90).
CONFIGS = [
    (32, 16, 64),       # 64. It spills 16 bytes, for a second program a multiprocessor: 100 µs, not 125.
    (32, 16, None),     # 114
    (16, 8, None),      # 80
    (64, 16, None),     # 128
    (32, 8, None),      # 211
    (16, 16, None),     # 63
]
COLUMNS, LONG = 256, 1024  # columns of a chunk: 16 bytes of bfloat16 for each thread of a warp


def sum_and_norm_fp8_reference(summands: Summands, scales: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """As `sum_and_norm_fp8`, in plain PyTorch."""
    a, c = (1, 1) if scales is None else scales
    y = a * add_up(tuple(map(widened, summands)))
    rms = (y.square().mean(1) + EPS).sqrt()
    scale = torch.tensor(normed_scale(y.size(1)), device=y.device)
    out = (c * y).type_as(summands[0]) if summands[1:] or scales is not None else None
    return out, *quantize_reference(y / rms[:, None], scale, in_pairs=True), rms


@triton.jit
def residual_fp8_kernel(summands, scales_ptr, out_ptr, norm_ptr, transposed_ptr, rms_ptr, n, width, eps,
                        to_fp8, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    a, c = 1.0, 1.0
    if scales_ptr is not None:
        a, c = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    first, pair = tl.program_id(0).to(tl.int64) * (2 * PAIRS), tl.arange(0, PAIRS)
    row, length = pair // 8 * 16 + pair % 8, tl.multiple_of(n // 2, 8)   # 16 divides n
    live, held, inverse = first + row < n, (), ()
    for half in tl.static_range(2):      # each pair's first token, then the one 8 further on
        start, squares = (first + 8 * half) * width, tl.zeros((PAIRS,), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            at, inside = row[:, None] * width + column, live[:, None] & (column < width)
            y = a * summed(summands, start, at, inside)
            if out_ptr is not None:
                tl.store(out_ptr + start + at, (c * y).to(out_ptr.dtype.element_ty), mask=inside)
            squares += tl.sum(y * y, axis=1)
            held += (y,)
        rms = tl.sqrt(squares / width + eps)
        tl.store(rms_ptr + first + 8 * half + row, rms, mask=live)
        inverse += ((to_fp8 / rms)[:, None],)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at, inside = row[:, None] * width + column, live[:, None] & (column < width)
        low, high = held[chunk] * inverse[0], held[CHUNKS + chunk] * inverse[1]
        tl.store(norm_ptr + first * width + at, low.to(norm_ptr.dtype.element_ty), mask=inside)
        tl.store(norm_ptr + (first + 8) * width + at, high.to(norm_ptr.dtype.element_ty), mask=inside)
        at = column.to(tl.int64).T * length + pair[None, :]
        both = packed(low, high, norm_ptr.dtype.element_ty)
        tl.store(transposed_ptr + first // 2 + at, both.T, mask=inside.T)


def sum_and_norm_fp8(
    summands: Summands,  # each (n, width) and contiguous, n a multiple of 16
    scales: Tensor | None = None,  # (2,) float32: a and c; None: 1 and 1
    tuned: tuple[int, int, int | None] | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """c y like a summand, or None if it is the only summand itself; q; `paired` qᵀ (width, n); rms(y) (n,)
    float32."""
    check_like(summands[0], scales, **{f"summands[{i}]": x for i, x in enumerate(summands[1:], 1)})
    x, (n, width) = summands[0], summands[0].shape
    tile, warps, registers = tuned or CONFIGS[0 if width <= LONG else -1]
    check(n % 16 == 0, "x", x, "of a multiple of 16 tokens, to be paired")
    out = torch.empty_like(x) if summands[1:] or scales is not None else None
    rms = x.new_empty(n, dtype=torch.float32)
    q, transposed = (torch.empty(shape, dtype=E4M3, device=x.device) for shape in ((n, width), (width, n)))
    if x.numel():
        residual_fp8_kernel[triton.cdiv(n, tile),](
            tuple(summands), scales, out, q, transposed.view(torch.int16), rms, n, width, EPS,
            1 / normed_scale(width), PAIRS=tile // 2, COLUMNS=COLUMNS, CHUNKS=triton.cdiv(width, COLUMNS),
            num_warps=warps, maxnreg=registers)
    return out, q, transposed, rms


def mlp_input_fp8(summands: Summands, scales: Tensor) -> tuple[Tensor, Quantized]:
    """As `mlp_input_reference`, for an FP8 MLP. Backward reads the first result: do not write over it."""
    x, _, q, transposed, stand_in = SumAndNorm.apply(sum_and_norm_fp8, scales, 1, *summands)
    return x, Quantized(stand_in, q, transposed)


def norm_fork_fp8(summands: Summands, readers: int = 1) -> tuple[Quantized | Tensor, ...]:
    """As `norm_fork_reference`, for readers that are FP8 matmuls. Each has a stand-in, and so a gradient, of
    its own."""
    x, again, q, transposed, *stand_ins = SumAndNorm.apply(sum_and_norm_fp8, None, readers, *summands)
    return *(Quantized(stand_in, q, transposed) for stand_in in stand_ins), x, again


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Of one summand, of two with scales as in training, and of three without."""
    def inputs(n: int, width: int, count: int, scaled: bool) -> tuple:
        scales = torch.tensor([1.05, 0.95], device=device) if scaled else None
        return tuple(torch.randn(n, width, device=device).to(dtype) for _ in range(count)), scales

    def without_rms(function: Callable) -> Callable:
        return lambda *args, **tuned: function(*args, **tuned)[:3]

    def exact(summands: Summands, scales: Tensor | None) -> tuple[Tensor | None, ...]:
        a, c = (1, 1) if scales is None else scales
        y = a * add_up(summands)
        q = y / (y.square().mean(1, keepdim=True) + EPS).sqrt() / normed_scale(y.size(1))
        return c * y if summands[1:] or scales is not None else None, q, paired(q.T)

    @cache
    def compiled() -> Callable:
        return torch.compile(mlp_input_reference)

    def two_kernels(summands: Summands, scales: Tensor) -> tuple[Tensor, ...]:
        x, normed = compiled()(summands, scales)
        return x, *quantize(normed, torch.full((), normed_scale(x.size(1)), device=device), in_pairs=True)

    real = (16384, 768, 2, True), (49152, 768, 2, True)
    odd = (16, 40, 1, False), (48, 272, 2, True), (32, 768, 3, False)
    for n, width, count, scaled in real if size == "real" else odd:
        yield Example(
            "normed into FP8 both ways (against the compiled norm and `quantize`)", f"{n:,} × {width}",
            partial(inputs, n, width, count, scaled), without_rms(sum_and_norm_fp8),
            without_rms(sum_and_norm_fp8_reference), 0.0, 8.0 * n * width, exact=exact, baseline=two_kernels,
            compile=False, configs=CONFIGS if scaled else (), slack=rounding_slack(device))
