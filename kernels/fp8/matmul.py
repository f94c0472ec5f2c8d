"""y = scale_a scale_b · a b for FP8 matrices a and b, by torch alone; and a linear layer for the head.

FP8 runs at twice the rate of bfloat16: on one H200 the matmul 49,152 × 768 × 50,304 reaches 1,085 TFLOP/s, in
bfloat16 about 650. `formats.py` explains FP8. A head in FP8 is from modded-nanogpt (@YouJiacheng).
"""
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.example import Example
from kernels.fp8.formats import E4M3, E5M2, round_to_fp8, widened

# The head's scales are constants (modded-nanogpt's). Its input is normed, so the range is known. The gradient
# of a logit softcapped by 23 sigmoid((z + 5) / 7.5) is at most 23 / 7.5 / 4 times the loss weight, for a loss
# summed over tokens.
HEAD_INPUT_SCALE, HEAD_WEIGHT_SCALE, HEAD_GRADIENT_SCALE = 100 / 448, 1.6 / 448, 0.75 / 448


def fp8_matmul(
    a: Tensor,  # (m, k) FP8, row-major
    b: Tensor,  # (k, n) FP8, column-major: Hopper multiplies in no other layout
    scale_a: float | Tensor,  # Tensor: 0-dim float32 on the device
    scale_b: float | Tensor,
    fast: bool,  # Hopper's fast accumulation, for forward passes; gradients want the exact one
    out: Tensor | None = None,  # (m, n) of any dtype: written over
) -> Tensor:
    """scale_a · scale_b · a b, (m, n) bfloat16, or `out`. At most one of a and b is e5m2."""
    scales = (s if isinstance(s, Tensor) else torch.full((), s, device=a.device) for s in (scale_a, scale_b))
    direct = out if out is not None and out.dtype == torch.bfloat16 else None
    result = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast, out=direct)
    return result if out is direct else out.copy_(result)


class FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = round_to_fp8(x, HEAD_INPUT_SCALE, E4M3), round_to_fp8(weight, HEAD_WEIGHT_SCALE, E4M3)
        ctx.save_for_backward(x8, weight8)
        return fp8_matmul(x8, weight8.T, HEAD_INPUT_SCALE, HEAD_WEIGHT_SCALE, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, weight8 = ctx.saved_tensors
        grad8 = round_to_fp8(grad, HEAD_GRADIENT_SCALE, E5M2)
        matmul = partial(fp8_matmul, scale_a=HEAD_GRADIENT_SCALE, fast=False)
        grad_x = matmul(grad8, weight8.T.contiguous().T, scale_b=HEAD_WEIGHT_SCALE)
        grad_weight = matmul(grad8.T.contiguous(), x8.T.contiguous().T, scale_b=HEAD_INPUT_SCALE)
        return grad_x, grad_weight


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (n, in) normed bf16, weight (out, in) bf16 -> (n, out) bf16; n, in and out multiples of 16. Gradients
    are bf16.

    The loss must be summed over tokens: the gradient's scale is a constant.
    """
    return FP8Linear.apply(x, weight)


def matmul_reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """As `fp8_matmul`, multiplied in float32 (float64 if a is float64)."""
    result = widened(a) @ widened(b) * (scale_a * scale_b)
    return result if a.dtype == torch.float64 else result.bfloat16()


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """The head's matmul, forward, against bfloat16's."""
    def inputs(m: int, k: int, n: int) -> tuple[Tensor, ...]:
        a, b = (torch.randn(rows, k, device=device).to(E4M3) for rows in (m, n))
        return a, b.T, torch.tensor(0.5, device=device), torch.tensor(0.02, device=device)

    def in_bfloat16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return a.bfloat16() @ b.bfloat16()

    real = size == "real"
    for m, k, n in ((16384, 768, 50304), (49152, 768, 50304)) if real else ((16, 16, 16), (48, 32, 80)):
        yield Example(
            "FP8 matmul (against bf16, with its conversion)", f"{m:,} × {k} × {n:,}",
            partial(inputs, m, k, n), partial(fp8_matmul, fast=real), matmul_reference,
            2.0 * m * k * n, k * (m + n) + 2.0 * m * n, rate=2, baseline=in_bfloat16,
            check_inputs=partial(inputs, min(m, 1024), k, n), slack=1e-2)
