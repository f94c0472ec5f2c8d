"""u = m̂ / (√v̂ + ε): one Adam step (arXiv 1412.6980) of flat tensors, with decoupled weight decay.

There is no Triton here: `torch.compile` fuses the function into one kernel.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.optimizer.master_weight import Master, Rule, apply_update


class Shared(NamedTuple):
    """How rows of tables are updated that share with like rows (shared_updates.py)."""
    own: Tensor     # (rows,) float32: the share of a row's own update
    more: Tensor    # like the weight: what is added


def adam_update(weight: Master, grad: Tensor, first: Tensor, second: Tensor, steps: Tensor, rule: Rule,
                betas: tuple[float, float], shared: Shared | None = None) -> None:
    """Update a weight (n,), its moments and the count of steps in place.

    Unless `rule.finite` the weight and the count stay, and the gradient counts as zero.

    `grad` (n,) has any dtype. `first` and `second` (n,) are float32: the running means of the gradient and of
    its square. `steps` is 0-dim float32, the number of updates so far. ε is 1e-10. With `shared`
    the weight is rows of tables, one after another.
    """
    grad = torch.where(rule.finite, grad, 0).float()
    steps.add_(rule.finite)
    second.lerp_(grad.square(), 1 - betas[1])
    first.lerp_(grad, 1 - betas[0])
    mean = first / (1 - betas[0] ** steps)
    update = mean / ((second / (1 - betas[1] ** steps)).sqrt() + 1e-10)
    if shared:
        update = (update.unflatten(0, (len(shared.own), -1)) * shared.own[:, None]).flatten() + shared.more
    apply_update(weight, update, rule)
