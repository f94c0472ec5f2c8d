"""x ≈ scale · q with q in 8 bits: what FP8 is, and how this project trains with it.

**Formats.** An FP8 number has a sign, an exponent and a mantissa, like any float
(Micikevicius et al., arXiv 2209.05433).

            exponent   mantissa   largest   full precision over   rounding error
    e4m3    4 bits     3 bits         448   15 powers of two      at most 6.25%
    e5m2    5 bits     2 bits      57,344   30 powers of two      at most 12.5%

Activations and weights are e4m3, for they need precision. Gradients vary more in size, so those whose bound
is loose are e5m2. The matrix units multiply FP8 at twice the rate of bfloat16 and add in float32, and FP8
takes half the memory traffic.

**Scales.** A tensor is divided by one float32 number before it is rounded, and the matmul multiplies its
result by the two scales. The scale must be large enough that no element passes the format's largest number.
Usually it comes from the maxima of earlier steps. Here it comes from norms of rows, because a row's norm
bounds each of its elements:

- A row that was normed has the norm √width, whatever it holds. Its scale is a constant, `normed_scale`.
- A weight's scale is its largest row norm over 448. It is computed once a step (`weights.py`).
- An element of x Wᵀ is the dot product of two rows. By Cauchy and Schwarz it is at most the product of their
  norms. So the bounds of the hidden activations, and of their gradient, follow from the norms of x, W and the
  incoming gradient. No pass over the hidden activations looks for their maximum (`scales.py`).
- The head's scales are constants, because its softcap bounds the gradient of its logits (`matmul.py`).

So a scale depends on nothing but the step's own numbers. There is no state to save and nothing to warm up.
The price is that a bound lies 5 to 15 powers of two above a typical element. A floating-point number keeps
its relative precision that far down: e4m3 over 15 powers of two, e5m2 over 30.

**Saturation.** What is too large becomes the format's largest number. The cast alone would make it NaN, since
e4m3 has no infinity. A NaN stays a NaN, so a broken run shows.

**Transposes.** Hopper's FP8 matmul reads both operands contiguous along the dimension that it sums over; in
bfloat16 it reads either way. A linear layer sums over three different dimensions:

    y      = x Wᵀ    over the inputs     needs x and W as they lie in memory
    grad_x = g W     over the outputs    needs g as it lies, and Wᵀ
    grad_W = gᵀ x    over the tokens     needs gᵀ and xᵀ

So every tensor is needed both ways. A kernel that has a tile of q in registers writes q and qᵀ. A pass that
transposes q later would read and write everything once more.

**Paired order.** A transposed tile of single bytes is expensive to store. In the transposes that are summed
over tokens, the tokens of each 16 stand in the order 0, 8, 1, 9, … 7, 15. A thread that holds tokens r and r
+ 8 packs them to one 16-bit number, and the transposition moves 16-bit numbers, which one instruction
(`stmatrix`) does. A sum over tokens does not depend on their order, as long as both operands have the same
one. `paired` is this order in plain PyTorch.

**Accumulation.** Forward matmuls use Hopper's fast accumulation, which keeps fewer bits of the sum. Gradients
use the exact one (`fast` of `fp8_matmul`).

**Autograd** demands that a gradient has its tensor's dtype, so no FP8 tensor may pass from one autograd
function to another with a gradient. `Quantized` carries FP8 numbers beside a stand-in, through which the
gradient flows in bfloat16.

**Measured.** One H200, 49,152 tokens: the head's matmul of 768 × 50,304 runs at 1,085 TFLOP/s, in bfloat16 at
about 650. The MLP, forward and backward, takes 1,521 µs where compiled bfloat16 takes 2,441. Q, K and V with
what follows take 805 µs where our bfloat16 kernels take 1,199. Against float64 the gradients of the MLP's
weights are off by 8.1% and 5.8% (W_in and W_out), where bfloat16 gradients of the same FP8 activations are
off by 5.3% and 4.4%. Validation losses, one run a side: 3.2756 with the MLP's forward and input gradient in
FP8, 3.2744 in bfloat16; in a shorter run 3.6222 and 3.6248 (two seeds) with the MLP's weight gradients in
FP8 as well, 3.6213 without; 3.2804 with Q, K and V in FP8, 3.2796 without. The head in FP8 is from
modded-nanogpt (@YouJiacheng).
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def has_fp8(device: torch.device) -> bool:
    """Whether the device has FP8 matrix units: Ada, Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def widened(x: Tensor) -> Tensor:
    """x in float32, or as it is if it is float64: what references compute in."""
    return x if x.dtype == torch.float64 else x.float()


def round_to_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in `dtype`, saturated, divided in float32 (float64 if x is float64)."""
    limit = torch.finfo(dtype).max
    return (widened(x) / scale).clamp(-limit, limit).to(dtype)


class Quantized(NamedTuple):
    """Normed rows x (n, width) that exist in FP8 alone."""

    stand_in: Tensor  # (n, width) of x's dtype, one number expanded: autograd sends x's gradient to it
    q: Tensor  # (n, width) float8_e4m3fn: x over `normed_scale`
    transposed: Tensor  # (width, n), `paired`


def normed_scale(width: int) -> float:
    """The scale of e4m3 rows with a root mean square of 1: no element passes the row's norm, √width."""
    return width**0.5 / torch.finfo(E4M3).max


def paired(x: Tensor) -> Tensor:
    """x (rows, n) with each 16 columns in the order 0, 8, 1, 9, … 7, 15; contiguous. 16 must divide n."""
    return x.unflatten(1, (-1, 2, 8)).mT.flatten(1).contiguous()


def rounding_slack(device: torch.device) -> float:
    """How much farther from float64 than its reference an FP8 kernel may be.

    On a CPU Triton's interpreter rounds to FP8 wrongly where rounding changes the exponent.
    """
    return 1e-6 if device.type == "cuda" else 0.15


@triton.jit
def packed(low, high, dtype: tl.constexpr):
    """`low` and `high` in FP8, as one 16-bit number.

    They are joined before the conversion, because the conversion takes two numbers at a time and leaves them
    in one register.
    """
    low, high = tl.split(tl.join(low, high).to(dtype).to(tl.uint8, bitcast=True))
    return low.to(tl.int16) | (high.to(tl.int16) << 8)


@triton.jit
def pairs(x, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows r and r + 8 of each 16 in FP8, as one row of 16-bit numbers: (ROWS // 2, COLUMNS). One thread
    holds both."""
    low, high = tl.split(tl.permute(tl.reshape(x, (ROWS // 16, 2, 8, COLUMNS)), (0, 2, 3, 1)))
    return tl.reshape(packed(low, high, dtype), (ROWS // 2, COLUMNS))
