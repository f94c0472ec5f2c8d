"""Collectives by torch.distributed, the form that runs everywhere; and the error where another rank is lost.

`copies.py` has collectives by the copy engines of the GPUs of one machine, and `nodes.py` those of several
machines.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from textwrap import shorten
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.ranks.watchdog import progress

# torch 2.13 renamed both.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# How long ranks wait for one that neither answers nor ends. Compilation may keep one for minutes.
PATIENCE = timedelta(minutes=10)


class RankError(Exception):
    """The ranks do not fit the machine, or one is lost. The message is one line: what, and what to do."""


@contextmanager
def with_others(counted: bool = True) -> Iterator[None]:
    """RankError where torch.distributed fails inside, because another rank has ended or hangs.

    The block counts as progress for the watchdog, which looks at the program's main thread alone. So blocks
    in another thread are not `counted`.
    """
    progress.count += counted
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):        # of this rank's own GPU
        raise
    except RuntimeError as error:
        raise RankError(f"another rank has ended, or has not answered for {PATIENCE.total_seconds():.0f} s "
                        f"({reason_of(error)})") from None


def reason_of(error: Exception) -> str:
    """What torch.distributed says, without NCCL's general words and without a line of gloo's sources."""
    return shorten(re.sub(r"^\[[^]]*\] *", "", str(error).rpartition("Last error:")[2].strip()), 150)


class Copies(NamedTuple):
    """A collective under way on the stream of the copies."""
    arrived: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.arrived)


Work = dist.Work | Copies | None  # a collective under way; None: there is only one rank


def wait(work: Work) -> None:
    """Wait for a collective. On a GPU only the current stream waits, not the program."""
    if work is not None:
        with with_others():
            work.wait()


class Collectives:
    """Collectives by torch.distributed, between the ranks of `group`: by default all of them.

    Each method returns at once, and its collective starts when the current stream comes to it; `wait` for
    what the method returns. With one rank nothing starts.
    """

    moves_own = True  # `all_to_all` also moves what a rank sends to itself.

    def __init__(self, size: int, group: dist.ProcessGroup | None = None):
        self.size, self.group = size, group
        self.rank = group.rank() if group else dist.get_rank() if dist.is_initialized() else 0

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that other ranks can read: make here what `all_gather` gathers and `reduce_scatter` sums."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    @property
    def apart(self) -> "Collectives":
        """Collectives of the same ranks, for what should not queue behind these, if they can run beside."""
        return self

    def outgoing(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what the next `all_to_all` of this many numbers sends. Its contents are not defined.

        It may be the same memory again. So wait for the last such `all_to_all` before you write there.
        """
        return torch.empty(*shape, dtype=dtype, device=device)

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Work:
        """shard (n, ...) = this rank's part of the sum over ranks of whole (size * n, ...)."""
        return REDUCE_SCATTER(shard, whole, group=self.group, async_op=True) if self.size > 1 else None

    def all_gather(self, whole: Tensor, shard: Tensor) -> Work:
        """whole (size * n, ...) = every rank's shard (n, ...), in rank order."""
        return ALL_GATHER(whole, shard, group=self.group, async_op=True) if self.size > 1 else None

    def all_gathered(self, x: Tensor) -> Tensor:
        """Every rank's x (n, ...) in rank order, (size * n, ...), to be used at once.

        It goes by torch.distributed in every subclass: it is short, and should not queue behind long copies.
        """
        whole = x.new_empty(self.size * len(x), *x.shape[1:]) if self.size > 1 else x
        wait(Collectives.all_gather(self, whole, x))
        return whole

    def all_reduce(self, x: Tensor) -> Work:
        """x becomes its sum over ranks."""
        return dist.all_reduce(x, group=self.group, async_op=True) if self.size > 1 else None

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Part r of sent (size * n, ...) goes to rank r; received gets one part from each, in rank order.

        Where `moves_own` is False, a rank's part for itself is not copied, and received keeps what was there.
        """
        if self.size == 1:
            return None
        return dist.all_to_all_single(received, sent, group=self.group, async_op=True)
