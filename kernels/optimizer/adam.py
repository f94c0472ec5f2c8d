"""u = m̂ / (√v̂ + ε): one Adam step (arXiv 1412.6980) of flat tensors, with decoupled weight decay.

There is no Triton here: `torch.compile` fuses the function into one kernel.
"""
import torch
from torch import Tensor

from kernels.optimizer.master_weight import Master, Rule, apply_update
from kernels.optimizer.shared_updates import OWN


def adam_update(weight: Master, grad: Tensor, first: Tensor, second: Tensor, steps: Tensor, rule: Rule,
                betas: tuple[float, float], shared: Tensor | None = None) -> None:
    """Update a weight (n,), its moments and the count of steps in place.

    Unless `rule.finite` the weight and the count stay, and the gradient counts as zero.

    `grad` (n,) has any dtype. `first` and `second` (n,) are float32: the running means of the gradient and of
    its square. `steps` is 0-dim float32, the number of updates so far. ε is 1e-10. `shared`
    (n,) is what the update shares with like tokens (shared_updates.py), which leaves less of its own.
    """
    grad = torch.where(rule.finite, grad, 0).float()
    steps.add_(rule.finite)
    second.lerp_(grad.square(), 1 - betas[1])
    first.lerp_(grad, 1 - betas[0])
    mean = first / (1 - betas[0] ** steps)
    update = mean / ((second / (1 - betas[1] ** steps)).sqrt() + 1e-10)
    apply_update(weight, update if shared is None else OWN * update + shared, rule)
