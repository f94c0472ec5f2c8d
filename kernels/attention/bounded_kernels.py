"""The Triton kernels of `bounded_attention`: forward, the queries' gradient, the keys' and values' gradients.

Each program keeps a tile of one head. The first two kernels keep a tile of queries and loop over tiles of
keys; the third keeps a tile of keys and loops over tiles of queries. Only tiles at the two ends of this loop
can hold pairs that do not see each other, so the kernels apply a mask only there. Scores are in units of
log 2: e^s = 2^(rate · q k). A tile of scores stays in registers from one matmul to the next; for this the
third kernel computes the scores' transpose.

In the records a program loops over some ten tiles, so its start counts. Its own tile is loaded without a
descriptor, because outside of loops a load by a descriptor waits for the load before it. Each loop has a
start too, so there is only one. With three loops, of which the first and the last applied masks, and with all
tiles loaded by descriptors, the kernels took 4% longer.
"""
from kernels.backend import tl, triton


@triton.jit
def dot(a, b, total=None):
    """a b, added to `total`; if a and b are float32, in float32 and not in TF32."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def load_tile(desc, start, head):
    """Rows from `start` on of one head's channels; zeros beyond the end."""
    return desc.load([start, head * desc.block_shape[1]])


@triton.jit
def load_rows(ptr, row, n, head, HEADS: tl.constexpr, CHANNELS: tl.constexpr):
    """As `load_tile`, but from a pointer, for tiles that are loaded outside of loops."""
    at = row.to(tl.int64)[:, None] * (HEADS * CHANNELS) + head * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return tl.load(ptr + at, mask=row[:, None] < n, other=0.0)


@triton.jit
def store_tile(desc, start, head, tile):
    desc.store([start, head * desc.block_shape[1]], tile.to(desc.dtype))


