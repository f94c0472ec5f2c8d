"""l_k = log Σ_v c_v e^(s_v) − s_(target k), s = 23 σ((z + 5) / 7.5), and ∂(Σ_k w_k l_k)/∂z of the logits z.

The softcap keeps s between 0 and 23, so no maximum is needed before exponentials are summed. This form is
modded-nanogpt's (@ClassicLarry, #181), after the bounded logits of Gemma 2 (arXiv 2408.00118). c_v says how
many tokens candidate v of a sampled softmax stands for; without candidate weights it is 1.

The first target may also have a probability e^o from another source: the copy head or, in a score, the
counts. `log_odds` holds these o, in units in which the logits' probability is e^(−l). The loss of the sum of
both is l − log(1 + e^(o + l)). Its gradient for o is −h, where h = σ(o + l) is the other source's share in
the sum. Its gradient for the logits would be 1 − h times the gradient of l. We leave the factor 1 − h out, so
the logits learn as if they were alone. With the factor the model learns least where it could copy, and ends
worse (records/ideas.md).

Tokens that cannot come next (data/canonical.py) may be left out: their s is -NEVER, as good as -infinity. In
a mixture they keep their probability from the other source.

The logits are read twice. First one program a token sums c e^s along its row and takes the losses. Then one
program a tile writes p ds/dz with p = Σ_k w_k c e^s / Σ c e^s, in bfloat16 or FP8, over the logits if wanted,
and also transposed for the FP8 matmul of the head's gradient, which contracts over tokens. Last, a third
kernel subtracts w_k in the entries of the few targets. The arithmetic of σ and exp is the limit, not memory.
One H200, 16,384 × 50,304, three targets, FP8 gradient and its transpose: 1.57 ms, compiled PyTorch 4.17 ms.
"""
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, triton
from kernels.example import Example
from kernels.loss.cross_entropy_kernels import gradient_kernel, loss_kernel, target_kernel

SOFTCAP = CAP, SHIFT, WIDTH = 23.0, 5.0, 7.5
NEVER = 1e3
# (tile rows, tile columns, warps) of the gradient. The first is used, or the second to write a transpose too.
CONFIGS = [(32, 128, 4), (64, 128, 8), (64, 64, 4)]


