"""w ← (1 − s) w + s w̄ after the last step, with every row's norm restored; w̄ is a moving average of w.

Late weights move around a point that they do not reach, because the learning rate does not fall to zero. An
average of the weights is nearer to this point, but shorter than the weights. So the mixture restores the
norms. The idea is from record 92 of the public speedrun. On one H200, 1,200 + 30 steps, the mixture is worth
0.0042 of loss, or 0.018 where the learning rate ends at a quarter instead of 15% (the weights of one run
each, records/ideas.md).

Of 400 steps, hidden matrices want a time constant of 50 and embeddings one of 200. Here these are shares, so
that averages over fewer steps are of the same form.

An update of an average of 85 M numbers takes 0.3 ms of one H200, by the bytes that it moves. An update in
every fifth step is enough.
"""
from typing import NamedTuple

import torch
from torch import Tensor


class Averaged(NamedTuple):
    """A weight that has an average."""
    weight: Tensor              # of any shape whose numbers fill rows of the model's width
    bits: Tensor | None         # what bfloat16 cuts off the weight; zero after the mixture
    memory: float               # the time constant of the average, as a share of the averaged steps


class Averages:
    """Moving averages of weights over the last steps of a run, which is `total` steps long."""

    def __init__(self, weights: list[Averaged], total: int, last: int, every: int, share: float, width: int):
        """Averages begin `last` steps before the end (0: none) and take the weights after each `every`-th."""
        self.weights, self.total, self.every, self.share, self.width = weights, total, every, share, width
        self.start, self.last = max(total - last, 0), last
        averaged = weights if last else []
        self.state = [torch.zeros_like(w.weight, dtype=torch.float32) for w in averaged]

    def of(self, weight: Tensor) -> Tensor | None:
        """The average of this weight, if it has one."""
        pairs = zip(self.weights, self.state)
        return next((average for averaged, average in pairs if averaged.weight is weight), None)

    @torch.no_grad()
    def after(self, index: int) -> None:
        """To call after step `index`: average the weights; after the last step, mix in the averages."""
        since = index - self.start
        if since >= 0 and since % self.every == 0:
            for (weight, _, memory), average in zip(self.weights, self.state):
                if since == 0:
                    average.copy_(weight)
                average.lerp_(weight.float(), min(self.every / (memory * self.last), 1.0))
        if index == self.total - 1:
            for (weight, bits, _), average in zip(self.weights, self.state):
                rows, mean = (x.float().view(-1, self.width) for x in (weight, average))
                mixed = rows.lerp(mean, self.share)
                mixed *= rows.norm(dim=1, keepdim=True) / mixed.norm(dim=1, keepdim=True).clamp(min=1e-12)
                weight.copy_(mixed.view(weight.shape))
                if bits is not None:
                    bits.zero_()
