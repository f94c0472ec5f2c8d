"""The Triton kernels of `smear`, forward and backward, and the calculus between them.

    out = norm(y),   y = x + m p,   x = norm(row),   m = strength · σ(x · gate),   norm(v) = v / |v|

p is the x of the token before (zero where a sequence starts), and |v|² = v·v / width, so |v| is the root mean
square. If g is the gradient of norm(v), then the gradient of v is

    (g − norm(v) (norm(v)·g) / width) / |v|    =    g / |v| − v (v·g) / (width |v|³)

A token's x reaches the results in three ways: through y, through the next token's y = next_x + next_m x, and
through the logit x · gate of its own m. With `grad` for the gradient of this token's out, and `next_grad` for
that of the next token's out:

    y_grad     = grad / |y| − y (y·grad) / (width |y|³)                    next_y_grad likewise
    mix_grad   = y_grad · p
    logit_grad = mix_grad · strength · σ (1 − σ)
    x_grad     = y_grad + next_m · next_y_grad + logit_grad · gate
    row_grad   = (x_grad − x (x·x_grad) / width) / |row|

So a token needs next_m · next_y_grad from the token behind it. The backward kernel goes backwards through
runs of tokens, one warp a run, and keeps that vector (`following`) and the next token's x from turn to
turn: each row and each gradient is read and computed with once. A row is read in chunks of columns, so that a
width like 768 pads nothing. (A form that treated each token alone computed everything for its next token
again, with 13 dot products a token and not 5, and took 296 µs for 98,304 tokens, where this one takes 190.)
"""
from kernels.backend import tl, triton


@triton.jit
def load_rows(rows_ptr, token, live, width, column):
    """Rows of tokens, in float32; zeros where a token is not live."""
    at = token.to(tl.int64)[:, None] * width + column
    return tl.load(rows_ptr + at, mask=live[:, None] & (column < width), other=0.0).to(tl.float32)


@triton.jit
def dot(a, b):
    return tl.sum(a * b, axis=1)


@triton.jit
def load_gate(gate_ptr, token, channels, column):
    """The gate, as wide as a chunk and of the rows' dtype, so that it lies in registers as the rows do."""
    return tl.load(gate_ptr + token[:, None] * 0 + column, mask=column < channels, other=0.0).to(tl.float32)


@triton.jit
def smear_kernel(rows_ptr, is_start_ptr, gate_ptr, strength_ptr, out_ptr, n, width, channels, eps,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = token < n
    joined = live & (token > 0) & (tl.load(is_start_ptr + token, mask=live, other=1) == 0)
    square, before_square = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    rows = ()  # by chunk: this token's and that of the token before
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        row = load_rows(rows_ptr, token, live, width, column)
        before = load_rows(rows_ptr, token - 1, joined, width, column)
        square, before_square = square + dot(row, row), before_square + dot(before, before)
        if chunk == 0:
            row_dot_gate = dot(row, load_gate(gate_ptr, token, channels, column))
        rows += ((row, before),)
    inverse, before_inverse = tl.rsqrt(square / width + eps), tl.rsqrt(before_square / width + eps)
    mix = tl.load(strength_ptr) * tl.sigmoid(row_dot_gate * inverse) * before_inverse
    y_square, ys = tl.zeros((ROWS,), tl.float32), ()
    for chunk in tl.static_range(CHUNKS):
        row, before = rows[chunk]
        y = row * inverse[:, None] + before * mix[:, None]
        y_square += dot(y, y)
        ys += (y,)
    y_inverse = tl.rsqrt(y_square / width + eps)[:, None]
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at = token.to(tl.int64)[:, None] * width + column
        out = (ys[chunk] * y_inverse).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, out, mask=live[:, None] & (column < width))


