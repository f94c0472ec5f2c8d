"""out_i = norm(n_i + g_i n_(i-1)), n = norm(rows), g_i = share · σ(n_i's first channels · gate): each token sees a little of the last.

One pass over the embedding's rows each way: forward they are read and the result is written, backward they and its gradient are read and
theirs is written. torch.compile makes four forward and as many backward of it, for norms before and behind what shifts by a token. A row is
read with its neighbours, which cache holds; backward everything is computed again, of the next token too, whose gradient reaches this one.
A warp holds a row, in chunks of columns, so that a width like 768 pads nothing; all sums are warps' and have one order.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EPS, check, tl, triton
from kernels.sequence import previous

# (tokens a program, columns a chunk, warps); and backward with programs a multiprocessor as well. The first is used.
CONFIGS = [(4, 256, 4), (8, 256, 8), (16, 256, 8), (4, 1024, 8)]
BACKWARD_CONFIGS = [(4, 256, 4, 2), (8, 256, 8, 1), (4, 256, 4, 1024), (8, 256, 8, 1024)]


def smear_reference(rows: Tensor, is_start: Tensor, gate: Tensor | None, share: Tensor) -> Tensor:
    """Plain PyTorch twin of `smear`; without a gate the normed rows."""
    x = F.rms_norm(rows, (rows.size(-1),))
    if gate is None:
        return x
    mix = share * torch.sigmoid(x[:, :len(gate)] @ gate.type_as(x))
    return F.rms_norm(x + mix[:, None].type_as(x) * previous(x, is_start), (rows.size(-1),))


@triton.jit
def load_rows(rows_ptr, token, live, width, column):
    """In float32; zeros where not live."""
    at = token.to(tl.int64)[:, None] * width + column
    return tl.load(rows_ptr + at, mask=live[:, None] & (column < width), other=0.0).to(tl.float32)


@triton.jit
def dot(a, b):
    return tl.sum(a * b, axis=1)


@triton.jit
def load_gate(gate_ptr, token, channels, column):
    """As wide as the rows' chunk and of their dtype, so that it lies in registers as they do."""
    return tl.load(gate_ptr + token[:, None] * 0 + column, mask=column < channels, other=0.0).to(tl.float32)


