"""What the ranks say to each other: by torch.distributed, or as copies by the GPUs' copy engines, for which no product has to wait.

NCCL's kernels hold 24 to 32 of an H200's 132 multiprocessors for as long as they move data or wait for a slower rank, and a kernel
that fills the GPU and starts meanwhile takes up to twice as long. `PeerCopies` makes each collective, on a stream of its own, of

    barrier (every rank's source is complete)    copies, one a rank, each from another    barrier (every rank's source has been read)

and for a sum adds the copies up, in float32 and in the order of the ranks: bits repeat, and the sum is rounded once.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.streams import beside, side_stream

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor      # renamed in torch 2.13
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Copies(NamedTuple):
    """Copies under way."""
    arrived: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.arrived)


Work = dist.Work | Copies | None        # a collective under way; None: there is but one rank


def wait(work: Work) -> None:
    """On a GPU only its current stream waits."""
    if work is not None:
        work.wait()


class Collectives:
    """By torch.distributed. Each collective starts when the current stream comes to it, and returns at once; one rank starts none."""

    def __init__(self, size: int):
        self.size = size

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where others will read: what `all_gather` gathers and `reduce_scatter` sums is best made here."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Work:
        """shard (n, ...) = this rank's part of the sum over ranks of whole (size * n, ...)."""
        return REDUCE_SCATTER(shard, whole, async_op=True) if self.size > 1 else None

    def all_gather(self, whole: Tensor, shard: Tensor) -> Work:
        """whole (size * n, ...) = every rank's shard (n, ...), in rank order."""
        return ALL_GATHER(whole, shard, async_op=True) if self.size > 1 else None

    def all_reduce(self, x: Tensor) -> Work:
        """x becomes its sum over ranks."""
        return dist.all_reduce(x, async_op=True) if self.size > 1 else None

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Part r of sent (size * n, ...) goes to rank r; received holds what came from each, in rank order."""
        return dist.all_to_all_single(received, sent, async_op=True) if self.size > 1 else None


def can_copy(device: torch.device, size: int) -> bool:
    """Whether all ranks are GPUs of one machine that see each other's memory."""
    here = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == size > 1
    return here and all(torch.cuda.can_device_access_peer(device.index, other) for other in range(size) if other != device.index)


class PeerCopies(Collectives):
    """By copies out of the other ranks' memory (`torch.distributed._symmetric_memory`), where `can_copy`.

    All ranks must ask for the same in the same order. In CUDA graphs too, of what has run once before: a source that the others cannot
    read is first copied to where they can, and that is made on its first use. RuntimeError where the driver shares no memory.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group.size())
        self.group, self.rank, self.stream = group, group.rank(), side_stream("copies")
        self.memories: dict[int, object] = {}                            # `_SymmetricMemory` by the address of what others can read
        self.buffers: dict[tuple[int, torch.dtype], Tensor] = {}         # for what they cannot, by its length
        self.zeros(1, dtype=torch.float32, device=torch.device("cuda", torch.cuda.current_device()))     # now, if it cannot be

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        from torch.distributed import _symmetric_memory  # not in every build of torch
        x = _symmetric_memory.empty(*shape, dtype=dtype, device=device).zero_()
        # Torch clears it, and what the barriers signal through, on the default stream and does not wait: behind a long queue that would
        # wipe out the first signal of a rank with a short one, and this rank would wait for it for ever.
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
        with beside(self.stream):
            work()
            return Copies(self.stream.record_event())

    def collect(self, into: Tensor, source: Tensor, own_part: bool) -> None:
        """into[r] of (size, ...) becomes rank r's `source` or, with `own_part`, the part of it that is this rank's."""
        if source.untyped_storage().data_ptr() not in self.memories:
            kind = source.numel(), source.dtype
            if kind not in self.buffers:
                self.buffers[kind] = self.zeros(source.numel(), dtype=source.dtype, device=source.device)
            source = self.buffers[kind].copy_(source.reshape(-1))
        memory, first = self.memories[source.untyped_storage().data_ptr()], source.storage_offset()
        first += self.rank * into[0].numel() if own_part else 0
        memory.barrier()
        for step in range(self.size):
            peer = (self.rank + step) % self.size                        # every rank from another
            into[peer].copy_(memory.get_buffer(peer, into[0].shape, source.dtype, first), non_blocking=True)
        memory.barrier()

    def add_up(self, out: Tensor, source: Tensor, own_part: bool) -> None:
        parts = torch.empty(self.size, *out.shape, dtype=out.dtype, device=out.device)
        self.collect(parts, source, own_part)
        torch.sum(parts, 0, out=out)
