"""The loss over a sample of the head's rows, the candidates: all targets, and others that are drawn.

Weights keep the mean of Σ e^s what it is over the whole vocabulary. This is importance sampling (Jean et al.,
arXiv 1412.2007), in the public speedrun since modded-nanogpt #360 (@devenpzak).

The tokens of a micro-batch may be split into parts, each with its own sample. A part has fewer different
targets, and so fewer candidates: 49,152 tokens of the records' corpus have up to 10,240 different targets,
16,384 tokens up to 4,864.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.embedding.rows import already_sorted
from kernels.loss.head import Targets


def among_candidates(targets: Tensor, candidates: Tensor) -> Tensor:
    """Where in `candidates` each target stands, (n,) int32.

    `candidates` (c,), ascending, int32 like targets (n,), holds all targets but -1. That is not scored and
    stays -1.
    """
    return torch.searchsorted(candidates, targets, out_int32=True).masked_fill(targets < 0, -1)


def sampled_head_loss(
    head_loss: Callable,  # or `head_loss_reference`
    lookup: Callable,  # of the head's rows
    x: Tensor,  # (n, width): what the head sees
    head: Tensor,  # (vocabulary, width)
    wanted: Targets,
    candidates: Tensor,  # (parts, c) int32, each ascending: of each of so many equal parts of the tokens
    weights: Tensor,  # (parts, c) float32: the count of each candidate in Σ e^s
    fp8: bool,
) -> tuple[Tensor, Tensor]:
    """Both losses of `head_loss`, each part's over its own sample of the head's rows, and their sums."""
    def of_part(x: Tensor, wanted: Targets, sample: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        rows = lookup(head, already_sorted(sample))
        wanted = wanted._replace(targets=among_candidates(wanted.targets, sample))
        return head_loss(x, rows, wanted, fp8, counts)

    if (count := len(candidates)) == 1:     # A chunk's gradient would be copied.
        return of_part(x, wanted, candidates[0], weights[0])
    training, next_token = zip(*map(of_part, x.chunk(count), wanted.parts(count), candidates, weights))
    return sum(training), sum(next_token)
