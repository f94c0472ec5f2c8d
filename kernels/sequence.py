"""Where packed sequences start and end, and shifts along them that never cross the start of one."""
from typing import NamedTuple

import torch
from torch import Tensor


def previous(x: Tensor, is_start: Tensor) -> Tensor:
    """The row of the token before each token, like x (n, ...); zero where a sequence starts.

    is_start (n,) bool. The first row has no predecessor: what it gets is only defined if is_start[0] is true.
    """
    shifted = torch.cat([x[:1], x[:-1]])
    return shifted.masked_fill(is_start.view(-1, *[1] * (x.dim() - 1)), 0)


def starts(cu_seqlens: Tensor, n: int) -> Tensor:
    """Whether a sequence starts at each of n tokens, (n,) bool; `cu_seqlens` as in a batch, n at its end."""
    is_start = torch.zeros(n + 1, dtype=torch.bool, device=cu_seqlens.device)
    return is_start.index_fill_(0, cu_seqlens.long(), True)[:n]


class Sequences(NamedTuple):
    """Where the sequences of n packed tokens lie."""
    bounds: Tensor  # (sequences + 1,) int32: where each starts, n at the end; empty ones may come last
    longest: int  # No sequence has more tokens.
    first: Tensor  # (n,) int32: the first token of each token's sequence
    end: Tensor  # (n,) int32: where that sequence ends

    @classmethod
    def of(cls, bounds: Tensor, longest: int, n: int) -> "Sequences":
        """From what a batch says of them, computed on the device, so that the host does not wait."""
        tokens = torch.arange(n, device=bounds.device, dtype=bounds.dtype)
        place = torch.searchsorted(bounds, tokens, right=True)
        return cls(bounds, longest, bounds[place - 1], bounds[place])
