"""Two sums of e^s a token, with s_tj = scale q_t · k_j over earlier states j < t of the same sequence:

    matching_t = log Σ_j [token j+1 = target t] e^s_tj        every_t = log Σ_j e^s_tj

State j predicts token j + 1, so a key that is like the query marks a similar context. And matching − every is
the logarithm of the probability that a pointer to earlier states gives to the target. This is induction, by
one head at the output.

Queries and keys have the norm √channels, so no score is above scale · channels, and the sums need no maximum
of the scores. No score is kept: memory grows with the tokens, not with their square. The backward pass
computes the scores again. If g and h are the gradients of the two sums, a score has the gradient g [match]
e^(s − matching) + h e^(s − every). One launch makes q's gradient by rows and another k's by columns, so
repeated runs are equal bit for bit.
"""
import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.backend import check, tiled, triton
from kernels.copying.pointer_kernels import pointer_kernel, pointer_key_kernel, pointer_query_kernel
from kernels.example import Example, both_ways
from kernels.sequence import Sequences

# (rows, columns, warps, stages) of a tile of each kernel; the first is used.
CONFIGS = [((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
           ((64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
           ((128, 64, 8, 3), (128, 32, 8, 3), (32, 64, 4, 3))]


LARGEST = 40.0   # e^(-2 · 40) is about the least that float32 holds.


def block_reference(q: Tensor, k: Tensor, follower: Tensor, target: Tensor, places: tuple[Tensor, ...],
                    scale: float) -> tuple[Tensor, Tensor]:
    """Both sums of some rows, (rows,) each, over some keys. `places`: of rows, keys, rows' sequences."""
    row, key, first = places
    earlier = (key < row[:, None]) & (key >= first[:, None])
    scores = (scale * (q @ k.mT)).to(torch.promote_types(q.dtype, torch.float32))
    sums = []
    for taken in (earlier & (follower == target[:, None]), earlier):
        none = ~taken.any(1)
        # Rows with nothing to sum take part with a score of 0: a sum over -inf alone has a gradient of NaN.
        finite = scores.masked_fill(~taken, -torch.inf).masked_fill(none[:, None], 0)
        sums.append(finite.logsumexp(1).masked_fill(none, -torch.inf))
    return sums[0], sums[1]


def pointer_sums_reference(q: Tensor, k: Tensor, tokens: Tensor, targets: Tensor,
                           sequences: Sequences, scale: float, block: int = 256) -> tuple[Tensor, Tensor]:
    """Plain PyTorch form of `pointer_sums`; keeps the scores of `block` rows at a time."""
    n, out = len(q), []
    place = torch.arange(n, device=q.device)
    for begin in range(0, n, block):
        end = min(begin + block, n)
        low = max(0, begin - sequences.longest + 1)
        rows, keys = slice(begin, end), slice(low, end)
        places = place[rows], place[keys], sequences.first[rows]
        follower = torch.cat([tokens[low + 1:end + 1], tokens[:1]])[:end - low]
        out.append(checkpoint(block_reference, q[rows], k[keys], follower, targets[rows], places, scale,
                              use_reentrant=False))
    none = q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))
    matching, every = zip(*out) if out else ([none], [none])
    return torch.cat(matching), torch.cat(every)


class PointerSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, tokens, targets, first, end, scale, tuned):
        (n, channels), (rows, columns, warps, stages) = q.shape, tuned[0]
        rate, followers = scale * math.log2(math.e), tokens.roll(-1)
        matching, every = (torch.empty(n, dtype=torch.float32, device=q.device) for _ in range(2))
        if n:
            pointer_kernel[(triton.cdiv(n, rows),)](
                q, tiled(k, columns, channels), tiled(followers, columns), targets, first, matching, every, n,
                rate, rate * channels, ROWS=rows, STAGES=stages, num_warps=warps)
        ctx.save_for_backward(q, k, followers, targets, first, end, matching, every)
        ctx.numbers, ctx.tuned = (n, rate, rate * channels, scale), tuned
        return matching, every

    @staticmethod
    def backward(ctx, *grads):
        q, k, followers, targets, first, end, *sums = ctx.saved_tensors
        q_grad, k_grad, *factors = map(torch.empty_like, (q, k, *sums))
        grads = [grad.contiguous() for grad in grads]
        n, channels = q.shape
        if n:
            rows, columns, warps, stages = ctx.tuned[1]
            pointer_query_kernel[(triton.cdiv(n, rows),)](
                q, tiled(k, columns, channels), tiled(q_grad, rows, channels), tiled(followers, columns),
                targets, first, *sums, *grads, *factors, *ctx.numbers, STAGES=stages, num_warps=warps)
            rows, columns, warps, stages = ctx.tuned[2]
            pointer_key_kernel[(triton.cdiv(n, columns),)](
                tiled(q, rows, channels), k, tiled(k_grad, columns, channels), followers,
                tiled(targets, rows), end, *(tiled(x, rows) for x in factors), *ctx.numbers, num_warps=warps,
                num_stages=stages)
        return q_grad, k_grad, None, None, None, None, None, None


def pointer_sums(
    q: Tensor,  # (n, channels), rows contiguous, of the norm √channels; channels: a power of two from 16 on
    k: Tensor,  # like q, of its dtype: the key of state j stands for the token after it
    tokens: Tensor,  # (n,) int32 or int64, contiguous: sequences one after another
    targets: Tensor,  # (n,) integers, contiguous: the token that follows; none is negative among tokens
    sequences: Sequences,
    scale: float,  # of q · k
    tuned: tuple = CONFIGS[0],
) -> tuple[Tensor, Tensor]:
    """Both sums, (n,) float32 each; -inf where there is nothing to sum, which has no gradient.

    Differentiable in q and k. The product scale · channels may be `LARGEST`; beyond it sums can vanish.
    """
    fits = q.ndim == 2 and q.size(1) >= 16 and q.size(1) & (q.size(1) - 1) == 0 and q.stride(1) == 1
    check(fits, "q", q, "(n, channels) with contiguous rows of a power of two of channels, at least 16")
    check(k.shape == q.shape and k.dtype == q.dtype and k.stride(1) == 1, "k", k, "like q")
    for name, x in (("tokens", tokens), ("targets", targets)):
        check(x.shape == q.shape[:1] and x.is_contiguous() and not x.is_floating_point(), name, x,
              f"contiguous integers, ({len(q)},)")
    return PointerSums.apply(
        q.contiguous(), k.contiguous(), tokens, targets, sequences.first, sequences.end, scale,
        tuned)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Both ways, over short sequences and one alone; at the real size 24 sequences of 2,048 tokens."""
    def inputs(lengths: list[int], channels: int) -> tuple:
        n, vocabulary = sum(lengths), 20  # A third of the targets is no token.
        q, k = (F.rms_norm(torch.randn(n, channels, device=device), (channels,)).to(dtype) for _ in range(2))
        tokens, targets = (torch.randint(top, (n,), device=device) for top in (vocabulary, 30))
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return q, k, tokens, targets, Sequences.of(bounds, max(lengths), n)

    def outputs(function, *given, **tuned):
        sums = function(*given, given[0].size(1) ** -0.5, **tuned)
        return tuple(torch.where(x.isinf(), 0, x) for x in sums)

    real = size == "real"
    for lengths, channels in [([2048] * 24, 128)] if real else [([1, 70, 1, 2, 61], 16), ([130, 90], 32)]:
        n, pairs = sum(lengths), sum(x * x / 2 for x in lengths)
        grads = torch.linspace(-1, 1, n, device=device), torch.linspace(1, 0.5, n, device=device)
        yield Example(
            "sums of a pointer, both ways", f"{len(lengths)} × {max(lengths):,} × {channels}",
            partial(inputs, lengths, channels), partial(outputs, pointer_sums),
            partial(outputs, pointer_sums_reference), flop=8.0 * pairs * channels,
            wrap=lambda function, grads=grads: both_ways(function, lambda: grads, (0, 1)), compile=False,
            configs=tuple(CONFIGS))
