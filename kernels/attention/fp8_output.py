"""y (s W)ᵀ with a learned scale s, as in `output.py`, with all three matmuls in FP8 (`kernels/fp8`).

It brings attention's result y back to the residual's width (the matrix O). It is one autograd function,
because autograd requires a tensor's gradient to have the tensor's dtype: y is bf16, and what is kept of it is
FP8.

- Of y only the transpose in FP8 is kept for the backward pass, half the bytes of bf16.
- Neither y nor the gradient that comes in is normed, so nothing known beforehand bounds them. Their e4m3
  scales come from the norms of SAMPLED of their rows. An element of another row saturates only if it alone is
  larger than each sampled row's norm.
- s multiplies the result of a matmul, not W: W is quantised once a step, for all its micro-batches. The tiny
  kernel that makes a scale of the norms also multiplies s by W's scale, so no launch is spent on that.
- The transposes are `paired`, an order of tokens that is cheap to write. A sum over tokens may take any
  order.
"""
from collections.abc import Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.output import scaled_linear, scaled_reference, weight_gradients
from kernels.backend import check
from kernels.example import Example, both_ways
from kernels.fp8.formats import rounding_slack
from kernels.fp8.matmul import fp8_matmul
from kernels.fp8.quantize import quantize
from kernels.fp8.scales import output_scales
from kernels.fp8.weights import FP8Weight, fp8_weights
from kernels.gradients import Gradient

SAMPLED = 4096  # rows, at least, that set the scale of y or of the incoming gradient; all, if there are fewer


def sample(x: Tensor) -> Tensor:
    """SAMPLED of x's rows, or up to twice as many, at equal distances; all rows, if there are fewer."""
    return x[::max(len(x) // SAMPLED, 1)]


class OutputFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, weight: Tensor, scale: Tensor, grad: Gradient | None,
                fp8: FP8Weight) -> Tensor:
        y_scale, learned_scale = output_scales(sample(y), fp8.scale, scale)
        y8, y8_transposed = quantize(y, y_scale, in_pairs=True)
        ctx.grad = grad
        ctx.save_for_backward(y8_transposed, weight, scale, fp8.transposed, fp8.scale, y_scale)
        return fp8_matmul(y8, fp8.q.T, y_scale, learned_scale, fast=True).type_as(y)

    @staticmethod
    def backward(ctx, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        y8_transposed, weight, scale, weight8_transposed, weight_scale, y_scale = ctx.saved_tensors
        out_grad = out_grad.contiguous()
        grad_scale, learned_scale = output_scales(sample(out_grad), weight_scale, scale)
        grad8, grad8_transposed = quantize(out_grad, grad_scale, in_pairs=True)
        y_grad = fp8_matmul(grad8, weight8_transposed.T, grad_scale, learned_scale, fast=False)
        scaled_grad = fp8_matmul(grad8_transposed, y8_transposed.T, grad_scale, y_scale, fast=False)
        of_weight = weight_gradients(ctx.grad, scaled_grad, weight, scale)
        return y_grad.type_as(out_grad), *of_weight, None, None


def output_fp8_reference(y: Tensor, weight: Tensor, scale: Tensor, grad: Gradient | None = None,
                         fp8: FP8Weight | None = None) -> Tensor:
    """Plain PyTorch form of `output_fp8`, in y's dtype. It ignores `grad` and `fp8`: autograd makes the
    gradients."""
    return F.linear(y, scaled_reference(weight, scale))


def output_fp8(
    y: Tensor,  # (n, heads · head_dim) bf16, rows contiguous; n and the width are multiples of 16
    weight: Tensor,  # (width, heads · head_dim) of y's dtype, contiguous; width a multiple of 16
    scale: Tensor,  # 0-dim float32, learned
    grad: Gradient | None = None,  # where the weight's gradient goes; None: autograd gets it
    fp8: FP8Weight | None = None,  # the weight in FP8, made once a step; None: it is made here
) -> Tensor:
    """y (scale · weight)ᵀ, (n, width) of y's dtype. Gradients for y, weight and scale.

    An element is off by FP8's rounding of y and of the weight. Of rows that are not sampled, elements beyond
    448 times the scale saturate, an infinity too. A NaN stays one. Raises a ValueError for other shapes.
    """
    check(y.ndim == 2 and y.stride(1) == 1 and all(size and size % 16 == 0 for size in y.shape), "y", y,
          "(n, heads · head_dim), both multiples of 16, with contiguous rows, not empty")
    check(weight.ndim == 2 and len(weight) % 16 == 0 and weight.shape[1:] == y.shape[1:]
          and weight.dtype == y.dtype and weight.is_contiguous(), "weight", weight,
          f"(width, {y.shape[1]}) with a width that is a multiple of 16, contiguous, of y's dtype")
    check(scale.ndim == 0 and scale.dtype == torch.float32, "scale", scale, "one float32, 0-dim")
    if fp8 is None:
        fp8, = fp8_weights((weight.detach(),))
    return OutputFP8.apply(y, weight, scale, grad, fp8)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Both ways, as near to float64 as FP8 comes. The scale's gradient is left out: in it much cancels."""
    def random(rows: int, columns: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, device=device) * factor).to(dtype)

    def inputs(n: int, inner: int, width: int) -> tuple[Tensor, ...]:
        return random(n, inner), random(width, inner, 0.02), torch.tensor(0.7, device=device)

    def gradients(n: int, width: int) -> tuple[Tensor]:
        return random(n, width),

    def in_bfloat16(y: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return scaled_linear(y, weight, scale)[0]

    real = (49152, 768, 768), (98304, 768, 768)
    for n, inner, width in real if size == "real" else ((16, 16, 16), (48, 32, 16), (144, 64, 96)):
        yield Example(
            "attention's output, both ways, FP8 (against bf16)", f"{n:,} × {inner} × {width}",
            partial(inputs, n, inner, width), output_fp8, output_fp8_reference, 6.0 * n * inner * width,
            n * (6.0 * inner + 4.0 * width), rate=2, baseline=in_bfloat16, compile=False,
            wrap=partial(both_ways, gradients=cache(partial(gradients, n, width)), wanted=(0, 1)),
            slack=0.1 + rounding_slack(device))
