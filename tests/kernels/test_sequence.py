"""Shifts along packed sequences."""
import pytest
import torch

from kernels.loss import later_targets
from kernels.sequence import previous

STARTS = torch.tensor([True, False, False, True, True, False])


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2)])
def test_previous_is_the_row_before_and_zero_at_a_start(shape):
    x = torch.randn(shape)
    expected = torch.zeros(shape)
    expected[[1, 2, 5]] = x[[0, 1, 4]]
    assert torch.equal(previous(x, STARTS), expected)


def test_later_targets_end_with_their_sequence():
    targets = torch.tensor([10, 11, 12, 20, 30, 31])
    ahead = [list(x) for x in torch.stack(later_targets(targets, STARTS, 3)).tolist()]
    assert ahead == [[10, 11, 12, 20, 30, 31], [11, 12, -1, -1, 31, -1], [12, -1, -1, -1, -1, -1]]
