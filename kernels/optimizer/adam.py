"""u = m̂ / (√v̂ + ε): one Adam step (arXiv 1412.6980) of flat tensors, with decoupled weight decay.

The kernel reads and writes everything once. Compiled PyTorch needs three kernels where rows share updates,
because it stores each row's own update before it mixes in those of other rows.
"""
import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.optimizer.master_weight import Master, Rule, apply_update, apply_update_at

# (elements a program at most, warps). The first is used.
CONFIGS = [(1024, 4), (1024, 8), (512, 4), (256, 2), (256, 1), (2048, 8)]


class Shared(NamedTuple):
    """How rows of tables, which come one after another, share updates with like rows (shared_updates.py)."""
    moved: Tensor       # (features, tables, width): the update of each feature
    of_row: Tensor      # (rows, features of a row) int64: the features of each row
    shares: Tensor      # like `of_row`, float32: their shares of the row's update; the rest is the row's own

    def mixed(self, update: Tensor) -> Tensor:
        """The mixed update of all tables, (numbers,), from `update`, which is the rows' own."""
        _, tables, width = self.moved.shape
        own = update.view(tables, -1, width) * (1 - self.shares.sum(1))[:, None]
        shared = (share[:, None, None] * self.moved[of] for share, of in zip(self.shares.T, self.of_row.T))
        return (own + sum(shared).transpose(0, 1)).flatten()


def adam_direction(grad: Tensor, first: Tensor, second: Tensor, count: Tensor,
                   betas: tuple[float, float]) -> Tensor:
    """m̂ / (√v̂ + ε) of the `count`-th update. `grad` is like the moments, which change in place."""
    second.lerp_(grad.square(), 1 - betas[1])
    first.lerp_(grad, 1 - betas[0])
    mean = first / (1 - betas[0] ** count)
    return mean / ((second / (1 - betas[1] ** count)).sqrt() + 1e-10)


def adam_update_reference(weight: Master, grad: Tensor, first: Tensor, second: Tensor, steps: Tensor,
                          rule: Rule, betas: tuple[float, float], shared: Shared | None = None) -> None:
    """Update a weight (n,), its moments and the count of steps in place.

    Unless `rule.finite` the weight and the count stay, and the gradient counts as zero.

    `grad` (n,) has any dtype. `first` and `second` (n,) are float32: the running means of the gradient and of
    its square. `steps` is 0-dim float32, the number of updates so far. ε is 1e-10.
    """
    grad = torch.where(rule.finite, grad, 0).to(first.dtype)
    steps.add_(rule.finite)
    update = adam_direction(grad, first, second, steps, betas)
    if shared:
        update = shared.mixed(update)
    apply_update(weight, update, rule)


@triton.jit
def direction_at(grad, first_ptr, second_ptr, at, mine, steps, beta1, beta2, log2_beta1, log2_beta2):
    """In a kernel, `adam_direction` of the elements `at` that are `mine`."""
    second = tl.load(second_ptr + at, mask=mine, other=0.0)
    first = tl.load(first_ptr + at, mask=mine, other=0.0)
    second += (1 - beta2) * (grad * grad - second)
    first += (1 - beta1) * (grad - first)
    tl.store(second_ptr + at, second, mask=mine)
    tl.store(first_ptr + at, first, mask=mine)
    root = tl.sqrt(second / (1 - tl.exp2(steps * log2_beta2))) + 1e-10
    return first / (1 - tl.exp2(steps * log2_beta1)) / root


@triton.jit
def mixed(update, moved_ptr, of_row_ptr, shares_ptr, place, column, mine, width, rows, tables,
          FEATURES: tl.constexpr):
    """`Shared.mixed` of part of a row, which is row place % rows of table place // rows."""
    row, table, own, more = place % rows, place // rows, 1.0, tl.zeros_like(update)
    for k in tl.static_range(FEATURES):
        share = tl.load(shares_ptr + row * FEATURES + k)
        feature = tl.load(of_row_ptr + row * FEATURES + k)
        moved = tl.load(moved_ptr + (feature * tables + table) * width + column, mask=mine, other=0.0)
        own -= share
        more += share * moved.to(tl.float32)
    return own * update + more