@triton.jit
def read(rows_ptr, gate_ptr, token, live, width, channels, eps, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    """By chunk the rows of tokens in float32; 1 over their root mean squares; and x · gate."""
    square, rows = tl.zeros(token.shape, tl.float32), ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        row = load_rows(rows_ptr, token, live, width, column)
        square += dot(row, row)
        if chunk == 0:
            row_dot_gate = dot(row, load_gate(gate_ptr, token, channels, column))
        rows += (row,)
    inverse = tl.rsqrt(square / width + eps)
    return rows, inverse, row_dot_gate * inverse


@triton.jit
def y_gradients(x, befores, grads, to_p, mix, width, eps, zeros):
    """By chunk y_grad; and mix_grad. `befores` times `to_p` is p."""
    y_square, y_dot_grad = zeros, zeros
    for chunk in tl.static_range(len(x)):
        y = x[chunk] + mix * (befores[chunk] * to_p)
        y_square, y_dot_grad = y_square + dot(y, y), y_dot_grad + dot(y, grads[chunk])
    y_inverse = tl.rsqrt(y_square / width + eps)
    y_share = (y_inverse * y_inverse * y_inverse * y_dot_grad / width)[:, None]
    mix_grad, y_grads = zeros, ()
    for chunk in tl.static_range(len(x)):
        p = befores[chunk] * to_p
        y_grad = grads[chunk] * y_inverse[:, None] - (x[chunk] + mix * p) * y_share
        mix_grad += dot(y_grad, p)
        y_grads += (y_grad,)
    return y_grads, mix_grad


@triton.jit
def store_gradients(rows_grad_ptr, gate_ptr, x, y_grads, following, logit_grad, logit, inverse, token, own,
                    width, channels, COLUMNS: tl.constexpr):
    """Write row_grad where a token is of the run."""
    along = logit_grad * logit      # and the rest of x · x_grad
    for chunk in tl.static_range(len(x)):
        along += dot(x[chunk], y_grads[chunk] + following[chunk])
    for chunk in tl.static_range(len(x)):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        x_grad = y_grads[chunk] + following[chunk]
        if chunk == 0:
            x_grad += logit_grad[:, None] * load_gate(gate_ptr, token, channels, column)
        row_grad = (x_grad - x[chunk] * (along / width)[:, None]) * inverse[:, None]
        at = token.to(tl.int64)[:, None] * width + column
        tl.store(rows_grad_ptr + at, row_grad.to(rows_grad_ptr.dtype.element_ty),
                 mask=own[:, None] & (column < width))


@triton.jit
def smear_backward_kernel(grad_ptr, rows_ptr, is_start_ptr, gate_ptr, strength_ptr, rows_grad_ptr, sums_ptr,
                          n, width, channels, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                          CHUNKS: tl.constexpr, RUN: tl.constexpr):
    strength, zeros = tl.load(strength_ptr), tl.zeros((ROWS,), tl.float32)
    # Each row of a tile goes backwards through RUN tokens. It begins one token behind them, because the last
    # of them needs that token's y_grad. This first turn stores nothing.
    first = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * RUN
    behind = first + RUN
    rows, inverse, logit = read(rows_ptr, gate_ptr, behind, behind < n, width, channels, eps, COLUMNS, CHUNKS)
    x, following = (), ()
    for chunk in tl.static_range(CHUNKS):
        x += (rows[chunk] * inverse[:, None],)
        following += (tl.zeros((ROWS, COLUMNS), tl.float32),)
    strength_sum, gate_sum = zeros, tl.zeros((ROWS, COLUMNS), tl.float32)
    for back in range(RUN + 1):
        token = behind - back
        live, own = token < n, (token < n) & (back > 0)
        joined = live & (token > 0) & (tl.load(is_start_ptr + token, mask=live, other=1) == 0)
        grads = ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            grads += (load_rows(grad_ptr, token, live, width, column),)
        befores, before_inverse, before_logit = read(
            rows_ptr, gate_ptr, token - 1, (token > 0) & (token <= n), width, channels, eps, COLUMNS, CHUNKS)
        sigma = tl.sigmoid(logit)
        mix, to_p = (strength * sigma)[:, None], tl.where(joined, before_inverse, 0.0)[:, None]
        y_grads, mix_grad = y_gradients(x, befores, grads, to_p, mix, width, eps, zeros)
        logit_grad = mix_grad * strength * sigma * (1 - sigma)
        store_gradients(rows_grad_ptr, gate_ptr, x, y_grads, following, logit_grad, logit, inverse, token,
                        own, width, channels, COLUMNS)
        strength_sum += tl.where(own, mix_grad * sigma, 0.0)
        gate_sum += tl.where(own, logit_grad, 0.0)[:, None] * x[0]
        next_x, next_following = (), ()
        for chunk in tl.static_range(CHUNKS):
            next_x += (befores[chunk] * before_inverse[:, None],)
            next_following += (y_grads[chunk] * tl.where(joined[:, None], mix, 0.0),)
        x, following, inverse, logit = next_x, next_following, before_inverse, before_logit
    sums_ptr += tl.program_id(0) * (channels + 1)
    tl.store(sums_ptr, tl.sum(strength_sum))
    column = tl.arange(0, COLUMNS)
    tl.store(sums_ptr + 1 + column, tl.sum(gate_sum, axis=0), mask=column < channels)
