"""The Triton kernels of `pointer_sums`: both sums, the gradient of q by rows, that of k by columns."""
from kernels.backend import tl, triton


@triton.jit
def load_rows(x_ptr, row, n, stride, CHANNELS: tl.constexpr):
    """Rows (rows, CHANNELS) of a matrix, zero from n on."""
    at = row.to(tl.int64)[:, None] * stride + tl.arange(0, CHANNELS)[None, :]
    return tl.load(x_ptr + at, mask=(row < n)[:, None], other=0.0)


@triton.jit
def tile(q, k, row, column, first, target, tokens_ptr, n, scale):
    """Scores (rows, columns), which of them take part, and which of those lead to the row's target."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    earlier = (column[None, :] < row[:, None]) & (column[None, :] >= first[:, None]) & (row < n)[:, None]
    follower = tl.load(tokens_ptr + column + 1, mask=column + 1 < n, other=-1)
    return scores, earlier, earlier & (follower[None, :] == target[:, None])


@triton.jit
def pointer_kernel(q_ptr, k_ptr, tokens_ptr, targets_ptr, first_ptr, matching_ptr, every_ptr, n, strides,
                   scale, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    begin = tl.program_id(0) * ROWS
    row = begin + tl.arange(0, ROWS)
    first = tl.load(first_ptr + row, mask=row < n, other=0)
    target = tl.load(targets_ptr + row, mask=row < n, other=-2)
    q = load_rows(q_ptr, row, n, strides[0], CHANNELS)
    # One maximum serves both sums: what lies so far below it that it underflows counts as no match.
    top = tl.full((ROWS,), -1e30, tl.float32)
    every = tl.zeros((ROWS,), tl.float32)
    matching = tl.zeros((ROWS,), tl.float32)
    for start in range(tl.load(first_ptr + begin), tl.minimum(begin + ROWS, n), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = load_rows(k_ptr, column, n, strides[1], CHANNELS)
        scores, earlier, match = tile(q, k, row, column, first, target, tokens_ptr, n, scale)
        scores = tl.where(earlier, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        mass = tl.where(earlier, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(top - higher)
        every = every * shrink + tl.sum(mass, 1)
        matching = matching * shrink + tl.sum(tl.where(match, mass, 0.0), 1)
        top = higher
    store_log(matching_ptr, row, n, matching, top)
    store_log(every_ptr, row, n, every, top)


@triton.jit
def store_log(out_ptr, row, n, total, top):
    """log total + top, -inf where the total is 0."""
    log = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(out_ptr + row, log, mask=row < n)


@triton.jit
def score_gradient(q, k, row, column, first_ptr, targets_ptr, tokens_ptr, matching_ptr, every_ptr,
                   matching_grad_ptr, every_grad_ptr, n, scale):
    """The gradient of the products q · k, (rows, columns) float32."""
    first = tl.load(first_ptr + row, mask=row < n, other=0)
    target = tl.load(targets_ptr + row, mask=row < n, other=-2)
    scores, earlier, match = tile(q, k, row, column, first, target, tokens_ptr, n, scale)
    matching = tl.load(matching_ptr + row, mask=row < n, other=float("-inf"))
    every = tl.load(every_ptr + row, mask=row < n, other=0.0)
    matching_grad = tl.load(matching_grad_ptr + row, mask=row < n, other=0.0)
    every_grad = tl.load(every_grad_ptr + row, mask=row < n, other=0.0)
    # A row without an earlier position has sums of -inf, and no score of it is used.
    every = tl.where(every > float("-inf"), every, 0.0)
    some = matching > float("-inf")
    # One exponential a score: where a score is in both sums, its part in `matching` says that in `every`.
    both = matching_grad + every_grad * tl.exp(tl.where(some, matching - every, 0.0))
    match = match & some[:, None]
    part = tl.exp(scores - tl.where(match, matching[:, None], every[:, None]))
    grad = part * tl.where(match, both[:, None], every_grad[:, None])
    return tl.where(earlier, grad, 0.0) * scale


@triton.jit
def query_kernel(q_ptr, k_ptr, tokens_ptr, targets_ptr, first_ptr, bound_ptr, matching_ptr, every_ptr,
                 matching_grad_ptr, every_grad_ptr, out_ptr, n, strides, scale,
                 CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    begin = tl.program_id(0) * ROWS
    row = begin + tl.arange(0, ROWS)
    q = load_rows(q_ptr, row, n, strides[0], CHANNELS)
    out = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(tl.load(bound_ptr + begin), tl.minimum(begin + ROWS, n), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = load_rows(k_ptr, column, n, strides[1], CHANNELS)
        grad = score_gradient(q, k, row, column, first_ptr, targets_ptr, tokens_ptr, matching_ptr, every_ptr,
                              matching_grad_ptr, every_grad_ptr, n, scale)
        out += tl.dot(grad.to(k.dtype), k, input_precision="ieee")
    at = row.to(tl.int64)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(row < n)[:, None])


@triton.jit
def key_kernel(q_ptr, k_ptr, tokens_ptr, targets_ptr, first_ptr, bound_ptr, matching_ptr, every_ptr,
               matching_grad_ptr, every_grad_ptr, out_ptr, n, strides, scale,
               CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    begin = tl.program_id(0) * COLUMNS
    column = begin + tl.arange(0, COLUMNS)
    k = load_rows(k_ptr, column, n, strides[1], CHANNELS)
    out = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    for start in range(begin, tl.load(bound_ptr + tl.minimum(begin + COLUMNS, n) - 1), ROWS):
        row = start + tl.arange(0, ROWS)
        q = load_rows(q_ptr, row, n, strides[0], CHANNELS)
        grad = score_gradient(q, k, row, column, first_ptr, targets_ptr, tokens_ptr, matching_ptr, every_ptr,
                              matching_grad_ptr, every_grad_ptr, n, scale)
        out += tl.dot(tl.trans(grad).to(q.dtype), q, input_precision="ieee")
    at = column.to(tl.int64)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(column < n)[:, None])
