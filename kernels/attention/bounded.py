"""softmax(scale · q kᵀ) v, causal, over a sliding window within each document, for normed queries and keys.

Each query has the norm √channels, and so has each key, unless half of the key comes from the token before
(the key offset): then the key's norm is at most √2 times that. So no score is above √2 bound, with bound =
scale · channels, and sums of e^(s − bound) need no maximum of the scores. Tiles of keys only add up, and
nothing is rescaled when a larger score comes:

    out_t = Σ_j e^(s_tj − bound) v_j / Σ_j e^(s_tj − bound)

A head may have a gate g_t = 2σ(w · q_t's last channels), which multiplies its output (`plain.py`). The
forward pass then stores log(Σ_j e^s_tj / g_t) where it otherwise stores log Σ_j e^s_tj. So P below becomes
g_t times as large, and the backward pass need not know more of the gate than the division of d_t.

The sums are float32. With a bound of at most `LARGEST` they neither overflow nor vanish. Backward computes
the scores again, in two launches. With P = g e^(s − log Σ e^s) and the products d_t = out_t · grad_t / g_t

    ∂s_tj = P_tj (grad_t · v_j − d_t)     ∂q_t = scale Σ_j ∂s_tj k_j     ∂k_j = scale Σ_t ∂s_tj q_t
    ∂v_j = Σ_t P_tj grad_t

The gate's logit has the gradient l_t = out_t · grad_t (1 − g_t / 2). So l_t w is added to the gradient of the
query's last channels, and the gradient of w is Σ_t l_t times these channels.

No program adds to what another one writes, so repeated runs are equal bit for bit.

A program takes a tile of tokens of one head, wherever sequences begin. Sequences of the records' corpus have
some 800 tokens, and most windows 128 to 1,408. So a program has few tiles of keys to go through, and much of
its time goes into its beginning and its end. Two to four of these programs fit a multiprocessor and fill each
other's gaps.
"""
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.bounded_kernels import attention_kernel, attention_key_kernel, attention_query_kernel
from kernels.attention.plain import attention_reference
from kernels.backend import check, tiled, triton
from kernels.example import Example, both_ways
from kernels.sequence import Sequences

