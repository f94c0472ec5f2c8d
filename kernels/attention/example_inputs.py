"""Inputs for the examples of `qkv.py` and `fp8_qkv.py`, which start after and before the matmul."""
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.inputs import HeadShape, Positions, Projection, Rows, ValueRows
from kernels.attention.rotary import rotary_tables

CHANNELS = 6  # that a gate sees of x, and as many of the value row


@dataclass(frozen=True)
class HeadInputs:
    """A size of a layer's heads, and functions that make random inputs of that size."""
    tokens: int
    heads: int
    qk_dim: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype
    key_offset: bool = False
    value: bool = False  # with value rows
    ngrams: int = 0  # heads with n-gram rows
    rotary_share: float = 0.5  # of a query's and a key's channels
    starts: tuple[int, ...] | None = None  # of sequences; None: every 512 tokens
    table: int = 0  # rows of a table in which the value rows are; 0: they are gathered

    def __str__(self) -> str:
        parts = [f"{self.tokens} × {self.heads} × (2 × {self.qk_dim} + {self.head_dim})"]
        parts += ["key offset"] * self.key_offset + ["value rows"] * self.value
        parts += [f"in a table of {self.table:,}"] * (self.table > 0)
        return ", ".join(parts + [f"n-grams in {self.ngrams}"] * (self.ngrams > 0))

    @property
    def from_x_size(self) -> str:
        """The size of the matmul, in words."""
        size = f"{self.tokens} × {self.width} × {self.columns}" + ", value rows" * self.value
        return size + f", n-grams in {self.ngrams}" * (self.ngrams > 0)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def columns(self) -> int:
        """Of Q, K and V together."""
        return self.heads * (2 * self.qk_dim + self.head_dim)

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.qk_dim, self.head_dim, self.key_offset)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    def positions(self) -> Positions:
        channels = int(self.rotary_share * self.qk_dim)
        tables = rotary_tables([64], self.tokens, channels, 1024.0, 0.1, False, self.device)
        starts = range(0, self.tokens, 512) if self.starts is None else self.starts
        is_start = torch.zeros(self.tokens, dtype=torch.bool, device=self.device)
        is_start[[start for start in starts if start < self.tokens]] = True
        return Positions(*tables[64][:2], is_start)

    def value_rows(self) -> ValueRows | None:
        if not self.value:
            return None
        gate = torch.randn(self.heads, 2 * CHANNELS, device=self.device)
        if not self.table:
            return ValueRows(self.random(self.tokens, self.width), gate)
        index = torch.randint(self.table, (self.tokens,), device=self.device, dtype=torch.int32)
        nothing = torch.zeros(self.tokens, self.width, device=self.device, dtype=self.dtype)
        return ValueRows(nothing, gate, Rows(self.random(self.table, self.width), index))

    def ngram_values(self) -> tuple[Tensor, Tensor] | None:
        """Rows and scales of one layer, for `sharing`."""
        if not self.ngrams:
            return None
        rows = self.random(self.tokens, self.ngrams, self.head_dim)
        return rows, torch.rand(1, self.ngrams, device=self.device) + 0.5

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; in small sizes the gradient of q is not contiguous."""
        n, heads = self.tokens, self.heads
        q_grad = self.random(self.qk_dim, heads, n).permute(2, 1, 0)
        q_grad = q_grad.contiguous() if n > 1024 else q_grad
        return q_grad, self.random(n, heads, self.qk_dim), self.random(n, heads, self.head_dim)

    def from_qkv(self) -> tuple:
        """What `qkv_heads` takes, and the gradients of its results."""
        seen = self.random(self.tokens, CHANNELS + 2)[:, :CHANNELS] if self.value else None
        return (self.random(self.tokens, self.columns), self.positions(), seen, self.value_rows(),
                self.ngram_values(), self.shape, self.gradients())

    def from_x(self) -> tuple:
        """What `qkv_fp8` takes, and the gradients of its results."""
        x = F.rms_norm(self.random(self.tokens, self.width), (self.width,))
        scale = torch.tensor(0.5, device=self.device)
        projection = Projection(self.random(self.columns, self.width) * 0.02, scale)
        return (x, projection, self.positions(), self.value_rows(), self.ngram_values(), self.shape,
                self.gradients())


def sharing(function: Callable, share: Callable) -> Callable:
    """`function` for inputs with n-gram rows and scales, from which `share` makes the n-gram values."""
    def run(*inputs: Any, **tuned: Any) -> tuple[Tensor, ...]:
        *others, ngrams, shape = inputs
        return function(*others, None if ngrams is None else share(*ngrams)[0], shape, **tuned)
    return run


def both_ways(function: Callable) -> Callable:
    """A function that returns the results and the gradients of its inputs; its last input is the results'
    gradients.

    The gradient of a 0-dim input, the learned scale, is made but not returned. It is a sum of random numbers
    that nearly cancel, and has a test of its own.
    """
    def run(*inputs: Any, **tuned: Any) -> tuple[Tensor, ...]:
        *inputs, grads = inputs
        leaves: list[Tensor] = []

        def with_leaves(x: Any) -> Any:
            if isinstance(x, Tensor):
                leaves.append(x.detach().requires_grad_())
                return leaves[-1]
            if isinstance(x, tuple) and not isinstance(x, (Positions, HeadShape, Rows)):
                parts = map(with_leaves, x)
                return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
            return x

        results = function(*map(with_leaves, inputs), **tuned)
        given = [grad.to(x.dtype) for grad, x in zip(grads, results)]
        found = torch.autograd.grad(results, leaves, given)
        return *(x.detach() for x in results), *(grad for grad, x in zip(found, leaves) if x.dim())
    return run


def real_sizes(device: torch.device, dtype: torch.dtype) -> Iterator[HeadInputs]:
    """The sizes of training's micro-batches, with queries and keys as wide as values, and half as wide."""
    for qk_dim, tokens in ((128, 16384), (128, 49152), (64, 49152)):
        for key_offset, value in ((False, False), (True, False), (False, True)):
            yield HeadInputs(tokens, 6, qk_dim, 128, device, dtype, key_offset, value)


def real_sizes_from_x(device: torch.device, dtype: torch.dtype) -> Iterator[HeadInputs]:
    sizes = (16384, 128, False), (49152, 128, False), (49152, 128, True), (49152, 64, False)
    for tokens, qk_dim, value in sizes:
        yield HeadInputs(tokens, 6, qk_dim, 128, device, dtype, key_offset=True, value=value)