@triton.jit
def keys_of(first_ptr, begin, row, n, window, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first key that each row sees; the first key of the loop; the key from which on all rows see all
    keys before `begin`."""
    low = tl.maximum(tl.load(first_ptr + row, mask=row < n, other=0), row - window)
    last = tl.minimum(begin + ROWS, n) - 1
    start = tl.maximum(tl.load(first_ptr + begin), begin - window) // COLUMNS * COLUMNS
    latest = tl.maximum(tl.load(first_ptr + last), last - window)
    return low, start, tl.minimum(tl.cdiv(latest, COLUMNS) * COLUMNS, begin)


@triton.jit
def own_tile(HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """This program's head, the first token of its tile, and all tokens of the tile."""
    begin = tl.program_id(0) // HEADS * TOKENS
    return tl.program_id(0) % HEADS, begin, begin + tl.arange(0, TOKENS)


@triton.jit
def output_gate(q, gate_ptr, head, SEEN: tl.constexpr):
    """Each query's gate (ROWS,), and its weights (1, QK_DIM), which are 0 for channels that it does not see.

    `gate_ptr`: (HEADS, SEEN) float32, for the last SEEN channels. The lowest logit keeps the gate above 0, so
    that the backward pass may divide by it. NaN stays NaN, so that the loss shows it.
    """
    channel = tl.arange(0, q.shape[1])[None, :] - (q.shape[1] - SEEN)
    weight = tl.load(gate_ptr + head * SEEN + channel, mask=channel >= 0, other=0.0)
    logit = tl.sum(q.to(tl.float32) * weight, 1)
    return 2 * tl.sigmoid(tl.maximum(logit, -40.0, propagate_nan=tl.PropagateNan.ALL)), weight


@triton.jit
def powers(a, b, rate, shift, start, low, high, begin, end):
    """2^(rate · a bᵀ − shift), but 0 where a column's token is below its row's `low` or above its `high`.

    Columns are the tokens from `start` on. All rows see the tokens from `begin` to `end`.
    """
    p = tl.exp2(dot(a, tl.trans(b)) * rate - shift)
    if (start < begin) | (start >= end):
        token = start + tl.arange(0, p.shape[1])
        p = tl.where((token[None, :] >= low[:, None]) & (token[None, :] <= high[:, None]), p, 0.0)
    return p


@triton.jit
def attention_kernel(q_ptr, k_desc, v_desc, out_desc, gate_ptr, first_ptr, sums_ptr, n, places, window, rate,
                     bound, HEADS: tl.constexpr, SEEN: tl.constexpr):
    """Also stores, for the backward pass, the logarithm to base 2 of each row's Σ e^s, less that of its gate.

    SEEN: how many channels of the query the gate sees; 0 without gates.
    """
    ROWS: tl.constexpr = out_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    QK_DIM: tl.constexpr = k_desc.block_shape[1]
    HEAD_DIM: tl.constexpr = v_desc.block_shape[1]
    head, begin, row = own_tile(HEADS, ROWS)
    q = load_rows(q_ptr, row, n, head, HEADS, QK_DIM)
    low, start, whole = keys_of(first_ptr, begin, row, n, window, ROWS, COLUMNS)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for key in range(start, begin + ROWS, COLUMNS):
        k, v = load_tile(k_desc, key, head), load_tile(v_desc, key, head)
        p = powers(q, k, rate, bound, key, low, row, whole, begin)
        total += tl.sum(p, 1)
        out = dot(p.to(v.dtype), v, out)
    share, log_sum = 1 / total, tl.log2(total) + bound
    if SEEN:
        gate, _ = output_gate(q, gate_ptr, head, SEEN)
        share *= gate
        log_sum -= tl.log2(gate)
    store_tile(out_desc, begin, head, out * share[:, None])
    tl.store(sums_ptr + head * places + row, log_sum, mask=row < places)


@triton.jit
def attention_query_kernel(q_ptr, k_desc, v_desc, out_ptr, out_grad_ptr, q_grad_desc, gate_ptr,
                           gate_grads_ptr, first_ptr, sums_ptr, products_ptr, n, places, window, rate, scale,
                           HEADS: tl.constexpr, SEEN: tl.constexpr):
    """Also stores each row's output · gradient of the output / gate, which `attention_key_kernel` reads.

    `gate_grads_ptr`: (tiles, HEADS, SEEN) float32; each program stores its part of the gradient of the gate's
    weights.
    """
    ROWS: tl.constexpr = q_grad_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    QK_DIM: tl.constexpr = k_desc.block_shape[1]
    HEAD_DIM: tl.constexpr = v_desc.block_shape[1]
    head, begin, row = own_tile(HEADS, ROWS)
    q = load_rows(q_ptr, row, n, head, HEADS, QK_DIM)
    out_grad = load_rows(out_grad_ptr, row, n, head, HEADS, HEAD_DIM)
    out = load_rows(out_ptr, row, n, head, HEADS, HEAD_DIM)
    log_sum = tl.load(sums_ptr + head * places + row, mask=row < places, other=0.0)
    low, start, whole = keys_of(first_ptr, begin, row, n, window, ROWS, COLUMNS)
    product = tl.sum(out.to(tl.float32) * out_grad.to(tl.float32), 1)
    grad = tl.zeros((ROWS, QK_DIM), tl.float32)
    if SEEN:
        gate, weight = output_gate(q, gate_ptr, head, SEEN)
        logit_grad = (product * (1 - gate / 2))[:, None]    # The derivative of 2σ is 2σ (1 − σ).
        product /= gate
        channel = tl.arange(0, QK_DIM) - (QK_DIM - SEEN)
        gate_grad = gate_grads_ptr + tl.program_id(0) * SEEN + channel
        tl.store(gate_grad, tl.sum(logit_grad * q.to(tl.float32), 0), mask=channel >= 0)
    tl.store(products_ptr + head * places + row, product, mask=row < places)
    for key in range(start, begin + ROWS, COLUMNS):
        k, v = load_tile(k_desc, key, head), load_tile(v_desc, key, head)
        p = powers(q, k, rate, log_sum[:, None], key, low, row, whole, begin)
        score_grad = p * (dot(out_grad, tl.trans(v)) - product[:, None])
        grad = dot(score_grad.to(k.dtype), k, grad)
    grad *= scale
    if SEEN:
        grad += logit_grad * weight
    store_tile(q_grad_desc, begin, head, grad)


@triton.jit
def attention_key_kernel(q_desc, k_ptr, v_ptr, out_grad_desc, k_grad_desc, v_grad_desc, end_ptr, sums_desc,
                         products_desc, n, places, window, rate, scale, HEADS: tl.constexpr):
    ROWS: tl.constexpr = q_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_grad_desc.block_shape[0]
    QK_DIM: tl.constexpr = q_desc.block_shape[1]
    HEAD_DIM: tl.constexpr = out_grad_desc.block_shape[1]
    head, begin, key = own_tile(HEADS, COLUMNS)
    k = load_rows(k_ptr, key, n, head, HEADS, QK_DIM)
    v = load_rows(v_ptr, key, n, head, HEADS, HEAD_DIM)
    # The last row that sees each key.
    high = tl.minimum(tl.load(end_ptr + key, mask=key < n, other=0) - 1, key + window)
    last = tl.minimum(begin + COLUMNS, n) - 1
    stop = tl.minimum(tl.load(end_ptr + last), last + window + 1)
    soonest = tl.minimum(tl.load(end_ptr + begin), begin + window + 1)
    # Up to this row, all rows behind this tile's own tokens see all of its keys.
    whole = soonest // ROWS * ROWS
    k_grad = tl.zeros((COLUMNS, QK_DIM), tl.float32)
    v_grad = tl.zeros((COLUMNS, HEAD_DIM), tl.float32)
    for start in range(begin, stop, ROWS):
        q, out_grad = load_tile(q_desc, start, head), load_tile(out_grad_desc, start, head)
        place = head * places + start
        log_sum, product = sums_desc.load([place]), products_desc.load([place])
        p = powers(k, q, rate, log_sum[None, :], start, key, high, begin + COLUMNS, whole)
        v_grad = dot(p.to(q.dtype), out_grad, v_grad)
        score_grad = p * (dot(v, tl.trans(out_grad)) - product[None, :])
        k_grad = dot(score_grad.to(q.dtype), q, k_grad)
    store_tile(k_grad_desc, begin, head, k_grad * scale)
    store_tile(v_grad_desc, begin, head, v_grad)
