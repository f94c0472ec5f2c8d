"""The whole MLP with its residual: R + relu(X W_inᵀ)² W_out, and its gradients, on the products of `kernels.mlp.relu_squared`.

No pass reads two activations and writes a third for the sum. In bfloat16 `mlp` writes over the residual: the last product adds to it
where it stands. An FP8 product cannot add: there both summands are returned, and who reads the sum makes it (`kernels.mlp.residual`).
`mlp_reference` is its plain form, which leaves the residual as it is. One H200, 49,152 tokens, 768 → 3072 (README.md): both ways 2.16 ms
where compiled PyTorch takes 2.34, in FP8 1.83, with a pass for the sum.

In FP8 the products forward and those of the input's gradient are FP8; the weights' gradients stay bfloat16, or are FP8 too with
`fp8_weight_grads`, which spares everything of hidden width in bfloat16. The scales (`kernels.fp8.scales`) need no state and no pass of
their own over the hidden activations: a row's norm bounds its elements and, by Cauchy and Schwarz, what products make of it. Such a
bound lies 5 to 15 binades above a typical element, and FP8 keeps its relative precision over 15 (e4m3) or 30 (e5m2). Of a gradient's
rows SAMPLED ones are enough: an element of another row saturates only if alone it is larger than all of theirs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8.formats import Quantized, round_to_fp8
from kernels.fp8.matmul import product
from kernels.fp8.quantize import quantize, quantize_reference
from kernels.fp8.scales import (
    gradient_scales,
    gradient_scales_reference,
    mlp_scales,
    mlp_scales_reference,
)
from kernels.fp8.weights import FP8Weight, fp8_weights, fp8_weights_reference
from kernels.mlp import relu_squared
from kernels.mlp.relu_squared import (
    relu_squared_backward,
    relu_squared_backward_fp8,
    relu_squared_backward_fp8_reference,
    relu_squared_backward_reference,
    relu_squared_fp8,
    relu_squared_fp8_reference,
    relu_squared_reference,
)

SAMPLED = 4096                  # rows at least of which a gradient's scale takes the largest norm; 49,152 take 24 µs, this many 4


class MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        act = relu_squared(x, w_in)
        ctx.save_for_backward(x, w_in, w_out, act)
        ctx.mark_dirty(residual)
        return residual.addmm_(act, w_out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        x, w_in, w_out, act = ctx.saved_tensors
        grad = grad.contiguous()
        grad_pre = relu_squared_backward(grad, w_out, act)
        return grad, grad_pre @ w_in, grad_pre.T @ x, act.T @ grad


def to_fp8(x: Tensor, scale: Tensor, fused: bool, both: bool, in_pairs: bool = False) -> tuple[Tensor, Tensor | None]:
    """x / scale in e4m3 and, if `both`, its transpose, each contiguous, the transpose in `paired` order if `in_pairs`."""
    if fused:
        return quantize(x, scale, both=both, in_pairs=in_pairs)
    return quantize_reference(x, scale, in_pairs=in_pairs) if both else (round_to_fp8(x, scale, torch.float8_e4m3fn), None)


class MLPWeights(NamedTuple):
    w_in: FP8Weight
    w_out: FP8Weight
    x_scale: Tensor  # from here on `kernels.fp8.scales.mlp_scales`
    act_scale: Tensor
    pre_scale: Tensor
    grad_bound: Tensor


def mlp_weights(w_in: FP8Weight, w_out: FP8Weight, width: int, fused: bool = True) -> MLPWeights:
    return MLPWeights(w_in, w_out, *(mlp_scales if fused else mlp_scales_reference)(w_in.norm, w_out.norm, width))


class FP8MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w_in: Tensor, w_out: Tensor, weights: MLPWeights, fused: bool, fp8_weight_grads: bool,
                into: tuple[Tensor, Tensor] | None, x: Tensor, *x8: Tensor) -> Tensor:
        (in8, in8_transposed, _, in_scale), (out8, out8_transposed, _, out_scale), x_scale, act_scale, pre_scale, grad_bound = weights
        x8, x8_transposed = x8 or to_fp8(x, x_scale, fused, fp8_weight_grads, in_pairs=fp8_weight_grads)
        if fp8_weight_grads:
            act8, act8_transposed = (relu_squared_fp8 if fused else relu_squared_fp8_reference)(x8, in8, pre_scale, act_scale)
            kept = x8_transposed, act8, act8_transposed
        else:
            act8 = torch.empty(len(x), len(w_in), dtype=x8.dtype, device=x.device)
            act = (relu_squared if fused else relu_squared_reference)(x8, in8, pre_scale, act8, act_scale)
            kept = x.type_as(act), act, None
        ctx.fused, ctx.fp8_weight_grads, ctx.into = fused, fp8_weight_grads, into
        ctx.save_for_backward(*kept, in8_transposed, out8, x_scale, in_scale, out_scale, act_scale, grad_bound)
        return product(act8, out8_transposed.T, act_scale, out_scale, fast=True).type_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, act, act_transposed, in8_transposed, out8, x_scale, in_scale, out_scale, act_scale, bound = ctx.saved_tensors
        grad, (into_in, into_out) = grad.contiguous(), ctx.into or (None, None)
        scales = gradient_scales if ctx.fused else gradient_scales_reference
        grad_scale, product_scale, pre_scale = scales(grad[::max(len(grad) // SAMPLED, 1)], out_scale, bound)
        grad8, grad8_transposed = to_fp8(grad, grad_scale, ctx.fused, ctx.fp8_weight_grads, in_pairs=ctx.fp8_weight_grads)
        if ctx.fp8_weight_grads:                                         # x, act and act_transposed are FP8 here
            backward = relu_squared_backward_fp8 if ctx.fused else relu_squared_backward_fp8_reference
            pre8, pre8_transposed = backward(grad8, out8, act, product_scale, act_scale, pre_scale)
            grad_in = product(pre8_transposed, x.T, pre_scale, x_scale, fast=False, out=into_in)
            grad_out = product(act_transposed, grad8_transposed.T, act_scale, grad_scale, fast=False, out=into_out)
        else:
            pre8 = torch.empty(act.shape, dtype=torch.float8_e5m2, device=x.device)
            backward = relu_squared_backward if ctx.fused else relu_squared_backward_reference
            grad_pre = backward(grad8, out8, act, product_scale, pre8, pre_scale)
            grad_in, grad_out = grad_pre.T @ x, act.T @ grad.type_as(act)
            if ctx.into:
                into_in.copy_(grad_in)
                into_out.copy_(grad_out)
        grad_x = product(pre8, in8_transposed.T, pre_scale, in_scale, fast=False)
        return *((None, None) if ctx.into else (grad_in, grad_out)), None, None, None, None, grad_x, None, None


def fp8_mlp(x: Tensor | Quantized, w_in: Tensor, w_out: Tensor, fused: bool, fp8_weight_grads: bool, weights: MLPWeights | None,
            into: tuple[Tensor, Tensor] | None) -> Tensor:
    if isinstance(x, Quantized) and not fp8_weight_grads:
        raise ValueError("x is there in FP8 alone, but for bfloat16 gradients of the weights it must be in bfloat16")
    made = (w_in.detach(), w_out.detach()) if weights is None else ()
    weights = weights or mlp_weights(*(fp8_weights if fused else fp8_weights_reference)(made), w_in.size(1), fused)
    return FP8MLP.apply(w_in, w_out, weights, fused, fp8_weight_grads, into, *(x if isinstance(x, Quantized) else (x,)))


def has_mlp(device: torch.device) -> bool:
    """Hopper and Blackwell servers: the tiles take up to 226 KB of shared memory, which other GPUs do not have."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def mlp_reference(residual: Tensor, x: Tensor | Quantized, w_in: Tensor, w_out: Tensor, fp8: bool,
             fp8_weight_grads: bool = False, weights: MLPWeights | None = None,
             into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
    """residual + relu(x w_inᵀ)² w_out, in FP8 as its two summands: residual, x (tokens, width), x in FP8 with normed rows, with
    `fp8_weight_grads` perhaps a `Quantized`; w_in, w_out (hidden, width).

    Its FP8 form multiplies in float32 where the kernel is fused: it is there to compare with, not to be fast. `fp8_weight_grads`
    changes nothing without `fp8`. `weights`: w_in and w_out in FP8, where they are at hand; else they are made. `into`, like w_in and
    w_out: in FP8 their gradients are written there, over what it held, in place of being returned, so that no first one is added to zeros.
    """
    if fp8:
        return residual, fp8_mlp(x, w_in, w_out, False, fp8_weight_grads, weights, into)
    return residual + F.relu(F.linear(x, w_in)).square() @ w_out,


def mlp(residual: Tensor, x: Tensor | Quantized, w_in: Tensor, w_out: Tensor, fp8: bool,
        fp8_weight_grads: bool = False, weights: MLPWeights | None = None, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
    """As `mlp_reference`, by Triton kernels, in bfloat16 over `residual`; in FP8 tokens, width and hidden are multiples of 16."""
    if fp8:
        return residual, fp8_mlp(x, w_in, w_out, True, fp8_weight_grads, weights, into)
    return MLP.apply(residual, x, w_in, w_out),
