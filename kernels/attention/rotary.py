"""(a, b) ← (a cos − b sin, a sin + b cos) on part of each head's channels; the rest of the head has no position.

The tables are rescaled each time the attention window grows (YaRN, arXiv 2309.00071): channels that turn often within the
old window keep their frequency, those that turn less than once are slowed by the growth.
"""
import math

import numpy as np
import torch
from torch import Tensor

from kernels.backend import tl, triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (n, heads, head_dim) with its first 2r channels rotated in pairs (i, i + r); cos, sin (n, r) float32."""
    r = cos.size(-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b, rest = x[..., :r].to(wide), x[..., r:2 * r].to(wide), x[..., 2 * r:]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([(a * cos - b * sin).type_as(x), (a * sin + b * cos).type_as(x), rest], dim=-1)


@triton.jit
def angles(cos_ptr, sin_ptr, token, channel, inside, R: tl.constexpr):
    """(tokens, qk_dim) factors of each channel and of its partner: cos and ∓sin, and 1 and 0 on channels without a position."""
    at, rotated = token[:, None] * R + channel % R, inside & (channel < 2 * R)
    sin = tl.load(sin_ptr + at, mask=rotated, other=0.0)
    return tl.load(cos_ptr + at, mask=rotated, other=1.0), tl.where(channel < R, -sin, sin)


@triton.jit
def load_rotated(rows, cos, sin, channel, inside, R: tl.constexpr):
    """x (tokens, qk_dim) and x rotated, float32; `rows` point to their first channels."""
    x = tl.load(rows + channel, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(rows + (channel + R) % (2 * R), mask=inside & (channel < 2 * R), other=0.0).to(tl.float32)
    return x, x * cos + partner * sin


def yarn(frequency: np.ndarray, old: int, new: int, alpha: float = 1.0, beta: float = 32.0) -> tuple[np.ndarray, float]:
    """Frequencies (radians a token) for a window grown from `old` to `new` tokens, and the factor for the attention scale."""
    turns = old * frequency / (2 * math.pi)
    keep = np.clip((turns - alpha) / (beta - alpha), 0, 1)
    return frequency * (old / new + keep * (1 - old / new)), 1 + 0.2 * math.log(new / old)


def rotary_tables(windows: list[int], positions: int, channels: int, base: float, attention_scale: float, rescale: bool,
                  device: torch.device) -> dict[int, tuple[Tensor, Tensor, float]]:
    """For each window in tokens, in the order they are used: cos and sin (positions, channels / 2) and the attention scale."""
    frequency, window, tables = base ** -np.linspace(0, 1, channels // 2), windows[0], {}
    position = torch.arange(positions, dtype=torch.float64)
    for new in windows:
        if rescale and new > window:
            frequency, growth = yarn(frequency, window, new)
            attention_scale, window = attention_scale * growth, new
        angle = torch.outer(position, torch.from_numpy(frequency))
        tables.setdefault(new, (angle.cos().float().to(device), angle.sin().float().to(device), attention_scale))
    return tables
