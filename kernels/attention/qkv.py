"""q, k = rotate(rms_norm(Q)), rotate(rms_norm(K)), v = V + 2σ(seen·gate) value_row + b·rows: all between the product QKV and attention.

In long windows the position-free channels of k then come from the token before. One pass each way: forward reads QKV and writes
q, k, v; backward reads Q, K and the gradients of q, k, v and writes QKV's, as the next product wants it, in one piece. For 49,152
tokens of 6 heads of 128 channels in bf16 that is 453 and 604 MB, at the bandwidth of one H200 108 and 145 µs, and takes 256 (README.md);
value rows add 75 and 151 MB. Compiled PyTorch takes several passes each way.

b·rows is a `Term` that all layers share, such as n-grams' rows, each as wide as a head, for the first heads alone. It adds 13 MB a head
forward and nothing backward, where a layer leaves those heads' part of v's gradient to `kernels.ngrams.shared_gradient`.

A program takes one head of a few tokens, Q, K and V of it. Norms are computed again in the backward pass; what is rotated
with a channel is read a second time, from cache: so a row keeps one layout, is read in whole lines and needs no shared memory.
Between norm and rotation, and between the value's product and sum, nothing is rounded where the plain form rounds.
Backward may write the gradient of QKV in FP8 with its transpose in place of bf16, 113 MB each in place of 226 (`kernels.attention.fp8_qkv`).
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.rotary import angles, load_rotated, rotate
from kernels.attention.value_gate import (
    value_mix,
    value_mix_backward,
    value_mix_reference,
)
from kernels.backend import EPS, check, tl, triton
from kernels.fp8.formats import E5M2, pairs
from kernels.ngrams.shared_gradient import Term, leave, of_heads

# (tokens a program, warps); the first is used. With 8 tokens of 128 channels to 4 warps a thread has 16 bytes of each row.
CONFIGS = [(8, 4), (4, 2), (2, 1), (8, 2), (16, 8), (16, 4), (32, 8)]
# Backward in FP8, a multiple of 16 tokens, of which 32 fill a sector of a transposed row: the first is used, the second where queries and
# keys are narrower than values. Registers a thread, of heads of 128 channels, with them as wide / of 64 (Triton 3.6, sm_90).
FP8_CONFIGS = [(32, 8), (32, 4), (64, 16), (16, 4), (64, 8)]             # 120 / 77, 233 / 125, 124 / 78, 93 / 67, 234 / 123


def qkv_heads_reference(qkv: Tensor, cos: Tensor, sin: Tensor, is_start: Tensor, seen: Tensor | None, value_row: Tensor | None,
                   value_gate: Tensor | None, qk_dim: int, head_dim: int, key_offset: bool,
                   term: Term | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch twin of `qkv_heads`."""
    dims = qk_dim, qk_dim, head_dim
    heads = qkv.size(1) // sum(dims)
    q, k, v = (part.unflatten(1, (heads, dim)) for part, dim in zip(qkv.split([heads * dim for dim in dims], 1), dims))
    q, k = (rotate(F.rms_norm(part, (qk_dim,), eps=EPS), cos, sin) for part in (q, k))
    if key_offset:
        rotary = 2 * cos.size(-1)
        before = F.pad(k[:-1, :, rotary:], (0, 0, 0, 0, 1, 0))
        k = torch.cat([k[..., :rotary], before.masked_fill(is_start[:, None, None], 0)], dim=-1)
    if value_row is not None:
        v = v + value_mix_reference(seen, value_row, value_gate)[..., None] * value_row.view_as(v)
    if term is not None:
        first, others = v.split([term.rows.size(1), heads - term.rows.size(1)], 1)
        v = torch.cat([(first + term.scale[:, None] * term.rows).type_as(v), others], 1)
    return q, k, v.contiguous()


