"""u = polar factor of the Nesterov momentum, each neuron's row divided by its running root mean square (arXiv 2510.05491).

The update in two elementwise halves; between them stands the orthogonalisation (newton_schulz.py).
"""
import torch
from torch import Tensor

from kernels.optimizer.master_weight import apply_update


def nesterov_momentum(grad: Tensor, momentum: Tensor, momentum_beta: Tensor, finite: Tensor) -> Tensor:
    """What is to be orthogonalised, in grad's shape and dtype; `momentum` (float32) is updated, unless not `finite`.

    `momentum_beta` and `finite` are 0-dim tensors: they change without a new program.
    """
    wide = torch.where(finite, grad, 0).float()
    momentum.lerp_(wide, 1 - momentum_beta)
    return wide.lerp(momentum, momentum_beta).to(grad.dtype)


def neuron_update(weight: Tensor, mantissa_bits: Tensor | None, update: Tensor, second: Tensor, finite: Tensor, lr: Tensor,
                  decay: Tensor, beta2: float, neuron_norm: bool, cautious: bool) -> None:
    """Apply orthogonalised updates to matrices (n, rows, columns) of `weight` in place. A row is a neuron.

    `second` (n, rows, 1) is the running mean square of a neuron's update; dividing by its root keeps the matrix's norm. `lr`
    (n, 1, 1), `decay` (a share of the weight, times lr) and `finite` are tensors.

    Both norms of a matrix follow from its rows' mean squares: to compute them from the elements would be two more passes, each by
    as few programs as there are matrices.
    """
    update = update.float()
    if neuron_norm:
        mean = update.square().mean(-1, keepdim=True)
        second.lerp_(mean, 1 - beta2)
        scale = second.clamp(min=1e-10).rsqrt()
        before, after = mean.sum(-2, keepdim=True), (mean * scale.square()).sum(-2, keepdim=True)
        update = update * (scale * (before / after.clamp(min=1e-20)).sqrt())
    apply_update(weight, mantissa_bits, update, finite, lr, decay, cautious)