@triton.jit
def adam_kernel(weight_ptr, bits_ptr, grad_ptr, first_ptr, second_ptr, steps_ptr, finite_ptr, lr_ptr,
                decay_ptr, moved_ptr, of_row_ptr, shares_ptr, n, width, rows, tables, beta1, beta2,
                log2_beta1, log2_beta2, FEATURES: tl.constexpr, CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes part of a row of `width` numbers. Without features, BLOCK numbers are a row."""
    parts = tl.cdiv(width, BLOCK)
    place, column = tl.program_id(0) // parts, tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    at = place.to(tl.int64) * width + column
    mine = (column < width) & (at < n)
    finite, steps = tl.load(finite_ptr) != 0, tl.load(steps_ptr)
    grad = tl.where(finite, tl.load(grad_ptr + at, mask=mine, other=0.0).to(tl.float32), 0.0)
    update = direction_at(grad, first_ptr, second_ptr, at, mine, steps, beta1, beta2, log2_beta1, log2_beta2)
    if FEATURES > 0:
        update = mixed(update, moved_ptr, of_row_ptr, shares_ptr, place, column, mine, width, rows, tables,
                       FEATURES)
    lr, decay = tl.load(lr_ptr), tl.load(decay_ptr)
    apply_update_at(weight_ptr, bits_ptr, at, mine, update, finite, lr, decay, CAUTIOUS)


def adam_update(weight: Master, grad: Tensor, first: Tensor, second: Tensor, steps: Tensor, rule: Rule,
                betas: tuple[float, float], shared: Shared | None = None,
                tuned: tuple[int, int] | None = None) -> None:
    """`adam_update_reference` as a Triton kernel. `betas` are above 0."""
    (stored, bits), (block, warps) = weight, tuned or CONFIGS[0]
    n = stored.numel()
    check(0 < min(betas) and max(betas) < 1, "first", first, f"decayed by betas between 0 and 1, not {betas}")
    for name, x in (("weight", stored), ("bits", bits), ("grad", grad), ("first", first), ("second", second)):
        if x is not None:
            check(x.shape == (n,) and x.is_contiguous(), name, x, f"({n},), contiguous")
    check(first.dtype == second.dtype == torch.float32, "first", first, "float32, as second is")
    check(bits is None or stored.dtype == torch.bfloat16, "weight", stored, "bf16, if it lacks bits")
    for name, x in (("finite", rule.finite), ("lr", rule.lr), ("decay", rule.decay)):
        check(x.numel() == 1, name, x, "one number")
    width, tables, rows, features, moved, of_row, shares = block, 1, 1, 0, grad, grad, grad
    if shared:
        (moved, of_row, shares), (_, tables, width) = shared, shared.moved.shape
        rows, features = of_row.shape
        fits = tables * rows * width == n and of_row.dtype == torch.int64
        check(fits, "of_row", of_row, f"int64, of the rows in {tables} tables of {n} numbers")
        fits = moved.is_contiguous() and of_row.is_contiguous() and shares.is_contiguous()
        check(fits and shares.shape == of_row.shape, "shares", shares, "like of_row, all contiguous")
        block = min(block, 1 << max(width - 1, 0).bit_length())
    steps.add_(rule.finite)
    if n:
        adam_kernel[triton.cdiv(n, width) * triton.cdiv(width, block),](
            stored if bits is None else stored.view(torch.int16), bits, grad, first, second, steps,
            rule.finite, rule.lr, rule.decay, moved, of_row, shares, n, width, rows, tables, *betas,
            *map(math.log2, betas), FEATURES=features, CAUTIOUS=rule.cautious, BLOCK=block, num_warps=warps)


def _update(function, value: Tensor, by: tuple[Tensor, Tensor, Tensor], steps: Tensor, rule: Rule,
            shared: Shared | None, **tuned) -> tuple[Tensor, ...]:
    """A float32 weight and its moments after an update `by` the gradient and both moments."""
    function(Master(value, None), *by, steps, rule, (0.75, 0.99), shared, **tuned)
    return value, *by[1:]


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """A table alone, and tables whose rows share updates."""
    def inputs(tables: int, rows: int, width: int, features: int) -> tuple:
        n, steps = tables * rows * width, torch.tensor(9.0, device=device)
        value, first, grad = torch.randn(3, n, device=device).unbind()
        finite, lr, decay = (torch.tensor(number, device=device) for number in (True, 0.01, 0.1))
        # A third of the shares are 0: rows alone with a feature, as 47, 17 and 4% of GPT-2's tokens are.
        shares = torch.rand(rows, 3, device=device).sub(0.33).clamp(min=0) / 2
        of_row = torch.randint(max(features, 1), (rows, 3), device=device) * (shares > 0)
        moved = torch.randn(features, tables, width, device=device).to(dtype)
        shared = Shared(moved, of_row, shares) if features else None
        by = grad.to(dtype), first, grad.square()
        return value, by, steps, Rule(finite, lr, decay, True), shared

    real = ((5, 50304, 768, 0), (5, 50304, 768, 20723), (5, 25152, 768, 20723))
    odd = ((1, 37, 80, 0), (2, 37, 80, 11), (1, 3, 1100, 2), (1, 1, 1, 1))
    for tables, rows, width, features in (real if size == "real" else odd):
        shape = f"{tables} × {rows:,} × {width}" + f", {features:,} features" * bool(features)
        numbers = tables * rows * width
        yield Example(
            "Adam", shape, partial(inputs, tables, rows, width, features), partial(_update, adam_update),
            partial(_update, adam_update_reference),
            bytes=26.0 * numbers + 2.0 * tables * features * width, configs=CONFIGS)