# (queries, keys, warps, stages) of each kernel: forward, the queries' gradient, the keys' gradient. A program
# keeps one tile and loops over others. The kept tile has a multiple of the others' tokens, so that the range
# without a mask begins and ends between tiles. The first configuration is used.
CONFIGS = [((64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
           ((64, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 2)),
           ((128, 32, 8, 3), (128, 64, 8, 2), (32, 64, 4, 2))]
CHANNELS = 16, 32, 64, 128
# The largest scale · channels. The smallest term is e^(-2.4 · bound), YaRN may add a fifth to the scale, and
# float32 holds little less than e^(-2.4 · 1.2 · 30).
LARGEST = 30.0


def by_head(tokens: int, *inputs: Tensor) -> list:
    """Descriptors of inputs (n, heads, channels), in tiles of `tokens` tokens of one head."""
    return [tiled(x.flatten(1), tokens, x.shape[2]) for x in inputs]


def channels_of(gate: Tensor | None) -> int:
    """How many of a query's channels its gate sees; 0 without one."""
    return 0 if gate is None else gate.size(1)


class BoundedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, gate, first, end, window, scale, tuned):
        (n, heads, channels), (rows, columns, warps, stages) = q.shape, tuned[0]
        rate, window = scale * math.log2(math.e), min(window, n)
        # Each head's sums begin at a multiple of 16 bytes, as descriptors want it.
        out, places = torch.empty_like(v), triton.cdiv(n, 4) * 4
        sums = torch.empty(heads, places, dtype=torch.float32, device=q.device)
        if n:
            attention_kernel[(triton.cdiv(n, rows) * heads,)](
                q, *by_head(columns, k, v), *by_head(rows, out), gate, first, sums, n, places, window, rate,
                rate * channels, HEADS=heads, SEEN=channels_of(gate), num_warps=warps, num_stages=stages)
        ctx.save_for_backward(q, k, v, gate, out, sums, first, end)
        ctx.numbers, ctx.tuned = (n, places, window, rate, scale), tuned
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, gate, out, sums, first, end = ctx.saved_tensors
        (n, heads, _), grad, products = q.shape, grad.contiguous(), torch.empty_like(sums)
        q_grad, k_grad, v_grad = map(torch.empty_like, (q, k, v))
        tiles = triton.cdiv(n, ctx.tuned[1][0])
        gate_grads = None if gate is None else gate.new_empty(tiles, *gate.shape)
        if n:
            rows, columns, warps, stages = ctx.tuned[1]
            attention_query_kernel[(triton.cdiv(n, rows) * heads,)](
                q, *by_head(columns, k, v), out, grad, *by_head(rows, q_grad), gate, gate_grads, first, sums,
                products, *ctx.numbers, HEADS=heads, SEEN=channels_of(gate), num_warps=warps,
                num_stages=stages)
            rows, columns, warps, stages = ctx.tuned[2]
            attention_key_kernel[(triton.cdiv(n, columns) * heads,)](
                *by_head(rows, q), k, v, *by_head(rows, grad), *by_head(columns, k_grad, v_grad), end,
                tiled(sums.flatten(), rows), tiled(products.flatten(), rows), *ctx.numbers, HEADS=heads,
                num_warps=warps, num_stages=stages)
        gate_grad = None if gate_grads is None else gate_grads.sum(0)
        return q_grad, k_grad, v_grad, gate_grad, None, None, None, None, None


def bounded_attention(
    q: Tensor,  # (n, heads, qk_dim), contiguous; each head of each token has at most the norm √2 · √qk_dim
    k: Tensor,  # like q
    v: Tensor,  # (n, heads, head_dim), contiguous, of q's dtype
    sequences: Sequences,
    window: int,  # A token sees itself and `window` tokens before it.
    scale: float,  # of the scores
    gate: Tensor | None = None,  # (heads, channels) float32, contiguous: the weights of `output_gates`
    tuned: tuple = CONFIGS[0],
) -> Tensor:
    """(n, heads, head_dim), like v.

    qk_dim and head_dim are among `CHANNELS`; the product qk_dim · scale is at most `LARGEST`.

    With longer queries or keys, sums overflow where a score is more than 88 above scale · qk_dim.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        fits = x.ndim == 3 and x.shape[:2] == q.shape[:2] and x.shape[2] in CHANNELS
        check(fits and x.is_contiguous() and x.dtype == q.dtype, name, x,
              f"contiguous ({len(q)}, heads, 16, 32, 64 or 128) in {q.dtype}")
    check(k.shape == q.shape, "k", k, "like q")
    if gate is not None:
        fits = gate.ndim == 2 and len(gate) == q.shape[1] and 0 < gate.size(1) <= q.shape[2]
        check(fits and gate.is_contiguous() and gate.dtype == torch.float32, "gate", gate,
              f"contiguous float32 ({q.shape[1]}, 1 to {q.shape[2]})")
    return BoundedAttention.apply(q, k, v, gate, sequences.first, sequences.end, window, scale, tuned)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Both ways, with queries narrower than values; at the real size a micro-batch of training."""
    def inputs(lengths: list[int], heads: int, channels: tuple[int, int], seen: int) -> tuple:
        n = sum(lengths)
        q, k = (F.rms_norm(torch.randn(n, heads, channels[0], device=device), channels[:1]).to(dtype)
                for _ in range(2))
        v = torch.randn(n, heads, channels[1], device=device).to(dtype)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        gate = torch.randn(heads, seen, device=device) / 4 if seen else None
        return q, k, v, gate, Sequences.of(bounds, max(lengths), n)

    def attend(attention: Callable, window: int, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None,
               sequences: Sequences, **tuned) -> Tensor:
        return attention(q, k, v, sequences, window, q.shape[2] ** -0.5, gate, **tuned)

    real = [([806] * 122, 640, 6, (64, 128), 0), ([806] * 122, 1408, 6, (64, 128), 0),
            ([806] * 122, 1408, 6, (64, 128), 32)]
    odd = [([1, 70, 1, 2, 61], 40, 2, (16, 32), 5), ([300], 100, 1, (32, 32), 32), ([50], 20, 2, (16, 16), 0)]
    for lengths, window, heads, channels, seen in real if size == "real" else odd:
        n, pairs = sum(lengths), heads * sum(min(i, window) + 1 for length in lengths for i in range(length))
        grad = torch.linspace(-1, 1, n * heads * channels[1], device=device).view(n, heads, -1).to(dtype)
        few = partial(inputs, lengths[:4], heads, channels, seen) if size == "real" else None
        wanted = (0, 1, 2, 3) if seen else (0, 1, 2)
        yield Example(
            f"attention with bounded scores{' and gates' * bool(seen)}, both ways",
            f"{len(lengths)} × {max(lengths)}, window {window:,}",
            partial(inputs, lengths, heads, channels, seen), partial(attend, bounded_attention, window),
            partial(attend, attention_reference, window),
            flop=2.0 * pairs * (4 * channels[0] + 3 * channels[1]), check_inputs=few, compile=False,
            wrap=lambda function, grad=grad, wanted=wanted: lambda *given, **tuned: both_ways(
                function, lambda: (grad[:len(given[0])],), wanted)(*given, **tuned),
            configs=tuple(CONFIGS))
