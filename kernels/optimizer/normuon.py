"""u = polar factor of the Nesterov momentum, each neuron's row divided by its running root mean square.

The two halves of NorMuon (Li et al., arXiv 2510.05491) around the orthogonalisation, which is in
orthogonalize.py. Dividing by the running root mean square of each neuron is worth 0.0153 of loss, or 2.6 of
34 seconds on four H200s (one pair of runs, seed 0).

The momentum takes one pass over memory. The neurons take two, for a matrix's norm must be known before any of
its weights moves. The first pass only reads the updates, so the two move 12 bytes for each bf16 number. For
14 × 3,072 × 768 on one H200 a momentum with a slow average takes 159 µs and the neurons 99, where compiled
PyTorch takes 159 and 106.

A gradient's weight in a momentum falls by the factor β with each step. With a second, slower average it
falls fast at first and then slowly: more gradients count, and the newest still count most (AggMo, arXiv
1804.00325; AdEMAMix, arXiv 2409.03137; for Muon, from a part of the run on: @orange4664,
modded-nanogpt #340).
"""
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.optimizer.master_weight import Master, Rule, apply_update, apply_update_at

# (elements a program, warps) of the momentum; (rows a program, columns a chunk, warps) of the neurons. The
# first is used; others were not timed. Four numbers a thread are 16 bytes of float32. With eight, which are
# 16 bytes of bf16, Triton sends numbers through shared memory between loads and stores. A neuron has a warp.
CONFIGS = [(1024, 8), (1024, 4), (2048, 8), (512, 4), (512, 2)]
NEURON_CONFIGS = [(8, 256, 8), (4, 256, 4), (16, 256, 8), (16, 256, 16), (32, 256, 8), (4, 1024, 8)]


class Rates(NamedTuple):
    """How the averages move. The tensors may change from step to step without a new compiled program."""
    beta: Tensor  # 0-dim: factor of the momentum in each step
    slow_share: Tensor  # 0-dim: share of the slow average where both are mixed
    slow_beta: float  # factor of the slow average in each step


def nesterov_momentum_reference(grad: Tensor, momentum: Tensor, slow: Tensor | None, rates: Rates,
                                finite: Tensor) -> Tensor:
    """The matrices to orthogonalise, like grad. Updates `momentum` and `slow` (float32, like it) in place.

    Unless `finite`, 0-dim, the gradient counts as zero.
    """
    wide = torch.where(finite, grad, 0).to(momentum.dtype)
    momentum.lerp_(wide, 1 - rates.beta)
    past = momentum
    if slow is not None:
        slow.lerp_(wide, 1 - rates.slow_beta)
        past = momentum.lerp(slow, rates.slow_share)
    return wide.lerp(past, rates.beta).to(grad.dtype)


def neuron_update_reference(weight: Master, update: Tensor, second: Tensor, rule: Rule, beta2: float,
                            neuron_norm: bool) -> None:
    """Apply orthogonalised updates (n, rows, columns) to matrices of that shape in place. A row is a neuron.

    `second` (n, rows, 1) float32 is the running mean square of each neuron's update. Dividing by its root
    keeps the matrix's norm. `rule.lr` is (n, 1, 1). With `neuron_norm` False this is plain Muon.

    The matrix's norms before and after the division follow from the mean squares of its rows. Computing the
    norms from the elements would take two more passes.
    """
    update = update.to(second.dtype)
    if neuron_norm:
        mean = update.square().mean(-1, keepdim=True)
        second.lerp_(mean, 1 - beta2)
        scale = second.clamp(min=1e-10).rsqrt()
        before, after = mean.sum(-2, keepdim=True), (mean * scale.square()).sum(-2, keepdim=True)
        update = update * (scale * (before / after.clamp(min=1e-20)).sqrt())
    apply_update(weight, update, rule)


