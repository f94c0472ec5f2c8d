"""Collectives: by torch.distributed, or by the GPUs' copy engines, which leave multiprocessors free.

NCCL's kernels hold 24 to 32 of an H200's 132 multiprocessors for as long as they move data or wait for a
slower rank. A matmul that fills the GPU and starts meanwhile takes up to twice as long. A GPU also has copy
engines, which move data between GPUs without a multiprocessor, and with symmetric memory each rank may read
buffers of the others. So `PeerCopies` makes each collective of three steps, on a stream of its own:

    barrier: every rank's source is complete
    copies: from each other rank one; at the same time no two ranks read from the same one
    barrier: every rank's source has been read, and may change

A rank copies its own part before the first barrier. For a sum the rank then adds the copies up, in float32
and in the order of the ranks: the sum is rounded once and its bits repeat. In a sum of two ranks it needs no
copy of its own part. Steps of three sizes take 12.7, 23.7, 35.2 ms on four H200s, by NCCL 13.1, 24.0, 35.7.

torch has the same algorithm for two collectives: `torch.ops.symm_mem._low_contention_all_gather` and
`_low_contention_reduce_scatter` (Yifu Wang; https://github.com/pytorch/pytorch/pull/130583). `PeerCopies` is
here because torch's two are private and allocate their outputs, while the optimizer's buffers stay in place;
because torch has no all-reduce and no all-to-all of this kind; and because `PeerCopies` has a stream of its
own. Nobody has timed torch's two beside it. We found two traps: torch clears the memory of the barriers'
signals without waiting for it (`PeerCopies.zeros`), and a stream from torch's pool may be the one on which
graphs are recorded (kernels/streams.py).
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from textwrap import shorten
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.ranks.watchdog import progress
from kernels.streams import beside, side_stream

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

    def __init__(self, size: int, group: dist.ProcessGroup | None = None):
        self.size, self.group = size, group

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that other ranks can read: make here what `all_gather` gathers and `reduce_scatter` sums."""
        return torch.zeros(*shape, dtype=dtype, device=device)

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
        """Part r of sent (size * n, ...) goes to rank r; received gets one part from each, in rank order."""
        if self.size == 1:
            return None
        return dist.all_to_all_single(received, sent, group=self.group, async_op=True)


def ranks_here() -> int:
    """How many ranks torchrun has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def can_copy(device: torch.device) -> bool:
    """Whether the ranks of this machine are several GPUs that see each other's memory."""
    here = ranks_here() if device.type == "cuda" else 1
    others = (other for other in range(here) if other != device.index)
    return here > 1 and all(torch.cuda.can_device_access_peer(device.index, other) for other in others)


def shared_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that other ranks may read after a rendezvous. torch may still be clearing it.

    By itself torch finds the strides by functions for symbolic sizes, whose import of sympy took 2.8 s of a
    start (2×H200). Here the strides are those of a meta tensor.
    """
    from torch.distributed import _symmetric_memory  # not in every build of torch
    strides = mock.patch.object(torch._prims_common, "make_contiguous_strides_for",
                                lambda shape: torch.empty(shape, device="meta").stride(), create=True)
    with strides:
        return _symmetric_memory.empty(*shape, dtype=dtype, device=device)


class PeerCopies(Collectives):
    """Collectives by copies from other ranks' memory (`torch.distributed._symmetric_memory`), if `can_copy`.

    All ranks must start the same collectives in the same order. Works inside CUDA graphs after one eager run:
    a source outside symmetric memory is staged through a buffer that is allocated on first use. RuntimeError
    where the driver shares no memory.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group.size(), group)
        self.rank, self.stream = group.rank(), side_stream("copies")
        self.memories: dict[int, object] = {}  # `_SymmetricMemory` by the address of what the others can read
        self.staging: dict[tuple[int, torch.dtype], Tensor] = {}  # buffers for the rest, by length
        # Fail now if the driver shares no memory. And load the kernels now: CUDA may wait for an idle GPU
        # before a kernel's first launch, and torch's barrier holds Python's lock meanwhile. Later CUDA could
        # wait like this for a collective that waits for a stopped rank, and no watchdog would run.
        device = torch.device("cuda", torch.cuda.current_device())
        self.all_reduce(self.zeros(1, dtype=torch.float32, device=device))
        torch.cuda.synchronize(device)

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        from torch.distributed import _symmetric_memory  # not in every build of torch
        # Making symmetric memory and the rendezvous hold Python's lock. If they had to wait for a stopped
        # rank, or for a collective that does, no watchdog would run. So this rank waits here, without the
        # lock.
        torch.cuda.synchronize(device)
        with with_others():
            dist.barrier(self.group)
        x = shared_memory(shape, dtype, device).zero_()
        # torch clears x, and the memory through which barriers signal, on the default stream, and does not
        # wait. On a rank with a long queue the clearing would wipe out the first signal of a faster rank, and
        # this rank would wait for that signal for ever.
        torch.cuda.synchronize(device)
        self.memories[x.untyped_storage().data_ptr()] = _symmetric_memory.rendezvous(x, self.group)
        return x

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Work:
        return self.run(lambda: self.add_up(shard, whole, own_part=True))

    def all_gather(self, whole: Tensor, shard: Tensor) -> Work:
        return self.run(lambda: self.collect(whole.view(self.size, *shard.shape), shard, own_part=False))

    def all_reduce(self, x: Tensor) -> Work:
        return self.run(lambda: self.add_up(x, x, own_part=False))

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        return self.run(lambda: self.collect(received.unflatten(0, (self.size, -1)), sent, own_part=True))

    @torch.no_grad()
    def run(self, work: Callable[[], None]) -> Work:
        """Queue `work` on the stream of the copies, after everything on the current one."""
        with beside(self.stream):
            work()
            return Copies(self.stream.record_event())

    def collect(self, into: Tensor, source: Tensor, own_part: bool, own: bool = True) -> None:
        """into[r] of (size, ...) becomes rank r's `source` or, with `own_part`, this rank's part of it.

        Without `own`, into[this rank] stays as it is.
        """
        if source.untyped_storage().data_ptr() not in self.memories:
            kind = source.numel(), source.dtype
            if kind not in self.staging:
                self.staging[kind] = self.zeros(source.numel(), dtype=source.dtype, device=source.device)
            source = self.staging[kind].copy_(source.reshape(-1))
        memory, first = self.memories[source.untyped_storage().data_ptr()], source.storage_offset()
        first += self.rank * into[0].numel() if own_part else 0

        def copy(peer: int) -> None:
            into[peer].copy_(memory.get_buffer(peer, into[0].shape, source.dtype, first), non_blocking=True)

        # A barrier that gives up names the rank on the standard output, and stops all work on its GPU.
        limit = int(PATIENCE.total_seconds() * 1000)
        if own:  # before the barrier, since the others may be late
            copy(self.rank)
        memory.barrier(timeout_ms=limit)
        for step in range(1, self.size):
            copy((self.rank + step) % self.size)  # In a step no two ranks read from the same rank.
        memory.barrier(timeout_ms=limit)

    def add_up(self, out: Tensor, source: Tensor, own_part: bool) -> None:
        """out becomes the sum over ranks of their `source`, or of this rank's part of it."""
        parts = torch.empty(self.size, *out.shape, dtype=out.dtype, device=out.device)
        if self.size == 2:  # the same sum, rounded once, by one pass over both
            self.collect(parts, source, own_part, own=False)
            own = source.chunk(2)[self.rank] if own_part else source
            torch.add(own, parts[1 - self.rank], out=out)
        else:
            self.collect(parts, source, own_part)
            torch.sum(parts, 0, out=out)
