"""The gradient of a residual stream's summands, from the gradients of c y and norm(y), in one pass.

Forward, y = a Σ summands gave c y and norm(y) (`residual_norm.py`, `residual_fp8.py`). All summands have the
same gradient, because a scales them all, so it is written once:

    n = norm(y) = c y / (c rms)
    gradient of y = c g + (h − mean(h · n) n) / rms      for gradients g of c y and h of norm(y)
    gradient of each summand = a · gradient of y

g and h are sums over the readers of c y and of the norm. The kernel reads c y, the gradients of all readers,
and one number a token. No atomics are used: every sum has one order, so repeated runs are bit-equal. One
H200, 49,152 × 768, one reader of each: 76 µs with the scales' gradients, where compiled PyTorch takes 70
without them.
"""
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, multiprocessors, tl, triton
from kernels.example import Example
from kernels.fp8.formats import widened
from kernels.mlp.residual import add_up

# (tokens a tile, columns a chunk, warps, programs a multiprocessor). The first is used. With a warp for each
# token, sums need no other warp, and chunks of 256 columns pad no row of 768: 76 µs for 49,152 rows, where a
# whole row padded to 1,024 takes 96. 1,024 programs mean one a tile. Of 4 programs a multiprocessor two run
# at first. Where collectives hold 8 multiprocessors, 4 programs take 90 µs and 2 programs 103.
CONFIGS = [
    (8, 256, 8, 4), (8, 256, 8, 2), (4, 256, 4, 4), (2, 256, 2, 8), (8, 256, 8, 1024), (4, 256, 4, 1024),
    (2, 256, 2, 1024), (1, 1024, 4, 8), (1, 1024, 4, 12), (1, 1024, 4, 1024),
]


def residual_backward_reference(out_grads: tuple[Tensor, ...], norm_grads: tuple[Tensor, ...], out: Tensor,
                                rms: Tensor, scales: Tensor) -> Tensor:
    """The first result of `residual_backward`, in plain PyTorch."""
    a, c = scales
    normed = widened(out) / (c * rms[:, None])
    out_grad, norm_grad = (add_up(tuple(map(widened, grads))) for grads in (out_grads, norm_grads))
    along = (norm_grad * normed).mean(1, keepdim=True)
    return (a * (c * out_grad + (norm_grad - along * normed) / rms[:, None])).type_as(out)


@triton.jit
def summed(summands, start, at, inside):
    """Σ summands in float32, of the elements `at` counted from `start`."""
    y = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(len(summands)):
        y += tl.load(summands[i] + start + at, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def residual_backward_kernel(out_grads, norm_grads, out_ptr, rms_ptr, scales_ptr, grad_ptr, sums_ptr,
                             n, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
                             PROGRAMS: tl.constexpr):
    a, c = 1.0, 1.0
    if scales_ptr is not None:
        a, c = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    sums_a, sums_c = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), PROGRAMS):
        row = tile * ROWS + tl.arange(0, ROWS)
        start, live = row.to(tl.int64)[:, None] * width, (row < n)[:, None]
        rms = tl.load(rms_ptr + row, mask=row < n, other=1.0)[:, None]
        # This factor turns c y into norm(y). Where c is 0, c y says nothing of y, and y is taken for 0.
        to_norm = 1 / tl.where(tl.abs(c * rms) < 1e-30, float("inf"), c * rms)
        along, held = tl.zeros((ROWS,), tl.float32), ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            at, inside = start + column, live & (column < width)
            normed = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32) * to_norm
            norm_grad = summed(norm_grads, 0, at, inside)
            along += tl.sum(norm_grad * normed, axis=1) / width
            held += ((normed, norm_grad, summed(out_grads, 0, at, inside)),)
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            normed, norm_grad, out_grad = held[chunk]
            grad = c * out_grad + (norm_grad - along[:, None] * normed) / rms        # of y
            summand_grad = (a * grad).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + start + column, summand_grad, mask=live & (column < width))
            if scales_ptr is not None:
                sums_a += grad * normed * rms
                sums_c += out_grad * normed * rms
    if scales_ptr is not None:           # Of a: Σ grad · y / a. If a is 0, so is y, and this is 0.
        tl.store(sums_ptr + 2 * tl.program_id(0), tl.sum(sums_a) / tl.where(a == 0, 1.0, a))
        tl.store(sums_ptr + 2 * tl.program_id(0) + 1, tl.sum(sums_c))


