"""Σ over tokens of CE(softcap(x Wᵀ), targets): head and loss in one step, with the gradient of the logits made in the forward.

W may be a sample of the head's rows, with weights that keep Σ e^s what it is over the vocabulary on average (`among_candidates`).
The logits are read twice and their gradient is written once, in FP8 with its transpose (or over the bf16 logits), where
separate operations keep the logits for the backward pass, write a bf16 gradient, round_to_fp8 and transpose it. One H200, 49,152
tokens × 768 × 50,304, both ways in FP8, three targets: 13.7 ms, `head_loss_reference`, the plain form, compiled 17.9 ms (README.md).
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fp8.matmul import (
    HEAD_GRADIENT_SCALE,
    HEAD_INPUT_SCALE,
    HEAD_WEIGHT_SCALE,
    fp8_linear,
    fp8_matmul,
)
from kernels.fp8.quantize import quantize
from kernels.gradients import Gradient
from kernels.loss.cross_entropy import CAP, SHIFT, WIDTH, cross_entropy


def later_targets(targets: Tensor, is_start: Tensor, count: int) -> list[Tensor]:
    """The targets of the next 1 ... count tokens, each (n,); -1 where one lies beyond the sequence's own next token."""
    next_starts = torch.cat([is_start[1:], torch.ones_like(is_start[:1])])
    all_targets = [targets]
    for _ in range(count - 1):
        targets = torch.cat([targets[1:], targets[:1]]).masked_fill(next_starts, -1)
        all_targets.append(targets)
    return all_targets


def among_candidates(targets: Tensor, columns: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """For a sampled softmax: where in `columns` (c,) each target (n,) stands, -1 stays -1, and the weight (c,) of each, float32.

    `columns`, ascending, int32 as targets are, holds all T tokens that are targets and c - T of the others, drawn uniformly. Those
    count (V - T) / (c - T) times, so that the sum of e^s over columns has the sum over all V tokens as its mean.
    """
    places = torch.searchsorted(columns, targets, out_int32=True).masked_fill(targets < 0, -1)
    is_target = torch.zeros(len(columns) + 1, dtype=torch.bool, device=columns.device)
    is_target = is_target.index_fill_(0, places.long(), True)[:-1]       # -1 fills the one entry too many
    count = is_target.sum()
    times = (vocabulary - count) / (len(columns) - count)
    return places, times.expand(len(columns)).masked_fill(is_target, 1.0)


def head_loss_reference(x: Tensor, head: Tensor, targets: Tensor, is_start: Tensor, weights: Tensor, fp8: bool,
                   candidate_weights: Tensor | None = None, grad: Gradient | None = None) -> tuple[Tensor, Tensor]:
    """Sums over tokens of the multi-token training loss and of the plain next-token loss (0-dim float32, nats).

    x (n, width), head (vocabulary, width), targets (n,) int32 with -1 not scored, is_start (n,) bool, weights (k,) of the
    next 1 ... k tokens, candidate_weights (vocabulary,) of the terms in the sum of exponentials, 1 for targets; None: all 1.
    Softcapped logits lie in (0, 23), so that sum needs no maximum.
    """
    logits = fp8_linear(x, head) if fp8 else F.linear(x, head)
    logits = CAP * torch.sigmoid((logits.float() + SHIFT) / WIDTH)
    exponentials = logits.exp() if candidate_weights is None else logits.exp() * candidate_weights
    log_normaliser = exponentials.sum(-1).log()
    columns = torch.arange(len(head), device=x.device)      # a comparison fuses with its neighbours; gather's gradient does not
    losses = []
    for wanted in later_targets(targets, is_start, len(weights)):
        picked = torch.where(wanted[:, None] == columns, logits, 0).sum(-1)
        losses.append((log_normaliser - picked).masked_fill(wanted < 0, 0).sum())
    return sum(weight * loss for weight, loss in zip(weights, losses)), losses[0]


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, head: Tensor, targets: Tensor, weights: Tensor, fp8: bool,
                candidate_weights: Tensor | None, head_grad: Gradient | None) -> tuple[Tensor, Tensor]:
        ctx.head_grad = head_grad
        ctx.fp8, wanted = fp8, any(ctx.needs_input_grad)
        grad = transposed = scale = None
        if fp8:
            scales = [torch.full((), s, device=x.device) for s in (HEAD_INPUT_SCALE, HEAD_WEIGHT_SCALE, HEAD_GRADIENT_SCALE)]
            (x8, x8_transposed), (head8, head8_transposed) = quantize(x, scales[0]), quantize(head, scales[1])
            logits = fp8_matmul(x8, head8.T, HEAD_INPUT_SCALE, HEAD_WEIGHT_SCALE, fast=True)
            if wanted:
                scale, grad = scales[2], torch.empty_like(logits, dtype=torch.float8_e5m2)
                transposed = torch.empty(grad.shape[::-1], dtype=grad.dtype, device=x.device)
                ctx.save_for_backward(grad, transposed, x8_transposed, head8_transposed)
        else:
            logits = F.linear(x, head)
            if wanted:
                grad = logits                               # in place: the logits are not needed again
                ctx.save_for_backward(grad, x, head)
        losses = cross_entropy(logits, targets, weights, grad, transposed, scale, candidate_weights).sum(0)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx, outer: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.fp8:
            grad, x, head = ctx.saved_tensors
            return grad @ head * outer, HeadLoss.delivered(ctx.head_grad, grad.T @ x * outer), None, None, None, None, None
        grad, transposed, x8_transposed, head8_transposed = ctx.saved_tensors
        grad_x = fp8_matmul(grad, head8_transposed.T, outer * HEAD_GRADIENT_SCALE, HEAD_WEIGHT_SCALE, fast=False)
        grad_head = fp8_matmul(transposed, x8_transposed.T, outer * HEAD_GRADIENT_SCALE, HEAD_INPUT_SCALE, fast=False)
        return grad_x, HeadLoss.delivered(ctx.head_grad, grad_head), None, None, None, None, None

    @staticmethod
    def delivered(where: Gradient | None, found: Tensor) -> Tensor | None:
        if where is None:
            return found
        where.buffer.add_(found) if where.accumulate else where.buffer.copy_(found)
        return None


def head_loss(x: Tensor, head: Tensor, targets: Tensor, is_start: Tensor, weights: Tensor, fp8: bool,
              candidate_weights: Tensor | None = None, grad: Gradient | None = None) -> tuple[Tensor, Tensor]:
    """As `head_loss_reference`, by Triton kernels; no gradient flows from the next-token loss."""
    columns = torch.stack(later_targets(targets, is_start, len(weights)), dim=1)
    total, losses = HeadLoss.apply(x, head, columns, weights, fp8, candidate_weights, grad)
    return total, losses[0]
