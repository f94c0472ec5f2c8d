"""Two sums of e^s a query over one stretch of a sorted list of keys, s = scale · (q · k − d) − drift · row:

    matching = Σ_j [follower j = target] e^s_j        every = Σ_j e^s_j        first ≤ j < end

So matching / every is the probability that a pointer to these keys gives to the target, if the list's key j
is the state of a text after which token `follower j` came. Queries and keys have d channels and, but for
rounding to FP8, the norm √d. So s is hardly above 0, and the sums need no maximum. Keys stay in their rows,
and the list names the rows, because moving tens of millions of keys takes longer than all else that makes the
list. `drift` makes a key in a later row weigh less.

Queries should come in the order of their stretches. Programs take a tile of queries and go over all keys from
the first to the end of any of them; a tile whose queries share a stretch wastes nothing. Several programs
share a tile, each with a part of its keys.
"""
import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example

# (queries, keys of one byte a channel, warps, stages) of a tile, and programs that share its keys; the first
# is used.
CONFIGS = [(64, 128, 4, 3, 8), (64, 64, 4, 3, 8), (64, 128, 4, 2, 8)]


def neighbour_sums_reference(q: Tensor, targets: Tensor, stretches: Tensor, keys: Tensor, listed: Tensor,
                             scale: float, drift: float = 0.0, block: int = 256) -> Tensor:
    """Plain PyTorch form of `neighbour_sums`; keeps the scores of `block` queries at a time."""
    wide = torch.promote_types(torch.float32, q.dtype if q.dtype.itemsize > 1 else torch.float32)
    sums, (order, followers) = [], listed
    for a in range(0, len(q), block):
        rows = slice(a, a + block)
        first, end = stretches[:, rows]
        low, high = int(first.min()), int(end.max())
        place = torch.arange(low, max(low, high), device=q.device)
        scores = q[rows].to(wide) @ keys[order[low:high]].to(wide).mT - q.shape[1]
        seen = (place >= first[:, None]) & (place < end[:, None])
        mass = (scale * scores - drift * order[low:high]).exp() * seen
        match = followers[low:high] == targets[rows, None]
        sums.append(torch.stack([(mass * match).sum(1), mass.sum(1)], 1))
    return torch.cat(sums) if sums else q.new_zeros(0, 2, dtype=wide)


