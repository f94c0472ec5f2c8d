"""u = polar factor of the Nesterov momentum, each neuron's row divided by its running root mean square (arXiv 2510.05491).

The update in two elementwise halves; between them stands the orthogonalisation (newton_schulz.py).
"""
import torch
from torch import Tensor

from kernels.master_weight import apply_update


def nesterov_momentum(grad: Tensor, momentum: Tensor, momentum_beta: Tensor, healthy: Tensor) -> Tensor:
    """What is to be orthogonalised, in grad's shape and dtype; `momentum` (float32) is updated, unless not `healthy`.

    `momentum_beta` and `healthy` are 0-dim tensors: they change without a new program.
    """
    wide = torch.where(healthy, grad, 0).float()
    momentum.lerp_(wide, 1 - momentum_beta)
    return wide.lerp(momentum, momentum_beta).to(grad.dtype)


def neuron_update(weight: Tensor, lost_bits: Tensor | None, update: Tensor, second: Tensor, healthy: Tensor, lr: Tensor,
                  decay: Tensor, beta2: float, neuron_norm: bool, cautious: bool) -> None:
    """Apply orthogonalised updates to matrices (n, rows, columns) of `weight` in place. A row is a neuron.

    `second` (n, rows, 1) is the running mean square of a neuron's update; dividing by its root keeps the matrix's norm. `lr`
    (n, 1, 1), `decay` (a share of the weight, times lr) and `healthy` are tensors.
    """
    update = update.float()
    if neuron_norm:
        second.lerp_(update.square().mean(-1, keepdim=True), 1 - beta2)
        scaled = update * second.clamp(min=1e-10).rsqrt()
        update = scaled * (update.norm(dim=(-2, -1), keepdim=True) / scaled.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-10))
    apply_update(weight, lost_bits, update, healthy, lr, decay, cautious)
