"""The copy head's parameters, and the two numbers a token by which the loss mixes both probabilities."""
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.loss import Mixture
from kernels.sequence import Sequences

# By so much the first score of not copying is above that of a key that equals its query. So one such key
# begins with 0.7% of the probability.
FIRST_MARGIN = 5.0


def project(x: Tensor, weight: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, (n, channels) each, normed; and the score of not copying, (n,) float32."""
    q, k = F.linear(x, weight).unflatten(-1, (2, -1)).float().unbind(-2)
    q, k = (F.rms_norm(y, y.shape[-1:]).to(x.dtype) for y in (q, k))
    return q, k, (q * gate).sum(-1) + bias


class CopyHead(nn.Module):
    """`weight` (2 channels, width) makes queries and keys. `gate` (channels,) is a key that all queries see.

    It makes the score of not copying, with `bias`. Without channels there is no parameter and no mixture.
    """

    def __init__(self, channels: int, width: int, scale: float, dtype: torch.dtype, device: torch.device):
        """`scale`: of a normed query times a normed key."""
        super().__init__()
        self.scale, self.weight, self.gate, self.bias = scale, None, None, None
        if channels:
            self.weight = nn.Parameter(torch.empty(2 * channels, width, dtype=dtype, device=device))
            self.gate, self.bias = (nn.Parameter(torch.zeros(n, device=device)) for n in (channels, 1))

    @torch.no_grad()
    def initialise(self, bound: float, generator: torch.Generator) -> None:
        """Queries and keys start as the same projection, uniform in ±bound, with next to no copying.

        So like states find each other from the first step on. Otherwise that waits for chance, and some
        seeds never make up for it (records/ideas.md).
        """
        if self.weight is not None:
            queries, keys = self.weight.chunk(2)
            keys.copy_(queries.uniform_(-bound, bound, generator=generator))
            self.gate.zero_()
            self.bias.fill_(self.scale * len(keys) + FIRST_MARGIN)

    def mixture(self, x: Tensor, batch, sequences: Sequences, project: Callable,
                pointer_sums: Callable) -> Mixture | None:
        """For the loss of `batch` from what the head sees, x (n, width); None without a copy head.

        `project` and `pointer_sums` are those of this package, or their kernels and references.
        """
        if self.weight is None:
            return None
        q, k, rest = project(x, self.weight, self.gate, self.bias)
        matching, every = pointer_sums(
            q, k, batch.tokens, batch.targets, sequences, self.scale)
        return Mixture(matching - rest, -F.softplus(every - rest))
