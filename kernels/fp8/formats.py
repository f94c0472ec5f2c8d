"""The formats of FP8 and how numbers get into them."""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def has_fp8(device: torch.device) -> bool:
    """FP8 matrix units: Ada, Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def round_to_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max                          # the cast alone turns what is too large into NaN
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


class Quantized(NamedTuple):
    """Rows x of norm √width in FP8, where nobody wants them in bfloat16."""

    stand_in: Tensor  # (n, width) of x's dtype, no numbers: autograd's name for x, to which its gradient goes
    q: Tensor  # (n, width) float8_e4m3fn: x over `normed_scale`
    transposed: Tensor  # (width, n), `paired`


def normed_scale(width: int) -> float:
    """e4m3's scale of rows whose root mean square is 1: their norm, √width, which no element passes, becomes its largest number."""
    return width**0.5 / torch.finfo(torch.float8_e4m3fn).max


def paired(x: Tensor) -> Tensor:
    """x (rows, n) with each 16 columns as 0, 8, 1, 9, … 7, 15, contiguous: the order in which `kernels.mlp.relu_squared` transposes.

    Products that contract over the columns do not see it, if both sides have it.
    """
    return x.unflatten(1, (-1, 2, 8)).mT.flatten(1).contiguous()


@triton.jit
def packed(low, high, dtype: tl.constexpr):
    """Both in FP8, as one 16-bit number.

    Joined before the conversion, which takes two numbers at a time: those become one 16-bit number without further work.
    """
    low, high = tl.split(tl.join(low, high).to(dtype).to(tl.uint8, bitcast=True))
    return low.to(tl.int16) | (high.to(tl.int16) << 8)


@triton.jit
def pairs(x, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows r and r + 8 of each 16 in FP8, as one row of 16-bit numbers (ROWS // 2, COLUMNS): a thread holds both, so nothing moves."""
    low, high = tl.split(tl.permute(tl.reshape(x, (ROWS // 16, 2, 8, COLUMNS)), (0, 2, 3, 1)))
    return tl.reshape(packed(low, high, dtype), (ROWS // 2, COLUMNS))