def check_like(x: Tensor, scales: Tensor | None, **others: Tensor) -> None:
    """The first tensor is one that the kernels can read, and the others are like it."""
    dtypes = torch.bfloat16, torch.float16, torch.float32
    check(x.ndim == 2 and x.is_contiguous() and x.shape[1] <= 8192 and x.dtype in dtypes, "x", x,
          "contiguous, (n, width <= 8192) in bf16, fp16 or float32")
    for name, tensor in others.items():
        like = tensor.shape == x.shape and tensor.dtype == x.dtype and tensor.is_contiguous()
        check(like, name, tensor, "like x")
    check(scales is None or scales.shape == (2,) and scales.dtype == torch.float32 and scales.is_contiguous(),
          "scales", scales, "two float32")


def given(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Those gradients of an autograd function's results that there are; if there are none, one of zeros."""
    return tuple(grad for grad in grads if grad is not None) or (torch.zeros_like(like),)


def residual_backward(
    out_grads: tuple[Tensor, ...],  # (n, width) each: the gradients of c y, one for each reader
    norm_grads: tuple[Tensor, ...],  # of norm(y), likewise
    out: Tensor,  # (n, width): c y
    rms: Tensor,  # (n,) float32
    scales: Tensor | None = None,  # as `sum_and_norm` got them
    tuned: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of each summand, like `out`, and that of `scales`, (2,) float32, if given.

    If c is 0, `out` says nothing of y. The gradient of y is then as if y were 0, and the gradient of c is 0.
    """
    out_grads, norm_grads = (tuple(x.contiguous() for x in grads) for grads in (out_grads, norm_grads))
    check_like(out, scales, **{f"out_grads[{i}]": x for i, x in enumerate(out_grads)},
               **{f"norm_grads[{i}]": x for i, x in enumerate(norm_grads)})
    (n, width), (tile, columns, warps, programs) = out.shape, tuned or CONFIGS[0]
    check(rms.shape == (n,) and rms.dtype == torch.float32 and rms.is_contiguous(), "rms", rms,
          f"contiguous float32 ({n},)")
    columns = min(columns, triton.next_power_of_2(width))
    programs = min(programs * multiprocessors(out), triton.cdiv(n, tile))
    grad = torch.empty_like(out)
    sums = None if scales is None else scales.new_empty(programs, 2)
    if out.numel():
        residual_backward_kernel[programs,](
            out_grads, norm_grads, out, rms, scales, grad, sums, n, width, ROWS=tile, COLUMNS=columns,
            CHUNKS=triton.cdiv(width, columns), PROGRAMS=programs, num_warps=warps)
    return grad, None if sums is None else sums.sum(0)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """With the scales of training. Their gradients are sums of random numbers that nearly cancel: not
    compared here."""
    def inputs(n: int, width: int, passing: int, readers: int) -> tuple:
        rms, scales = torch.rand(n, device=device) + 0.5, torch.tensor([1.05, 0.95], device=device)
        normed, *grads = (torch.randn(n, width, device=device) for _ in range(1 + passing + readers))
        out, grads = scales[1] * rms[:, None] * F.rms_norm(normed, (width,)), [x.to(dtype) for x in grads]
        return tuple(grads[:passing]), tuple(grads[passing:]), out.to(dtype), rms, scales

    def kernel(*args, **tuned) -> Tensor:
        return residual_backward(*args, **tuned)[0]

    real, odd = ((16384, 768, 1, 1), (49152, 768, 1, 1)), ((1, 1, 1, 1), (13, 528, 1, 2), (37, 133, 2, 3))
    for n, width, passing, readers in real if size == "real" else odd:
        yield Example(
            "gradient of the residual's summands", f"{n:,} × {width}, {readers} reader{'s' * (readers > 1)}",
            partial(inputs, n, width, passing, readers), kernel, residual_backward_reference, 0.0,
            2.0 * (2 + passing + readers) * n * width, configs=CONFIGS)
