"""Tokens that have a feature in common share part of their updates, so that rare ones learn from common ones.

    u_t = 0.4 adam(g_t) + Σ share_f · adam(s_f),    s_f = Σ of g over all tokens with feature f

g_t is the gradient of token t's row in a table of tokens: the embedding, the head or a value embedding. The
features of GPT-2's tokens are their class, their stem and their form (data/classes.py), with shares of 0.3,
0.15 and 0.15. It is as if each row were a sum of four, its own and one for each feature, and each of them had
an Adam of its own; fastText has such sums (Bojanowski et al., arXiv 1607.04606). But no such row is stored:
its updates are added to the token's own. A token that is alone with a feature keeps that share to itself,
so only the 20,723 features that several tokens have need moments.

Ranks update rows of their own, while the tokens of a feature may lie on any of them. So in each update they
trade rows of the gradients for columns, and columns of the shared updates for rows.
"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.embedding import add_rows, add_rows_reference, lookup
from kernels.example import Example
from kernels.optimizer.adam import Shared
from kernels.ranks.collectives import wait

add_several = partial(add_rows, once=False)     # A token's gradient is added to each of its features.
SHARES = 0.3, 0.15, 0.15    # of a token's class, its stem and its form in its update; the rest is its own


class Features(NamedTuple):
    """The features that several tokens have, numbered from 0, and these tokens."""
    of_token: Tensor    # (tokens, features of a token) int64; 0 where a token is alone with its feature
    shares: Tensor      # like it, float32: of the token's update; 0 where it is alone, which is its own share
    rows: Tensor        # (pairs,) int32, ascending: features …
    tokens: Tensor      # … and a token that has each, int64
    count: int

    def own(self) -> Tensor:
        """(tokens,) float32: the share of its own gradient in a token's update."""
        return 1 - self.shares.sum(1)


def number_features(features: np.ndarray, rows: int, device: torch.device) -> Features:
    """Of `features` (tokens, n) equal ones in a column are one. Further rows of a table have none."""
    of_token = np.zeros((rows, features.shape[1]), np.int64)
    shares, count = np.zeros(of_token.shape, np.float32), 0
    for number, share, share_of, column in zip(of_token.T, SHARES, shares.T, features.T):
        _, place, tokens = np.unique(column, return_inverse=True, return_counts=True)
        several = tokens > 1
        known = slice(len(column))
        share_of[known] = share * several[place]
        number[known] = np.where(several, several.cumsum() - 1 + count, 0)[place]
        count += int(several.sum())
    token, level = shares.nonzero()
    order = np.argsort(of_token[token, level], kind="stable")
    whole = of_token, shares, of_token[token, level][order].astype(np.int32), token[order]
    return Features(*(torch.from_numpy(x).to(device) for x in whole), count)


def feature_sums(add: Callable, grads: Tensor, features: Features) -> Tensor:
    """Sums (tables, features, columns) of grads (tables, tokens, columns). `add` is `add_rows` or its
    reference."""
    sums = grads.new_zeros(len(grads), features.count, grads.shape[2])
    for into, grad in zip(sums, grads):
        add(into, grad, features.rows, features.tokens)
    return sums


def feature_update(sums: Tensor, first: Tensor, second: Tensor, steps: Tensor, finite: Tensor,
                   betas: tuple[float, float]) -> Tensor:
    """Adam's update of each feature, (tables, features, columns) of the dtype of `sums`, their gradients.

    The moments, float32 and of the shape of `sums`, change in place. `steps` and `finite`: as in Adam, before
    it counts this step.
    """
    sums, count, dtype = torch.where(finite, sums, 0).float(), steps + 1, sums.dtype
    second.lerp_(sums.square(), 1 - betas[1])
    first.lerp_(sums, 1 - betas[0])
    size = (second / (1 - betas[1] ** count)).sqrt() + 1e-10
    return (first / (1 - betas[0] ** count) / size).to(dtype)


def spread(moved: Tensor, of_token: Tensor, shares: Tensor) -> Tensor:
    """What features add to their tokens' updates: (tables, tokens, columns) like `moved` of each feature."""
    parts = (share[:, None] * moved[:, feature] for share, feature in zip(shares.T, of_token.T))
    return sum(parts).to(moved.dtype)


class SharedUpdates:
    """The features' part of a group's updates."""

    def __init__(self, features: np.ndarray, tables: list[Tensor], world):
        """For tables (rows, width) of tokens. Of their `features` (tokens, 3) equal ones in a column are one.

        `world`: the program's ranks.
        """
        self.tables, self.collectives, (rows, width) = len(tables), world.collectives, tables[0].shape
        self.features, device = number_features(features, rows, tables[0].device), tables[0].device
        self.own = self.features.own().chunk(self.collectives.size)[world.rank].repeat(self.tables)
        self.columns = width // self.collectives.size
        shape = self.tables, self.features.count, self.columns
        self.moments = [torch.zeros(shape, device=device) for _ in range(2)]

    def update(self, ops, grad: Tensor, steps: Tensor, finite: Tensor,
               betas: tuple[float, float]) -> Shared:
        """For this rank's rows (numbers,) of which `grad` is the summed gradient. `ops`: the program's."""
        ranks, columns = self.collectives.size, self.columns
        rows = grad.view(self.tables, -1, ranks, columns)
        from_ranks = self.exchange(rows.permute(2, 0, 1, 3))    # (ranks, tables, rows of each, columns)
        grads = from_ranks.transpose(0, 1).flatten(1, 2)
        add = add_several if ops.lookup is lookup else add_rows_reference      # as the look-ups' gradients
        sums = feature_sums(add, grads, self.features)
        moved = ops.feature_update(sums, *self.moments, steps, finite, betas)
        more = ops.spread(moved, self.features.of_token, self.features.shares)
        to_ranks = more.unflatten(1, (ranks, -1)).transpose(0, 1)
        return Shared(self.own, self.exchange(to_ranks).permute(1, 2, 0, 3).flatten())

    def exchange(self, parts: Tensor) -> Tensor:
        """Part r of (ranks, …) goes to rank r; returns what came from each."""
        if self.collectives.size == 1:
            return parts
        sent = parts.flatten(0, 1).contiguous()
        received = torch.empty_like(sent)
        wait(self.collectives.all_to_all(received, sent))
        return received.view(parts.shape)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """The sums of a table; a token has three features."""
    def inputs(rows: int, width: int, features: np.ndarray) -> tuple:
        return torch.randn(1, rows, width, device=device).to(dtype), number_features(features, rows, device)

    rows, width = (50304, 768) if size == "real" else (70, 24)
    # As many tokens of a feature as GPT-2's tokens of a class, a stem and a form have in the mean.
    features = np.stack([np.arange(rows) * 2 // 3, np.arange(rows) * 3 // 7, np.arange(rows) // 13], 1)
    yield Example(
        "sums over tokens of like spelling", f"{rows:,} × {width}", partial(inputs, rows, width, features),
        partial(feature_sums, add_several), partial(feature_sums, add_rows_reference),
        bytes=2.0 * width * (rows + sum(len(np.unique(feature)) for feature in features.T)))
