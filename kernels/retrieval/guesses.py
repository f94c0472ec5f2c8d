"""Guesses of the next token, from its own sequence. A token reads one row of a table for its guess."""
from collections.abc import Callable

from torch import Tensor

from kernels.retrieval.matching import guess_rows, near_guesses


class Guesses:
    """A guess a token: what followed the longest earlier match of the last tokens in its sequence."""

    def __init__(self, near: tuple[int, ...], suffix_keys: Callable):
        """`near`: lengths of matches, () for none. `suffix_keys` may be its reference."""
        self.near, self.suffix_keys = (*sorted(near),), suffix_keys

    def rows(self, tokens: Tensor, is_start: Tensor, count: int) -> Tensor:
        """Rows (n, 1) int32 of a table of `count` rows, for each token."""
        keys = self.suffix_keys(tokens, is_start, self.near)
        return guess_rows(*near_guesses(tokens, is_start, keys), count)[:, None]
