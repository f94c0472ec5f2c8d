"""y = x (s W)ᵀ with a learned s, which multiplies the weight; and a copy of x's first columns, for gates that look at them.

Two gradients are added where they belong, by the backward pass itself. That of the columns into x's, where the product of this very
backward pass has made it, so that nobody else holds it yet: as a view of x they would get from autograd a gradient as wide as x, zeros
beside them, 75 MB for 49,152 tokens of 768 in bf16. And W's into the rows of a `.grad` that the caller names: one kernel makes s P of
P, the gradient of s W, adds it and sums W · P, which is s's, where autograd takes ten launches a layer for rows of a longer leaf.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton

BLOCK, WARPS = 4096, 8          # elements a program


def add_scaled_reference(out: Tensor, product: Tensor, weight: Tensor, scale: Tensor, first: int = 0) -> Tensor:
    """Plain PyTorch twin of `add_scaled`."""
    wide = torch.promote_types(out.dtype, torch.float32)
    out.copy_(out.to(wide) + scale * product.to(wide))
    return (weight[first:].to(wide) * product[first:].to(wide)).sum().to(scale.dtype)


@triton.jit
def add_scaled_kernel(out_ptr, product_ptr, weight_ptr, scale_ptr, sums_ptr, size, first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(product_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=(at < size) & (at >= first), other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (out + tl.load(scale_ptr) * product).to(out_ptr.dtype.element_ty), mask=at < size)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(weight * tl.where(at < first, 0.0, product)))


@triton.jit
def scaled_kernel(weight_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (tl.load(scale_ptr) * weight).to(out_ptr.dtype.element_ty), mask=at < size)


def scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """scale · weight, rounded once, where torch would first round the 0-dim scale to the weight's dtype."""
    check(weight.is_contiguous(), "weight", weight, "contiguous")
    out = torch.empty_like(weight)
    if weight.numel():
        scaled_kernel[triton.cdiv(weight.numel(), BLOCK),](weight, scale, out, weight.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return out


def add_scaled(
    out: Tensor,  # (rows, columns), added to in place
    product: Tensor,  # like out
    weight: Tensor,  # like out
    scale: Tensor,  # 0-dim float32
    first: int = 0,  # row from which on weight and product are multiplied
) -> Tensor:
    """out += scale · product, rounded once; returns Σ weight · product from row `first` on (0-dim float32). All contiguous."""
    for name, tensor in (("out", out), ("product", product), ("weight", weight)):
        check(tensor.ndim == 2 and tensor.shape == out.shape and tensor.is_contiguous(), name, tensor, f"{tuple(out.shape)}, contiguous")
    check(scale.numel() == 1 and scale.dtype == torch.float32, "scale", scale, "one float32")
    blocks = triton.cdiv(out.numel(), BLOCK)
    sums = torch.empty(blocks, dtype=torch.float32, device=out.device)
    if blocks:
        add_scaled_kernel[blocks,](out, product, weight, scale, sums, out.numel(), first * out.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return sums.sum()


def weight_gradients(into: Tensor | None, product: Tensor, weight: Tensor, scale: Tensor, fused: bool,
                     first: int = 0) -> tuple[Tensor | None, Tensor]:
    """What a backward pass returns for weight, None where it adds that to `into`, and for scale; `product`: the gradient of s W."""
    out = torch.zeros_like(weight) if into is None else into
    scale_grad = (add_scaled if fused else add_scaled_reference)(out, product, weight, scale, first)
    return out if into is None else None, scale_grad


def scaled_linear_reference(x: Tensor, weight: Tensor, scale: Tensor, count: int = 0, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Plain PyTorch twin of `scaled_linear`; autograd makes its gradients, so that `into` is left as it is."""
    return F.linear(x, (weight * scale[None]).type_as(x)), x[:, :count].clone()


class ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scale: Tensor, count: int, into: Tensor | None) -> tuple[Tensor, Tensor]:
        by_scale = scaled(weight, scale) if x.is_cuda else (weight * scale[None]).type_as(x)
        ctx.into = into
        ctx.save_for_backward(x, weight, by_scale, scale)
        return F.linear(x, by_scale), x[:, :count].clone()

    @staticmethod
    def backward(ctx, grad: Tensor, columns_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, by_scale, scale = ctx.saved_tensors
        x_grad = grad @ by_scale
        x_grad[:, :columns_grad.size(1)] += columns_grad
        return x_grad, *weight_gradients(ctx.into, grad.T @ x, weight, scale, x.is_cuda), None, None


def scaled_linear(
    x: Tensor,  # (n, in)
    weight: Tensor,  # (out, in) like x
    scale: Tensor,  # 0-dim float32
    count: int = 0,  # how many of x's first columns are returned
    into: Tensor | None = None,  # like weight: its gradient is added here, in place of being returned
) -> tuple[Tensor, Tensor]:
    """x (scale · weight)ᵀ (n, out) and a copy of x's first columns (n, count), contiguous."""
    return ScaledLinear.apply(x, weight, scale, count, into)