def cross_entropy_reference(
    logits: Tensor, targets: Tensor, weights: Tensor, scale: Tensor | None = None,
    grad_dtype: torch.dtype | None = None, candidate_weights: Tensor | None = None,
    log_odds: Tensor | None = None, never: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Plain PyTorch form: the losses; with a `grad_dtype` also the gradient that `cross_entropy` writes."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    sigma = torch.sigmoid((logits.to(dtype) + SHIFT) / WIDTH)
    weight = weights.to(dtype) * (targets >= 0)  # (tokens, k)
    log_counts = 0
    if candidate_weights is not None:
        part = len(logits) // len(candidate_weights)
        log_counts = candidate_weights.to(dtype).log().repeat_interleave(part, 0)
    scores = CAP * sigma + log_counts
    scores = scores if never is None else scores.masked_fill(set_bits(never, logits.shape[1]), -NEVER)
    log_p = torch.log_softmax(scores, dim=-1)
    losses = -((targets >= 0) * log_p.gather(1, targets.clamp(min=0).long()))
    if log_odds is not None:
        first = torch.arange(targets.shape[1], device=targets.device) == 0
        more = log_odds.to(dtype)[:, None] + losses.detach()
        losses = torch.where(first & (targets >= 0), losses - F.softplus(more), losses)
    if grad_dtype is None:
        return losses, None
    grad = weight.sum(1, keepdim=True) * log_p.exp()
    grad.scatter_add_(1, targets.clamp(min=0).long(), -weight)
    grad *= CAP / WIDTH * sigma * (1 - sigma)
    if scale is not None:
        grad /= scale
    limit = torch.finfo(grad_dtype).max
    return losses, grad.clamp(-limit, limit).to(grad_dtype)


def parts_of(candidate_weights: Tensor | None) -> int:
    """Into how many equal parts the tokens are split: each row of candidate weights is one part's."""
    return 1 if candidate_weights is None else len(candidate_weights)


def set_bits(never: Tensor, columns: int) -> Tensor:
    """Where the bits of never (n, ceil(columns / 8)) uint8 are 1, lowest first: (n, columns) bool."""
    bits = never[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=never.device) & 1
    return bits.flatten(1)[:, :columns].bool()


def check_inputs(logits: Tensor, targets: Tensor, weights: Tensor, grad: Tensor | None,
                 transposed: Tensor | None, scale: Tensor | None, counts: Tensor | None,
                 by_row: tuple[Tensor | None, ...]) -> None:
    check(logits.ndim == 2 and logits.stride(1) == 1 and logits.shape[1] < 2**31, "logits", logits,
          "(tokens, vocabulary) with contiguous rows")
    tokens, vocabulary = logits.shape
    fits = targets.ndim == 2 and targets.shape[0] == tokens and targets.shape[1] <= 4
    check(fits and targets.is_contiguous() and not targets.is_floating_point(), "targets", targets,
          f"contiguous integers, ({tokens}, k <= 4)")
    check(weights.shape == targets.shape[1:] and weights.dtype == torch.float32 and weights.is_contiguous(),
          "weights", weights, f"contiguous float32 ({targets.shape[1]},)")
    check(grad is None or grad.shape == logits.shape and grad.stride(1) == 1, "grad", grad,
          "like logits, or None")
    check(counts is None or counts.ndim == 2 and counts.shape[1] == vocabulary and len(counts) > 0
          and tokens % len(counts) == 0 and counts.dtype == torch.float32 and counts.is_contiguous(),
          "candidate_weights", counts, f"contiguous float32 (parts, {vocabulary}) of {tokens} tokens")
    parts = parts_of(counts)
    check(transposed is None or grad is not None and transposed.shape == (parts * vocabulary, tokens // parts)
          and transposed.stride(1) == 1 and transposed.dtype == grad.dtype, "transposed", transposed,
          f"({parts * vocabulary}, {tokens // parts}) of grad's dtype, and given only with grad")
    check(scale is None or scale.numel() == 1 and scale.dtype == torch.float32, "scale", scale,
          "one float32, or None")
    never, eighth = by_row[2], -(-vocabulary // 8)
    check(never is None or never.shape == (tokens, eighth) and never.dtype == torch.uint8
          and never.is_contiguous() and grad is None and targets.shape[1] == 1, "never", never,
          f"contiguous uint8 ({tokens}, {eighth}) for one target without gradient, or None")
    for name, x in (("log_odds", by_row[0]), ("share", by_row[1])):
        check(x is None or x.shape == (tokens,) and x.dtype == torch.float32 and x.is_contiguous(), name, x,
              f"contiguous float32 ({tokens},), or None")


def cross_entropy(
    logits: Tensor,  # (tokens, vocabulary), rows contiguous; bfloat16, float16 or float32
    targets: Tensor,  # (tokens, k) int32 or int64, contiguous, k <= 4; -1 is ignored, >= vocabulary gives NaN
    weights: Tensor,  # (k,) float32 on the device: the loss weight of each target
    grad: Tensor | None = None,  # (tokens, vocabulary): receives ∂Σloss/∂logits / scale; may be `logits`
    # (parts · vocabulary, tokens / parts), of grad's dtype: receives gradᵀ of each part, one below the other
    transposed: Tensor | None = None,
    scale: Tensor | None = None,  # one float32 on the device
    # (parts, vocabulary) float32: factors of e^s, a row for each of equal parts of the tokens; 1 for targets
    candidate_weights: Tensor | None = None,
    log_odds: Tensor | None = None,  # (tokens,) float32: of the first target by another source; -inf: none
    share: Tensor | None = None,  # (tokens,) float32: receives that source's share, if there is a grad
    never: Tensor | None = None,  # (tokens, ceil(vocabulary / 8)) uint8: bits of tokens that cannot come next
    tuned: tuple[int, int, int] | None = None,
) -> Tensor:
    """The unweighted losses (tokens, k) float32 of each token's targets; fills `grad`, of any dtype."""
    check_inputs(logits, targets, weights, grad, transposed, scale, candidate_weights,
                 (log_odds, share, never))
    (tokens, vocabulary), k, weighted = logits.shape, targets.shape[1], candidate_weights is not None
    parts = parts_of(candidate_weights)
    part = tokens // parts
    losses = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return losses
    weight_over_sum = None if grad is None else losses.new_empty(tokens)
    sigma = None if grad is None else torch.empty_like(losses)
    if (mixed := log_odds is not None) and grad is not None and share is None:
        share = losses.new_empty(tokens)
    loss_kernel[(tokens,)](
        logits, targets, weights, candidate_weights, log_odds, never, losses, weight_over_sum, sigma, share,
        part, vocabulary, (logits.stride(0), 0 if never is None else never.stride(0)), SOFTCAP=SOFTCAP,
        NEVER=NEVER, WEIGHTED=weighted, MIXED=mixed, MASKED=never is not None, TARGETS=k,
        GRADIENT=grad is not None, BLOCK=1024, num_warps=4)
    if grad is not None:
        rows, columns, warps = tuned or CONFIGS[transposed is not None]
        form = dict(SOFTCAP=SOFTCAP, SCALED=scale is not None, TRANSPOSE=transposed is not None)
        rough = grad.element_size() == 1 and grad.is_cuda  # the interpreter runs no PTX
        transposed_stride = 0 if transposed is None else transposed.stride(0)
        gradient_kernel[(parts * triton.cdiv(part, rows) * triton.cdiv(vocabulary, columns),)](
            logits, candidate_weights, weight_over_sum, grad, transposed, scale, part, vocabulary,
            (logits.stride(0), grad.stride(0), transposed_stride),
            **form, WEIGHTED=weighted, ROUGH=rough, ROWS=rows, COLUMNS=columns, num_warps=warps)
        target_kernel[(triton.cdiv(tokens, 128),)](
            targets, weights, weight_over_sum, sigma, grad, transposed, scale, tokens, part, vocabulary,
            grad.stride(0), transposed_stride, **form, TARGETS=k, BLOCK=128, num_warps=4)
    return losses


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """The loss alone, with its gradient in `dtype`, and on GPUs with one in FP8 and its transpose."""
    def inputs(tokens: int, vocabulary: int, parts: int, k: int, masked: bool) -> tuple:
        seen = vocabulary // 2 if parts else vocabulary
        weights, scale = (torch.tensor(x, device=device) for x in ([1.0, 0.5, 0.25][:k], 0.75 / 448))
        targets = torch.randint(seen, (tokens, k), device=device)
        counts = torch.where(torch.arange(vocabulary, device=device) < seen, 1.0, 4.0)
        counts = counts.repeat(parts, 1) if parts else None
        logits = (torch.randn(tokens, vocabulary, device=device) * 4).to(dtype)
        bits = torch.randint(256, (tokens, -(-vocabulary // 8)), device=device, dtype=torch.uint8)
        never = bits & bits.roll(1, 0) & bits.roll(2, 0) if masked else None     # an eighth of them
        return logits, targets, weights, scale, counts, never

    def kernel(logits, targets, weights, scale, counts, never, out: torch.dtype | None, tuned=None):
        grad = None if out is None else torch.empty_like(logits, dtype=out)
        parts = parts_of(counts)
        shape = parts * logits.shape[1], len(logits) // parts
        transposed = grad.new_empty(shape) if out == torch.float8_e5m2 else None
        losses = cross_entropy(
            logits, targets, weights, grad, transposed, scale, counts, never=never, tuned=tuned)
        return losses, grad, transposed

    def reference(logits, targets, weights, scale, counts, never, out: torch.dtype | None, both: bool):
        losses, grad = cross_entropy_reference(logits, targets, weights, scale, out, counts, None, never)
        return losses, grad, grad.unflatten(0, (parts_of(counts), -1)).mT.flatten(0, 1) if both else None

    real = size == "real"
    fp8_too = real or device.type == "cuda"  # The interpreter miscomputes small numbers in e5m2.
    shapes, fewer = [(5, 100, 0), (4, 1100, 2)], 80 if real else 40     # tokens a part, to check alone
    if real:
        shapes = [(16384, 50304, 0), (49152, 50304, 0), (98304, 7168, 12)]
    forms = [(1, None, False, False), (1, None, False, True), (3, dtype, False, False)]
    forms += [(3, torch.float8_e5m2, True, False)] * fp8_too
    for (tokens, vocabulary, parts), (k, out, both, masked) in product(shapes, forms):
        kind = "loss only" + ", masked" * masked
        if out is not None:
            kind = f"gradient {out}{' + transpose' * both}".replace("torch.", "")
        yield Example(
            f"cross-entropy{f' of {parts} samples' if parts else ''}, {k} targets, {kind}",
            f"{tokens:,} × {vocabulary:,}",
            partial(inputs, tokens, vocabulary, parts, k, masked), partial(kernel, out=out),
            partial(reference, out=out, both=both),
            bytes=tokens * vocabulary * (2.0 + (out.itemsize * (1 + both) if out else 0)),
            exact=partial(reference, out=out and torch.float64, both=both),
            check_inputs=partial(inputs, fewer * parts or min(tokens, 1024), vocabulary, parts, k, masked),
            configs=tuple(CONFIGS))
