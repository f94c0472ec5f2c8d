"""u = polar factor of the Nesterov momentum, each neuron's row divided by its running root mean square.

The two elementwise halves of NorMuon (Li et al., arXiv 2510.05491); the orthogonalisation between them is in
orthogonalize.py. Dividing by the running root mean square of each neuron is worth 0.0153 of loss, or 2.6 of
34 seconds on four H200s (one pair of runs, seed 0). There is no Triton here: `torch.compile` fuses each
function.

What a gradient counts in a momentum falls by β with each step. With a second, slower average it falls fast at
first and then slowly: more gradients count, and the newest still count most (AggMo, arXiv 1804.00325;
AdEMAMix, arXiv 2409.03137; for Muon, from a part of the run on: @orange4664, modded-nanogpt #340).
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.optimizer.master_weight import Master, Rule, apply_update


class Rates(NamedTuple):
    """How the averages move. The tensors may change from step to step without a new compiled program."""
    beta: Tensor  # 0-dim: of the momentum
    slow_share: Tensor  # 0-dim: of the slow average in the momentum's place
    slow_beta: float


def nesterov_momentum(grad: Tensor, momentum: Tensor, slow: Tensor | None, rates: Rates,
                      finite: Tensor) -> Tensor:
    """The matrices to orthogonalise, like grad. Updates `momentum` and `slow` (float32, like it) in place.

    Unless `finite`, 0-dim, the gradient counts as zero.
    """
    wide = torch.where(finite, grad, 0).float()
    momentum.lerp_(wide, 1 - rates.beta)
    past = momentum
    if slow is not None:
        slow.lerp_(wide, 1 - rates.slow_beta)
        past = momentum.lerp(slow, rates.slow_share)
    return wide.lerp(past, rates.beta).to(grad.dtype)


def neuron_update(weight: Master, update: Tensor, second: Tensor, rule: Rule, beta2: float,
                  neuron_norm: bool) -> None:
    """Apply orthogonalised updates (n, rows, columns) to matrices of that shape in place. A row is a neuron.

    `second` (n, rows, 1) float32 is the running mean square of each neuron's update. Dividing by its root
    keeps the matrix's norm. `rule.lr` is (n, 1, 1). With `neuron_norm` False this is plain Muon.

    The matrix's norms before and after both follow from its rows' mean squares. Computing them from the
    elements would take two more passes, each with only as many programs as there are matrices.
    """
    update = update.float()
    if neuron_norm:
        mean = update.square().mean(-1, keepdim=True)
        second.lerp_(mean, 1 - beta2)
        scale = second.clamp(min=1e-10).rsqrt()
        before, after = mean.sum(-2, keepdim=True), (mean * scale.square()).sum(-2, keepdim=True)
        update = update * (scale * (before / after.clamp(min=1e-20)).sqrt())
    apply_update(weight, update, rule)
