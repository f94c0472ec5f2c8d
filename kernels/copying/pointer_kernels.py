"""The Triton kernels of `pointer_sums`: both sums, the gradient of q by rows, that of k by columns.

Queries and keys have the norm √channels, so no score is above `bound`, and sums of 2^(score − bound) need no
maximum. Scores are in units of log 2. A row t and a key j take part in a sum if j < t in one sequence. Only
the first tiles of a program and the last ones hold pairs that do not, so only there a mask is applied.
"""
from kernels.backend import tl, triton


@triton.jit
def followers(tokens_ptr, key, n):
    """The tokens that follow the keys' own."""
    return tl.load(tokens_ptr + key + 1, mask=key + 1 < n, other=-1)


@triton.jit
def masses(q, k, row, key, first, rate, bound, MASKED: tl.constexpr):
    """2^(score − bound), (rows, keys); 0 for pairs that do not take part."""
    mass = tl.exp2(tl.dot(q, tl.trans(k)) * rate - bound)
    if MASKED:
        mass = tl.where((key[None, :] < row[:, None]) & (key[None, :] >= first[:, None]), mass, 0.0)
    return mass


@triton.jit
def keys_of(first_ptr, begin, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the rows' keys begin, and from where on all rows see all keys before `begin`."""
    start = tl.load(first_ptr + begin) // COLUMNS * COLUMNS
    latest = tl.load(first_ptr + tl.minimum(begin + ROWS, n) - 1)
    return start, tl.minimum(tl.cdiv(latest, COLUMNS) * COLUMNS, begin)


@triton.jit
def add_masses(matching, every, q, k_desc, tokens_ptr, start, row, first, target, n, rate, bound,
               MASKED: tl.constexpr):
    key = start + tl.arange(0, k_desc.block_shape[0])
    mass = masses(q, k_desc.load([start, 0]), row, key, first, rate, bound, MASKED)
    match = followers(tokens_ptr, key, n)[None, :] == target[:, None]
    return matching + tl.sum(tl.where(match, mass, 0.0), 1), every + tl.sum(mass, 1)


@triton.jit
def pointer_kernel(q_desc, k_desc, tokens_ptr, targets_ptr, first_ptr, matching_ptr, every_ptr, n, rate,
                   bound):
    ROWS: tl.constexpr = q_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    begin = tl.program_id(0) * ROWS
    row = begin + tl.arange(0, ROWS)
    first = tl.load(first_ptr + row, mask=row < n, other=0)
    target = tl.load(targets_ptr + row, mask=row < n, other=-2)
    start, whole = keys_of(first_ptr, begin, n, ROWS, COLUMNS)
    q = q_desc.load([begin, 0])
    matching, every = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for key in range(start, whole, COLUMNS):
        matching, every = add_masses(matching, every, q, k_desc, tokens_ptr, key, row, first, target, n, rate,
                                     bound, True)
    for key in range(whole, begin, COLUMNS):
        matching, every = add_masses(matching, every, q, k_desc, tokens_ptr, key, row, first, target, n, rate,
                                     bound, False)
    for key in range(begin, begin + ROWS, COLUMNS):
        matching, every = add_masses(matching, every, q, k_desc, tokens_ptr, key, row, first, target, n, rate,
                                     bound, True)
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
def add_query_gradient(grad, q, k_desc, tokens_ptr, start, row, first, target, on_match, on_every, n, rate,
                       bound, MASKED: tl.constexpr):
    key = start + tl.arange(0, k_desc.block_shape[0])
    k = k_desc.load([start, 0])
    mass = masses(q, k, row, key, first, rate, bound, MASKED)
    match = followers(tokens_ptr, key, n)[None, :] == target[:, None]
    score_grad = mass * (on_every[:, None] + tl.where(match, on_match[:, None], 0.0))
    return tl.dot(score_grad.to(k.dtype), k, grad)


@triton.jit
def query_kernel(q_desc, k_desc, q_grad_desc, tokens_ptr, targets_ptr, first_ptr, matching_ptr, every_ptr,
                 matching_grad_ptr, every_grad_ptr, factors_ptr, n, rate, bound, scale):
    """Also leaves each row's two factors, (2, n), which the keys' kernel reads."""
    ROWS: tl.constexpr = q_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    CHANNELS: tl.constexpr = q_desc.block_shape[1]
    begin = tl.program_id(0) * ROWS
    row = begin + tl.arange(0, ROWS)
    first = tl.load(first_ptr + row, mask=row < n, other=0)
    target = tl.load(targets_ptr + row, mask=row < n, other=-2)
    on_match = factor(matching_ptr, matching_grad_ptr, row, n, bound)
    on_every = factor(every_ptr, every_grad_ptr, row, n, bound)
    tl.store(factors_ptr + row, on_match, mask=row < n)
    tl.store(factors_ptr + n + row, on_every, mask=row < n)
    start, whole = keys_of(first_ptr, begin, n, ROWS, COLUMNS)
    q = q_desc.load([begin, 0])
    grad = tl.zeros((ROWS, CHANNELS), tl.float32)
    for key in range(start, whole, COLUMNS):
        grad = add_query_gradient(grad, q, k_desc, tokens_ptr, key, row, first, target, on_match, on_every, n,
                                  rate, bound, True)
    for key in range(whole, begin, COLUMNS):
        grad = add_query_gradient(grad, q, k_desc, tokens_ptr, key, row, first, target, on_match, on_every, n,
                                  rate, bound, False)
    for key in range(begin, begin + ROWS, COLUMNS):
        grad = add_query_gradient(grad, q, k_desc, tokens_ptr, key, row, first, target, on_match, on_every, n,
                                  rate, bound, True)
    q_grad_desc.store([begin, 0], (grad * scale).to(q_grad_desc.dtype))


@triton.jit
def add_key_gradient(grad, k, q_desc, targets_ptr, factors_ptr, start, key, end, follower, n, rate, bound,
                     MASKED: tl.constexpr):
    row = start + tl.arange(0, q_desc.block_shape[0])
    q = q_desc.load([start, 0])
    target = tl.load(targets_ptr + row, mask=row < n, other=-2)
    on_match = tl.load(factors_ptr + row, mask=row < n, other=0.0)
    on_every = tl.load(factors_ptr + n + row, mask=row < n, other=0.0)
    mass = tl.exp2(tl.dot(k, tl.trans(q)) * rate - bound)
    if MASKED:
        mass = tl.where((row[None, :] > key[:, None]) & (row[None, :] < end[:, None]), mass, 0.0)
    match = follower[:, None] == target[None, :]
    score_grad = mass * (on_every[None, :] + tl.where(match, on_match[None, :], 0.0))
    return tl.dot(score_grad.to(q.dtype), q, grad)


@triton.jit
def key_kernel(q_desc, k_desc, k_grad_desc, tokens_ptr, targets_ptr, end_ptr, factors_ptr, n, rate, bound,
               scale):
    ROWS: tl.constexpr = q_desc.block_shape[0]
    COLUMNS: tl.constexpr = k_desc.block_shape[0]
    CHANNELS: tl.constexpr = q_desc.block_shape[1]
    begin = tl.program_id(0) * COLUMNS
    key = begin + tl.arange(0, COLUMNS)
    end = tl.load(end_ptr + key, mask=key < n, other=0)
    follower = followers(tokens_ptr, key, n)
    after, stop = begin + COLUMNS, tl.load(end_ptr + tl.minimum(begin + COLUMNS, n) - 1)
    whole = tl.maximum(after, tl.load(end_ptr + begin) // ROWS * ROWS)
    k = k_desc.load([begin, 0])
    grad = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    for row in range(begin, after, ROWS):
        grad = add_key_gradient(grad, k, q_desc, targets_ptr, factors_ptr, row, key, end, follower, n, rate,
                                bound, True)
    for row in range(after, whole, ROWS):
        grad = add_key_gradient(grad, k, q_desc, targets_ptr, factors_ptr, row, key, end, follower, n, rate,
                                bound, False)
    for row in range(whole, stop, ROWS):
        grad = add_key_gradient(grad, k, q_desc, targets_ptr, factors_ptr, row, key, end, follower, n, rate,
                                bound, True)
    k_grad_desc.store([begin, 0], (grad * scale).to(k_grad_desc.dtype))