@triton.jit
def place(HEADS: tl.constexpr, TOKENS: tl.constexpr, QK_DIM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """This program's head and tokens (TOKENS,), and the channels of Q and K and of V. Neighbours share tokens, so lines of the tables."""
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    return head, token, tl.arange(0, QK_DIM)[None, :], tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def inverse_norm(x, EPS: tl.constexpr, QK_DIM: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 1) / QK_DIM + EPS)[:, None]


@triton.jit
def norm_backward(x, grad, EPS: tl.constexpr, QK_DIM: tl.constexpr):
    scale = inverse_norm(x, EPS, QK_DIM)
    return scale * (grad - x * (scale * scale * (tl.sum(x * grad, 1) / QK_DIM)[:, None]))


@triton.jit
def heads_kernel(qkv_ptr, cos_ptr, sin_ptr, is_start_ptr, row_ptr, mix_ptr, shared_ptr, shared_scale_ptr, q_ptr, k_ptr, v_ptr, n,
                 SHARED: tl.constexpr, OFFSET: tl.constexpr, VALUE: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
                 EPS: tl.constexpr, QK_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr):
    head, token, channel, value_channel = place(HEADS, TOKENS, QK_DIM, HEAD_DIM)
    live, inside = token < n, (token < n)[:, None]
    row = qkv_ptr + token[:, None] * (HEADS * (2 * QK_DIM + HEAD_DIM))
    queries = row + head * QK_DIM
    keys, values = queries + HEADS * QK_DIM, row + 2 * HEADS * QK_DIM + head * HEAD_DIM + value_channel
    out = token[:, None] * (HEADS * QK_DIM) + head * QK_DIM + channel
    value_out = token[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + value_channel
    cos, sin = angles(cos_ptr, sin_ptr, token, channel, inside, R)
    q, q_rotated = load_rotated(queries, cos, sin, channel, inside, R)
    k, k_rotated = load_rotated(keys, cos, sin, channel, inside, R)
    v = tl.load(values, mask=inside, other=0.0).to(tl.float32)
    tl.store(q_ptr + out, (q_rotated * inverse_norm(q, EPS, QK_DIM)).to(q_ptr.dtype.element_ty), mask=inside)
    k_rotated *= inverse_norm(k, EPS, QK_DIM)
    if OFFSET:
        follows = live & (token > 0) & (tl.load(is_start_ptr + token, mask=live, other=1) == 0)
        before = keys - HEADS * (2 * QK_DIM + HEAD_DIM) + channel                        # the token's before
        before = tl.load(before, mask=follows[:, None], other=0.0).to(tl.float32)
        k_rotated = tl.where(channel < 2 * R, k_rotated, before * inverse_norm(before, EPS, QK_DIM))
    tl.store(k_ptr + out, k_rotated.to(k_ptr.dtype.element_ty), mask=inside)
    if VALUE:
        mix = tl.load(mix_ptr + token * HEADS + head, mask=live, other=0.0)[:, None]
        v += mix * tl.load(row_ptr + value_out, mask=inside, other=0.0).to(tl.float32)
    if SHARED:                                                                          # another head reads nothing and adds zero
        shared = shared_ptr + token[:, None] * (SHARED * HEAD_DIM) + head * HEAD_DIM + value_channel
        shared = tl.load(shared, mask=inside & (head < SHARED), other=0.0).to(tl.float32)
        v += tl.load(shared_scale_ptr + head, mask=head < SHARED, other=0.0) * shared
    tl.store(v_ptr + value_out, v.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_gradient(x, column, grad_ptr, transposed_ptr, scale_ptr, token, n, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
                   HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """x (tokens, channels), the gradient of these columns of qkv, as it is; or, with a scale, over that in FP8, and transposed too."""
    if scale_ptr is not None:
        x = x.to(tl.float32) * (1 / tl.load(scale_ptr))
        if LIMIT is not None:                                            # a GPU's conversion saturates, the interpreter's does not
            x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        row, pair = tl.multiple_of(n // 2, 8), tl.program_id(0) // HEADS * (TOKENS // 2) + tl.arange(0, TOKENS // 2)[None, :]
        transposed = pairs(x, grad_ptr.dtype.element_ty, TOKENS, x.shape[1]).T
        tl.store(transposed_ptr + column.to(tl.int64).T * row + pair, transposed, mask=pair < row)
    tl.store(grad_ptr + token[:, None] * WIDTH + column, x.to(grad_ptr.dtype.element_ty), mask=token[:, None] < n)


@triton.jit
def heads_backward_kernel(qkv_ptr, cos_ptr, sin_ptr, is_start_ptr, row_ptr, mix_ptr, q_grad_ptr, k_grad_ptr, v_grad_ptr,
                          grad_ptr, transposed_ptr, scale_ptr, row_grad_ptr, mix_grad_ptr, n, LIMIT: tl.constexpr,
                          OFFSET: tl.constexpr, VALUE: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
                          EPS: tl.constexpr, QK_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr):
    head, token, channel, value_channel = place(HEADS, TOKENS, QK_DIM, HEAD_DIM)
    live, inside, WIDTH = token < n, (token < n)[:, None], HEADS * (2 * QK_DIM + HEAD_DIM)
    query = head * QK_DIM + channel                                                     # columns of qkv
    key, value = query + HEADS * QK_DIM, 2 * HEADS * QK_DIM + head * HEAD_DIM + value_channel
    out_rows = token[:, None] * (HEADS * QK_DIM) + head * QK_DIM
    value_out = token[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + value_channel
    cos, sin = angles(cos_ptr, sin_ptr, token, channel, inside, R)
    q = tl.load(qkv_ptr + token[:, None] * WIDTH + query, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(qkv_ptr + token[:, None] * WIDTH + key, mask=inside, other=0.0).to(tl.float32)
    _, q_grad = load_rotated(q_grad_ptr + out_rows, cos, -sin, channel, inside, R)      # back by the same angle
    _, k_grad = load_rotated(k_grad_ptr + out_rows, cos, -sin, channel, inside, R)
    v_grad = tl.load(v_grad_ptr + value_out, mask=inside, other=0.0)
    q_grad = norm_backward(q, q_grad, EPS, QK_DIM)
    store_gradient(q_grad, query, grad_ptr, transposed_ptr, scale_ptr, token, n, WIDTH, LIMIT, HEADS, TOKENS)
    if OFFSET:                                                                          # they went to the next token's k, if to any
        follows = (token + 1 < n) & (tl.load(is_start_ptr + token + 1, mask=token + 1 < n, other=1) == 0)
        after = k_grad_ptr + HEADS * QK_DIM + out_rows + channel
        after = tl.load(after, mask=follows[:, None] & (channel >= 2 * R), other=0.0)
        k_grad = tl.where(channel < 2 * R, k_grad, after.to(tl.float32))
    k_grad = norm_backward(k, k_grad, EPS, QK_DIM)
    store_gradient(k_grad, key, grad_ptr, transposed_ptr, scale_ptr, token, n, WIDTH, LIMIT, HEADS, TOKENS)
    store_gradient(v_grad, value, grad_ptr, transposed_ptr, scale_ptr, token, n, WIDTH, LIMIT, HEADS, TOKENS)
    if VALUE:
        v_grad, mixes = v_grad.to(tl.float32), token * HEADS + head
        value_row = tl.load(row_ptr + value_out, mask=inside, other=0.0).to(tl.float32)
        mix = tl.load(mix_ptr + mixes, mask=live, other=0.0)[:, None]
        tl.store(row_grad_ptr + value_out, (mix * v_grad).to(row_grad_ptr.dtype.element_ty), mask=inside)
        tl.store(mix_grad_ptr + mixes, tl.sum(v_grad * value_row, 1), mask=live)


def _form(qkv: Tensor, cos: Tensor, sin: Tensor, is_start: Tensor, value_row: Tensor | None, mix: Tensor | None, qk_dim: int,
          head_dim: int, key_offset: bool) -> dict:
    """The shapes as the kernels take them, after checking what they rely on."""
    check(qkv.ndim == 2 and qkv.is_contiguous() and qkv.dtype in (torch.bfloat16, torch.float16, torch.float32), "qkv", qkv,
          "contiguous (n, heads (2 qk_dim + head_dim)) in bf16, fp16 or float32")
    n, heads = len(qkv), qkv.size(1) // (2 * qk_dim + head_dim)
    width = heads * head_dim
    check(qk_dim & qk_dim - 1 == head_dim & head_dim - 1 == 0 and 0 < heads * (2 * qk_dim + head_dim) == qkv.size(1), "qkv", qkv,
          f"(n, heads (2 qk_dim + head_dim)) with the qk_dim and head_dim that are given, {qk_dim} and {head_dim}, powers of two")
    for name, table in (("cos", cos), ("sin", sin)):
        check(table.ndim == 2 and len(table) == n and table.shape == cos.shape and 0 < 2 * table.size(1) <= qk_dim
              and table.dtype == torch.float32 and table.is_contiguous(), name, table,
              f"contiguous float32 ({n}, r), r of 1 to {qk_dim // 2}")
    check(is_start.shape == (n,) and is_start.dtype == torch.bool and is_start.is_contiguous(), "is_start", is_start, f"bool ({n},)")
    if value_row is not None:
        check(value_row.shape == (n, width) and value_row.is_contiguous() and value_row.dtype == qkv.dtype, "value_row", value_row,
              f"contiguous ({n}, {width}) {qkv.dtype}")
        check(mix.shape == (n, heads) and mix.is_contiguous(), "mix", mix, f"contiguous ({n}, {heads})")
    return dict(OFFSET=key_offset, VALUE=value_row is not None, R=cos.size(1), HEADS=heads, EPS=EPS, QK_DIM=qk_dim, HEAD_DIM=head_dim)


def heads_forward(qkv: Tensor, cos: Tensor, sin: Tensor, is_start: Tensor, value_row: Tensor | None, mix: Tensor | None, qk_dim: int,
                  head_dim: int, key_offset: bool, term: Term | None = None,
                  tuned: tuple[int, int] = CONFIGS[0]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (n, heads, qk_dim) and v (n, heads, head_dim) = V + mix value_row + term; mix (n, heads) float32."""
    form, (tokens, warps), n = _form(qkv, cos, sin, is_start, value_row, mix, qk_dim, head_dim, key_offset), tuned, len(qkv)
    q, k, v = (torch.empty(n, form["HEADS"], dim, dtype=qkv.dtype, device=qkv.device) for dim in (qk_dim, qk_dim, head_dim))
    rows, scale, shared = of_heads(term, v)
    if n:
        heads_kernel[triton.cdiv(n, tokens) * form["HEADS"],](
            qkv, cos, sin, is_start, value_row, mix, rows, scale, q, k, v, n, SHARED=shared, **form, TOKENS=tokens, num_warps=warps)
    return q, k, v


def heads_backward(q_grad: Tensor, k_grad: Tensor, v_grad: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, is_start: Tensor,
                   value_row: Tensor | None, mix: Tensor | None, qk_dim: int, head_dim: int, key_offset: bool,
                   tuned: tuple[int, int] | None = None, scale: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradients of qkv, value_row and mix from those of q, k (n, heads, qk_dim) and v (n, heads, head_dim); and, with a scale
    (one float32), qkv's over it in float8_e5m2, saturated, and in the last place that transposed, in `kernels.fp8.quantize.paired` order.
    """
    form, n = _form(qkv, cos, sin, is_start, value_row, mix, qk_dim, head_dim, key_offset), len(qkv)
    tokens, warps = tuned or (CONFIGS[0] if scale is None else FP8_CONFIGS[qk_dim < head_dim])
    grads = [grad.contiguous() for grad in (q_grad, k_grad, v_grad)]
    for name, grad, dim in zip(("q_grad", "k_grad", "v_grad"), grads, (qk_dim, qk_dim, head_dim)):
        check(grad.shape == (n, form["HEADS"], dim), name, grad, f"({n}, {form['HEADS']}, {dim})")
    check(scale is None or n % 16 == tokens % 16 == 0 and scale.numel() == 1 and scale.dtype == torch.float32, "qkv", qkv,
          "of a multiple of 16 tokens, in blocks of such, and the scale one float32, to have its gradient in FP8")
    grad, row_grad, mix_grad = (None if x is None else torch.empty_like(x) for x in (qkv, value_row, mix))
    transposed = by_pairs = None
    if scale is not None:
        grad, transposed = (torch.empty(shape, dtype=E5M2, device=qkv.device) for shape in (qkv.shape, qkv.shape[::-1]))
        by_pairs = transposed.view(torch.int16)
    if n:
        heads_backward_kernel[triton.cdiv(n, tokens) * form["HEADS"],](
            qkv, cos, sin, is_start, value_row, mix, *grads, grad, by_pairs, scale, row_grad, mix_grad, n,
            LIMIT=None if qkv.is_cuda else torch.finfo(E5M2).max, **form, TOKENS=tokens, num_warps=warps)
    return grad, row_grad, mix_grad, transposed


class Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, is_start, seen, value_row, value_gate, qk_dim: int, head_dim: int, key_offset: bool,
                term: Term | None, tuned, *_: Tensor) -> tuple[Tensor, ...]:
        mix = None if value_row is None else value_mix(seen, value_row, value_gate)
        ctx.save_for_backward(qkv, cos, sin, is_start, value_row, mix, seen, value_gate)
        ctx.form, ctx.term = (qk_dim, head_dim, key_offset, tuned), term
        return heads_forward(qkv, cos, sin, is_start, value_row, mix, qk_dim, head_dim, key_offset, term, tuned)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, seen, value_gate = ctx.saved_tensors
        grad, row_grad, mix_grad, _ = heads_backward(*grads[:2], leave(ctx.term, grads[2]), *tensors, *ctx.form)
        seen_grad = gate_grad = None
        if row_grad is not None:
            seen_grad, gate_grad = value_mix_backward(mix_grad, tensors[-1], seen, tensors[-2], value_gate, row_grad)
        return grad, None, None, None, seen_grad, row_grad, gate_grad, *[None] * 6


def qkv_heads(
    qkv: Tensor,  # (n, heads (2 qk_dim + head_dim)) bf16, fp16 or float32, contiguous: each token's Q, K, V
    cos: Tensor,  # (n, r) float32, contiguous, 2r <= qk_dim
    sin: Tensor,  # like cos
    is_start: Tensor,  # (n,) bool: where sequences start; the first token is taken for a start in any case
    seen: Tensor | None,  # (n, channels): what the value's gates see of the token, beside as many channels of its value row
    value_row: Tensor | None,  # (n, heads head_dim) like qkv; None: V alone
    value_gate: Tensor | None,  # (heads, 2 channels) float32
    qk_dim: int,  # channels of a query and of a key, a power of two
    head_dim: int,  # channels of a value, a power of two
    key_offset: bool,  # the channels of k past 2r come from the token before, zero where a sequence starts
    term: Term | None = None,  # from `share`, rows (n, k, head_dim) like qkv: what is added to the first heads' values
    tuned: tuple[int, int] = CONFIGS[0],  # both ways
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (n, heads, qk_dim) and v (n, heads, head_dim), contiguous; gradients for qkv, seen, value_row, value_gate, through the term."""
    return Heads.apply(qkv, cos, sin, is_start, seen, value_row, value_gate, qk_dim, head_dim, key_offset, term, tuned,
                       None if term is None else term.rows)
