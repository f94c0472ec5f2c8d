"""The ranks of a run: one process for each GPU, started by torchrun, or several on a CPU."""
import gc
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.ranks.collectives import PATIENCE, Collectives, RankError, reason_of, with_others
from kernels.ranks.copies import PeerCopies, can_copy, ranks_here
from kernels.ranks.nodes import Nodes, groups
from kernels.ranks.watchdog import Watchdog, progress

PIECE = 2 ** 22     # words of 8 bytes that are hashed at a time: what is computed with them takes memory


def hash_bits(x: Tensor) -> Tensor:
    """64 bits (0-dim int64) that change if any one bit of x changes, and likely if several do."""
    bytes_ = x.detach().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(bytes_, (0, -len(bytes_) % 8)).view(torch.int64)
    places, sums = torch.arange(min(len(words), PIECE), device=x.device), []
    for first in range(0, len(words), PIECE):
        piece = words[first:first + PIECE]
        # An odd factor loses no bit. Each place has its own factor, so an exchange of two words shows.
        sums.append(((piece ^ piece >> 32) * (2 * (places[:len(piece)] + first) + 1)).sum())
    return torch.stack(sums).sum()


def launched() -> tuple[int, int, int]:
    """This process's rank, the number of ranks, and its rank on this machine, by the environment.

    RankError if these are not what torchrun sets.
    """
    given = {name: os.environ.get(name) or default for name, default in
             (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))}
    wrong = [name for name, text in given.items() if not (text.isdecimal() and len(text) < 10)]
    rank, size, local, here = (0, 1, 0, 1) if wrong else map(int, given.values())
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 and not os.environ.get(name)]
    if wrong or missing or rank >= size or not here:
        found = " ".join(f"{name}={text}" for name, text in given.items())
        lacking = f" without {' and '.join(missing)}" * bool(missing)
        raise RankError(f"the environment has {found!a}{lacking}, which torchrun sets otherwise; start with "
                        "torchrun, or unset these")
    return rank, size, local


def require_gpu(local: int) -> None:
    """RankError if this machine has no GPU for the process of this local rank."""
    count = torch.cuda.device_count()
    if local >= count:
        raise RankError(f"{local + 1} or more processes on a machine with {count} GPUs; use "
                        f"--nproc_per_node={count}")


class World:
    """This process's rank, its device, and the collectives by which it speaks to the others."""

    def __init__(self):
        self.rank, self.size, local = launched()
        self.device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            require_gpu(local)
            torch.cuda.set_device(self.device)
            # cuBLASLt would clear a workspace before every FP8 matmul, which takes 0.7% of a step.
            os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
            # Before torch ends a rank, it would write a report that nobody reads, and then sleep for four
            # times the report's time limit: 60 s by default, and 2 s with this setting.
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
        self.watchdog = None
        if self.size > 1:
            try:
                # torch would try an address that nobody knows for as long as PATIENCE.
                socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
                dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE,
                                        device_id=self.device if on_gpu else None)
                self.watchdog = Watchdog(self.rank, self.size, PATIENCE.total_seconds())
            except (RuntimeError, ValueError, OSError) as error:        # torch's own errors among them
                raise RankError(f"the ranks do not find each other ({reason_of(error)}); start with "
                                "torchrun") from None
        self.collectives = Collectives(self.size)
        self.found: dict[str, dict] = {}            # by records/run/fit.py before a run, for its log

    def least(self, x: int) -> int:
        """The least x of all ranks."""
        value = torch.tensor(x, device=self.device)
        if self.size > 1:
            with with_others():
                dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    def choose_collectives(self, copies: bool) -> None:
        """Use the copy engines if that is wanted and possible: of all ranks, or inside nodes."""
        # Every rank must choose the same. Nodes are of one size, and ranks are numbered node by node.
        here = ranks_here()
        in_order = self.size % here == 0 and self.rank % here == int(os.environ.get("LOCAL_RANK", 0))
        alike = self.least(here) == here and in_order
        copies = self.least(copies and alike and can_copy(self.device))
        self.collectives = Collectives(self.size)
        if not copies:
            return
        node, between = groups(here) if here < self.size else (dist.group.WORLD, None)
        try:
            self.collectives = PeerCopies(node)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankError(f"the GPUs cannot share memory ({reason}); use --peer_copies false") from None
        if between is not None:
            across = Collectives(between.size(), between)
            self.collectives = Nodes(self.collectives, across, self.collectives.stream)

    def check_equal(self, tensors: dict[str, Tensor]) -> None:
        """RankError, on all ranks, if a tensor differs between ranks. Only hashes travel; the host waits."""
        hashes = self.collectives.all_gathered(torch.stack([hash_bits(x) for x in tensors.values()])[None])
        for name, found in zip(tensors, hashes.T.tolist()):
            # Most ranks are right. If two differ, nobody knows which one is right, so both are named.
            usual = next((value for value in found if 2 * found.count(value) > len(found)), None)
            if others := [str(rank) for rank, value in enumerate(found) if value != usual]:
                raise RankError(f"{name} of rank {', '.join(others)} differ from those of the other ranks: a "
                                "bit has flipped, or the ranks did not do the same")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with with_others():
                dist.barrier()

    def watched(self, step: Callable, *given: object) -> object:
        """step(*given), a step of the timed run: a rank that hangs inside is noticed after a minute."""
        progress.count += 1
        progress.in_step = True
        try:
            return step(*given)
        finally:
            progress.in_step = False

    def be_deterministic(self, on: bool) -> None:
        """Whether torch chooses operations that give the same bits in every run, which are slower."""
        if on or torch.are_deterministic_algorithms_enabled():      # Torch imports its compiler for this.
            torch.use_deterministic_algorithms(on, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def release(self) -> None:
        """Give back the memory of a run that has ended, so that the next one finds it in one piece."""
        gc.collect()                # Graphs hold memory until reference cycles are collected.
        if self.device.type == "cuda":
            # cuBLAS keeps its workspaces. If they lie in the one piece of memory of all graphs, that piece is
            # never freed: later runs of a process reserved 18.7 GB more.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End the process group, if there is one."""
        if self.watchdog:
            self.watchdog.close()
        if dist.is_initialized():
            dist.destroy_process_group()
