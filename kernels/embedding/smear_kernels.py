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

A row is read in chunks of columns, so that a width like 768 pads nothing. The dot products
x·x_grad and y_grad·p are expanded into dot products of y, next_y, grad, next_grad, x and p. One loop over
chunks makes all of these (`dot_products`); another loop makes row_grad (`store_gradients`).
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
def dot_products(grad_ptr, rows, token, live, next_joined, inverses, mixes, width, zeros,
                 COLUMNS: tl.constexpr):
    """By chunk x, y, next_y, grad and next_grad; and all dot products that the gradients need."""
    inverse, before_inverse, next_inverse = inverses
    mix, next_mix = mixes
    y_square, next_y_square, y_dot_grad, next_y_dot_next_grad = zeros, zeros, zeros, zeros
    grad_dot_x, y_dot_x, next_grad_dot_x, next_y_dot_x = zeros, zeros, zeros, zeros
    grad_dot_p, y_dot_p, vectors = zeros, zeros, ()
    for chunk in tl.static_range(len(rows)):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        row, before, after = rows[chunk]
        x, p = row * inverse[:, None], before * before_inverse[:, None]
        y, next_y = x + p * mix[:, None], after * next_inverse[:, None] + x * next_mix[:, None]
        grad = load_rows(grad_ptr, token, live, width, column)
        next_grad = load_rows(grad_ptr, token + 1, next_joined, width, column)
        y_square, next_y_square = y_square + dot(y, y), next_y_square + dot(next_y, next_y)
        y_dot_grad += dot(y, grad)
        next_y_dot_next_grad += dot(next_y, next_grad)
        grad_dot_x, y_dot_x = grad_dot_x + dot(grad, x), y_dot_x + dot(y, x)
        next_grad_dot_x, next_y_dot_x = next_grad_dot_x + dot(next_grad, x), next_y_dot_x + dot(next_y, x)
        grad_dot_p, y_dot_p = grad_dot_p + dot(grad, p), y_dot_p + dot(y, p)
        vectors += ((x, y, next_y, grad, next_grad),)
    this = y_square, y_dot_grad, grad_dot_x, y_dot_x
    following = next_y_square, next_y_dot_next_grad, next_grad_dot_x, next_y_dot_x
    return vectors, this, following, (grad_dot_p, y_dot_p)


@triton.jit
def store_gradients(rows_grad_ptr, vectors, gate_ptr, factors, token, live, width, channels,
                    COLUMNS: tl.constexpr):
    y_inverse, y_share, next_y_inverse, next_y_share, next_mix, logit_grad, along, inverse = factors
    for chunk in tl.static_range(len(vectors)):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        x, y, next_y, grad, next_grad = vectors[chunk]
        x_grad = grad * y_inverse[:, None] - y * y_share[:, None] + next_mix[:, None] * (
            next_grad * next_y_inverse[:, None] - next_y * next_y_share[:, None])
        if chunk == 0:
            x_grad += logit_grad[:, None] * load_gate(gate_ptr, token, channels, column)
        row_grad = (x_grad - x * (along / width)[:, None]) * inverse[:, None]
        at = token.to(tl.int64)[:, None] * width + column
        tl.store(rows_grad_ptr + at, row_grad.to(rows_grad_ptr.dtype.element_ty),
                 mask=live[:, None] & (column < width))


@triton.jit
def smear_backward_kernel(grad_ptr, rows_ptr, is_start_ptr, gate_ptr, strength_ptr, rows_grad_ptr, sums_ptr,
                          n, width, channels, eps, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                          CHUNKS: tl.constexpr, GATES: tl.constexpr, PROGRAMS: tl.constexpr):
    strength, strength_sum = tl.load(strength_ptr), tl.zeros((ROWS,), tl.float32)
    gate_sum, zeros = tl.zeros((1, GATES), tl.float32), tl.zeros((ROWS,), tl.float32)
    gates = tl.arange(0, GATES)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), PROGRAMS):
        token = tile * ROWS + tl.arange(0, ROWS)
        live, next_live = token < n, token + 1 < n
        joined = live & (token > 0) & (tl.load(is_start_ptr + token, mask=live, other=1) == 0)
        next_joined = next_live & (tl.load(is_start_ptr + token + 1, mask=next_live, other=1) == 0)
        square, before_square, next_square, rows = zeros, zeros, zeros, ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            row = load_rows(rows_ptr, token, live, width, column)
            before = load_rows(rows_ptr, token - 1, joined, width, column)
            after = load_rows(rows_ptr, token + 1, next_joined, width, column)
            square, before_square = square + dot(row, row), before_square + dot(before, before)
            next_square += dot(after, after)
            if chunk == 0:
                gate = load_gate(gate_ptr, token, channels, column)
                row_dot_gate, next_row_dot_gate = dot(row, gate), dot(after, gate)
            rows += ((row, before, after),)
        inverse, before_inverse = tl.rsqrt(square / width + eps), tl.rsqrt(before_square / width + eps)
        next_inverse = tl.rsqrt(next_square / width + eps)
        sigma = tl.sigmoid(row_dot_gate * inverse)
        next_mix = strength * tl.sigmoid(next_row_dot_gate * next_inverse)
        mix = strength * sigma

        inverses = inverse, before_inverse, next_inverse
        vectors, this, following, with_p = dot_products(
            grad_ptr, rows, token, live, next_joined, inverses, (mix, next_mix), width, zeros, COLUMNS)
        y_square, y_dot_grad, grad_dot_x, y_dot_x = this
        next_y_square, next_y_dot_next_grad, next_grad_dot_x, next_y_dot_x = following
        # y_grad = grad · y_inverse − y · y_share, and so for the next token.
        y_inverse, next_y_inverse = tl.rsqrt(y_square / width + eps), tl.rsqrt(next_y_square / width + eps)
        y_share = y_inverse * y_inverse * y_inverse * y_dot_grad / width
        next_y_share = next_y_inverse * next_y_inverse * next_y_inverse * next_y_dot_next_grad / width
        next_mix = tl.where(next_joined, next_mix, 0.0)  # nothing reaches a token that starts a sequence
        grad_dot_p, y_dot_p = with_p
        mix_grad = y_inverse * grad_dot_p - y_share * y_dot_p
        logit_grad = mix_grad * strength * sigma * (1 - sigma)
        # x · x_grad; x · gate is row_dot_gate · inverse.
        along = (y_inverse * grad_dot_x - y_share * y_dot_x
                 + next_mix * (next_y_inverse * next_grad_dot_x - next_y_share * next_y_dot_x)
                 + logit_grad * row_dot_gate * inverse)
        factors = y_inverse, y_share, next_y_inverse, next_y_share, next_mix, logit_grad, along, inverse
        store_gradients(rows_grad_ptr, vectors, gate_ptr, factors, token, live, width, channels, COLUMNS)
        strength_sum += mix_grad * sigma
        at = token.to(tl.int64)[:, None] * width + gates
        seen = tl.load(rows_ptr + at, mask=live[:, None] & (gates < channels), other=0.0).to(tl.float32)
        gate_sum += tl.sum(logit_grad[:, None] * seen * inverse[:, None], axis=0, keep_dims=True)
    sums_ptr += tl.program_id(0) * (channels + 1)
    tl.store(sums_ptr, tl.sum(strength_sum))
    tl.store(sums_ptr + 1 + gates, gate_sum, mask=gates < channels)
