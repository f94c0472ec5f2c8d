"""The residual stream as the model sees it."""
import pytest
import torch
from checks import DEVICE, random

from kernels.mlp.residual import Residual, add_up, before_head_reference, norm


def test_the_sum_of_one_summand_is_that_summand():
    x, y, z = (random(3, 4) for _ in range(3))
    assert add_up((x,)) is x
    assert torch.equal(add_up((x, y, z)), x + y + z)


def test_the_first_reader_sums_and_each_reader_gets_its_own_copy():
    calls, (x, update) = [], (random(3, 4), random(3, 4))

    def norm_fork(summands, readers):
        calls.append((summands, readers))
        total = add_up(summands)
        return *(f"copy {i}" for i in range(readers)), total, total.clone()

    stream = Residual(x, update, readers=3)
    assert stream.newest is update and stream.summands == stream.later == (x, update) and not calls
    assert [stream.normed(norm_fork) for _ in range(3)] == ["copy 2", "copy 1", "copy 0"]
    assert calls == [((x, update), 3)]
    (total,), (again,) = stream.summands, stream.later
    assert torch.equal(total, x + update) and torch.equal(total, again)
    assert stream.newest is total is not again
    with pytest.raises(ValueError, match="made for 3 readers"):
        stream.normed(norm_fork)


def test_the_head_reads_the_norm_less_a_share_of_the_kept_layer():
    (x, update, kept), share = (random(3, 4) for _ in range(3)), torch.tensor(0.5, device=DEVICE)
    assert all(torch.equal(out, norm(x + update)) for out in before_head_reference((x, update), None, share))
    wanted = norm(x + update - share * (kept + kept))
    assert all(torch.equal(out, wanted) for out in before_head_reference((x, update), (kept, kept), share))
