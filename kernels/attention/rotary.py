"""(a, b) ← (a cos − b sin, a sin + b cos): rotary positions (arXiv 2104.09864) on some of a head's channels.

Channels (i, i + r) of the q and k of a token at position t are rotated by the angle t · frequency i. A dot
product q · k then depends on positions through their distance alone. The rest of the head has no position: it
compares contents wherever they stand.

The tables are rescaled each time the attention window grows (YaRN, arXiv 2309.00071): channels that turn
often within the old window keep their frequency, and those that turn less than once are slowed by the growth,
so that no angle is new to the model.
"""
import math

import numpy as np
import torch
from torch import Tensor

from kernels.backend import tl, triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (n, heads, channels), its first 2r channels rotated in pairs (i, i + r); cos, sin (n, r) float32."""
    r = cos.size(-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b, rest = x[..., :r].to(wide), x[..., r:2 * r].to(wide), x[..., 2 * r:]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([(a * cos - b * sin).type_as(x), (a * sin + b * cos).type_as(x), rest], dim=-1)


@triton.jit
def angles(cos_ptr, sin_ptr, token, channel, inside, R: tl.constexpr):
    """Factors (tokens, channels) of a channel and its partner: cos and ∓sin, or 1 and 0 without position."""
    at, rotated = token[:, None] * R + channel % R, inside & (channel < 2 * R)
    sin = tl.load(sin_ptr + at, mask=rotated, other=0.0)
    return tl.load(cos_ptr + at, mask=rotated, other=1.0), tl.where(channel < R, -sin, sin)


@triton.jit
def load_rotated(rows, cos, sin, channel, inside, R: tl.constexpr):
    """x (tokens, channels) and x rotated, float32; `rows` point to their first channels, cos and sin are from
    `angles`.

    Each channel's partner is read a second time, from cache: so a row keeps one layout and needs no shared
    memory.
    """
    x = tl.load(rows + channel, mask=inside, other=0.0).to(tl.float32)
    partner = rows + (channel + R) % (2 * R)
    partner = tl.load(partner, mask=inside & (channel < 2 * R), other=0.0).to(tl.float32)
    return x, x * cos + partner * sin


def yarn(
    frequency: np.ndarray, old: int, new: int, alpha: float = 1.0, beta: float = 32.0
) -> tuple[np.ndarray, float]:
    """Frequencies (radians a token) for a window grown from `old` to `new` tokens, and a factor for the
    attention scale.

    A channel with more than `beta` turns in the old window keeps its frequency, one with fewer than `alpha`
    is slowed.
    """
    turns = old * frequency / (2 * math.pi)
    keep = np.clip((turns - alpha) / (beta - alpha), 0, 1)
    return frequency * (old / new + keep * (1 - old / new)), 1 + 0.2 * math.log(new / old)


def rotary_tables(
    windows: list[int],  # in tokens, in the order in which training uses them
    positions: int,  # tokens of the longest batch: positions count through all of its sequences
    channels: int,  # how many channels of a query and key are rotated: 2r
    base: float,  # the slowest pair turns this many times more slowly than the fastest
    attention_scale: float,  # of the first window
    rescale: bool,  # whether to rescale by YaRN where the window grows
    device: torch.device,
) -> dict[int, tuple[Tensor, Tensor, float]]:
    """For each window: cos and sin (positions, r) float32, and the attention scale."""
    frequency, window, tables = base ** -np.linspace(0, 1, channels // 2), windows[0], {}
    position = torch.arange(positions, dtype=torch.float64)
    for new in windows:
        if rescale and new > window:
            frequency, growth = yarn(frequency, window, new)
            attention_scale, window = attention_scale * growth, new
        angle = torch.outer(position, torch.from_numpy(frequency))
        cos, sin = angle.cos().float().to(device), angle.sin().float().to(device)
        tables.setdefault(new, (cos, sin, attention_scale))
    return tables
