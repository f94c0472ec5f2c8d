"""Keys of older weights made like those of the present weights, by reading a little of the text again.

A model's states of a text drift while it trains. So the oldest keys of a datastore are hardly like any query
of the model that is scored. For each of PARTS parts of the states, by age, W is the matrix that minimises

    Σ |k W − k'|² + RIDGE n |W − 1|²

over n states whose keys were k when they were stored and are k' by the present weights. Then k W replaces k.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

PARTS = 32          # of the states, by age; each has a map of its own
READ = 2 ** 16      # states of a rank that are read again, over all parts
LEAST = 16          # Fewer are read again if that would be more than a LEAST-th of all.
RIDGE = 0.02


def stretches(tokens: Tensor, longest: int, most: int) -> Tensor:
    """Rows to read again, (PARTS, n): one stretch in each part of the signed `tokens` (count,).

    It begins where a sequence does, as far as sequences have at most `longest` tokens. n is a multiple of 16,
    at most `most`, and 0 where there are too few tokens.
    """
    count, device = len(tokens), tokens.device
    n = min(min(READ, count // LEAST) // PARTS, most) // 16 * 16
    begin = torch.arange(PARTS, device=device) * count // PARTS
    near = (begin[:, None] + torch.arange(longest, device=device)).clamp(max=count - 1)
    begin += (tokens[near] < 0).int().argmax(1)
    return begin.clamp(max=count - n)[:, None] + torch.arange(n, device=device)


def batch_of(tokens: Tensor, targets: Tensor, form):
    """A batch like `form`, of signed `tokens` (parts, n) and their `targets`, without candidates and rows."""
    is_start = tokens < 0
    is_start[:, 0] = True
    bounds = is_start.flatten().nonzero().flatten().int()
    none = tokens.new_empty(0)
    return form._replace(
        tokens=(tokens.abs() - 1).clamp(min=0).flatten(), targets=targets.flatten(),
        cu_seqlens=F.pad(bounds, (0, 1), value=tokens.numel()), candidates=none, weights=none, rows=none)


def signed(tokens: Tensor, is_start: Tensor) -> Tensor:
    """Tokens (n,) counted from 1, and negative where a sequence starts."""
    return (tokens + 1) * (1 - 2 * is_start.int())


def nearest_maps(old: Tensor, new: Tensor) -> Tensor:
    """W of each part, (parts, channels, channels) float32, from keys `old` and `new` (parts, n, channels)."""
    old, new = old.float(), new.float()
    ridge = RIDGE * old.shape[1] * torch.eye(old.shape[2], device=old.device)
    return torch.linalg.solve(old.mT @ old + ridge, old.mT @ new + ridge)
