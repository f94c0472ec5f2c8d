"""y = a Σ summands gives c y and y / rms(y), in one pass; and back: one gradient for all summands, in one pass.

Between attention and MLP a layer adds to the residual what attention gave. As a scales all of them, the summands have the same gradient,
written once. Backward reads y from its normed self, which the MLP keeps anyway, and one number a token: 3 tensors in, 1 out, where
residual and attention's part would make 4 in.

Where an FP8 MLP alone reads the norm, it is never written in bfloat16 (`kernels.mlp.residual_fp8`): backward then has y from c y.
`norm_fork` is the same two kernels for norm(y) beside y = Σ summands: the gradients of both meet in the kernel. What an FP8 MLP gives
is an summand too, not summed in a pass of its own. No atomics: all sums have one order, repeated runs are bit-equal. Times: README.md.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EPS, check, tl, triton

CONFIGS = [(1, 4), (1, 2), (2, 4), (4, 8), (2, 8)]                       # (tokens a tile, warps); the first is used
# And (tokens a tile, columns a chunk, warps, programs a multiprocessor): with a warp a token sums need no other warp, and chunks of 256
# columns pad no row of 768: 76 µs for 49,152 rows, where a whole row padded to 1,024 takes 96. 1,024 programs: one a tile.
# Of 4 programs two run at first: where collectives hold 8 multiprocessors it takes 90 µs, with 2 programs 103.
BACKWARD_CONFIGS = [(8, 256, 8, 4), (8, 256, 8, 2), (4, 256, 4, 4), (2, 256, 2, 8), (8, 256, 8, 1024), (4, 256, 4, 1024), (2, 256, 2, 1024),
                    (1, 1024, 4, 8), (1, 1024, 4, 12), (1, 1024, 4, 1024)]
Summands = tuple[Tensor, ...]                                             # (n, width) each, one or more


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def add_up(summands: Summands) -> Tensor:
    return sum(summands[1:], summands[0])                                  # one summand is its sum itself, no copy


def mlp_input_reference(summands: Summands, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of `mlp_input`."""
    x = scales[0] * add_up(summands)
    return scales[1] * x, norm(x)


def norm_fork_reference(summands: Summands, readers: int = 1) -> tuple[Tensor, ...]:
    """Plain PyTorch twin of `norm_fork`."""
    return *(norm(x := add_up(summands)),) * readers, x


@triton.jit
def summed(summands, start, at, inside):
    """Σ summands in float32, of the elements `at` counted from `start`."""
    y = tl.zeros(at.shape, tl.float32)
    for i in tl.static_range(len(summands)):
        y += tl.load(summands[i] + start + at, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def residual_kernel(summands, scales_ptr, out_ptr, norm_ptr, rms_ptr, n, width, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    at, inside = row.to(tl.int64)[:, None] * width + column, (row < n)[:, None] & (column < width)
    a, c = 1.0, 1.0
    if scales_ptr is not None:
        a, c = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    y = a * summed(summands, 0, at, inside)
    if out_ptr is not None:
        tl.store(out_ptr + at, (c * y).to(out_ptr.dtype.element_ty), mask=inside)
    rms = tl.sqrt(tl.sum(y * y, axis=1) / width + eps)
    tl.store(norm_ptr + at, (y / rms[:, None]).to(norm_ptr.dtype.element_ty), mask=inside)
    tl.store(rms_ptr + row, rms, mask=row < n)


@triton.jit
def residual_backward_kernel(out_grad_ptr, norm_grads, kept_ptr, rms_ptr, scales_ptr, grad_ptr, sums_ptr, n, width, NORMED: tl.constexpr,
                             ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, PROGRAMS: tl.constexpr):
    a, c = 1.0, 1.0
    if scales_ptr is not None:
        a, c = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    sums_a, sums_c = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), PROGRAMS):
        row = tile * ROWS + tl.arange(0, ROWS)
        start, live = row.to(tl.int64)[:, None] * width, (row < n)[:, None]
        rms = tl.load(rms_ptr + row, mask=row < n, other=1.0)[:, None]
        to_norm, along, held = 1.0, tl.zeros((ROWS,), tl.float32), ()
        if not NORMED:                                                   # c y: where c is 0 it says nothing of y, which is taken for 0
            to_norm = 1 / tl.where(tl.abs(c * rms) < 1e-30, float("inf"), c * rms)
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            at, inside = start + column, live & (column < width)
            normed = tl.load(kept_ptr + at, mask=inside, other=0.0).to(tl.float32) * to_norm
            norm_grad = summed(norm_grads, 0, at, inside)
            along += tl.sum(norm_grad * normed, axis=1) / width
            held += ((normed, norm_grad, tl.load(out_grad_ptr + at, mask=inside, other=0.0).to(tl.float32)),)
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            normed, norm_grad, out_grad = held[chunk]
            grad = c * out_grad + (norm_grad - along[:, None] * normed) / rms                    # of y
            tl.store(grad_ptr + start + column, (a * grad).to(grad_ptr.dtype.element_ty), mask=live & (column < width))
            if scales_ptr is not None:
                sums_a += grad * normed * rms
                sums_c += out_grad * normed * rms
    if scales_ptr is not None:                                           # ∂/∂a = Σ grad · y / a: 0 where a and with it y is 0
        tl.store(sums_ptr + 2 * tl.program_id(0), tl.sum(sums_a) / tl.where(a == 0, 1.0, a))
        tl.store(sums_ptr + 2 * tl.program_id(0) + 1, tl.sum(sums_c))


