"""l_k = log Σ_v c_v e^s_v - s_target_k with s = 23 σ((z + 5) / 7.5), and ∂(Σ_k w_k l_k)/∂z: logits z read twice.

First one program a token sums e^s along its row (s < 23, so no maximum is needed); a column
counts c_v times, once where no weights are given. Then one program a tile
writes p = Σ_k w_k c e^s / Σ c e^s times ds/dz, in bfloat16 or FP8, over the logits if wanted, and also transposed
for the FP8 weight product, which contracts over tokens; last the few targets' entries, where w_k is subtracted,
are corrected. Bound by the arithmetic of σ and exp, not by memory. One H200, 16,384 × 50,304, three targets, FP8
gradient and its transpose: 1.54 ms, compiled PyTorch 4.28 ms (README.md).
"""

import torch
from torch import Tensor

from kernels.backend import check, tl, triton

CAP, SHIFT, WIDTH = 23.0, 5.0, 7.5
# (tile rows, tile columns, warps) of the gradient, from kernels.bench --sweep; with its transpose, the second is used.
CONFIGS = [(32, 128, 4), (64, 128, 8), (64, 64, 4)]


def cross_entropy_reference(
    logits: Tensor, targets: Tensor, weights: Tensor, scale: Tensor | None = None,
    grad_dtype: torch.dtype | None = None, candidate_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Plain PyTorch twin: the losses and, if `grad_dtype` is given, the gradient that `cross_entropy` writes."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    sigma = torch.sigmoid((logits.to(dtype) + SHIFT) / WIDTH)
    weight = weights.to(dtype) * (targets >= 0)  # (tokens, k)
    log_p = torch.log_softmax(CAP * sigma + (0 if candidate_weights is None else candidate_weights.to(dtype).log()), dim=-1)
    losses = -((targets >= 0) * log_p.gather(1, targets.clamp(min=0).long()))
    if grad_dtype is None:
        return losses, None
    grad = weight.sum(1, keepdim=True) * log_p.exp()
    grad.scatter_add_(1, targets.clamp(min=0).long(), -weight)
    grad *= CAP / WIDTH * sigma * (1 - sigma)
    if scale is not None:
        grad /= scale
    limit = torch.finfo(grad_dtype).max
    return losses, grad.clamp(-limit, limit).to(grad_dtype)


@triton.jit
def sigmoid(z, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """σ((z + SHIFT) / WIDTH) in float32; the division, in Newton steps, spares the busy special-function unit."""
    RATE: tl.constexpr = -1.4426950408889634 / WIDTH
    exponent = tl.minimum(z.to(tl.float32) * RATE + SHIFT * RATE, 100.0, propagate_nan=tl.PropagateNan.ALL)
    d = 1 + tl.exp2(exponent)
    inverse = (0x7EF311C7 - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # 1/d within 13%
    inverse *= 2 - d * inverse
    inverse *= 2 - d * inverse
    return inverse * (2 - d * inverse)  # within 5e-8


@triton.jit
def rough_sigmoid(z, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """The same within 3e-4, in one instruction: for a gradient that FP8 rounds by up to 12% anyway."""
    HALF: tl.constexpr = 0.5 / WIDTH
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z.to(tl.float32) * HALF + SHIFT * HALF],
                                     dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 + 0.5 * tanh


@triton.jit
def exp_below_cap(sigma, CAP: tl.constexpr):
    """e^(s - CAP) for s = CAP·sigma: at most 1, at least e^-23, so no row needs its maximum."""
    RATE: tl.constexpr = CAP * 1.4426950408889634
    return tl.exp2(sigma * RATE - RATE)


@triton.jit
def scaled_slope(sigma, scale_ptr, CAP: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    """ds/dz, divided by the gradient's scale."""
    factor = CAP / WIDTH
    if SCALED:
        factor /= tl.load(scale_ptr)
    return (sigma - sigma * sigma) * factor


@triton.jit
def loss_kernel(logits_ptr, targets_ptr, weights_ptr, columns_ptr, losses_ptr, share_ptr, sigma_ptr, vocabulary,
                logits_row, CAP: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
                TARGETS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * logits_row
    block = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + block < vocabulary
        sigma = sigmoid(tl.load(logits_ptr + start + block, mask=inside, other=0.0), SHIFT, WIDTH)
        if WEIGHTED:
            sums += exp_below_cap(sigma, CAP) * tl.load(columns_ptr + start + block, mask=inside, other=0.0)
        else:
            sums += tl.where(inside, exp_below_cap(sigma, CAP), 0.0)
    total = tl.sum(sums)
    weight = 0.0
    for k in tl.static_range(TARGETS):
        target = tl.load(targets_ptr + token * TARGETS + k)
        known = (target >= 0) & (target < vocabulary)
        w = tl.where(known, tl.load(weights_ptr + k), tl.where(target < 0, 0.0, float("nan")))
        sigma = sigmoid(tl.load(logits_ptr + target, mask=known, other=0.0), SHIFT, WIDTH)
        loss = tl.where(target < 0, 0.0, tl.log(total) + CAP * (1 - sigma))
        tl.store(losses_ptr + token * TARGETS + k, tl.where(known | (target < 0), loss, float("nan")))
        weight += w
        if GRADIENT:
            tl.store(sigma_ptr + token * TARGETS + k, sigma)
    if GRADIENT:
        tl.store(share_ptr + token, weight / total)


@triton.jit
def gradient_kernel(logits_ptr, columns_ptr, share_ptr, grad_ptr, transposed_ptr, scale_ptr, tokens, vocabulary,
                    logits_row, grad_row, transposed_row,
                    CAP: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ROUGH: tl.constexpr,
                    SCALED: tl.constexpr, TRANSPOSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column_tiles = tl.cdiv(vocabulary, COLUMNS)
    token = (tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    inside = (token < tokens) & (column < vocabulary)
    z = tl.load(logits_ptr + token * logits_row + column, mask=inside, other=0.0)
    sigma = rough_sigmoid(z, SHIFT, WIDTH) if ROUGH else sigmoid(z, SHIFT, WIDTH)
    share = tl.load(share_ptr + token, mask=token < tokens, other=0.0)
    grad = share * exp_below_cap(sigma, CAP) * scaled_slope(sigma, scale_ptr, CAP, WIDTH, SCALED)
    if WEIGHTED:
        grad *= tl.load(columns_ptr + column, mask=column < vocabulary, other=0.0)
    grad = grad.to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + token * grad_row + column, grad, mask=inside)
    if TRANSPOSE:
        tl.debug_barrier()  # read back from cache: otherwise the compiler computes everything again, transposed
        grad = tl.load(grad_ptr + token * grad_row + column, mask=inside)
        tl.store(transposed_ptr + column * transposed_row + token, grad, mask=inside)


@triton.jit
def target_kernel(targets_ptr, weights_ptr, share_ptr, sigma_ptr, grad_ptr, transposed_ptr, scale_ptr, tokens,
                  vocabulary, grad_row, transposed_row, CAP: tl.constexpr, WIDTH: tl.constexpr,
                  TARGETS: tl.constexpr, SCALED: tl.constexpr, TRANSPOSE: tl.constexpr, BLOCK: tl.constexpr):
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = token < tokens
    share = tl.load(share_ptr + token, mask=inside, other=0.0)
    for k in tl.static_range(TARGETS):
        target = tl.load(targets_ptr + token * TARGETS + k, mask=inside, other=-1).to(tl.int64)
        sigma = tl.load(sigma_ptr + token * TARGETS + k, mask=inside, other=0.0)
        grad = share * exp_below_cap(sigma, CAP)  # a target's column has weight 1
        for other in tl.static_range(TARGETS):  # the same token may be several targets: each of them writes the sum
            same = tl.load(targets_ptr + token * TARGETS + other, mask=inside, other=-1) == target
            grad -= tl.where(same, tl.load(weights_ptr + other), 0.0)
        grad *= scaled_slope(sigma, scale_ptr, CAP, WIDTH, SCALED)
        grad = grad.to(grad_ptr.dtype.element_ty)
        known = inside & (target >= 0) & (target < vocabulary)
        tl.store(grad_ptr + token * grad_row + target, grad, mask=known)
        if TRANSPOSE:
            tl.store(transposed_ptr + target * transposed_row + token, grad, mask=known)


def _check(logits: Tensor, targets: Tensor, weights: Tensor, grad: Tensor | None, transposed: Tensor | None,
           scale: Tensor | None, candidate_weights: Tensor | None) -> None:
    check(logits.ndim == 2 and logits.stride(1) == 1 and logits.shape[1] < 2**31, "logits", logits,
          "(tokens, vocabulary) with contiguous rows")
    tokens, vocabulary = logits.shape
    check(targets.shape[:1] == (tokens,) and targets.ndim == 2 and targets.shape[1] <= 4 and targets.is_contiguous()
          and not targets.is_floating_point(), "targets", targets, f"contiguous integers, ({tokens}, k <= 4)")
    check(weights.shape == targets.shape[1:] and weights.dtype == torch.float32, "weights", weights,
          f"float32 ({targets.shape[1]},)")
    check(grad is None or grad.shape == logits.shape and grad.stride(1) == 1, "grad", grad, "like logits, or None")
    check(transposed is None or grad is not None and transposed.shape == (vocabulary, tokens)
          and transposed.stride(1) == 1 and transposed.dtype == grad.dtype, "transposed", transposed,
          "(vocabulary, tokens) of grad's dtype, and given only with grad")
    check(scale is None or scale.numel() == 1 and scale.dtype == torch.float32, "scale", scale, "one float32, or None")
    check(candidate_weights is None or candidate_weights.shape == (vocabulary,) and candidate_weights.dtype == torch.float32
          and candidate_weights.is_contiguous(), "candidate_weights", candidate_weights, f"float32 ({vocabulary},), or None")


def cross_entropy(
    logits: Tensor,  # (tokens, vocabulary), rows contiguous; bfloat16, float16 or float32
    targets: Tensor,  # (tokens, k) int32 or int64, contiguous, k <= 4; -1 is ignored, >= vocabulary gives NaN
    weights: Tensor,  # (k,) float32 on the device: the loss weight of each target
    grad: Tensor | None = None,  # (tokens, vocabulary): receives ∂Σloss/∂logits / scale; may be `logits` itself
    transposed: Tensor | None = None,  # (vocabulary, tokens), of grad's dtype: receives gradᵀ
    scale: Tensor | None = None,  # one float32 on the device
    candidate_weights: Tensor | None = None,  # (vocabulary,) float32: of each term in Σ e^s, 1 for every target; None: all 1
    tuned: tuple[int, int, int] | None = None,
) -> Tensor:
    """The losses (tokens, k) float32 of each token's targets, unweighted; fills `grad` (bfloat16 or float8_e5m2, say)."""
    _check(logits, targets, weights, grad, transposed, scale, candidate_weights)
    (tokens, vocabulary), k = logits.shape, targets.shape[1]
    losses = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return losses
    share, sigma = (None, None) if grad is None else (losses.new_empty(tokens), torch.empty_like(losses))
    form, weighted = dict(CAP=CAP, WIDTH=WIDTH), candidate_weights is not None
    loss_kernel[(tokens,)](logits, targets, weights, candidate_weights, losses, share, sigma, vocabulary, logits.stride(0), **form,
                           SHIFT=SHIFT, WEIGHTED=weighted, TARGETS=k, GRADIENT=grad is not None, BLOCK=1024, num_warps=4)
    if grad is not None:
        rows, columns, warps = tuned or CONFIGS[transposed is not None]
        form |= dict(SCALED=scale is not None, TRANSPOSE=transposed is not None)
        rough = grad.element_size() == 1 and grad.is_cuda  # the interpreter runs no PTX
        transposed_row = 0 if transposed is None else transposed.stride(0)
        gradient_kernel[(triton.cdiv(tokens, rows) * triton.cdiv(vocabulary, columns),)](
            logits, candidate_weights, share, grad, transposed, scale, tokens, vocabulary,
            logits.stride(0), grad.stride(0), transposed_row,
            **form, SHIFT=SHIFT, WEIGHTED=weighted, ROUGH=rough, ROWS=rows, COLUMNS=columns, num_warps=warps)
        target_kernel[(triton.cdiv(tokens, 128),)](
            targets, weights, share, sigma, grad, transposed, scale, tokens, vocabulary, grad.stride(0), transposed_row,
            **form, TARGETS=k, BLOCK=128, num_warps=4)
    return losses
