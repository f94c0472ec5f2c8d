"""The Triton kernels between the Q, K, V matmul and attention; `qkv.py` has their mathematics.

Each is one pass. Forward reads Q, K, V and writes q, k, v: 453 MB for 49,152 tokens of 6 heads of 128
channels in bf16. Backward reads Q, K and the gradients of q, k, v and writes the gradient of Q, K, V in one
piece, as the next matmul wants it: 604 MB. At the bandwidth of one H200 these bytes take 108 and 145 µs; the
two kernels together take 256. Value rows add 75 and 151 MB, less where they are read from their table. Each
head with n-gram rows adds 13 MB forward and nothing backward.

A program takes one head of a few tokens, with its Q, K and V. Norms are computed again in the backward pass
instead of being kept. Nothing is rounded between norm and rotation, nor between the terms of v, where the
reference rounds.

The backward kernel can also write the gradient of Q, K, V in FP8 together with its transpose, 113 MB each
instead of 226 in bf16: the matmuls of `fp8_qkv.py` want both, and no further pass over the gradient makes
them.
"""
import torch
from torch import Tensor

from kernels.attention.inputs import HeadShape, Positions, Rows
from kernels.attention.rotary import angles, load_rotated
from kernels.attention.value_gate import check_rows, row_of
from kernels.backend import EPS, check, tl, triton
from kernels.fp8.formats import E5M2, pairs
from kernels.ngrams.shared_gradient import NGramValues, kernel_arguments

# (tokens a program, warps), the first is used: of 128 channels a thread has 16 bytes of each row.
CONFIGS = [(8, 4), (4, 2), (2, 1), (8, 2), (16, 8), (16, 4), (32, 8)]
# (tokens a program, warps) of the backward kernel in FP8. Tokens are a multiple of 16; 32 fill a sector of a
# transposed row. The first is used, or the second where queries and keys are narrower than values. Registers
# a thread for values of 128 channels, with queries and keys of 128 / of 64 channels (Triton 3.6, sm_90):
# 120 / 77, 233 / 125, 124 / 78, 93 / 67, 234 / 123.
FP8_CONFIGS = [(32, 8), (32, 4), (64, 16), (16, 4), (64, 8)]


@triton.jit
def place(HEADS: tl.constexpr, TOKENS: tl.constexpr, QK_DIM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """This program's head, its tokens (TOKENS,), and the channels of a query and of a value.

    Programs of the same tokens are neighbours, and so share the lines of the rotary tables.
    """
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    return head, token, tl.arange(0, QK_DIM)[None, :], tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def inverse_norm(x, EPS: tl.constexpr, QK_DIM: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 1) / QK_DIM + EPS)[:, None]


@triton.jit
def norm_backward(x, grad, EPS: tl.constexpr, QK_DIM: tl.constexpr):
    """The gradient of x from that of s x, with s = 1 / √(mean x² + EPS): s (grad − x s² mean(x grad))."""
    scale = inverse_norm(x, EPS, QK_DIM)
    return scale * (grad - x * (scale * scale * (tl.sum(x * grad, 1) / QK_DIM)[:, None]))


