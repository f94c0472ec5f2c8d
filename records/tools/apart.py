"""Ranks that each do work of their own on one GPU, and bring their results together at the end."""
import datetime
import os
from typing import NamedTuple

import torch.distributed as dist

from kernels.ranks.collectives import RankError
from kernels.ranks.world import launched

GPUS = "CUDA_VISIBLE_DEVICES"
PATIENCE = datetime.timedelta(days=1)   # A rank may have several runs more to train than another.


class Share(NamedTuple):
    """Which pieces of work are this process's: those whose number, divided by `ranks`, leaves `rank`."""
    rank: int = 0
    ranks: int = 1

    def of(self, work: list) -> list:
        return work[self.rank::self.ranks]

    def collected(self, mine: list) -> list:
        """The results of all ranks' pieces in the order of the work. `mine` are those of `of(work)`."""
        if self.ranks == 1:
            return mine
        dist.init_process_group("gloo", rank=self.rank, world_size=self.ranks, timeout=PATIENCE)
        everyone: list = [None] * self.ranks
        dist.all_gather_object(everyone, mine)
        dist.destroy_process_group()
        whole: list = [None] * sum(map(len, everyone))
        for rank, results in enumerate(everyone):
            whole[rank::self.ranks] = results
        return whole


def separate() -> Share:
    """Make this process, which torchrun started as one of several, the only rank of a program of its own.

    It sees only the GPU of its local rank. Call this before anything asks CUDA for devices. RankError as for
    `launched`, and where CUDA_VISIBLE_DEVICES has no GPU for it.
    """
    rank, ranks, local = launched()
    visible = os.environ.get(GPUS)
    if visible != "":               # With "" the person wants no GPU.
        gpus = visible.split(",") if visible else list(map(str, range(local + 1)))
        if local >= len(gpus):
            raise RankError(f"{local + 1} or more processes, and {GPUS}={visible}; give each a GPU")
        os.environ[GPUS] = gpus[local]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return Share(rank, ranks)
