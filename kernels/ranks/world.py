"""The ranks of a run: one process for each GPU, started by torchrun, or several on a CPU."""
import math
import os

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.ranks.collectives import Collectives, PeerCopies, can_copy
from kernels.ranks.watchdog import Watchdog


class RankError(Exception):
    """The ranks do not fit the machine. The message is one line: what was found, and what to do."""


class World:
    """This process's rank, its device, and the collectives by which it speaks to the others."""

    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            if local >= torch.cuda.device_count():
                count = torch.cuda.device_count()
                raise RankError(f"{local + 1} or more processes on a machine with {count} GPUs; "
                                f"use --nproc_per_node={count}")
            torch.cuda.set_device(self.device)
            # With a workspace cuBLASLt clears it before every FP8 matmul, which takes 0.7% of a step.
            os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
        if self.size > 1:
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=self.device if on_gpu else None)
        self.watchdog = Watchdog(self.rank, self.size) if self.size > 1 else None
        self.collectives = Collectives(self.size)

    @property
    def memory(self) -> float:
        """Bytes of the device; infinite for a CPU."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_properties(self.device).total_memory if on_gpu else math.inf

    def choose_collectives(self, copies: bool) -> None:
        """Use the copy engines if that is wanted and possible."""
        try:
            copies = copies and can_copy(self.device, self.size)
            self.collectives = PeerCopies(dist.group.WORLD) if copies else Collectives(self.size)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankError(f"the GPUs cannot share memory ({reason}); use --peer_copies false") from None

    def broadcast(self, x: Tensor) -> Tensor:
        """A copy of rank 0's x, on every rank."""
        x = x.clone()
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def check_equal(self, name: str, x: Tensor) -> None:
        """RankError if x differs from rank 0's in any bit."""
        if differ := int((self.broadcast(x).view(torch.uint8) != x.view(torch.uint8)).sum()):
            raise RankError(f"rank {self.rank}: {differ} bytes of {name} differ from rank 0's")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """End the process group, if there is one."""
        if self.watchdog:
            self.watchdog.close()
        if dist.is_initialized():
            dist.destroy_process_group()