@triton.jit
def smear_kernel(rows_ptr, is_start_ptr, gate_ptr, share_ptr, out_ptr, n, width, channels, eps,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = token < n
    joined = live & (token > 0) & (tl.load(is_start_ptr + token, mask=live, other=1) == 0)
    square, before_square, held = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        row, before = load_rows(rows_ptr, token, live, width, column), load_rows(rows_ptr, token - 1, joined, width, column)
        square, before_square = square + dot(row, row), before_square + dot(before, before)
        if chunk == 0:
            logit = dot(row, load_gate(gate_ptr, token, channels, column))
        held += ((row, before),)
    inverse, before_inverse = tl.rsqrt(square / width + eps), tl.rsqrt(before_square / width + eps)
    mix = tl.load(share_ptr) * tl.sigmoid(logit * inverse) * before_inverse
    y_square, summed = tl.zeros((ROWS,), tl.float32), ()
    for chunk in tl.static_range(CHUNKS):
        row, before = held[chunk]
        y = row * inverse[:, None] + before * mix[:, None]
        y_square += dot(y, y)
        summed += (y,)
    y_inverse = tl.rsqrt(y_square / width + eps)[:, None]
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at = token.to(tl.int64)[:, None] * width + column
        tl.store(out_ptr + at, (summed[chunk] * y_inverse).to(out_ptr.dtype.element_ty), mask=live[:, None] & (column < width))


@triton.jit
def smear_backward_kernel(grad_ptr, rows_ptr, is_start_ptr, gate_ptr, share_ptr, rows_grad_ptr, sums_ptr, n, width, channels, eps,
                          ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, GATES: tl.constexpr, PROGRAMS: tl.constexpr):
    share, share_sum, gate_sum = tl.load(share_ptr), tl.zeros((ROWS,), tl.float32), tl.zeros((1, GATES), tl.float32)
    zeros, few = tl.zeros((ROWS,), tl.float32), tl.arange(0, GATES)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), PROGRAMS):
        token = tile * ROWS + tl.arange(0, ROWS)
        live, next_live = token < n, token + 1 < n
        joined = live & (token > 0) & (tl.load(is_start_ptr + token, mask=live, other=1) == 0)
        next_joined = next_live & (tl.load(is_start_ptr + token + 1, mask=next_live, other=1) == 0)
        square, before_square, next_square, held = zeros, zeros, zeros, ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            row, before = load_rows(rows_ptr, token, live, width, column), load_rows(rows_ptr, token - 1, joined, width, column)
            after = load_rows(rows_ptr, token + 1, next_joined, width, column)
            square, before_square = square + dot(row, row), before_square + dot(before, before)
            next_square += dot(after, after)
            if chunk == 0:
                gate = load_gate(gate_ptr, token, channels, column)
                logit, next_logit = dot(row, gate), dot(after, gate)
            held += ((row, before, after),)
        inverse, before_inverse = tl.rsqrt(square / width + eps), tl.rsqrt(before_square / width + eps)
        next_inverse = tl.rsqrt(next_square / width + eps)
        sigma, next_mix = tl.sigmoid(logit * inverse), share * tl.sigmoid(next_logit * next_inverse)
        mix = share * sigma
        # y: of this token, z: of the next; their squares, and sums with the gradients d, e of their norms and with what they are made of.
        yy, zz, yd, ze, dn, yn, en, zn, dp, yp, more = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            row, before, after = held[chunk]
            row, before = row * inverse[:, None], before * before_inverse[:, None]
            y, z = row + before * mix[:, None], after * next_inverse[:, None] + row * next_mix[:, None]
            d, e = load_rows(grad_ptr, token, live, width, column), load_rows(grad_ptr, token + 1, next_joined, width, column)
            yy, zz, yd, ze = yy + dot(y, y), zz + dot(z, z), yd + dot(y, d), ze + dot(z, e)
            dn, yn, en, zn = dn + dot(d, row), yn + dot(y, row), en + dot(e, row), zn + dot(z, row)
            dp, yp = dp + dot(d, before), yp + dot(y, before)
            more += ((row, y, z, d, e),)
        # ∂/∂y = d · of_d - y · of_y, and so for z, times how much of this token's row it has; none where the next starts a sequence.
        of_d, of_e = tl.rsqrt(yy / width + eps), tl.rsqrt(zz / width + eps)
        of_y, of_z = of_d * of_d * of_d * yd / width, of_e * of_e * of_e * ze / width
        next_mix = tl.where(next_joined, next_mix, 0.0)
        mix_grad = of_d * dp - of_y * yp
        logit_grad = mix_grad * share * sigma * (1 - sigma)
        along = of_d * dn - of_y * yn + next_mix * (of_e * en - of_z * zn) + logit_grad * logit * inverse
        for chunk in tl.static_range(CHUNKS):
            column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            row, y, z, d, e = more[chunk]
            grad = d * of_d[:, None] - y * of_y[:, None] + next_mix[:, None] * (e * of_e[:, None] - z * of_z[:, None])
            if chunk == 0:
                grad += logit_grad[:, None] * load_gate(gate_ptr, token, channels, column)
            grad = (grad - row * (along / width)[:, None]) * inverse[:, None]
            at = token.to(tl.int64)[:, None] * width + column
            tl.store(rows_grad_ptr + at, grad.to(rows_grad_ptr.dtype.element_ty), mask=live[:, None] & (column < width))
        share_sum += mix_grad * sigma
        at = token.to(tl.int64)[:, None] * width + few
        first = tl.load(rows_ptr + at, mask=live[:, None] & (few < channels), other=0.0).to(tl.float32)
        gate_sum += tl.sum(logit_grad[:, None] * first * inverse[:, None], axis=0, keep_dims=True)
    sums_ptr += tl.program_id(0) * (channels + 1)
    tl.store(sums_ptr, tl.sum(share_sum))
    tl.store(sums_ptr + 1 + few, gate_sum, mask=few < channels)


