"""The Triton kernels of `cross_entropy`: the losses, the gradient of the logits, its entries at the targets.

s = CAP · σ((z + SHIFT) / WIDTH), so ds/dz = CAP / WIDTH · σ (1 − σ). With the weights w_k of a token's
targets and the counts c of the candidates the gradient of Σ_k w_k l_k is

    (Σ_k w_k · c e^s / Σ c e^s − Σ_k w_k [this is target k]) ds/dz

`loss_kernel` writes each token's Σ_k w_k / Σ c e^(s − CAP) to `weight_over_sum`, and σ at the token's targets
to `sigma`. Where the first target's probability is mixed (MIXED), it writes the other source's share h of the
mixture to `share`; the logits get the gradient that they would get alone. With MASKED the sum leaves out the
tokens whose bits are set in `never`, and the score s of such a target is -NEVER.

The tokens lie in equal parts of `part` tokens. Each part has counts of its own, and a transpose of its own.
"""
from kernels.backend import tl, triton


@triton.jit
def sigmoid(z, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """σ((z + SHIFT) / WIDTH) in float32. Newton steps divide, to spare the busy special-function unit."""
    RATE: tl.constexpr = -1.4426950408889634 / WIDTH
    exponent = tl.minimum(z.to(tl.float32) * RATE + SHIFT * RATE, 100.0, propagate_nan=tl.PropagateNan.ALL)
    d = 1 + tl.exp2(exponent)
    inverse = (0x7EF311C7 - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # 1/d within 13%
    inverse *= 2 - d * inverse
    inverse *= 2 - d * inverse
    return inverse * (2 - d * inverse)  # within 5e-8


@triton.jit
def rough_sigmoid(z, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """`sigmoid` within 3e-4, in one instruction: for a gradient that FP8 rounds by up to 12% anyway."""
    HALF: tl.constexpr = 0.5 / WIDTH
    half = z.to(tl.float32) * HALF + SHIFT * HALF
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half],
                                     dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 + 0.5 * tanh


@triton.jit
def exp_below_cap(sigma, CAP: tl.constexpr):
    """e^(s - CAP) for s = CAP · sigma: at most 1, at least e^-23, so no row needs its maximum."""
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
def loss_kernel(logits_ptr, targets_ptr, weights_ptr, counts_ptr, odds_ptr, never_ptr, losses_ptr,
                weight_over_sum_ptr, sigma_ptr, share_ptr, part, vocabulary, strides, SOFTCAP: tl.constexpr,
                NEVER: tl.constexpr, WEIGHTED: tl.constexpr, MIXED: tl.constexpr, MASKED: tl.constexpr,
                TARGETS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    CAP: tl.constexpr = SOFTCAP[0]
    SHIFT: tl.constexpr = SOFTCAP[1]
    WIDTH: tl.constexpr = SOFTCAP[2]
    token = tl.program_id(0).to(tl.int64)
    logits_stride, never_stride = strides
    logits_ptr += token * logits_stride
    if WEIGHTED:
        counts_ptr += token // part * vocabulary
    block = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + block < vocabulary
        sigma = sigmoid(tl.load(logits_ptr + start + block, mask=inside, other=0.0), SHIFT, WIDTH)
        counted = inside
        if MASKED:
            bits = tl.load(never_ptr + token * never_stride + (start + block) // 8, mask=inside, other=0)
            counted = inside & (((bits.to(tl.int32) >> (block % 8)) & 1) == 0)
        if WEIGHTED:
            sums += exp_below_cap(sigma, CAP) * tl.load(counts_ptr + start + block, mask=counted, other=0.0)
        else:
            sums += tl.where(counted, exp_below_cap(sigma, CAP), 0.0)
    total = tl.sum(sums)
    weight = 0.0
    for k in tl.static_range(TARGETS):
        target = tl.load(targets_ptr + token * TARGETS + k)
        known = (target >= 0) & (target < vocabulary)
        w = tl.where(known, tl.load(weights_ptr + k), tl.where(target < 0, 0.0, float("nan")))
        sigma = sigmoid(tl.load(logits_ptr + target, mask=known, other=0.0), SHIFT, WIDTH)
        loss = tl.log(total) + CAP * (1 - sigma)
        if MASKED:
            bits = tl.load(never_ptr + token * never_stride + target // 8, mask=known, other=0)
            is_never = ((bits.to(tl.int32) >> (target % 8).to(tl.int32)) & 1) != 0
            loss = tl.where(is_never, tl.log(total) + CAP + NEVER, loss)
        if MIXED and k == 0:
            # With u = odds + loss the mixture adds log(1 + e^u) to the logarithm of p; h = σ(u).
            u = tl.load(odds_ptr + token) + loss
            small = tl.exp(-tl.abs(u))
            loss -= tl.maximum(u, 0.0) + tl.log(1 + small)
            if GRADIENT:
                share = tl.where(u < 0, small, 1.0) / (1 + small)
                tl.store(share_ptr + token, tl.where(known, share, 0.0))
        loss = tl.where(target < 0, 0.0, loss)
        tl.store(losses_ptr + token * TARGETS + k, tl.where(known | (target < 0), loss, float("nan")))
        weight += w
        if GRADIENT:
            tl.store(sigma_ptr + token * TARGETS + k, sigma)
    if GRADIENT:
        tl.store(weight_over_sum_ptr + token, weight / total)


@triton.jit
def gradient_kernel(logits_ptr, counts_ptr, weight_over_sum_ptr, grad_ptr, transposed_ptr, scale_ptr, part,
                    vocabulary, strides, SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, ROUGH: tl.constexpr,
                    SCALED: tl.constexpr, TRANSPOSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    CAP: tl.constexpr = SOFTCAP[0]
    SHIFT: tl.constexpr = SOFTCAP[1]
    WIDTH: tl.constexpr = SOFTCAP[2]
    logits_stride, grad_stride, transposed_stride = strides
    column_tiles = tl.cdiv(vocabulary, COLUMNS)
    row_tile, row_tiles = tl.program_id(0) // column_tiles, tl.cdiv(part, ROWS)     # No tile has two parts.
    in_part = (row_tile % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    number = (row_tile // row_tiles).to(tl.int64)   # of the part
    token = number * part + in_part
    column = (tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    inside = (in_part < part) & (column < vocabulary)
    z = tl.load(logits_ptr + token * logits_stride + column, mask=inside, other=0.0)
    sigma = rough_sigmoid(z, SHIFT, WIDTH) if ROUGH else sigmoid(z, SHIFT, WIDTH)
    weight_over_sum = tl.load(weight_over_sum_ptr + token, mask=in_part < part, other=0.0)
    grad = weight_over_sum * exp_below_cap(sigma, CAP) * scaled_slope(sigma, scale_ptr, CAP, WIDTH, SCALED)
    if WEIGHTED:
        grad *= tl.load(counts_ptr + number * vocabulary + column, mask=column < vocabulary, other=0.0)
    grad = grad.to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + token * grad_stride + column, grad, mask=inside)
    if TRANSPOSE:
        # Read back from the cache: otherwise the compiler computes everything again, transposed.
        tl.debug_barrier()
        grad = tl.load(grad_ptr + token * grad_stride + column, mask=inside)
        row = number * vocabulary + column
        tl.store(transposed_ptr + row * transposed_stride + in_part, grad, mask=inside)


@triton.jit
def target_kernel(targets_ptr, weights_ptr, weight_over_sum_ptr, sigma_ptr, grad_ptr, transposed_ptr,
                  scale_ptr, tokens, part, vocabulary, grad_stride, transposed_stride, SOFTCAP: tl.constexpr,
                  TARGETS: tl.constexpr, SCALED: tl.constexpr, TRANSPOSE: tl.constexpr, BLOCK: tl.constexpr):
    CAP: tl.constexpr = SOFTCAP[0]
    WIDTH: tl.constexpr = SOFTCAP[2]
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = token < tokens
    weight_over_sum = tl.load(weight_over_sum_ptr + token, mask=inside, other=0.0)
    for k in tl.static_range(TARGETS):
        target = tl.load(targets_ptr + token * TARGETS + k, mask=inside, other=-1).to(tl.int64)
        sigma = tl.load(sigma_ptr + token * TARGETS + k, mask=inside, other=0.0)
        grad = weight_over_sum * exp_below_cap(sigma, CAP)  # a target counts once, so no count multiplies it
        for other in tl.static_range(TARGETS):  # one token may be several targets: each writes the sum
            same = tl.load(targets_ptr + token * TARGETS + other, mask=inside, other=-1) == target
            grad -= tl.where(same, tl.load(weights_ptr + other), 0.0)
        grad *= scaled_slope(sigma, scale_ptr, CAP, WIDTH, SCALED)
        grad = grad.to(grad_ptr.dtype.element_ty)
        known = inside & (target >= 0) & (target < vocabulary)
        tl.store(grad_ptr + token * grad_stride + target, grad, mask=known)
        if TRANSPOSE:
            row = token // part * vocabulary + target
            tl.store(transposed_ptr + row * transposed_stride + token % part, grad, mask=known)
