"""Σ over tokens of CE(softcap(x Wᵀ), targets): head and loss in one; forward makes the logits' gradient too.

The logits are read twice and their gradient is written once, in FP8 with its transpose, or in bf16 over the
logits. Separate operations keep the logits for the backward pass, write a bf16 gradient, quantise it and
transpose it. One H200, 49,152 tokens × 768 × 50,304, both ways in FP8, three targets: 13.7 ms, the reference
compiled 18.1 ms.

In training W may be a sample of the head's rows, the candidates (`sampled.py`). Each token may have several
targets: the next one, two and three tokens (Gloeckle et al., arXiv 2404.19737; this form: @varunneal, #178).
An FP8 head is @YouJiacheng's.
"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check
from kernels.example import Example
from kernels.fp8.matmul import (
    HEAD_GRADIENT_SCALE,
    HEAD_INPUT_SCALE,
    HEAD_WEIGHT_SCALE,
    fp8_linear,
    fp8_matmul,
)
from kernels.fp8.quantize import quantize
from kernels.gradients import Gradient
from kernels.loss.cross_entropy import CAP, NEVER, SHIFT, WIDTH, cross_entropy, parts_of, set_bits


class Mixture(NamedTuple):
    """How another source shares in the next token's probability: a p_other + (1 − a) p_head.

    The head's gradient is that of the head alone (cross_entropy.py); the other source's is the mixture's.
    """
    log_odds: Tensor  # (n,) float32: log a p_other(target) / (1 − a); -inf where p_other is 0
    log_rest: Tensor  # (n,) float32: log(1 − a)

    @classmethod
    def after(cls, mixture: "Mixture | None", p: Tensor, rest: Tensor) -> "Mixture":
        """`mixture` (None: the head alone) with the part `rest` (n,), to which another source adds p (n,)."""
        log_rest = rest.log() if mixture is None else rest.log() + mixture.log_rest
        log_odds = p.log() - log_rest
        return cls(log_odds if mixture is None else torch.logaddexp(mixture.log_odds, log_odds), log_rest)


class Targets(NamedTuple):
    """What the head is to predict, and what that counts."""
    # (n,) int32: each token's next token, as a row of the head or of its part's candidates; -1: not scored
    targets: Tensor
    is_start: Tensor  # (n,) bool: a sequence starts here
    weights: Tensor  # (k,) float32: loss weights of the next 1 ... k tokens
    mixture: Mixture | None = None  # for the next token; None: the head alone
    # (n, rows of the head / 8) uint8: bits of tokens that cannot come next, where there are no gradients
    never: Tensor | None = None

    def ahead(self) -> list[Tensor]:
        """The targets 1 ... k tokens ahead, (n,) each; -1 beyond the sequence's own last target."""
        return later_targets(self.targets, self.is_start, len(self.weights))


def ruled_out(never, tokens: Tensor) -> Tensor | None:
    """`Targets.never` behind tokens (n,), by a `data.canonical.Never`; None where there are gradients."""
    return None if never is None or torch.is_grad_enabled() else never.behind(tokens)


def later_targets(targets: Tensor, is_start: Tensor, count: int) -> list[Tensor]:
    """The targets 1 ... count tokens ahead, each (n,); -1 beyond the sequence's own last target."""
    next_starts = torch.cat([is_start[1:], torch.ones_like(is_start[:1])])
    all_targets = [targets]
    for _ in range(count - 1):
        targets = torch.cat([targets[1:], targets[:1]]).masked_fill(next_starts, -1)
        all_targets.append(targets)
    return all_targets