def _check(rows: Tensor, is_start: Tensor, gate: Tensor, share: Tensor) -> None:
    check(rows.ndim == 2 and rows.is_contiguous() and rows.dtype in (torch.bfloat16, torch.float16, torch.float32), "rows", rows,
          "contiguous, (n, width) in bf16, fp16 or float32")
    check(is_start.shape == rows.shape[:1] and is_start.dtype == torch.bool and is_start.is_contiguous(), "is_start", is_start,
          f"contiguous bool ({len(rows)},)")
    check(gate.ndim == 1 and 0 < len(gate) <= min(rows.size(1), 128) and gate.dtype == torch.float32 and gate.is_contiguous(), "gate", gate,
          f"contiguous float32, of at most {min(rows.size(1), 128)} channels")
    check(share.numel() == 1 and share.dtype == torch.float32, "share", share, "one float32")


def smear_forward(rows: Tensor, is_start: Tensor, gate: Tensor, share: Tensor, tuned: tuple[int, int, int] | None = None) -> Tensor:
    _check(rows, is_start, gate, share)
    (n, width), (tile, columns, warps), out = rows.shape, tuned or CONFIGS[0], torch.empty_like(rows)
    columns = min(columns, triton.next_power_of_2(width))
    if rows.numel():
        smear_kernel[triton.cdiv(n, tile),](rows, is_start, gate.type_as(rows), share, out, n, width, len(gate), EPS, ROWS=tile,
                                            COLUMNS=columns, CHUNKS=triton.cdiv(width, columns), num_warps=warps)
    return out


def smear_backward(grad: Tensor, rows: Tensor, is_start: Tensor, gate: Tensor, share: Tensor,
                   tuned: tuple[int, int, int, int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of rows, gate and share, from that of the result."""
    _check(rows, is_start, gate, share)
    grad, out = grad.contiguous(), torch.empty_like(rows)
    (n, width), (tile, columns, warps, programs) = rows.shape, tuned or BACKWARD_CONFIGS[0]
    columns = min(columns, triton.next_power_of_2(width))
    programs *= torch.cuda.get_device_properties(rows.device).multi_processor_count if rows.is_cuda else 1
    programs = min(programs, triton.cdiv(n, tile))
    sums = torch.empty(programs, 1 + len(gate), dtype=torch.float32, device=rows.device)
    if rows.numel():
        smear_backward_kernel[programs,](
            grad, rows, is_start, gate.type_as(rows), share, out, sums, n, width, len(gate), EPS, ROWS=tile, COLUMNS=columns,
            CHUNKS=triton.cdiv(width, columns), GATES=triton.next_power_of_2(len(gate)), PROGRAMS=programs, num_warps=warps)
    total = sums.sum(0)
    return out, total[1:], total[0]


class Smear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return smear_forward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows_grad, gate_grad, share_grad = smear_backward(grad, *ctx.saved_tensors)
        return rows_grad, None, gate_grad, share_grad


def smear(
    rows: Tensor,  # (n, width) contiguous
    is_start: Tensor,  # (n,) bool: a sequence starts here. The first token's predecessor is never seen
    gate: Tensor | None,  # (channels,) float32; None: no share of the last token, by torch alone
    share: Tensor,  # 0-dim float32
) -> Tensor:
    """(n, width) like rows, of root mean square 1. Gradients for rows, gate and share."""
    return smear_reference(rows, is_start, None, share) if gate is None else Smear.apply(rows, is_start, gate, share)
