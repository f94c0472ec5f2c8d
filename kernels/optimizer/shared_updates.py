"""Tokens that have a feature in common share part of their updates, so that rare ones learn from common ones.

    u_t = 0.4 adam(g_t) + Σ share_f · adam(s_f),    s_f = Σ of g over all tokens with feature f

g_t is the gradient of token t's row in a table of tokens: the embedding, the head or a value embedding. The
features of GPT-2's tokens are their class, their root and their form (data/classes.py), with shares of 0.3,
0.15 and 0.15. It is as if each row were a sum of four rows, its own and one for each feature, and each of the
four had an Adam of its own; fastText has such sums (Bojanowski et al., arXiv 1607.04606). But the rows of
features are not stored: their updates are added to the tokens' rows. A token that is alone with a feature
keeps the feature's share to itself, so only the 18,361 features that several tokens have need moments.

Each rank updates rows of its own, while the tokens of a feature may lie on any rank. So each rank sums the
gradients of its own rows by feature. Then the features go the way of all weights: a reduce-scatter of these
sums, an update of a part of the features, an all-gather of the updates.
"""
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.embedding import add_rows, add_rows_reference, lookup
from kernels.example import Example
from kernels.optimizer.adam import CONFIGS, Shared, adam_direction, direction_at
from kernels.ranks.collectives import wait

add_several = partial(add_rows, once=False)     # A token's gradient is added to each of its features.
SHARES = 0.3, 0.15, 0.15    # of a token's class, its root and its form in its update; the rest is its own


class Features(NamedTuple):
    """The features that several tokens have, numbered from 0, and these tokens, or those of one rank."""
    of_token: Tensor    # (tokens, features of a token) int64; 0 where a token is alone with its feature
    shares: Tensor      # like `of_token`, float32: share of a token's update; 0 where the token is alone
    rows: Tensor        # (pairs,) int32, ascending: features …
    tokens: Tensor      # … and a token that has each, int64
    count: int


