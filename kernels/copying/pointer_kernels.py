"""The Triton kernels of `pointer_sums`: both sums, the gradient of q by rows, that of k by columns.

Queries and keys have the norm √channels, so no score is above `bound`, and sums of 2^(score − bound) need no
maximum. Scores are in units of log 2. A row t and a key j take part in a sum if j < t in one sequence. Only
the first and the last tiles of a program can hold other pairs, so only these tiles are masked. Loops over
keys set their number of stages themselves. Otherwise Triton would load the followers, which no matmul reads,
only when they are needed.
"""
from kernels.attention.bounded_kernels import dot, keys_of, load_rows, own_tile, powers
from kernels.backend import tl, triton


@triton.jit
def pointer_kernel(q_ptr, k_desc, followers_desc, targets_ptr, first_ptr, matching_ptr, every_ptr, n, rate,
                   bound, ROWS: tl.constexpr, STAGES: tl.constexpr):
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    _, begin, row = own_tile(1, ROWS)
    q = load_rows(q_ptr, row, n, 0, 1, k_desc.block_shape[1])
    target = tl.load(targets_ptr + row, mask=row < n, other=-2)
    first, start, whole = keys_of(first_ptr, begin, row, n, n, ROWS, COLUMNS)
    matching, every = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for key in tl.range(start, begin + ROWS, COLUMNS, num_stages=STAGES):
        mass = powers(q, k_desc.load([key, 0]), rate, bound, key, first, row - 1, whole, begin)
        match = followers_desc.load([key])[None, :] == target[:, None]
        matching += tl.sum(tl.where(match, mass, 0.0), 1)
        every += tl.sum(mass, 1)
    store_log(matching_ptr, row, n, matching, bound)
    store_log(every_ptr, row, n, every, bound)


@triton.jit
def store_log(out_ptr, row, n, total, bound):
    """The natural logarithm of total · 2^bound, or -inf."""
    log = (tl.log2(tl.maximum(total, 1e-37)) + bound) * 0.6931471805599453
    tl.store(out_ptr + row, tl.where(total > 0, log, float("-inf")), mask=row < n)


@triton.jit
def factor(log_ptr, grad_ptr, row, n, bound):
    """The gradient of a sum's logarithm, over the sum · 2^-bound; 0 where there is nothing to sum."""
    log = tl.load(log_ptr + row, mask=row < n, other=float("-inf"))
    grad = tl.load(grad_ptr + row, mask=row < n, other=0.0)
    none = log == float("-inf")
    return tl.where(none, 0.0, grad * tl.exp2(bound - tl.where(none, 0.0, log) * 1.4426950408889634))


@triton.jit
def pointer_query_kernel(q_ptr, k_desc, q_grad_desc, followers_desc, targets_ptr, first_ptr, matching_ptr,
                         every_ptr, matching_grad_ptr, every_grad_ptr, on_match_ptr, on_every_ptr, n, rate,
                         bound, scale, STAGES: tl.constexpr):
    """Also leaves each row's two factors, which the keys' kernel reads."""
    ROWS: tl.constexpr = q_grad_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    CHANNELS: tl.constexpr = k_desc.block_shape[1]
    _, begin, row = own_tile(1, ROWS)
    q = load_rows(q_ptr, row, n, 0, 1, CHANNELS)
    target = tl.load(targets_ptr + row, mask=row < n, other=-2)
    on_match = factor(matching_ptr, matching_grad_ptr, row, n, bound)
    on_every = factor(every_ptr, every_grad_ptr, row, n, bound)
    tl.store(on_match_ptr + row, on_match, mask=row < n)
    tl.store(on_every_ptr + row, on_every, mask=row < n)
    first, start, whole = keys_of(first_ptr, begin, row, n, n, ROWS, COLUMNS)
    grad = tl.zeros((ROWS, CHANNELS), tl.float32)
    for key in tl.range(start, begin + ROWS, COLUMNS, num_stages=STAGES):
        k = k_desc.load([key, 0])
        mass = powers(q, k, rate, bound, key, first, row - 1, whole, begin)
        match = followers_desc.load([key])[None, :] == target[:, None]
        score_grad = mass * (on_every[:, None] + tl.where(match, on_match[:, None], 0.0))
        grad = dot(score_grad.to(k.dtype), k, grad)
    q_grad_desc.store([begin, 0], (grad * scale).to(q_grad_desc.dtype))


@triton.jit
def pointer_key_kernel(q_desc, k_ptr, k_grad_desc, followers_ptr, targets_desc, end_ptr, on_match_desc,
                       on_every_desc, n, rate, bound, scale):
    ROWS: tl.constexpr = q_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_grad_desc.block_shape[0]
    CHANNELS: tl.constexpr = q_desc.block_shape[1]
    _, begin, key = own_tile(1, COLUMNS)
    k = load_rows(k_ptr, key, n, 0, 1, CHANNELS)
    follower = tl.load(followers_ptr + key, mask=key < n, other=-1)
    end = tl.load(end_ptr + key, mask=key < n, other=0)
    stop = tl.load(end_ptr + tl.minimum(begin + COLUMNS, n) - 1)
    whole = tl.load(end_ptr + begin) // ROWS * ROWS
    grad = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    for start in range(begin, stop, ROWS):
        q = q_desc.load([start, 0])
        on_match, on_every = on_match_desc.load([start]), on_every_desc.load([start])
        mass = powers(k, q, rate, bound, start, key + 1, end - 1, begin + COLUMNS, whole)
        match = follower[:, None] == targets_desc.load([start])[None, :]
        score_grad = mass * (on_every[None, :] + tl.where(match, on_match[None, :], 0.0))
        grad = dot(score_grad.to(q.dtype), q, grad)
    k_grad_desc.store([begin, 0], (grad * scale).to(k_grad_desc.dtype))
