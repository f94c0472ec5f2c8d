"""softmax(scale · q kᵀ) v, causal, over a sliding window within each document, for normed queries and keys.

All queries and keys have the norm √channels ("QK-norm"), so no score is above bound = scale · channels. Then sums of
e^(s − bound) need no maximum of the scores: tiles of keys only add up, and nothing is rescaled when a larger score
comes,

    out_t = Σ_j e^(s_tj − bound) v_j / Σ_j e^(s_tj − bound)

The smallest e^(s − bound) is e^(−2 bound), 10⁻¹¹ for scores up to 12.5, and sums are float32.

A program takes a tile of 64 tokens of one head, wherever documents begin. Documents of the records' corpus have some
800 tokens, and windows 128 to 1,408: so a program has few tiles of keys to go through, and much of its time goes into
its beginning and its end. Three of these programs fit a multiprocessor and fill each other's gaps.
"""
import math

import torch
from torch import Tensor

from kernels.attention.bounded_kernels import forward_kernel, key_kernel, query_kernel
from kernels.backend import check, triton
from kernels.sequence import sequence_bounds

# (queries, keys, warps, stages) of a tile, of each kernel. A multiple of the other side's length, in the direction
# in which a program keeps its tile.
FORWARD = [(64, 64, 4, 2), (128, 32, 8, 3), (128, 32, 8, 2), (128, 64, 8, 2), (64, 32, 4, 3), (128, 64, 4, 2)]
QUERIES = [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2)]
KEYS = [(64, 64, 4, 2), (32, 64, 4, 2), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 8, 2), (32, 128, 8, 2)]


class BoundedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, first, end, window, scale, tuned):
        (n, heads, channels), (rows, columns, warps, stages) = q.shape, tuned[0]
        out, sums = torch.empty_like(v), torch.empty(heads, n, dtype=torch.float32, device=q.device)
        rate, bound = scale * math.log2(math.e), scale * channels * math.log2(math.e)
        if n:
            forward_kernel[(triton.cdiv(n, rows) * heads,)](
                tiled(q, rows), tiled(k, columns), tiled(v, columns), tiled(out, rows), first, sums, n, window, rate,
                bound, HEADS=heads, num_warps=warps, num_stages=stages)
        ctx.save_for_backward(q, k, v, out, sums, first, end)
        ctx.window, ctx.scale, ctx.rate, ctx.tuned = window, scale, rate, tuned
        return out

    @staticmethod
    def backward(ctx, out_grad):
        q, k, v, out, sums, first, end = ctx.saved_tensors
        n, heads, _ = q.shape
        out_grad, products = out_grad.contiguous(), torch.empty_like(sums)
        q_grad, k_grad, v_grad = map(torch.empty_like, (q, k, v))
        numbers = n, ctx.window, ctx.rate, ctx.scale
        if n:
            rows, columns, warps, stages = ctx.tuned[1]
            query_kernel[(triton.cdiv(n, rows) * heads,)](
                tiled(q, rows), tiled(k, columns), tiled(v, columns), tiled(out, rows), tiled(out_grad, rows),
                tiled(q_grad, rows), first, sums, products, *numbers, HEADS=heads, num_warps=warps, num_stages=stages)
            rows, columns, warps, stages = ctx.tuned[2]
            key_kernel[(triton.cdiv(n, columns) * heads,)](
                tiled(q, rows), tiled(k, columns), tiled(v, columns), tiled(out_grad, rows), tiled(k_grad, columns),
                tiled(v_grad, columns), end, sums, products, *numbers, HEADS=heads, num_warps=warps,
                num_stages=stages)
        return q_grad, k_grad, v_grad, None, None, None, None, None


def tiled(x: Tensor, tokens: int):
    """A descriptor of x (n, heads, channels) by tiles of so many tokens of one head."""
    from triton.tools.tensor_descriptor import TensorDescriptor
    return TensorDescriptor.from_tensor(x.flatten(1), [tokens, x.shape[2]])


def bounded_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, window: int,
                      scale: float, tuned: tuple = (FORWARD[0], QUERIES[0], KEYS[0])) -> Tensor:
    """As in `flash.py`, where each query and each key has the norm √channels."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        fits = x.ndim == 3 and x.shape[:2] == q.shape[:2] and x.is_contiguous() and x.shape[2] in (16, 32, 64, 128)
        check(fits and x.dtype == q.dtype, name, x, "(n, heads, 16 to 128 channels), contiguous, of one dtype")
    check(k.shape == q.shape, "k", k, f"{tuple(q.shape)}")
    first, end = sequence_bounds(cu_seqlens, len(q))
    return BoundedAttention.apply(q, k, v, first, end, window, scale, tuned)