def number_features(features: np.ndarray, rows: int, device: torch.device, rank: int = 0,
                    ranks: int = 1) -> Features:
    """The features, with the tokens in the rank's equal part of a table's rows, numbered from 0.

    Tokens with the same number in a column of `features` (tokens, n) share that feature. Rows of the table
    beyond the tokens have no feature.
    """
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
    order = order[token[order] // (rows // ranks) == rank]
    own = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    pairs = of_token[token, level][order].astype(np.int32), token[order] - own.start
    return Features(*(torch.from_numpy(x).to(device) for x in (of_token[own], shares[own], *pairs)), count)


def feature_sums(add: Callable, grads: Tensor, features: Features, sums: Tensor) -> Tensor:
    """Write sums of grads (tables, tokens, width) over `sums` (features, tables, width). Other rows become 0.

    `add` is `add_rows` or its reference.
    """
    sums.zero_()
    for i, grad in enumerate(grads):
        add(sums[:, i], grad, features.rows, features.tokens)
    return sums


def feature_update_reference(sums: Tensor, first: Tensor, second: Tensor, steps: Tensor, finite: Tensor,
                             betas: tuple[float, float]) -> None:
    """Turn `sums` (features, tables, width), which are the features' gradients, into Adam's updates in place.

    The moments, float32 and of the shape of `sums`, change as well. `finite` is as in Adam, and `steps` as
    before Adam counts this step.
    """
    grads = torch.where(finite, sums, 0).to(first.dtype)
    sums.copy_(adam_direction(grads, first, second, steps + 1, betas))


@triton.jit
def feature_kernel(sums_ptr, first_ptr, second_ptr, steps_ptr, finite_ptr, n, beta1, beta2, log2_beta1,
                   log2_beta2, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine, steps = at < n, tl.load(steps_ptr) + 1
    grad = tl.load(sums_ptr + at, mask=mine, other=0.0).to(tl.float32)
    grad = tl.where(tl.load(finite_ptr) != 0, grad, 0.0)
    update = direction_at(grad, first_ptr, second_ptr, at, mine, steps, beta1, beta2, log2_beta1, log2_beta2)
    tl.store(sums_ptr + at, update.to(sums_ptr.dtype.element_ty), mask=mine)


def feature_update(sums: Tensor, first: Tensor, second: Tensor, steps: Tensor, finite: Tensor,
                   betas: tuple[float, float], tuned: tuple[int, int] = CONFIGS[0]) -> None:
    """`feature_update_reference` as a Triton kernel, in one pass. `betas` are above 0."""
    n, (block, warps) = sums.numel(), tuned
    check(0 < min(betas) and max(betas) < 1, "first", first, f"decayed by betas between 0 and 1, not {betas}")
    check(sums.is_contiguous(), "sums", sums, "contiguous")
    for name, x in (("first", first), ("second", second)):
        fits = x.shape == sums.shape and x.dtype == torch.float32 and x.is_contiguous()
        check(fits, name, x, "like sums, in contiguous float32")
    for name, x in (("steps", steps), ("finite", finite)):
        check(x.numel() == 1, name, x, "one number")
    if n:
        feature_kernel[triton.cdiv(n, block),](sums, first, second, steps, finite, n, *betas,
                                               *map(math.log2, betas), BLOCK=block, num_warps=warps)


class SharedUpdates:
    """The features' part of a group's updates."""

    def __init__(self, features: np.ndarray, tables: list[Tensor], world):
        """`tables` (rows, width) of tokens. Equal numbers in a column of `features` (tokens, 3) are one.

        `world`: the program's ranks.
        """
        self.collectives, self.rank, (rows, width) = world.collectives.apart, world.rank, tables[0].shape
        ranks, like = self.collectives.size, dict(dtype=tables[0].dtype, device=tables[0].device)
        self.features = number_features(features, rows, like["device"], self.rank, ranks)
        each = -(-self.features.count // ranks)     # The last part may exceed the features.
        zeros = self.collectives.zeros if ranks > 1 else torch.zeros
        self.sums = zeros(each * ranks, len(tables), width, **like)
        # The collectives of a single rank do nothing, so there the part is the whole.
        self.part = zeros(each, len(tables), width, **like) if ranks > 1 else self.sums
        self.moments = [torch.zeros(self.part.shape, device=like["device"]) for _ in range(2)]

    def update(self, ops, grad: Tensor, steps: Tensor, finite: Tensor,
               betas: tuple[float, float]) -> Shared:
        """For this rank's rows, from their summed gradient `grad` (numbers,). `ops`: those of the program."""
        _, tables, width = self.sums.shape
        add = add_several if ops.lookup is lookup else add_rows_reference      # as the look-ups' gradients
        feature_sums(add, grad.view(tables, -1, width), self.features, self.sums)
        wait(self.collectives.reduce_scatter(self.part, self.sums))
        ops.feature_update(self.part, *self.moments, steps, finite, betas)
        wait(self.collectives.all_gather(self.sums, self.part))
        return Shared(self.sums, self.features.of_token, self.features.shares)

    def load(self, moments: list[Tensor]) -> None:
        """Take this rank's part of the moments of all features, which may be padded to another length."""
        for mine, whole in zip(self.moments, moments):
            fitted = F.pad(whole, (0, 0, 0, 0, 0, len(self.sums) - len(whole)))     # or cut
            mine.copy_(fitted.chunk(self.collectives.size)[self.rank])


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """The sums of two tables, where a token has three features; Adam of sums."""
    def inputs(rows: int, width: int, features: np.ndarray) -> tuple:
        numbered, grads = number_features(features, rows, device), torch.randn(2, rows, width, device=device)
        return grads.to(dtype), numbered, torch.ones(numbered.count, 2, width, device=device, dtype=dtype)

    def moments(*shape: int) -> tuple:
        sums, first = torch.randn(2, *shape, device=device).unbind()
        steps, finite = torch.tensor(9.0, device=device), torch.tensor(True, device=device)
        return sums.to(dtype), first, sums.square(), steps, finite, (0.75, 0.99)

    def in_place(function: Callable, *args, **tuned) -> tuple:
        function(*args, **tuned)
        return args[:3]

    rows, width = (50304, 768) if size == "real" else (70, 24)
    # A feature has as many tokens as a class, a root and a form of GPT-2's tokens have in the mean.
    features = np.stack([np.arange(rows) * 2 // 3, np.arange(rows) * 5 // 16, np.arange(rows) // 13], 1)
    yield Example(
        "sums over tokens of like spelling", f"{rows:,} × {width}", partial(inputs, rows, width, features),
        partial(feature_sums, add_several), partial(feature_sums, add_rows_reference),
        bytes=4.0 * width * (rows + sum(len(np.unique(feature)) for feature in features.T)))
    for shape in ((20723, 5, 768), (18361, 1, 768)) if size == "real" else ((37, 2, 24), (1, 1, 1)):
        yield Example(
            "Adam of features", "{:,} × {} × {}".format(*shape), partial(moments, *shape),
            partial(in_place, feature_update), partial(in_place, feature_update_reference),
            bytes=20.0 * math.prod(shape), configs=CONFIGS)
