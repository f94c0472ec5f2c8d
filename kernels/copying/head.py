"""q, k = norm(x Wᵀ by halves), rest = q · gate + bias; and the copy head's parameters.

norm divides a vector by its root mean square. The queries q, the keys k and the score `rest` of not copying
go to `pointer.py` and the loss. The matmul is torch's. One launch reads the matmul's result and writes q, k
and `rest`. In the backward pass one launch reads that result again and the three gradients, and writes the
result's gradient. A row of 128 channels lies within half a warp, so norms need no shared memory. Each program
sums the gradients of gate and bias over its rows, and torch adds the programs' sums up: all sums have one
order. On one H200, 98,304 rows take 114 µs both ways, where compiled PyTorch takes 244.
"""
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backend import EPS, check, multiprocessors, tl, triton
from kernels.example import Example, both_ways
from kernels.loss import Mixture
from kernels.sequence import Sequences

# At first the score of not copying exceeds the score of a key that equals its query by this much. So one such
# key begins with 0.7% of the probability.
FIRST_MARGIN = 5.0
# Forward (rows a tile, warps), backward also programs a multiprocessor. The first is used. With 8 rows of 128
# channels and 4 warps a thread loads 16 bytes of each half.
CONFIGS = [((8, 4), (8, 4, 8)), ((16, 4), (16, 4, 4)), ((16, 8), (16, 8, 4)), ((4, 2), (8, 4, 4)),
           ((32, 8), (4, 2, 16))]


