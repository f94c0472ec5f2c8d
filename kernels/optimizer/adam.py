"""u = m̂ / (√v̂ + ε): one Adam step of flat tensors, with decoupled cautious decay on the exact master weight."""
import torch
from torch import Tensor

from kernels.optimizer.master_weight import apply_update


def adam_update(weight: Tensor, mantissa_bits: Tensor | None, grad: Tensor, first: Tensor | None, second: Tensor, steps: Tensor,
                finite: Tensor, lr: Tensor, decay: Tensor, betas: tuple[float, float], cautious: bool) -> None:
    """Update (n,) `weight`, its moments (float32; `first` is None where β₁ is 0) and the count of `steps` in place, unless not `finite`.

    `steps`, `finite`, `lr` and `decay` (a share of the weight, times lr) are 0-dim tensors: they change without a new program.
    """
    grad = torch.where(finite, grad, 0).float()
    steps.add_(finite)
    second.lerp_(grad.square(), 1 - betas[1])
    if first is None:
        mean = grad
    else:
        first.lerp_(grad, 1 - betas[0])
        mean = first / (1 - betas[0] ** steps)
    update = mean / ((second / (1 - betas[1] ** steps)).sqrt() + 1e-10)
    apply_update(weight, mantissa_bits, update, finite, lr, decay, cautious)