def _check(x: Tensor, scales: Tensor | None, **others: Tensor) -> None:
    check(x.ndim == 2 and x.is_contiguous() and x.shape[1] <= 8192 and x.dtype in (torch.bfloat16, torch.float16, torch.float32),
          "x", x, "contiguous, (n, width <= 8192) in bf16, fp16 or float32")
    for name, tensor in others.items():
        check(tensor.shape == x.shape and tensor.dtype == x.dtype and tensor.is_contiguous(), name, tensor, "like x")
    check(scales is None or scales.shape == (2,) and scales.dtype == torch.float32 and scales.is_contiguous(), "scales", scales,
          "two float32")


def check_summands(summands: Summands, scales: Tensor | None) -> None:
    _check(summands[0], scales, **{f"summands[{i}]": update for i, update in enumerate(summands[1:], 1)})


def residual(summands: Summands, scales: Tensor | None = None, tuned: tuple[int, int] | None = None) -> tuple[Tensor | None, Tensor, Tensor]:
    """c y and norm(y), like an summand, and rms(y) (n,) float32; c y is None where it is the only summand itself."""
    check_summands(summands, scales)
    x, (n, width), (tile, warps) = summands[0], summands[0].shape, tuned or CONFIGS[0]
    out = torch.empty_like(x) if summands[1:] or scales is not None else None
    normed, rms = torch.empty_like(x), x.new_empty(n, dtype=torch.float32)
    if x.numel():
        residual_kernel[triton.cdiv(n, tile),](tuple(summands), scales, out, normed, rms, n, width, EPS, ROWS=tile,
                                               COLUMNS=triton.next_power_of_2(width), num_warps=warps)
    return out, normed, rms


def residual_backward(out_grad: Tensor, norm_grad: Tensor | tuple[Tensor, ...], kept: Tensor, rms: Tensor, scales: Tensor | None = None,
                      tuned: tuple[int, int, int, int] | None = None, normed: bool = True) -> tuple[Tensor, Tensor | None]:
    """The gradient of each summand, like `kept` (n, width), and that of `scales`, (2,) float32, if given. `norm_grad` may be in summands.

    `kept`: norm(y), or, with `normed` False, c y, of which a c of 0 leaves nothing: that of y is then as if y were 0, and c has none.
    """
    norm_grads = tuple(grad.contiguous() for grad in (norm_grad if isinstance(norm_grad, tuple) else (norm_grad,)))
    out_grad = out_grad.contiguous()
    _check(kept, scales, out_grad=out_grad, **{f"norm_grad[{i}]": grad for i, grad in enumerate(norm_grads)})
    (n, width), (tile, columns, warps, programs) = kept.shape, tuned or BACKWARD_CONFIGS[0]
    columns = min(columns, triton.next_power_of_2(width))
    programs *= torch.cuda.get_device_properties(kept.device).multi_processor_count if kept.is_cuda else 1
    programs = min(programs, triton.cdiv(n, tile))
    grad = torch.empty_like(kept)
    sums = None if scales is None else scales.new_empty(programs, 2)
    if kept.numel():
        residual_backward_kernel[programs,](out_grad, norm_grads, kept, rms, scales, grad, sums, n, width, NORMED=normed, ROWS=tile,
                                            COLUMNS=columns, CHUNKS=triton.cdiv(width, columns), PROGRAMS=programs, num_warps=warps)
    return grad, None if sums is None else sums.sum(0)


class MLPInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scales: Tensor, *summands: Tensor) -> tuple[Tensor, Tensor]:
        out, normed, rms = residual(summands, scales)
        ctx.save_for_backward(normed, rms, scales)
        ctx.count = len(summands)
        return out, normed

    @staticmethod
    def backward(ctx, out_grad: Tensor, norm_grad: Tensor) -> tuple[Tensor, ...]:
        normed, rms, scales = ctx.saved_tensors
        grad, sums = residual_backward(out_grad, norm_grad, normed, rms, scales)
        return sums, *[grad] * ctx.count


def mlp_input(summands: Summands, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The residual that passes the MLP by, c y, and what the MLP sees, norm(y), where y = a Σ summands.

    Summands contiguous; `scales` (2,) float32: a and c. The first result may be written over.
    """
    return MLPInput.apply(scales, *summands)


class NormFork(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *summands: Tensor) -> tuple[Tensor, Tensor]:
        out, normed, rms = residual(summands)
        ctx.save_for_backward(normed, rms)
        ctx.count = len(summands)
        return normed, summands[0] if out is None else out

    @staticmethod
    def backward(ctx, norm_grad: Tensor, out_grad: Tensor) -> tuple[Tensor, ...]:
        return (residual_backward(out_grad, norm_grad, *ctx.saved_tensors)[0],) * ctx.count


def norm_fork(summands: Summands, readers: int = 1) -> tuple[Tensor, ...]:
    """norm(y), for each reader, and y = Σ summands (n, width), contiguous, whose gradients are added where the norm's is made."""
    normed, x = NormFork.apply(*summands)
    return *(normed,) * readers, x
