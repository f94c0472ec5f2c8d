"""The Triton kernels of `bounded_attention`: forward, the queries' gradient, that of keys and values.

Each program keeps a tile of tokens of one head: of queries in the first two kernels, of keys in the third. It
goes through the tiles of the others in three loops. Only in those of the first loop and of the last one are
there pairs that do not see each other, so only there a mask is applied. Scores are in units of log 2:
e^s = 2^(rate · q k). The products of a tile are in registers from one matmul to the next: keys' and values'
gradients come from the scores' transpose.
"""
from kernels.backend import tl, triton


@triton.jit
def load_tile(desc, start, head):
    """Rows from `start` on of one head's channels; zeros beyond the end."""
    return desc.load([start, head * desc.block_shape[1]])


@triton.jit
def store_tile(desc, start, head, tile):
    desc.store([start, head * desc.block_shape[1]], tile.to(desc.dtype))


@triton.jit
def keys_of(first_ptr, begin, row, n, window, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first key of each row; where keys begin; from where on all rows see all keys before `begin`."""
    low = tl.maximum(tl.load(first_ptr + row, mask=row < n, other=0), row - window)
    last = tl.minimum(begin + ROWS, n) - 1
    start = tl.maximum(tl.load(first_ptr + begin), begin - window) // COLUMNS * COLUMNS
    latest = tl.maximum(tl.load(first_ptr + last), last - window)
    return low, start, tl.minimum(tl.cdiv(latest, COLUMNS) * COLUMNS, begin)


@triton.jit
def add_values(out, total, q, k_desc, v_desc, start, head, row, low, rate, bound, MASKED: tl.constexpr):
    """Add what the keys from `start` on contribute to Σ 2^(s − bound) v and Σ 2^(s − bound)."""
    k, v = load_tile(k_desc, start, head), load_tile(v_desc, start, head)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * rate - bound)
    if MASKED:
        key = start + tl.arange(0, k_desc.block_shape[0])
        p = tl.where((key[None, :] >= low[:, None]) & (key[None, :] <= row[:, None]), p, 0.0)
    return tl.dot(p.to(v.dtype), v, out), total + tl.sum(p, 1)


@triton.jit
def forward_kernel(q_desc, k_desc, v_desc, out_desc, first_ptr, sums_ptr, n, window, rate, bound,
                   HEADS: tl.constexpr):
    ROWS: tl.constexpr = q_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    HEAD_DIM: tl.constexpr = v_desc.block_shape[1]
    head, begin = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS * ROWS
    row = begin + tl.arange(0, ROWS)
    low, start, whole = keys_of(first_ptr, begin, row, n, window, ROWS, COLUMNS)
    q = load_tile(q_desc, begin, head)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for key in range(start, whole, COLUMNS):
        out, total = add_values(out, total, q, k_desc, v_desc, key, head, row, low, rate, bound, True)
    for key in range(whole, begin, COLUMNS):
        out, total = add_values(out, total, q, k_desc, v_desc, key, head, row, low, rate, bound, False)
    for key in range(begin, begin + ROWS, COLUMNS):
        out, total = add_values(out, total, q, k_desc, v_desc, key, head, row, low, rate, bound, True)
    store_tile(out_desc, begin, head, out / total[:, None])
    tl.store(sums_ptr + head * n + row, tl.log2(total) + bound, mask=row < n)


@triton.jit
def add_query_gradient(grad, q, out_grad, k_desc, v_desc, start, head, row, low, log_sum, product, rate,
                       MASKED: tl.constexpr):
    k, v = load_tile(k_desc, start, head), load_tile(v_desc, start, head)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * rate - log_sum[:, None])
    if MASKED:
        key = start + tl.arange(0, k_desc.block_shape[0])
        p = tl.where((key[None, :] >= low[:, None]) & (key[None, :] <= row[:, None]), p, 0.0)
    score_grad = p * (tl.dot(out_grad, tl.trans(v)) - product[:, None])
    return tl.dot(score_grad.to(k.dtype), k, grad)


@triton.jit
def query_kernel(q_desc, k_desc, v_desc, out_desc, out_grad_desc, q_grad_desc, first_ptr, sums_ptr,
                 products_ptr, n, window, rate, scale, HEADS: tl.constexpr):
    """Also leaves each row's product of the output and its gradient, which the keys' kernel reads."""
    ROWS: tl.constexpr = q_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    QK_DIM: tl.constexpr = q_desc.block_shape[1]
    head, begin = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS * ROWS
    row = begin + tl.arange(0, ROWS)
    low, start, whole = keys_of(first_ptr, begin, row, n, window, ROWS, COLUMNS)
    q, out_grad = load_tile(q_desc, begin, head), load_tile(out_grad_desc, begin, head)
    out = load_tile(out_desc, begin, head)
    product = tl.sum(out.to(tl.float32) * out_grad.to(tl.float32), 1)
    tl.store(products_ptr + head * n + row, product, mask=row < n)
    log_sum = tl.load(sums_ptr + head * n + row, mask=row < n, other=0.0)
    grad = tl.zeros((ROWS, QK_DIM), tl.float32)
    for key in range(start, whole, COLUMNS):
        grad = add_query_gradient(grad, q, out_grad, k_desc, v_desc, key, head, row, low, log_sum, product,
                                  rate, True)
    for key in range(whole, begin, COLUMNS):
        grad = add_query_gradient(grad, q, out_grad, k_desc, v_desc, key, head, row, low, log_sum, product,
                                  rate, False)
    for key in range(begin, begin + ROWS, COLUMNS):
        grad = add_query_gradient(grad, q, out_grad, k_desc, v_desc, key, head, row, low, log_sum, product,
                                  rate, True)
    store_tile(q_grad_desc, begin, head, grad * scale)


@triton.jit
def add_key_gradients(k_grad, v_grad, k, v, q_desc, out_grad_desc, start, head, key, high, sums_ptr,
                      products_ptr, n, rate, MASKED: tl.constexpr):
    row = start + tl.arange(0, q_desc.block_shape[0])
    q, out_grad = load_tile(q_desc, start, head), load_tile(out_grad_desc, start, head)
    log_sum = tl.load(sums_ptr + head * n + row, mask=row < n, other=0.0)
    product = tl.load(products_ptr + head * n + row, mask=row < n, other=0.0)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * rate - log_sum[None, :])
    if MASKED:
        p = tl.where((row[None, :] >= key[:, None]) & (row[None, :] <= high[:, None]), p, 0.0)
    v_grad = tl.dot(p.to(q.dtype), out_grad, v_grad)
    score_grad = p * (tl.dot(v, tl.trans(out_grad)) - product[None, :])
    return tl.dot(score_grad.to(q.dtype), q, k_grad), v_grad


@triton.jit
def key_kernel(q_desc, k_desc, v_desc, out_grad_desc, k_grad_desc, v_grad_desc, end_ptr, sums_ptr,
               products_ptr, n, window, rate, scale, HEADS: tl.constexpr):
    ROWS: tl.constexpr = q_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    QK_DIM: tl.constexpr = q_desc.block_shape[1]
    HEAD_DIM: tl.constexpr = v_desc.block_shape[1]
    head, begin = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS * COLUMNS
    key = begin + tl.arange(0, COLUMNS)
    # The last row that sees each key.
    high = tl.minimum(tl.load(end_ptr + key, mask=key < n, other=0) - 1, key + window)
    last = tl.minimum(begin + COLUMNS, n) - 1
    stop = tl.minimum(tl.load(end_ptr + last), last + window + 1)
    soonest = tl.minimum(tl.load(end_ptr + begin), begin + window + 1)
    after = begin + COLUMNS
    # Up to here all rows from `after` on see all keys.
    whole = tl.maximum(after, soonest // ROWS * ROWS)
    k, v = load_tile(k_desc, begin, head), load_tile(v_desc, begin, head)
    k_grad = tl.zeros((COLUMNS, QK_DIM), tl.float32)
    v_grad = tl.zeros((COLUMNS, HEAD_DIM), tl.float32)
    for row in range(begin, after, ROWS):
        k_grad, v_grad = add_key_gradients(k_grad, v_grad, k, v, q_desc, out_grad_desc, row, head, key, high,
                                           sums_ptr, products_ptr, n, rate, True)
    for row in range(after, whole, ROWS):
        k_grad, v_grad = add_key_gradients(k_grad, v_grad, k, v, q_desc, out_grad_desc, row, head, key, high,
                                           sums_ptr, products_ptr, n, rate, False)
    for row in range(whole, stop, ROWS):
        k_grad, v_grad = add_key_gradients(k_grad, v_grad, k, v, q_desc, out_grad_desc, row, head, key, high,
                                           sums_ptr, products_ptr, n, rate, True)
    store_tile(k_grad_desc, begin, head, k_grad * scale)
    store_tile(v_grad_desc, begin, head, v_grad)