@triton.jit
def neighbour_kernel(q_ptr, targets_ptr, stretches_ptr, keys_ptr, order_ptr, followers_ptr, sums_ptr, n, rate,
                     bound, drift, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
                     STAGES: tl.constexpr):
    """Scores are in units of log 2, as are `rate` = scale / log 2 and `drift`; `bound` = d · rate."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel, column = tl.arange(0, CHANNELS), tl.arange(0, COLUMNS)
    q_ptr += row.to(tl.int64)[:, None] * CHANNELS
    q = tl.load(q_ptr + channel[None, :], mask=row[:, None] < n, other=0.0)
    target = tl.load(targets_ptr + row, mask=row < n, other=-2)
    first = tl.load(stretches_ptr + row, mask=row < n, other=0)
    end = tl.load(stretches_ptr + n + row, mask=row < n, other=0)
    # Without any key low is high, for loads ahead of a loop from 0x7FFFFFFF would overflow 32 bits.
    high = tl.max(end)
    low = tl.minimum(tl.min(tl.where(first < end, first, 0x7FFFFFFF)), high)
    own = tl.cdiv(high - low, tl.num_programs(1) * COLUMNS) * COLUMNS       # keys of each program
    low += tl.program_id(1) * own
    high = tl.minimum(low + own, high)
    matching, every = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    # Places and followers are loaded a tile ahead by hand, for Triton loads only the product's inputs ahead.
    place = tl.load(order_ptr + low + column, mask=low + column < high, other=0)
    follower = tl.load(followers_ptr + low + column, mask=low + column < high, other=-1)
    for start in tl.range(low, high, COLUMNS, num_stages=STAGES):
        key = start + column
        at = place.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        k = tl.load(keys_ptr + at, mask=key[:, None] < high, other=0.0)
        less = bound + drift * place.to(tl.float32)
        place = tl.load(order_ptr + key + COLUMNS, mask=key + COLUMNS < high, other=0)
        following = tl.load(followers_ptr + key + COLUMNS, mask=key + COLUMNS < high, other=-1)
        mass = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * rate - less[None, :])
        mass = tl.where((key[None, :] >= first[:, None]) & (key[None, :] < end[:, None]), mass, 0.0)
        matching += tl.sum(tl.where(follower[None, :] == target[:, None], mass, 0.0), 1)
        every += tl.sum(mass, 1)
        follower = following
    out = sums_ptr + 2 * (tl.program_id(1).to(tl.int64) * n + row)
    tl.store(out, matching, mask=row < n)
    tl.store(out + 1, every, mask=row < n)


def neighbour_sums(q: Tensor, targets: Tensor, stretches: Tensor, keys: Tensor, listed: Tensor, scale: float,
                   drift: float = 0.0, tuned: tuple[int, ...] = CONFIGS[0]) -> Tensor:
    """Both sums of each query, (n, 2) float32: over keys whose follower is the target, and over all keys.

    q (n, d) and `keys` (·, d): of one dtype, FP8 too; d a power of two. `listed` (2, m): rows of keys, and
    the followers of these keys. `stretches` (2, n): where each query's stretch of the list begins and ends.
    These and `targets` (n,) are int32. A follower of -1 matches only a target of -1, which no score counts.
    There is no gradient.
    """
    (n, channels), m = q.shape, listed.shape[1]
    fits = keys.ndim == 2 and keys.shape[1] == channels and channels >= 16 and channels & (channels - 1) == 0
    check(fits and keys.is_contiguous() and keys.dtype == q.dtype, "keys", keys,
          f"contiguous {q.dtype} (·, {channels}), of 16, 32, … channels")
    check(q.is_contiguous(), "q", q, "contiguous")
    for name, x, *shape in (
            ("targets", targets, n), ("stretches", stretches, 2, n), ("listed", listed, 2, m)):
        check(x.shape == (*shape,) and x.is_contiguous() and x.dtype == torch.int32, name, x,
              f"contiguous int32 {(*shape,)}")
    rows, columns, warps, stages, parts = tuned
    sums, rate = q.new_empty(parts, n, 2, dtype=torch.float32), scale / math.log(2)
    if n:
        neighbour_kernel[triton.cdiv(n, rows), parts](
            q, targets, stretches, keys, *listed, sums, n, rate, rate * channels, drift / math.log(2),
            ROWS=rows, COLUMNS=columns // q.element_size(), CHANNELS=channels, STAGES=stages, num_warps=warps)
    return sums.sum(0)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Queries of several stretches, some of them empty; at the real size a chunk of a text in FP8."""
    def inputs(queries: int, keys: int, stretches: int, channels: int, kind: torch.dtype) -> tuple:
        sizes = queries, keys
        q, k = (F.rms_norm(torch.randn(x, channels, device=device), (channels,)).to(kind) for x in sizes)
        # Stretches of very different lengths: they end at the cubes of even shares.
        edges = (torch.linspace(0, 1, stretches + 1, device=device) ** 3 * keys).int()
        chosen = torch.randint(stretches, (queries,), device=device).sort().values
        targets, followers = (torch.randint(9, (x,), device=device, dtype=torch.int32) for x in sizes)
        order = torch.randperm(keys, device=device, dtype=torch.int32)
        return q, targets, edges[torch.stack([chosen, chosen + 1])], k, torch.stack([order, followers])

    real = size == "real"
    for queries, keys, stretches, channels in [(524_288, 16_777_216, 1024, 256)] if real else [
            (70, 300, 5, 16), (33, 40, 30, 32), (1, 200, 1, 64), (20, 0, 1, 16)]:
        yield Example(
            "sums over neighbours", f"{queries:,} × {keys:,} / {stretches} × {channels}",
            partial(inputs, queries, keys, stretches, channels, torch.float8_e4m3fn if real else dtype),
            partial(neighbour_sums, scale=0.3, drift=2 / max(keys, 1)),
            partial(neighbour_sums_reference, scale=0.3, drift=2 / max(keys, 1)),
            flop=2.0 * queries * keys / stretches * channels, rate=2.0 if real else 1.0,
            check_inputs=partial(inputs, 512, 65_536, 8, channels, torch.float8_e4m3fn) if real else None,
            compile=False, configs=tuple(CONFIGS))
