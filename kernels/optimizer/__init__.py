"""The optimizer's arithmetic: how a gradient becomes a step of a weight. train_gpt.py says on which rank.

NorMuon updates the matrices of attention and MLP, in four steps:

1. normuon.py: Nesterov momentum in float32.
2. orthogonalize.py: the nearest orthogonal matrix to the momentum, by Newton–Schulz (Muon, Keller Jordan et
   al., https://kellerjordan.github.io/posts/muon/). coefficients.py derives the coefficients (Polar
   Express, Amsel et al., arXiv 2505.16932), and symmetric.py has the matmuls. A second method, AOL, first
   multiplies by a diagonal matrix (Prach and Lampert, arXiv 2208.03160; in Turbo-Muon, arXiv 2512.04632). A
   run with 4 steps of AOL ends at the same loss as a run with 5 plain steps.
3. normuon.py again: each neuron's update divided by its running root mean square (NorMuon, Li et al.,
   arXiv 2510.05491). The division is worth 0.0153 of loss, or 2.6 of 34 seconds on four H200s.
4. master_weight.py: the step on an exact float32 weight in two halves, with cautious weight decay (Chen et
   al., arXiv 2510.12402), which is worth nothing that one pair of runs can show.

All other weights have Adam (adam.py), and the long n-gram table an Adam that touches only the rows that were
read (sparse_adam.py). Tokens of like spelling may share part of their updates (shared_updates.py). At the end
weights may be mixed with their averages (averages.py). Each worth is from one pair of runs, seed 0
(records/2026-11-22_four-h200-together).
"""
from kernels.optimizer.adam import adam_update, adam_update_reference
from kernels.optimizer.averages import Averaged, Averages
from kernels.optimizer.coefficients import Triple, lower_end, polar_express
from kernels.optimizer.master_weight import Master, Rule, apply_update, read_master, write_master
from kernels.optimizer.normuon import (
    Rates,
    nesterov_momentum,
    nesterov_momentum_reference,
    neuron_update,
    neuron_update_reference,
)
from kernels.optimizer.orthogonalize import newton_schulz, newton_schulz_reference
from kernels.optimizer.shared_updates import SharedUpdates, feature_update, feature_update_reference
from kernels.optimizer.snapshot import restore, snapshot
from kernels.optimizer.sparse_adam import row_adam, row_adam_reference
