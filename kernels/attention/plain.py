"""Attention in plain PyTorch, for CPUs, tests and backends to be compared with."""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sequence import Sequences


def output_gates(q: Tensor, gate: Tensor) -> Tensor:
    """2σ(gate · a query's last channels), (n, heads) float32: how much each head passes on of what it reads.

    q (n, heads, qk_dim). `gate` (heads, channels) float32 sees channels that have no position, so it knows
    what a head looks for, but not where. A head that finds nothing can pass on nothing, which the softmax
    alone does not let it do. Gates of attention's output: @ClassicLarry, modded-nanogpt#117, and Qiu et al.,
    arXiv 2505.06708. There they see the layer's input; here the query, which the kernels have at hand.
    """
    return 2 * torch.sigmoid((q[..., q.size(-1) - gate.size(-1):] * gate).sum(-1))


def gated(out: Tensor, q: Tensor, gate: Tensor | None) -> Tensor:
    """Attention's output (n, heads, head_dim) times `output_gates`, in its dtype; without a gate as it is."""
    return out if gate is None else (out * output_gates(q, gate)[..., None]).type_as(out)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, window: int, scale: float,
    gate: Tensor | None = None,
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
    return gated(torch.cat(outputs), q, gate)
