"""A copy of what a step changes, to put it back: after a warm-up, or to take the same steps once more."""
from collections.abc import Sequence

import torch
from torch import Tensor


class Snapshot:
    """Copies of tensors as they are now. What is all zero, like most of a new optimizer's state, has none."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = list(tensors)
        self.copies = [x.clone() if x.any() else None for x in self.tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the tensors the numbers that they had."""
        for mine, kept in zip(self.tensors, self.copies):
            mine.zero_() if kept is None else mine.copy_(kept)
