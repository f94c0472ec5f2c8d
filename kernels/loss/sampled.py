"""The loss over a sample of the head's rows, the candidates: all targets, and others that are drawn.

With the candidates' weights Σ e^s has the mean that it has over the whole vocabulary: importance sampling
(Jean et al., arXiv 1412.2007), in the public speedrun since modded-nanogpt #360 (@devenpzak).

The tokens of a micro-batch may be split into parts, each with its own sample. A part has fewer different
targets, and so fewer candidates: 49,152 tokens of the records' corpus have up to 10,240 different targets,
16,384 tokens up to 4,867, and 8,192 up to 3,061.
"""
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.loss.head import Targets


def among_candidates(targets: Tensor, candidates: Tensor) -> Tensor:
    """Where among the candidates of its part each target stands, (n,) int32.

    Each row of `candidates` (parts, c), ascending, int32 like targets (n,), holds all targets of its part. A
    target of -1 is not among them: it is not scored and stays -1.
    """
    of_parts = targets.view(len(candidates), -1)
    return torch.searchsorted(candidates, of_parts, out_int32=True).flatten().masked_fill(targets < 0, -1)


def sampled_head_loss(
    head_loss: Callable,  # or `head_loss_reference`
    lookup: Callable,  # of the head's rows
    sort: Callable,  # makes the order of row numbers that `lookup` wants (kernels/embedding/rows.py)
    x: Tensor,  # (n, width): what the head sees
    head: Tensor,  # (vocabulary, width)
    wanted: Targets,
    # (parts, c) int32: a row of candidates, ascending, for each of equal parts of the tokens; and (parts, c)
    # float32: the count of each candidate in Σ e^s.
    sample: tuple[Tensor, Tensor],
    fp8: bool,
) -> tuple[Tensor, Tensor]:
    """Both losses of `head_loss`, each part's over its own sample of the head's rows.

    A part's sample need not hold other parts' targets, so no token has targets that lie in the next part.
    """
    (candidates, weights), is_start = sample, wanted.is_start.clone()
    is_start[::len(x) // len(candidates)] = True
    wanted = wanted._replace(targets=among_candidates(wanted.targets, candidates), is_start=is_start)
    return head_loss(x, lookup(head, sort(candidates.flatten())), wanted, fp8, weights)
