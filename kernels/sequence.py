"""Where packed sequences start, and shifts along them that never cross the start of one."""
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


def sequence_bounds(cu_seqlens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Where each token's sequence begins and ends, (n,) each; `cu_seqlens` as in a batch, n at its end."""
    place = torch.searchsorted(cu_seqlens, torch.arange(n, device=cu_seqlens.device, dtype=cu_seqlens.dtype),
                               right=True)
    return cu_seqlens[place - 1], cu_seqlens[place]
