"""y = relu(x W_inᵀ)² W_out and its gradients, all six matmuls in FP8. The residual is not added here.

The activation is squared ReLU (So et al., arXiv 2109.08668). Nothing of hidden width is ever bfloat16: the
matmul kernels of `relu_squared.py` write the activation, and backward its gradient, in FP8 with transposes.
That is 302 MB for 49,152 tokens instead of 453 forward, and 453 instead of 755 backward. An FP8 matmul cannot
add to its output, so the residual and y stay two summands, and whoever reads the sum makes it
(`residual.py`).

All scales follow from norms of rows (`kernels/fp8/formats.py`, `kernels/fp8/scales.py`). The gradient's scale
comes from the norms of SAMPLED of its rows. An element of another row saturates only if this one element is
larger than the norm of every sampled row.

One H200, 49,152 tokens, 768 → 3072, both ways: 1.52 ms, where compiled PyTorch takes 2.44 ms in bfloat16.
"""
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.example import Example, both_ways
from kernels.fp8.formats import Quantized, has_fp8, rounding_slack
from kernels.fp8.matmul import fp8_matmul
from kernels.fp8.quantize import quantize
from kernels.fp8.scales import gradient_scales, mlp_scales
from kernels.fp8.weights import FP8Weight, fp8_weights
from kernels.gradients import Gradient
from kernels.mlp.relu_squared import SHARED_BYTES, relu_squared_backward_fp8, relu_squared_fp8

SAMPLED = 4096  # rows of a gradient, at least, that set its scale: 3.7 µs, where all 49,152 take 24


class FeedForwardWeights(NamedTuple):
    """Both weights in FP8, and the scales that depend on them alone (see `kernels.fp8.scales.mlp_scales`)."""
    w_in: FP8Weight
    w_out: FP8Weight
    x_scale: Tensor  # of the normed input
    act_scale: Tensor  # of the activation
    pre_scale: Tensor  # x_scale times w_in's scale: what x w_inᵀ is multiplied with
    grad_bound: Tensor  # of the gradient before the activation, for an incoming gradient of norm 1


def feed_forward_weights(w_in: FP8Weight, w_out: FP8Weight, width: int) -> FeedForwardWeights:
    """Both weights with all their scales, to be made once a step, for all its micro-batches."""
    return FeedForwardWeights(w_in, w_out, *mlp_scales(w_in.norm, w_out.norm, width))


def has_feed_forward_fp8(device: torch.device) -> bool:
    """Whether there is FP8, and shared memory for the tiles, as on Hopper and on servers' Blackwell."""
    return has_fp8(device) and (
        torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= SHARED_BYTES)


def weight_gradient(grad: Gradient | None, a: Tensor, b: Tensor, scale_a: Tensor,
                    scale_b: Tensor) -> Tensor | None:
    """scale_a · scale_b · a b, the gradient of a weight: returned, or written or added where `grad` says."""
    if grad is None:
        return fp8_matmul(a, b, scale_a, scale_b, fast=False)
    if grad.accumulate:
        grad.buffer.add_(fp8_matmul(a, b, scale_a, scale_b, fast=False))
    else:
        fp8_matmul(a, b, scale_a, scale_b, fast=False, out=grad.buffer)
    return None


class FeedForwardFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w_in: Tensor, w_out: Tensor, grads: tuple[Gradient, Gradient] | None,
                fp8: FeedForwardWeights, x: Tensor, x8: Tensor | None,
                x8_transposed: Tensor | None) -> Tensor:
        if x8 is None:
            x8, x8_transposed = quantize(x, fp8.x_scale, in_pairs=True)
        act, act_transposed = relu_squared_fp8(x8, fp8.w_in.q, fp8.pre_scale, fp8.act_scale)
        ctx.save_for_backward(
            x8_transposed, act, act_transposed, fp8.w_in.transposed, fp8.w_out.q,
            fp8.x_scale, fp8.w_in.scale, fp8.w_out.scale, fp8.act_scale, fp8.grad_bound)
        ctx.grads = grads or (None, None)
        out = fp8_matmul(act, fp8.w_out.transposed.T, fp8.act_scale, fp8.w_out.scale, fast=True)
        return out.type_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x_transposed, act, act_transposed, in_transposed, w_out,
         x_scale, in_scale, out_scale, act_scale, grad_bound) = ctx.saved_tensors
        grad, (to_w_in, to_w_out) = grad.contiguous(), ctx.grads
        sampled = grad[::max(len(grad) // SAMPLED, 1)]
        grad_scale, matmul_scale, pre_scale = gradient_scales(sampled, out_scale, grad_bound)
        grad8, grad_transposed = quantize(grad, grad_scale, in_pairs=True)
        pre, pre_transposed = relu_squared_backward_fp8(grad8, w_out, act, matmul_scale, act_scale, pre_scale)
        w_in_grad = weight_gradient(to_w_in, pre_transposed, x_transposed.T, pre_scale, x_scale)
        w_out_grad = weight_gradient(to_w_out, act_transposed, grad_transposed.T, act_scale, grad_scale)
        x_grad = fp8_matmul(pre, in_transposed.T, pre_scale, in_scale, fast=False)
        return w_in_grad, w_out_grad, None, None, x_grad, None, None


def feed_forward_reference(x: Tensor, w_in: Tensor, w_out: Tensor,
                           grads: tuple[Gradient, Gradient] | None = None,
                           fp8: FeedForwardWeights | None = None) -> Tensor:
    """relu(x w_inᵀ)² w_out in plain PyTorch. It ignores `grads` and `fp8`: autograd adds to `weight.grad`."""
    return F.relu(F.linear(x, w_in)).square() @ w_out


def feed_forward_fp8(
    x: Quantized | Tensor,  # (tokens, width), rows normed; tokens and width multiples of 16
    w_in: Tensor,  # (hidden, width) bfloat16, hidden a multiple of 16
    w_out: Tensor,  # (hidden, width)
    grads: tuple[Gradient, Gradient] | None,  # where the gradients of w_in and w_out go; None: to autograd
    fp8: FeedForwardWeights | None,  # both weights in FP8; None: they are quantised here
) -> Tensor:
    """relu(x w_inᵀ)² w_out, (tokens, width) of x's dtype, by FP8 kernels."""
    if fp8 is None:
        fp8 = feed_forward_weights(*fp8_weights((w_in.detach(), w_out.detach())), w_in.size(1))
    entering = x if isinstance(x, Quantized) else (x, None, None)
    return FeedForwardFP8.apply(w_in, w_out, grads, fp8, *entering)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Against bfloat16, from which the result and its gradients may differ by FP8's rounding."""
    def inputs(tokens: int, width: int, hidden: int) -> tuple[Tensor, ...]:
        x, w_in, w_out = (torch.randn(rows, width, device=device) for rows in (tokens, hidden, hidden))
        return F.rms_norm(x, (width,)).to(dtype), (w_in * 0.02).to(dtype), (w_out * 0.02).to(dtype)

    real = ((16384, 768, 3072), (49152, 768, 3072))
    for tokens, width, hidden in real if size == "real" else ((48, 16, 32), (144, 64, 96)):
        grad = torch.randn(tokens, width, device=device).to(dtype)
        yield Example(
            "MLP, both ways, FP8 with the weights' gradients (against bf16)",
            f"{tokens:,} × {width} × {hidden}", partial(inputs, tokens, width, hidden),
            partial(feed_forward_fp8, grads=None, fp8=None), feed_forward_reference,
            12.0 * tokens * width * hidden, 8.0 * tokens * (width + hidden), rate=2,
            wrap=partial(both_ways, gradients=lambda grad=grad: (grad,), wanted=(0, 1, 2)),
            slack=0.1 + rounding_slack(device))
