"""Ranks that each do work of their own on one GPU, and bring their results together at the end."""
import datetime
import json
import os
from typing import NamedTuple

import torch
from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from kernels.ranks.collectives import RankError
from kernels.ranks.world import launched, require_gpu

GPUS = "CUDA_VISIBLE_DEVICES"
LONGEST_WAIT = datetime.timedelta(days=1)   # One rank may end a whole run later than another.


class Share(NamedTuple):
    """Which pieces of work are this process's: those whose number, divided by `ranks`, leaves `rank`."""
    rank: int = 0
    ranks: int = 1
    store: Store | None = None      # in which the ranks leave things for one another

    def of(self, work: list) -> list:
        return work[self.rank::self.ranks]

    def gathered(self, name: str, mine: object) -> list:
        """What each rank has of this name, in the order of ranks: numbers, texts, lists and dicts of these.

        A tuple comes back as a list. A name serves once. RankError if a rank is lost.
        """
        if self.ranks == 1:
            return [mine]
        try:
            self.store.set(f"{name} {self.rank}", json.dumps(mine))
            return [json.loads(self.store.get(f"{name} {rank}")) for rank in range(self.ranks)]
        except RuntimeError as error:
            raise RankError(f"another rank sent no {name} ({str(error).splitlines()[0]})") from None

    def collected(self, mine: list) -> list:
        """The results of all ranks' pieces in the order of the work. `mine` are those of `of(work)`."""
        everyone = self.gathered("results", mine)
        whole: list = [None] * sum(map(len, everyone))
        for rank, results in enumerate(everyone):
            whole[rank::self.ranks] = results
        return whole


def separate() -> Share:
    """Make this process, which torchrun started as one of several, the only rank of a program of its own.

    It sees only the GPU of its local rank. Call this before the process uses CUDA. RankError as for
    `launched`, if there are fewer GPUs than processes, or if CUDA was used before.
    """
    rank, ranks, local = launched()
    store = None
    if ranks > 1:
        store, _, _ = next(rendezvous("env://", rank, ranks, timeout=LONGEST_WAIT))
    if torch.cuda.device_count():       # This does not start CUDA.
        require_gpu(local)
        visible = os.environ.get(GPUS)
        os.environ[GPUS] = visible.split(",")[local] if visible else str(local)
        if torch.cuda.device_count() != 1:
            raise RankError(f"{GPUS}={os.environ[GPUS]} came too late: this process has used CUDA")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return Share(rank, ranks, store)
