"""Collectives of several nodes: inside a node by the GPUs' copies, between nodes by torch.distributed.

Weights and gradients move in two halves. So the slow network between N nodes carries each number once for a
node, not once for each of the node's L GPUs. Rank n L + l is GPU l of node n:

    sum       inside   GPU l gets the node's sum of the parts of all ranks with number l, (N, part)
              between  the N ranks with number l sum these, and each keeps its own part
    gather    between  GPU l gets the parts of all ranks with number l, (N, part)
              inside   the L GPUs of a node give each other these parts

torch.distributed between all ranks moves what is short, and what goes from each rank to every other one. A
short sum in two halves could be rounded differently on the ranks of one node, and their copies of the small
weights would drift apart.
"""
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.ranks.collectives import Collectives, Copies, Work, wait
from kernels.streams import beside


@cache
def groups(inside: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's node, of `inside` ranks, and the ranks with its number on all nodes. All must call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    nodes = [dist.new_group(range(first, first + inside)) for first in range(0, size, inside)]
    between = [dist.new_group(range(first, size, inside)) for first in range(inside)]
    return nodes[rank // inside], between[rank % inside]


class Nodes(Collectives):
    """Collectives of ranks that lie node by node. On GPUs both halves run on `stream`."""

    def __init__(self, inside: Collectives, between: Collectives, stream: torch.cuda.Stream | None = None):
        super().__init__(inside.size * between.size)
        self.inside, self.between, self.stream = inside, between, stream

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Work:
        with torch.no_grad(), beside(self.stream):
            by_node = whole.view(self.between.size, self.inside.size, *shard.shape)
            by_gpu = by_node.transpose(0, 1).contiguous()
            part = torch.empty_like(by_gpu[0])                          # (nodes, n, ...)
            wait(self.inside.reduce_scatter(part.flatten(0, 1), by_gpu.flatten(0, 2)))
            wait(self.between.reduce_scatter(shard, part.flatten(0, 1)))
            return self.stream and Copies(self.stream.record_event())

    def all_gather(self, whole: Tensor, shard: Tensor) -> Work:
        with torch.no_grad(), beside(self.stream):
            part = shard.new_empty(self.between.size, *shard.shape)
            wait(self.between.all_gather(part.flatten(0, 1), shard))
            by_gpu = part.new_empty(self.inside.size, *part.shape)
            wait(self.inside.all_gather(by_gpu.flatten(0, 2), part.flatten(0, 1)))
            whole.view(self.between.size, self.inside.size, *shard.shape).copy_(by_gpu.transpose(0, 1))
            return self.stream and Copies(self.stream.record_event())
