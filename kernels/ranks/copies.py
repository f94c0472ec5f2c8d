"""Collectives by the GPUs' copy engines, which leave multiprocessors free.

NCCL's kernels hold 24 to 32 of an H200's 132 multiprocessors for as long as they move data or wait for a
slower rank. A matmul that fills the GPU and starts meanwhile takes up to twice as long. A GPU also has copy
engines, which move data between GPUs without a multiprocessor, and with symmetric memory each rank may read
buffers of the others. So `PeerCopies` makes each collective of three steps, on its stream:

    barrier: every rank's source is complete
    copies: from each other rank one; at the same time no two ranks read from the same one
    barrier: every rank's source has been read, and may change

A rank copies its own part before the first barrier. An all-to-all and a sum of two ranks do without that. For
a sum the rank then adds the copies up, in float32 and in the order of the ranks: the sum is rounded once and
its bits repeat. Steps of three sizes take 12.7, 23.7, 35.2 ms on four H200s, by NCCL 13.1, 24.0, 35.7.

torch has the same algorithm for two collectives: `torch.ops.symm_mem._low_contention_all_gather` and
`_low_contention_reduce_scatter` (Yifu Wang; https://github.com/pytorch/pytorch/pull/130583). `PeerCopies` is
here because torch's two are private and allocate their outputs, while the optimizer's buffers stay in place;
because torch has no all-reduce and no all-to-all of this kind; and because `PeerCopies` has a stream of its
own. Nobody has timed torch's two beside it. We found two traps: torch clears the memory of the barriers'
signals without waiting for it (`PeerCopies.zeros`), and a stream from torch's pool may be the one on which
graphs are recorded (kernels/streams.py).
"""

import math
import os
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.ranks.collectives import PATIENCE, Collectives, Copies, Work, with_others
from kernels.streams import beside, side_stream


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
    a source outside symmetric memory is staged through a buffer that is allocated on first use, and so is
    `outgoing` memory. RuntimeError where the driver shares no memory.
    """

    moves_own = False

    def __init__(self, group: dist.ProcessGroup, stream: str = "copies"):
        """`stream`: the name of the stream of the copies."""
        super().__init__(group.size(), group)
        self.stream = side_stream(stream)
        self.others: PeerCopies | None = None  # `apart`, once it was asked for
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

    @property
    def apart(self) -> "PeerCopies":
        if self.others is None:
            self.others = PeerCopies(self.group, "copies apart")
        return self.others

    def outgoing(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        kind = math.prod(shape), dtype
        if kind not in self.staging:
            self.staging[kind] = self.zeros(kind[0], dtype=dtype, device=device)
        return self.staging[kind].view(shape)

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Work:
        return self.run(lambda: self.add_up(shard, whole, own_part=True))

    def all_gather(self, whole: Tensor, shard: Tensor) -> Work:
        return self.run(lambda: self.collect(whole.view(self.size, *shard.shape), shard, own_part=False))

    def all_reduce(self, x: Tensor) -> Work:
        return self.run(lambda: self.add_up(x, x, own_part=False))

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        into = received.unflatten(0, (self.size, -1))
        return self.run(lambda: self.collect(into, sent, own_part=True, own=self.moves_own))

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
            source = self.outgoing(source.numel(), dtype=source.dtype, device=source.device).copy_(
                source.reshape(-1))
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