def normed_halves_reference(both: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch form of `NormedHalves`."""
    wide = torch.promote_types(both.dtype, torch.float32)
    q, k = (F.rms_norm(half, half.shape[-1:], eps=EPS).to(both.dtype)
            for half in both.unflatten(-1, (2, -1)).to(wide).unbind(-2))
    return q, k, (q * gate).sum(-1) + bias


def project_reference(x: Tensor, weight: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch form of `project`."""
    return normed_halves_reference(F.linear(x, weight), gate, bias)


@triton.jit
def places(row, n, width, CHANNELS: tl.constexpr):
    """Where the first CHANNELS numbers of these rows lie, and which rows there are."""
    return row.to(tl.int64)[:, None] * width + tl.arange(0, CHANNELS)[None, :], (row < n)[:, None]


@triton.jit
def normed(half_ptr, row, n, eps, CHANNELS: tl.constexpr):
    """A half of these rows divided by its root mean square, (rows, CHANNELS) float32; and 1 over that."""
    at, live = places(row, n, 2 * CHANNELS, CHANNELS)
    half = tl.load(half_ptr + at, mask=live, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(half * half, axis=1, keep_dims=True) / CHANNELS + eps)
    return half * inverse, inverse


@triton.jit
def halves_kernel(both_ptr, gate_ptr, bias_ptr, q_ptr, k_ptr, rest_ptr, n, eps, ROWS: tl.constexpr,
                  CHANNELS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q, _ = normed(both_ptr, row, n, eps, CHANNELS)
    k, _ = normed(both_ptr + CHANNELS, row, n, eps, CHANNELS)
    at, live = places(row, n, CHANNELS, CHANNELS)
    q = q.to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + at, q, mask=live)
    tl.store(k_ptr + at, k.to(k_ptr.dtype.element_ty), mask=live)
    gate = tl.load(gate_ptr + tl.arange(0, CHANNELS))[None, :]
    rest = tl.sum(q.to(tl.float32) * gate, axis=1) + tl.load(bias_ptr)
    tl.store(rest_ptr + row, rest, mask=row < n)


@triton.jit
def store_half_grad(half_grad_ptr, grad, normed_half, inverse, row, n, CHANNELS: tl.constexpr):
    at, live = places(row, n, 2 * CHANNELS, CHANNELS)
    along = tl.sum(grad * normed_half, axis=1, keep_dims=True) / CHANNELS
    half_grad = (grad - along * normed_half) * inverse
    tl.store(half_grad_ptr + at, half_grad.to(half_grad_ptr.dtype.element_ty), mask=live)


@triton.jit
def halves_backward_kernel(q_grad_ptr, k_grad_ptr, rest_grad_ptr, both_ptr, gate_ptr, both_grad_ptr, sums_ptr,
                           n, eps, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    channel = tl.arange(0, CHANNELS)
    gate = tl.load(gate_ptr + channel)[None, :]
    gate_grad, bias_grad = tl.zeros((ROWS, CHANNELS), tl.float32), tl.zeros((ROWS,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        q, q_inverse = normed(both_ptr, row, n, eps, CHANNELS)
        k, k_inverse = normed(both_ptr + CHANNELS, row, n, eps, CHANNELS)
        at, live = places(row, n, CHANNELS, CHANNELS)
        q_grad = tl.load(q_grad_ptr + at, mask=live, other=0.0).to(tl.float32)
        k_grad = tl.load(k_grad_ptr + at, mask=live, other=0.0).to(tl.float32)
        rest_grad = tl.load(rest_grad_ptr + row, mask=row < n, other=0.0)
        gate_grad += rest_grad[:, None] * q.to(both_ptr.dtype.element_ty).to(tl.float32)  # q as it was stored
        bias_grad += rest_grad
        q_grad += rest_grad[:, None] * gate
        store_half_grad(both_grad_ptr, q_grad, q, q_inverse, row, n, CHANNELS)
        store_half_grad(both_grad_ptr + CHANNELS, k_grad, k, k_inverse, row, n, CHANNELS)
    sums_ptr += tl.program_id(0) * (CHANNELS + 1)
    tl.store(sums_ptr + channel, tl.sum(gate_grad, axis=0))
    tl.store(sums_ptr + CHANNELS, tl.sum(bias_grad))


class NormedHalves(torch.autograd.Function):
    """The two halves of the rows of `both` (n, 2 channels) normed, and the first one · gate + bias."""

    @staticmethod
    def forward(ctx, both: Tensor, gate: Tensor, bias: Tensor, tuned: tuple) -> tuple[Tensor, Tensor, Tensor]:
        (n, channels), (rows, warps) = (len(both), len(gate)), tuned[0]
        q, k = (both.new_empty(n, channels) for _ in range(2))
        rest = both.new_empty(n, dtype=torch.float32)
        if n:
            halves_kernel[triton.cdiv(n, rows),](
                both, gate, bias, q, k, rest, n, EPS, ROWS=rows, CHANNELS=channels, num_warps=warps)
        ctx.save_for_backward(both, gate)
        ctx.tuned = tuned[1]
        return q, k, rest

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (both, gate), (rows, warps, programs) = ctx.saved_tensors, ctx.tuned
        n, channels = len(both), len(gate)
        programs = min(programs * multiprocessors(both), triton.cdiv(n, rows))
        both_grad, sums = torch.empty_like(both), gate.new_empty(programs, channels + 1)
        if n:
            halves_backward_kernel[programs,](
                *(grad.contiguous() for grad in grads), both, gate, both_grad, sums, n, EPS, ROWS=rows,
                CHANNELS=channels, num_warps=warps)
        total = sums.sum(0)
        return both_grad, total[:-1], total[-1:], None


def project(
    x: Tensor,  # (n, width) bf16, fp16 or float32
    weight: Tensor,  # (2 channels, width), of x's dtype; channels: a power of two
    gate: Tensor,  # (channels,) float32, contiguous
    bias: Tensor,  # (1,) float32
    tuned: tuple = CONFIGS[0],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, (n, channels) each, normed; and the score of not copying, (n,) float32.

    Gradients for all four.
    """
    dtypes = torch.bfloat16, torch.float16, torch.float32
    check(x.ndim == 2 and x.dtype in dtypes, "x", x, "(n, width) in bf16, fp16 or float32")
    fits = gate.ndim == 1 and gate.numel().bit_count() == 1 and gate.is_contiguous()
    check(fits and gate.dtype == torch.float32, "gate", gate, "contiguous float32, of a power of two")
    check(weight.shape == (2 * len(gate), x.size(1)) and weight.dtype == x.dtype, "weight", weight,
          f"({2 * len(gate)}, {x.size(1)}), of x's dtype")
    check(bias.shape == (1,) and bias.dtype == torch.float32, "bias", bias, "one float32")
    return NormedHalves.apply(F.linear(x, weight), gate, bias, tuned)


class CopyHead(nn.Module):
    """`weight` (2 channels, width) makes queries and keys. `gate` (channels,) is a key that all queries see.

    `gate` and `bias` make the score of not copying. Without channels there is no parameter and no mixture.
    """

    def __init__(self, channels: int, width: int, scale: float, dtype: torch.dtype, device: torch.device):
        """`scale`: of a normed query times a normed key."""
        super().__init__()
        self.scale, self.weight, self.gate, self.bias = scale, None, None, None
        if channels:
            self.weight = nn.Parameter(torch.empty(2 * channels, width, dtype=dtype, device=device))
            self.gate, self.bias = (nn.Parameter(torch.zeros(n, device=device)) for n in (channels, 1))

    @torch.no_grad()
    def initialise(self, bound: float, generator: torch.Generator) -> None:
        """Queries and keys start as the same projection, uniform in ±bound, with next to no copying.

        So similar states find each other from the first step on. Projections that start apart find them by
        chance, and some seeds never make up for the time lost (records/ideas.md).
        """
        if self.weight is not None:
            queries, keys = self.weight.chunk(2)
            keys.copy_(queries.uniform_(-bound, bound, generator=generator))
            self.gate.zero_()
            self.bias.fill_(self.scale * len(keys) + FIRST_MARGIN)

    def mixture(self, x: Tensor, batch, sequences: Sequences, project: Callable,
                pointer_sums: Callable) -> Mixture | None:
        """The mixture for the loss of `batch`, from the head's input x (n, width); None without a copy head.

        `project` and `pointer_sums` are those of this package, or their references.
        """
        if self.weight is None:
            return None
        q, k, rest = project(x, self.weight, self.gate, self.bias)
        matching, every = pointer_sums(
            q, k, batch.tokens, batch.targets, sequences, self.scale)
        return Mixture(matching - rest, -F.softplus(every - rest))


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """What follows the matmul, both ways."""
    def inputs(n: int, channels: int) -> tuple[Tensor, ...]:
        gate, bias = (torch.randn(length, device=device) for length in (channels, 1))
        return torch.randn(n, 2 * channels, device=device).to(dtype), gate, bias

    def gradients(n: int, channels: int) -> tuple[Tensor, ...]:
        return *torch.randn(2, n, channels, device=device), torch.linspace(0.5, 1, n, device=device)

    def kernel(*args: Tensor, tuned: tuple = CONFIGS[0]) -> tuple[Tensor, ...]:
        return NormedHalves.apply(*args, tuned)

    real = ((49152, 128), (98304, 128))
    for n, channels in real if size == "real" else ((1, 16), (83, 32)):
        yield Example(
            "queries and keys of the copy head, both ways", f"{n:,} × 2 · {channels}",
            partial(inputs, n, channels), kernel, normed_halves_reference, bytes=20.0 * n * channels,
            wrap=partial(both_ways, gradients=cache(partial(gradients, n, channels)), wanted=(0, 1, 2)),
            configs=tuple(CONFIGS))
