"""y = x (s W)ᵀ with a learned scale s of the weight; and a copy of x's first channels, which gates look at.

A layer has two such matmuls, Q, K, V before attention and O after it. Compared with plain autograd:

- The copied channels' gradient is added in place to x's gradient, which is safe because x's gradient was just
  computed here and nobody else holds it. If the channels were a view of x, autograd would give them a
  gradient as wide as x that is almost all zeros: 75 MB for 49,152 tokens of 768 channels in bf16.
- One kernel reads P, the gradient of s W, and both writes s P into the weight's gradient (or adds it there,
  see `kernels/gradients.py`) and sums W · P, which is the gradient of s. Autograd launches ten kernels.
- s W is rounded once. PyTorch would first round s itself to bf16.

One H200, 1536 × 768: 1.9 µs for s W and 6.6 µs for the gradients.
"""
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.gradients import Gradient

BLOCK, WARPS = 4096, 8  # elements a program


def scaled_reference(weight: Tensor, scale: Tensor) -> Tensor:
    """Plain PyTorch form of `scaled`. PyTorch multiplies in float32 because the scale is made 1-dim here."""
    return (weight * scale[None]).type_as(weight)


def add_scaled_reference(
    out: Tensor, scaled_grad: Tensor, weight: Tensor, scale: Tensor, first: int = 0, accumulate: bool = True
) -> Tensor:
    """Plain PyTorch form of `add_scaled`."""
    wide = torch.promote_types(out.dtype, torch.float32)
    update = scale * scaled_grad.to(wide)
    out.copy_(out.to(wide) + update if accumulate else update)
    return (weight[first:].to(wide) * scaled_grad[first:].to(wide)).sum().to(scale.dtype)


@triton.jit
def add_scaled_kernel(
    out_ptr, scaled_grad_ptr, weight_ptr, scale_ptr, sums_ptr, size, first,
    ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled_grad = tl.load(scaled_grad_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=(at < size) & (at >= first), other=0.0).to(tl.float32)
    if ACCUMULATE:
        out = tl.load(out_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        out = out + tl.load(scale_ptr) * scaled_grad
    else:
        out = tl.load(scale_ptr) * scaled_grad
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=at < size)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(weight * tl.where(at < first, 0.0, scaled_grad)))


@triton.jit
def scaled_kernel(weight_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (tl.load(scale_ptr) * weight).to(out_ptr.dtype.element_ty), mask=at < size)


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """scale · weight, rounded once; weight contiguous, of any floating-point dtype, scale one float32."""
    check(weight.is_contiguous(), "weight", weight, "contiguous")
    out = torch.empty_like(weight)
    size = weight.numel()
    if size:
        scaled_kernel[triton.cdiv(size, BLOCK),](weight, scale, out, size, BLOCK=BLOCK, num_warps=WARPS)
    return out


def add_scaled(
    out: Tensor,  # (rows, columns), contiguous
    scaled_grad: Tensor,  # like out: the gradient of scale · weight
    weight: Tensor,  # like out
    scale: Tensor,  # 0-dim float32
    first: int = 0,  # the first row of weight and scaled_grad that counts for the scale's gradient
    accumulate: bool = True,  # False: write over `out` instead of adding to it
) -> Tensor:
    """out += scale · scaled_grad, rounded once; returns Σ weight · scaled_grad from `first` on."""
    for name, tensor in (("out", out), ("scaled_grad", scaled_grad), ("weight", weight)):
        check(tensor.ndim == 2 and tensor.shape == out.shape and tensor.is_contiguous(), name, tensor,
              f"{tuple(out.shape)}, contiguous")
    check(scale.numel() == 1 and scale.dtype == torch.float32, "scale", scale, "one float32")
    blocks = triton.cdiv(out.numel(), BLOCK)
    sums = torch.empty(blocks, dtype=torch.float32, device=out.device)
    if blocks:
        add_scaled_kernel[blocks,](
            out, scaled_grad, weight, scale, sums, out.numel(), first * out.shape[1],
            ACCUMULATE=accumulate, BLOCK=BLOCK, num_warps=WARPS)
    return sums.sum()


