"""A copy of tensors, to put them back: the warm-up takes real steps, and the run begins as if it had not."""
from collections.abc import Iterable

from torch import Tensor


def snapshot(state: Iterable[Tensor]) -> list[Tensor | None]:
    """Copies of these tensors; None for one that is all zero, as most of an optimizer's are at first."""
    return [x.clone() if x.any() else None for x in state]


def restore(state: Iterable[Tensor], kept: list[Tensor | None]) -> None:
    """Make the tensors of `state` in place what they were when `snapshot` took `kept`."""
    for mine, copy in zip(state, kept, strict=True):
        mine.zero_() if copy is None else mine.copy_(copy)