@triton.jit
def heads_kernel(
    qkv_ptr, positions, value, ngrams, outputs, n, NGRAM_HEADS: tl.constexpr, OFFSET: tl.constexpr,
    VALUE: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, QK_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr,
):
    cos_ptr, sin_ptr, is_start_ptr = positions
    rows_ptr, index_ptr, mix_ptr = value
    ngram_ptr, ngram_scale_ptr = ngrams
    q_ptr, k_ptr, v_ptr = outputs
    head, token, channel, value_channel = place(HEADS, TOKENS, QK_DIM, HEAD_DIM)
    live, inside = token < n, (token < n)[:, None]
    row = qkv_ptr + token[:, None] * (HEADS * (2 * QK_DIM + HEAD_DIM))
    queries = row + head * QK_DIM
    keys = queries + HEADS * QK_DIM
    values = row + 2 * HEADS * QK_DIM + head * HEAD_DIM + value_channel
    out = token[:, None] * (HEADS * QK_DIM) + head * QK_DIM + channel
    value_out = token[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + value_channel

    cos, sin = angles(cos_ptr, sin_ptr, token, channel, inside, R)
    q, q_rotated = load_rotated(queries, cos, sin, channel, inside, R)
    k, k_rotated = load_rotated(keys, cos, sin, channel, inside, R)
    v = tl.load(values, mask=inside, other=0.0).to(tl.float32)
    tl.store(q_ptr + out, (q_rotated * inverse_norm(q, EPS, QK_DIM)).to(q_ptr.dtype.element_ty), mask=inside)
    k_rotated *= inverse_norm(k, EPS, QK_DIM)
    if OFFSET:  # channels without a position come from the token before, unless a sequence starts here
        follows = live & (token > 0) & (tl.load(is_start_ptr + token, mask=live, other=1) == 0)
        before = keys - HEADS * (2 * QK_DIM + HEAD_DIM) + channel
        before = tl.load(before, mask=follows[:, None], other=0.0).to(tl.float32)
        k_rotated = tl.where(channel < 2 * R, k_rotated, before * inverse_norm(before, EPS, QK_DIM))
    tl.store(k_ptr + out, k_rotated.to(k_ptr.dtype.element_ty), mask=inside)
    if VALUE:
        mix = tl.load(mix_ptr + token * HEADS + head, mask=live, other=0.0)[:, None]
        row = rows_ptr + row_of(token, index_ptr, n)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM
        v += mix * tl.load(row + value_channel, mask=inside, other=0.0).to(tl.float32)
    if NGRAM_HEADS:  # the other heads read nothing and add zero
        ngram = ngram_ptr + token[:, None] * (NGRAM_HEADS * HEAD_DIM) + head * HEAD_DIM + value_channel
        ngram = tl.load(ngram, mask=inside & (head < NGRAM_HEADS), other=0.0).to(tl.float32)
        v += tl.load(ngram_scale_ptr + head, mask=head < NGRAM_HEADS, other=0.0) * ngram
    tl.store(v_ptr + value_out, v.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_gradient(
    x, column, outputs, token, n,
    WIDTH: tl.constexpr, LIMIT: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):
    """Write x (tokens, channels), the gradient of columns of Q, K, V; with a scale in FP8, and transposed."""
    grad_ptr, transposed_ptr, scale_ptr = outputs
    if scale_ptr is not None:
        x = x.to(tl.float32) * (1 / tl.load(scale_ptr))
        if LIMIT is not None:  # a GPU's conversion saturates, the interpreter's does not
            x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        row = tl.multiple_of(n // 2, 8)
        pair = tl.program_id(0) // HEADS * (TOKENS // 2) + tl.arange(0, TOKENS // 2)[None, :]
        transposed = pairs(x, grad_ptr.dtype.element_ty, TOKENS, x.shape[1]).T
        tl.store(transposed_ptr + column.to(tl.int64).T * row + pair, transposed, mask=pair < row)
    out = grad_ptr + token[:, None] * WIDTH + column
    tl.store(out, x.to(grad_ptr.dtype.element_ty), mask=token[:, None] < n)


@triton.jit
def heads_backward_kernel(
    qkv_ptr, positions, value, grads, outputs, value_outputs, n, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    VALUE: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr, QK_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr,
):
    cos_ptr, sin_ptr, is_start_ptr = positions
    rows_ptr, index_ptr, mix_ptr = value
    q_grad_ptr, k_grad_ptr, v_grad_ptr = grads
    rows_grad_ptr, mix_grad_ptr = value_outputs
    head, token, channel, value_channel = place(HEADS, TOKENS, QK_DIM, HEAD_DIM)
    live, inside, WIDTH = token < n, (token < n)[:, None], HEADS * (2 * QK_DIM + HEAD_DIM)
    q_column = head * QK_DIM + channel
    k_column = q_column + HEADS * QK_DIM
    v_column = 2 * HEADS * QK_DIM + head * HEAD_DIM + value_channel
    out_rows = token[:, None] * (HEADS * QK_DIM) + head * QK_DIM
    value_out = token[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + value_channel

    cos, sin = angles(cos_ptr, sin_ptr, token, channel, inside, R)
    q = tl.load(qkv_ptr + token[:, None] * WIDTH + q_column, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(qkv_ptr + token[:, None] * WIDTH + k_column, mask=inside, other=0.0).to(tl.float32)
    _, q_grad = load_rotated(q_grad_ptr + out_rows, cos, -sin, channel, inside, R)  # back by the same angle
    _, k_grad = load_rotated(k_grad_ptr + out_rows, cos, -sin, channel, inside, R)
    v_grad = tl.load(v_grad_ptr + value_out, mask=inside, other=0.0)
    q_grad = norm_backward(q, q_grad, EPS, QK_DIM)
    store_gradient(q_grad, q_column, outputs, token, n, WIDTH, LIMIT, HEADS, TOKENS)
    if OFFSET:  # these channels went into the next token's k, unless a sequence starts there
        follows = (token + 1 < n) & (tl.load(is_start_ptr + token + 1, mask=token + 1 < n, other=1) == 0)
        after = k_grad_ptr + HEADS * QK_DIM + out_rows + channel
        after = tl.load(after, mask=follows[:, None] & (channel >= 2 * R), other=0.0)
        k_grad = tl.where(channel < 2 * R, k_grad, after.to(tl.float32))
    k_grad = norm_backward(k, k_grad, EPS, QK_DIM)
    store_gradient(k_grad, k_column, outputs, token, n, WIDTH, LIMIT, HEADS, TOKENS)
    store_gradient(v_grad, v_column, outputs, token, n, WIDTH, LIMIT, HEADS, TOKENS)
    if VALUE:
        v_grad, mix_at = v_grad.to(tl.float32), token * HEADS + head
        row = rows_ptr + row_of(token, index_ptr, n)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM
        value_row = tl.load(row + value_channel, mask=inside, other=0.0).to(tl.float32)
        mix = tl.load(mix_ptr + mix_at, mask=live, other=0.0)[:, None]
        tl.store(rows_grad_ptr + value_out, (mix * v_grad).to(rows_grad_ptr.dtype.element_ty), mask=inside)
        tl.store(mix_grad_ptr + mix_at, tl.sum(v_grad * value_row, 1), mask=live)


def constants(qkv: Tensor, positions: Positions, rows: Rows | None, mix: Tensor | None,
              shape: HeadShape) -> dict:
    """What both kernels are compiled for, after checking the shapes that they rely on."""
    qk_dim, head_dim, key_offset = shape
    cos, sin, is_start = positions
    columns = 2 * qk_dim + head_dim
    known_dtype = qkv.dtype in (torch.bfloat16, torch.float16, torch.float32)
    check(qkv.ndim == 2 and qkv.is_contiguous() and known_dtype, "qkv", qkv,
          "contiguous (n, heads (2 qk_dim + head_dim)) in bf16, fp16 or float32")
    n, heads = len(qkv), qkv.size(1) // columns
    powers_of_two = qk_dim & qk_dim - 1 == head_dim & head_dim - 1 == 0
    check(powers_of_two and 0 < heads * columns == qkv.size(1), "qkv", qkv,
          f"(n, heads (2 qk_dim + head_dim)) for {qk_dim=} and {head_dim=}, both powers of two")
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.ndim == 2 and table.shape == cos.shape and len(table) == n
        fits = fits and 0 < 2 * table.size(1) <= qk_dim
        check(fits and table.dtype == torch.float32 and table.is_contiguous(), name, table,
              f"contiguous float32 ({n}, r), r of 1 to {qk_dim // 2}")
    check(is_start.shape == (n,) and is_start.dtype == torch.bool and is_start.is_contiguous(), "is_start",
          is_start, f"bool ({n},)")
    if rows is not None:
        check_rows(rows, n, heads * head_dim)
        check(rows.table.is_contiguous() and rows.table.dtype == qkv.dtype, "value rows", rows.table,
              f"contiguous {qkv.dtype}")
        check(mix.shape == (n, heads) and mix.is_contiguous(), "mix", mix, f"contiguous ({n}, {heads})")
    return dict(OFFSET=key_offset, VALUE=rows is not None, R=cos.size(1), HEADS=heads, EPS=EPS,
                QK_DIM=qk_dim, HEAD_DIM=head_dim)


def heads_forward(
    qkv: Tensor,  # (n, heads (2 qk_dim + head_dim))
    positions: Positions,
    rows: Rows | None,  # (n, heads head_dim): the value rows
    mix: Tensor | None,  # (n, heads) float32, from `value_mix`: how much of its value row each head takes
    ngrams: NGramValues | None,
    shape: HeadShape,
    tuned: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (n, heads, qk_dim) and v (n, heads, head_dim) = V + mix · value rows + scale · n-gram rows."""
    compiled_for = constants(qkv, positions, rows, mix, shape)
    (tokens, warps), n, heads = tuned or CONFIGS[0], len(qkv), compiled_for["HEADS"]
    dims = shape.qk_dim, shape.qk_dim, shape.head_dim
    q, k, v = (torch.empty(n, heads, dim, dtype=qkv.dtype, device=qkv.device) for dim in dims)
    ngram_rows, ngram_scale, ngram_heads = kernel_arguments(ngrams, v)
    if n:
        heads_kernel[triton.cdiv(n, tokens) * heads,](
            qkv, tuple(positions), (*(rows or (None, None)), mix), (ngram_rows, ngram_scale), (q, k, v), n,
            NGRAM_HEADS=ngram_heads, **compiled_for, TOKENS=tokens, num_warps=warps)
    return q, k, v


def heads_backward(
    grads: tuple[Tensor, Tensor, Tensor],  # of q, k (n, heads, qk_dim) and v (n, heads, head_dim)
    qkv: Tensor,
    positions: Positions,
    rows: Rows | None,
    mix: Tensor | None,
    shape: HeadShape,
    scale: Tensor | None = None,  # one float32: the gradient of qkv is then written in FP8, over this scale
    tuned: tuple[int, int] | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of qkv, value rows and mix; and the transpose of qkv's gradient, None without a scale.

    In FP8 the gradient is float8_e5m2, saturated, and its transpose is in the order of
    `kernels.fp8.formats.paired`.
    """
    compiled_for, n = constants(qkv, positions, rows, mix, shape), len(qkv)
    tokens, warps = tuned or (CONFIGS[0] if scale is None else FP8_CONFIGS[shape.qk_dim < shape.head_dim])
    heads, dims = compiled_for["HEADS"], (shape.qk_dim, shape.qk_dim, shape.head_dim)
    grads = tuple(grad.contiguous() for grad in grads)
    for name, grad, dim in zip(("q_grad", "k_grad", "v_grad"), grads, dims):
        check(grad.shape == (n, heads, dim), name, grad, f"({n}, {heads}, {dim})")
    one_float = scale is None or scale.numel() == 1 and scale.dtype == torch.float32
    check(one_float and (scale is None or n % 16 == tokens % 16 == 0), "qkv", qkv,
          "of a multiple of 16 tokens, in blocks of such, and the scale one float32, for its gradient in FP8")
    grad, mix_grad = (None if x is None else torch.empty_like(x) for x in (qkv, mix))
    rows_grad = None if rows is None else qkv.new_empty(n, heads * shape.head_dim)
    transposed = by_pairs = None
    if scale is not None:
        grad = torch.empty(qkv.shape, dtype=E5M2, device=qkv.device)
        transposed = torch.empty(qkv.shape[::-1], dtype=E5M2, device=qkv.device)
        by_pairs = transposed.view(torch.int16)
    if n:
        heads_backward_kernel[triton.cdiv(n, tokens) * heads,](
            qkv, tuple(positions), (*(rows or (None, None)), mix), grads, (grad, by_pairs, scale),
            (rows_grad, mix_grad), n, LIMIT=None if qkv.is_cuda else torch.finfo(E5M2).max, **compiled_for,
            TOKENS=tokens, num_warps=warps)
    return grad, rows_grad, mix_grad, transposed