def head_loss_reference(
    x: Tensor, head: Tensor, wanted: Targets, fp8: bool, candidate_weights: Tensor | None = None,
    grad: Gradient | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch form of `head_loss`. Softcapped logits lie in (0, 23), so Σ e^s needs no maximum."""
    parts = parts_of(candidate_weights)
    made = list(map(fp8_linear if fp8 else F.linear, x.chunk(parts), head.chunk(parts)))
    logits = made[0] if parts == 1 else torch.cat(made)
    logits = CAP * torch.sigmoid((logits.float() + SHIFT) / WIDTH)
    if wanted.never is not None:
        logits = logits.masked_fill(set_bits(wanted.never, len(head)), -NEVER)
    exponentials = logits.exp()
    if candidate_weights is not None:
        exponentials = exponentials.unflatten(0, (parts, -1)) * candidate_weights[:, None]
    log_normaliser = exponentials.sum(-1).flatten().log()
    # A comparison fuses with its neighbours when compiled. The gradient of a gather does not.
    tokens = torch.arange(logits.shape[1], device=x.device)
    losses = []
    for i, targets in enumerate(wanted.ahead()):
        loss = log_normaliser - torch.where(targets[:, None] == tokens, logits, 0).sum(-1)
        if wanted.mixture and i == 0:
            loss = loss - F.softplus(wanted.mixture.log_odds + loss.detach()) - wanted.mixture.log_rest
        losses.append(loss.masked_fill(targets < 0, 0).sum())
    return sum(weight * loss for weight, loss in zip(wanted.weights, losses)), losses[0]


def over_tokens(x: Tensor) -> Tensor:
    """Σ over the tokens of x (n, …) float32. In one step torch would sum on one multiprocessor alone."""
    return (x.unflatten(0, (-1, 64)).sum(1) if len(x) % 64 == 0 else x).sum(0)


def deliver(made: Tensor, grad: Gradient | None) -> Tensor | None:
    """The gradient itself for autograd, or None after it has gone where `grad` says."""
    if grad is None:
        return made
    grad.buffer.add_(made) if grad.accumulate else grad.buffer.copy_(made)
    return None


def side_by_side(parts: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The first of so many equal parts of each tensor's rows, then the second, …"""
    return zip(*(x.chunk(parts) for x in tensors))


class HeadLoss(torch.autograd.Function):
    """Parts of the tokens differ in their matmuls alone: the rest is one launch for all of them."""
    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, log_odds: Tensor | None, targets: Tensor, all_wanted: Targets,
                fp8: bool, candidate_weights: Tensor | None, grad: Gradient | None) -> tuple[Tensor, Tensor]:
        ctx.fp8, ctx.grad, wanted = fp8, grad, any(ctx.needs_input_grad)
        weights, ctx.parts = all_wanted.weights, parts_of(candidate_weights)
        logits = x.new_empty(len(x), len(head) // ctx.parts, dtype=torch.bfloat16 if fp8 else x.dtype)
        logits_grad = transposed = scale = share = None
        if fp8:
            scales = HEAD_INPUT_SCALE, HEAD_WEIGHT_SCALE, HEAD_GRADIENT_SCALE
            scales = [torch.full((), s, device=x.device) for s in scales]
            x8, x8_transposed = quantize(x, scales[0], both=wanted)
            head8, head8_transposed = quantize(head, scales[1], both=wanted)
            for a, b, out in side_by_side(ctx.parts, x8, head8, logits):
                fp8_matmul(a, b.T, *scales[:2], fast=True, out=out)
            if wanted:
                scale, logits_grad = scales[2], torch.empty_like(logits, dtype=torch.float8_e5m2)
                transposed = logits_grad.new_empty(len(head), len(x) // ctx.parts)
                kept = logits_grad, transposed, x8_transposed, head8_transposed
        else:
            for a, b, out in side_by_side(ctx.parts, x, head, logits):
                torch.mm(a, b.T, out=out)
            if wanted:
                logits_grad = logits  # in place: the logits are not needed again
                kept = logits_grad, x, head
        if wanted:
            share = None if log_odds is None else torch.empty_like(log_odds)
            ctx.save_for_backward(weights, share, *kept)
        losses = over_tokens(cross_entropy(
            logits, targets, weights, logits_grad, transposed, scale, candidate_weights, log_odds, share,
            all_wanted.never))
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx, outer: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        weights, share, *kept = ctx.saved_tensors
        rest = None if share is None else -outer * weights[0] * share, *[None] * 5
        if not ctx.fp8:
            logits_grad, x, head = kept
            x_grad, head_grad = torch.empty_like(x), torch.empty_like(head)
            for grad, a, b, *out in side_by_side(ctx.parts, logits_grad, x, head, x_grad, head_grad):
                torch.mm(grad, b, out=out[0])
                torch.mm(grad.T, a, out=out[1])
            return x_grad.mul_(outer), deliver(head_grad.mul_(outer), ctx.grad), *rest
        logits_grad, transposed, x8_transposed, head8_transposed = kept
        scale, grad = outer * HEAD_GRADIENT_SCALE, ctx.grad
        scales = [torch.full((), s, device=outer.device) for s in (HEAD_WEIGHT_SCALE, HEAD_INPUT_SCALE)]
        over = None if grad is None or grad.accumulate else grad.buffer  # the matmul may write there itself
        x8, head8 = x8_transposed.T, head8_transposed.T
        x_grad = torch.empty(x8.shape, dtype=torch.bfloat16, device=x8.device)
        head_grad = x_grad.new_empty(head8.shape) if over is None else over
        for a, b, out in side_by_side(ctx.parts, logits_grad, head8, x_grad):
            fp8_matmul(a, b, scale, scales[0], fast=False, out=out)
        for a, b, out in side_by_side(ctx.parts, transposed, x8, head_grad):
            fp8_matmul(a, b, scale, scales[1], fast=False, out=out)
        return x_grad, deliver(head_grad, grad) if over is None else None, *rest


def head_loss(
    # (n, width): what the head sees. In FP8 it is normed, and the width and each part's tokens and rows are
    # multiples of 16.
    x: Tensor,
    head: Tensor,  # (vocabulary, width), or the rows of all parts' candidates, (parts · candidates, width)
    wanted: Targets,
    fp8: bool,  # all three matmuls in FP8, with constant scales (kernels/fp8/matmul.py)
    candidate_weights: Tensor | None = None,  # (parts, candidates) float32, of equal parts of the tokens
    grad: Gradient | None = None,  # where the head's gradient goes; None: autograd gets it
) -> tuple[Tensor, Tensor]:
    """The multi-token training loss and the next-token loss, each summed over tokens (0-dim float32, nats).

    No gradient flows from the next-token loss.
    """
    parts = parts_of(candidate_weights)
    check(len(x) % parts == 0, "x", x, f"of {parts} equal parts")
    check(len(head) % parts == 0, "head", head, f"of {parts} equal parts")
    if not torch.is_grad_enabled():  # A function of autograd would make the logits' gradient all the same.
        x, head = x.detach(), head.detach()
    targets, mixture = torch.stack(wanted.ahead(), dim=1), wanted.mixture
    log_odds = mixture.log_odds if mixture else None
    total, losses = HeadLoss.apply(
        x, head, log_odds, targets, wanted, fp8, candidate_weights, grad)
    if mixture is None:
        return total, losses[0]
    more = -over_tokens(mixture.log_rest.masked_fill(wanted.targets < 0, 0))
    return total + wanted.weights[0] * more, losses[0] + more.detach()


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Gradients of x and head, in FP8, of all tokens and of samples whose first halves are the targets."""
    def inputs(tokens: int, width: int, vocabulary: int, parts: int) -> tuple:
        seen = vocabulary // 2 if parts else vocabulary
        rows = max(parts, 1) * vocabulary
        x, head = (torch.randn(n, width, device=device).to(dtype) for n in (tokens, rows))
        targets = torch.randint(seen, (tokens,), device=device, dtype=torch.int32)
        is_start = torch.arange(tokens, device=device) % (512 if size == "real" else 7) == 0
        weights = torch.tensor([1.0, 0.5, 0.25], device=device)
        counts = torch.where(torch.arange(vocabulary, device=device) < seen, 1.0, 4.0)
        counts = counts.repeat(parts, 1) if parts else None
        return F.rms_norm(x, (width,)), head * 0.02, Targets(targets, is_start, weights), True, counts

    def gradients(function: Callable) -> Callable:
        def run(x: Tensor, head: Tensor, *rest) -> tuple[Tensor, ...]:
            x, head = (leaf.detach().requires_grad_() for leaf in (x, head))
            return torch.autograd.grad(function(x, head, *rest)[0], (x, head))
        return run

    def exact(*tensors) -> tuple[Tensor, ...]:
        return gradients(head_loss_reference)(*tensors[:3], False, tensors[4])

    if size == "real":
        shapes = [(16384, 768, 50304, 0), (49152, 768, 50304, 0), (98304, 768, 11264, 6),
                  (98304, 768, 7168, 12)]
    else:
        shapes = [(48, 32, 320, 0), (32, 32, 320, 2)]
    for tokens, width, vocabulary, parts in shapes:
        yield Example(
            f"head and loss{f' of {parts} samples' if parts else ''}, both ways, FP8, 3 targets",
            f"{tokens:,} × {width} × {vocabulary:,}", partial(inputs, tokens, width, vocabulary, parts),
            head_loss, head_loss_reference, 6.0 * tokens * width * vocabulary,
            tokens * vocabulary * (2.0 * 3 + 1.0 * 4), rate=2, wrap=gradients, exact=exact,
            check_inputs=partial(inputs, 80 * parts or min(tokens, 1024), width, vocabulary, parts))
