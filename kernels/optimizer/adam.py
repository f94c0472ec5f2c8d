"""u = m̂ / (√v̂ + ε): one Adam step (arXiv 1412.6980) of flat tensors, with decoupled weight decay.

There is no Triton here: `torch.compile` fuses the function into one kernel.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.optimizer.master_weight import Master, Rule, apply_update


class Shared(NamedTuple):
    """How rows of tables, which come one after another, share updates with like rows (shared_updates.py)."""
    moved: Tensor       # (features, tables, width): the update of each feature
    of_row: Tensor      # (rows, features of a row) int64: which these are
    shares: Tensor      # like it, float32: of each in the row's update; the rest is the row's own

    def mixed(self, update: Tensor) -> Tensor:
        """The update of all tables, (numbers,), from their own."""
        _, tables, width = self.moved.shape
        own = update.view(tables, -1, width) * (1 - self.shares.sum(1))[:, None]
        shared = (share[:, None, None] * self.moved[of] for share, of in zip(self.shares.T, self.of_row.T))
        return (own + sum(shared).transpose(0, 1)).flatten()


def adam_update(weight: Master, grad: Tensor, first: Tensor, second: Tensor, steps: Tensor, rule: Rule,
                betas: tuple[float, float], shared: Shared | None = None) -> None:
    """Update a weight (n,), its moments and the count of steps in place.

    Unless `rule.finite` the weight and the count stay, and the gradient counts as zero.

    `grad` (n,) has any dtype. `first` and `second` (n,) are float32: the running means of the gradient and of
    its square. `steps` is 0-dim float32, the number of updates so far. ε is 1e-10.
    """
    grad = torch.where(rule.finite, grad, 0).float()
    steps.add_(rule.finite)
    second.lerp_(grad.square(), 1 - betas[1])
    first.lerp_(grad, 1 - betas[0])
    mean = first / (1 - betas[0] ** steps)
    update = mean / ((second / (1 - betas[1] ** steps)).sqrt() + 1e-10)
    if shared:
        update = shared.mixed(update)
    apply_update(weight, update, rule)