def weight_gradients(
    grad: Gradient | None, scaled_grad: Tensor, weight: Tensor, scale: Tensor, first: int = 0
) -> tuple[Tensor | None, Tensor]:
    """The gradients of weight and scale, as a backward pass returns them: None for a weight whose gradient
    goes where `grad` says.

    `scaled_grad`: the gradient of scale · weight. The scale's gradient sums from row `first` on. On a CPU
    this is plain PyTorch.
    """
    buffer, accumulate = (torch.empty_like(weight), False) if grad is None else grad
    add = add_scaled if weight.is_cuda else add_scaled_reference
    scale_grad = add(buffer, scaled_grad, weight, scale, first, accumulate)
    return buffer if grad is None else None, scale_grad


def scaled_linear_reference(
    x: Tensor, weight: Tensor, scale: Tensor, count: int = 0, grad: Gradient | None = None
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch form of `scaled_linear`. It ignores `grad`: autograd makes the gradients."""
    return F.linear(x, scaled_reference(weight, scale).type_as(x)), x[:, :count].clone()


class ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor, count: int, grad: Gradient | None):
        scaled_weight = (scaled if x.is_cuda else scaled_reference)(weight, scale)
        ctx.grad = grad
        ctx.save_for_backward(x, weight, scaled_weight, scale)
        return F.linear(x, scaled_weight), x[:, :count].clone()

    @staticmethod
    def backward(ctx, y_grad: Tensor, channels_grad: Tensor):
        x, weight, scaled_weight, scale = ctx.saved_tensors
        x_grad = y_grad @ scaled_weight
        x_grad[:, :channels_grad.size(1)] += channels_grad
        return x_grad, *weight_gradients(ctx.grad, y_grad.T @ x, weight, scale), None, None


def scaled_linear(
    x: Tensor,  # (n, in)
    weight: Tensor,  # (out, in), of x's dtype
    scale: Tensor,  # 0-dim float32
    count: int = 0,  # how many of x's first channels are returned as well
    grad: Gradient | None = None,  # where the weight's gradient goes; None: autograd gets it
) -> tuple[Tensor, Tensor]:
    """x (scale · weight)ᵀ (n, out), and a copy of x's first channels (n, count), contiguous.

    Gradients for x, weight and scale. On a CPU this is plain PyTorch, with the same gradients in the same
    order.
    """
    return ScaledLinear.apply(x, weight, scale, count, grad)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """s W, and its gradient written over a buffer. The gradient of s is left out: much of it cancels."""
    scale = torch.tensor(0.7, device=device)

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device).to(dtype)

    def gradient(add):
        def run(scaled_grad: Tensor, weight: Tensor) -> Tensor:
            out = torch.empty_like(weight)
            add(out, scaled_grad, weight, scale, len(weight) // 3, accumulate=False)
            return out
        return run

    shapes = [(1536, 768)] if size == "real" else [(1, 9), (9, 1), (130, 70), (96, 768)]
    for rows, columns in shapes:
        shape, elements = f"{rows} × {columns}", float(rows * columns)
        yield Example(
            "scaled weight", shape, lambda rows=rows, columns=columns: (random(rows, columns),),
            lambda weight: scaled(weight, scale), lambda weight: scaled_reference(weight, scale),
            bytes=4 * elements, exact=lambda weight: weight * scale.double())
        yield Example(
            "gradients of a scaled weight", shape,
            lambda rows=rows, columns=columns: (random(rows, columns), random(rows, columns)),
            gradient(add_scaled), gradient(add_scaled_reference), bytes=6 * elements,
            exact=lambda scaled_grad, weight: scaled_grad * scale.double())