@triton.jit
def momentum_kernel(grad_ptr, momentum_ptr, slow_ptr, out_ptr, beta_ptr, slow_share_ptr, finite_ptr, n,
                    slow_step, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine, step = at < n, 1 - tl.load(beta_ptr)
    grad = tl.load(grad_ptr + at, mask=mine, other=0.0).to(tl.float32)
    grad = tl.where(tl.load(finite_ptr) != 0, grad, 0.0)
    momentum = tl.load(momentum_ptr + at, mask=mine, other=0.0)
    momentum += step * (grad - momentum)
    past = momentum
    if slow_ptr is not None:
        slow = tl.load(slow_ptr + at, mask=mine, other=0.0)
        slow += slow_step * (grad - slow)
        past += tl.load(slow_share_ptr) * (slow - momentum)
        tl.store(slow_ptr + at, slow, mask=mine)
    tl.store(momentum_ptr + at, momentum, mask=mine)
    tl.store(out_ptr + at, (past + step * (grad - past)).to(out_ptr.dtype.element_ty), mask=mine)


def nesterov_momentum(grad: Tensor, momentum: Tensor, slow: Tensor | None, rates: Rates, finite: Tensor,
                      tuned: tuple[int, int] | None = None) -> Tensor:
    """`nesterov_momentum_reference` as a Triton kernel."""
    n, (block, warps) = grad.numel(), tuned or CONFIGS[0]
    check(grad.is_contiguous(), "grad", grad, "contiguous")
    for name, x in (("momentum", momentum), ("slow", slow)):
        fits = x is None or x.shape == grad.shape and x.dtype == torch.float32 and x.is_contiguous()
        check(fits, name, x, "like grad, in contiguous float32")
    for name, x in (("beta", rates.beta), ("slow_share", rates.slow_share), ("finite", finite)):
        check(x.numel() == 1, name, x, "one number")
    out = torch.empty_like(grad)
    if n:
        momentum_kernel[triton.cdiv(n, block),](
            grad, momentum, slow, out, rates.beta, rates.slow_share, finite, n, 1 - rates.slow_beta,
            BLOCK=block, num_warps=warps)
    return out


@triton.jit
def rows_of(program, rows, ROWS: tl.constexpr):
    """The matrix of which this program takes ROWS rows, their places among all rows, and which exist."""
    programs = tl.cdiv(rows, ROWS)
    matrix, row = program // programs, program % programs * ROWS + tl.arange(0, ROWS)
    return matrix, matrix.to(tl.int64) * rows + row, row < rows


@triton.jit
def at_least(x, least):
    """max(x, least), but a NaN stays a NaN."""
    return tl.where(x < least, least, x)


@triton.jit
def neuron_squares_kernel(update_ptr, second_ptr, sums_ptr, rows, columns, step, ROWS: tl.constexpr,
                          COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    """Updates `second`, and sums over the program's rows the mean squares before and after the division.

    The first programs take the last rows: the matmul before wrote these last, so L2 may still hold them. At
    the end L2 holds the first rows, where `neuron_update_kernel` begins.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    _, row, live = rows_of(program, rows, ROWS)
    squares = tl.zeros((ROWS,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at, mine = row[:, None] * columns + column, live[:, None] & (column < columns)
        update = tl.load(update_ptr + at, mask=mine, other=0.0).to(tl.float32)
        squares += tl.sum(update * update, axis=1)
    mean = squares / columns
    second = tl.load(second_ptr + row, mask=live, other=0.0)
    second += step * (mean - second)
    tl.store(second_ptr + row, second, mask=live)
    tl.store(sums_ptr + 2 * program, tl.sum(mean))
    tl.store(sums_ptr + 2 * program + 1, tl.sum(mean / at_least(second, 1e-10)))


@triton.jit
def neuron_update_kernel(weight_ptr, bits_ptr, update_ptr, second_ptr, sums_ptr, finite_ptr, lr_ptr,
                         decay_ptr, rows, columns, parts, PARTS: tl.constexpr, CAUTIOUS: tl.constexpr,
                         ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    """Each program adds up the `parts` of its matrix's sums in the same order: no atomics, the same bits."""
    matrix, row, live = rows_of(tl.program_id(0), rows, ROWS)
    finite, lr, decay = tl.load(finite_ptr) != 0, tl.load(lr_ptr + matrix), tl.load(decay_ptr)
    scale = tl.full((ROWS,), 1.0, tl.float32)
    if sums_ptr is not None:
        part = tl.arange(0, PARTS)
        at = sums_ptr + 2 * (matrix * parts + part)
        before = tl.sum(tl.load(at, mask=part < parts, other=0.0))
        after = tl.sum(tl.load(at + 1, mask=part < parts, other=0.0))
        second = tl.load(second_ptr + row, mask=live, other=1.0)
        scale = tl.rsqrt(at_least(second, 1e-10)) * tl.sqrt(before / at_least(after, 1e-20))
    for chunk in tl.static_range(CHUNKS):
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at, mine = row[:, None] * columns + column, live[:, None] & (column < columns)
        update = tl.load(update_ptr + at, mask=mine, other=0.0).to(tl.float32) * scale[:, None]
        apply_update_at(weight_ptr, bits_ptr, at, mine, update, finite, lr, decay, CAUTIOUS)


def neuron_update(weight: Master, update: Tensor, second: Tensor, rule: Rule, beta2: float, neuron_norm: bool,
                  tuned: tuple[int, int, int] | None = None) -> None:
    """`neuron_update_reference` as two Triton kernels, or as one without `neuron_norm`."""
    update = update.contiguous()        # The reference of Newton–Schulz returns tall matrices transposed.
    (stored, bits), (tile, chunk, warps) = weight, tuned or NEURON_CONFIGS[0]
    check(update.ndim == 3 and update.shape[2] <= 8192, "update", update, "(n, rows, columns <= 8192)")
    for name, x in (("weight", stored), ("bits", bits)):
        check(x is None or x.shape == update.shape and x.is_contiguous(), name, x, "contiguous, like update")
    check(bits is None or stored.dtype == torch.bfloat16, "weight", stored, "bf16, if it lacks bits")
    n, rows, columns = update.shape
    fits = second.shape == (n, rows, 1) and second.dtype == torch.float32 and second.is_contiguous()
    check(fits, "second", second, f"contiguous float32 ({n}, {rows}, 1)")
    check(rule.lr.shape == (n, 1, 1) and rule.lr.is_contiguous(), "lr", rule.lr, f"contiguous ({n}, 1, 1)")
    for name, x in (("finite", rule.finite), ("decay", rule.decay)):
        check(x.numel() == 1, name, x, "one number")
    if not update.numel():
        return
    parts, chunk, sums = triton.cdiv(rows, tile), min(chunk, triton.next_power_of_2(columns)), None
    shape = dict(ROWS=tile, COLUMNS=chunk, CHUNKS=triton.cdiv(columns, chunk), num_warps=warps)
    if neuron_norm:
        sums = torch.empty(n * parts, 2, device=update.device)
        neuron_squares_kernel[n * parts,](update, second, sums, rows, columns, 1 - beta2, **shape)
    neuron_update_kernel[n * parts,](
        stored if bits is None else stored.view(torch.int16), bits, update, second, sums, rule.finite,
        rule.lr, rule.decay, rows, columns, parts, PARTS=triton.next_power_of_2(parts),
        CAUTIOUS=rule.cautious, **shape)


def _moved(function, value: Tensor, update: Tensor, second: Tensor, *how, **tuned) -> tuple[Tensor, Tensor]:
    """A float32 weight and the running mean squares after an update."""
    function(Master(value, None), update, second, *how, **tuned)
    return value, second


def _averaged(function, grad: Tensor, *averages_and_rates, **tuned) -> tuple[Tensor | None, ...]:
    """The momentum that looks ahead, and both averages."""
    return function(grad, *averages_and_rates, **tuned), *averages_and_rates[:2]


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Matrices of MLPs and of attention, for one GPU and for two; or small ones of any form."""
    def number(x: float) -> Tensor:
        return torch.tensor(x, device=device)

    def averages(shape: tuple, with_slow: bool) -> tuple:
        grad, momentum, slow = torch.randn(3, *shape, device=device).unbind()
        rates = Rates(number(0.95), number(0.3), 0.99)
        return grad.to(dtype), momentum, slow if with_slow else None, rates, number(True)

    def matrices(shape: tuple, neuron_norm: bool) -> tuple:
        value, update = torch.randn(2, *shape, device=device).unbind()
        second, lr = torch.rand(*shape[:2], 1, device=device), torch.rand(shape[0], 1, 1, device=device)
        rule = Rule(number(True), lr / 9, number(0.1), True)
        return value, update.to(dtype), second, rule, 0.95, neuron_norm

    real = (14, 3072, 768), (28, 768, 768)
    for shape in real if size == "real" else ((3, 37, 80), (2, 9, 300), (1, 1, 1)):
        numbers, text = float(torch.Size(shape).numel()), "{} × {:,} × {:,}".format(*shape)
        for more in (False, True):
            yield Example(
                "Nesterov momentum" + ", also a slow one" * more, text, partial(averages, shape, more),
                partial(_averaged, nesterov_momentum), partial(_averaged, nesterov_momentum_reference),
                bytes=(20 if more else 12) * numbers, configs=CONFIGS)
            yield Example(
                "neurons' update" if more else "update without the neurons' norm", text,
                partial(matrices, shape, more), partial(_moved, neuron_update),
                partial(_moved, neuron_update_reference), bytes=(12 if more else 10) * numbers,
                configs=NEURON_CONFIGS)
