"""y = a Σ summands gives c y, and q = fp8(y / rms(y) / scale) with its transpose, in one pass: what FP8 products read.

`kernels.mlp.residual` writes norm(y) in bfloat16, which `kernels.fp8.quantize` then reads to write q and qᵀ; nobody else reads it but the norm's
own backward, and that has y from c y, which exists anyway. So q and qᵀ stand in norm(y)'s place: as many bytes written, 75 MB for
49,152 × 768 not read and one launch less. q is made of the float32 norm, not of one rounded to bfloat16. Its scale is known before: the
norm of a normed row is √width, which none of its elements passes, so nothing saturates.

qᵀ is in `kernels.fp8.quantize.paired` order. A thread therefore loads the same columns of tokens 8 apart, as two tiles, and packs what it
holds to 16-bit numbers: only these go through shared memory, 8 KB of them. A whole row is held in float32 from its sum to its norm, in
chunks of columns, so that a width like 768 pads nothing.

`mlp_input_fp8` and `norm_fork_fp8` are `kernels.mlp.residual`'s functions with a `Quantized` in place of the norm. Times: README.md.
"""
import torch
from torch import Tensor

from kernels.backend import EPS, check, tl, triton
from kernels.fp8.formats import Quantized, normed_scale, packed
from kernels.fp8.quantize import quantize_reference
from kernels.mlp.residual import (
    Summands,
    check_summands,
    mlp_input_reference,
    norm_fork_reference,
    residual_backward,
    summed,
)

# (tokens a program, warps, most registers a thread); of tokens, a multiple of 16, 32 fill a sector of a transposed row. The first is used;
# where a row is longer than LONG, the last, which holds 2,048 columns. Registers of width 768, of three summands and, when
# measured, a shared row (Triton 3.6, sm_90):
CONFIGS = [(32, 16, 64), (32, 16, None), (16, 8, None),                  # 64 (16 bytes a thread spilled, for a second program a
           (64, 16, None), (32, 8, None), (16, 16, None)]                # multiprocessor: 100 µs for 125), 114, 80; 128, 211, 63
COLUMNS, LONG = 256, 1024                                                # a chunk's: 16 bytes of bfloat16 for each thread of a warp


def residual_fp8_reference(summands: Summands, scales: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch twin of `residual_fp8`, without its last result."""
    wide = torch.promote_types(summands[0].dtype, torch.float32)
    summands, dtype = tuple(summand.to(wide) for summand in summands), summands[0].dtype
    x, normed = norm_fork_reference(summands)[::-1] if scales is None else mlp_input_reference(summands, scales)
    return x.to(dtype), *quantize_reference(normed, torch.tensor(normed_scale(x.size(1)), device=x.device), in_pairs=True)


@triton.jit
def residual_fp8_kernel(summands, scales_ptr, out_ptr, norm_ptr, transposed_ptr, rms_ptr, n, width, eps, to_fp8,
                        PAIRS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    a, c = 1.0, 1.0
    if scales_ptr is not None:
        a, c = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    first, pair = tl.program_id(0).to(tl.int64) * (2 * PAIRS), tl.arange(0, PAIRS)
    row, length = pair // 8 * 16 + pair % 8, tl.multiple_of(n // 2, 8)                   # n is a multiple of 16
    live, held, inverse = first + row < n, (), ()
    for half in tl.static_range(2):                                      # each pair's first token, and the one 8 further on
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
        tl.store(transposed_ptr + first // 2 + at, packed(low, high, norm_ptr.dtype.element_ty).T, mask=inside.T)


def residual_fp8(
    summands: Summands,  # and scales as `mlp_input` takes them; tokens a multiple of 16
    scales: Tensor | None = None,  # None: 1 and 1
    tuned: tuple[int, int, int | None] | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """c y like an summand (n, width), None where it is the only summand itself; q and `paired` qᵀ (width, n); rms(y) (n,) float32."""
    check_summands(summands, scales)
    x, (n, width) = summands[0], summands[0].shape
    tile, warps, registers = tuned or CONFIGS[0 if width <= LONG else -1]
    check(n % 16 == 0, "x", x, "of a multiple of 16 tokens, to be paired")
    out = torch.empty_like(x) if summands[1:] or scales is not None else None
    rms = x.new_empty(n, dtype=torch.float32)
    q, transposed = (torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device) for shape in ((n, width), (width, n)))
    if x.numel():
        residual_fp8_kernel[triton.cdiv(n, tile),](
            tuple(summands), scales, out, q, transposed.view(torch.int16), rms, n, width, EPS, 1 / normed_scale(width),
            PAIRS=tile // 2, COLUMNS=COLUMNS, CHUNKS=triton.cdiv(width, COLUMNS), num_warps=warps, maxnreg=registers)
    return out, q, transposed, rms


class ResidualFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scales: Tensor | None, readers: int, *summands: Tensor) -> tuple[Tensor, ...]:
        out, q, transposed, rms = residual_fp8(summands, scales)
        out = summands[0] if out is None else out
        ctx.save_for_backward(out, rms, scales)
        ctx.mark_non_differentiable(q, transposed)
        ctx.set_materialize_grads(False)                                 # of these two autograd would make zeros, 75 MB for nobody
        ctx.count = len(summands)
        return out, q, transposed, *(out.new_empty(()).expand_as(out) for _ in range(readers))

    @staticmethod
    def backward(ctx, out_grad: Tensor | None, q: None, transposed: None, *norm_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        out, rms, scales = ctx.saved_tensors
        out_grad = torch.zeros_like(out) if out_grad is None else out_grad
        norm_grads = tuple(grad for grad in norm_grads if grad is not None) or (torch.zeros_like(out),)
        grad, sums = residual_backward(out_grad, norm_grads, out, rms, scales, normed=False)
        return sums, None, *[grad] * ctx.count


def mlp_input_fp8(summands: Summands, scales: Tensor) -> tuple[Tensor, Quantized]:
    """`mlp_input` for an MLP whose products are all FP8. Nobody may write over the first result."""
    x, q, transposed, stand_in = ResidualFP8.apply(scales, 1, *summands)
    return x, Quantized(stand_in, q, transposed)


def norm_fork_fp8(summands: Summands, readers: int = 1) -> tuple[Quantized | Tensor, ...]:
    """`norm_fork` for FP8 products. Each reader has a stand-in of its own: their gradients are added where the norm's is made."""
    x, q, transposed, *stand_ins = ResidualFP8.apply(None, readers, *summands)
    return *(Quantized(stand_in, q, transposed) for stand_in in stand_ins), x
