"""Adam's kernels against their references, also where a step is not finite and where rows share updates."""
import pytest
import torch
from checks import DEVICE, DTYPE, in_halves, refused, same_bits

from kernels.optimizer import (
    Master,
    Rule,
    adam_update,
    adam_update_reference,
    feature_update,
    feature_update_reference,
    read_master,
)
from kernels.optimizer.adam import Shared

TABLES, ROWS, WIDTH, FEATURES = 2, 37, 80, 5


def rule(finite: bool, cautious: bool = True) -> Rule:
    return Rule(*(torch.tensor(x, device=DEVICE) for x in (finite, 0.01, 0.1)), cautious)


def numbers() -> tuple[torch.Tensor, ...]:
    """A value, its gradient, and both moments."""
    value, grad, first = torch.randn(3, TABLES * ROWS * WIDTH, device=DEVICE).unbind()
    return value, grad.to(DTYPE), first, grad.square()


def shared() -> Shared:
    of_row = torch.arange(ROWS * 3, device=DEVICE).view(ROWS, 3) % FEATURES
    return Shared(torch.randn(FEATURES, TABLES, WIDTH, device=DEVICE).to(DTYPE), of_row, of_row / 20.0)


@pytest.mark.parametrize("halves, with_features, cautious", [
    (True, True, True), (True, False, False), (False, True, False), (False, False, True)])
def test_several_updates_are_those_of_the_reference(halves, with_features, cautious):
    """The second of four is not finite: it moves no weight, is not counted, and its gradient is all zeros."""
    torch.manual_seed(0)
    value, grad, first, second = numbers()
    together = shared() if with_features else None
    ended = []
    for function in (adam_update, adam_update_reference):
        weight = in_halves(value) if halves else Master(value.clone(), None)
        state = first.clone(), second.clone(), torch.tensor(3.0, device=DEVICE)
        for finite in (True, False, True, True):
            before = read_master(weight).clone()
            given = grad if finite else torch.full_like(grad, torch.nan)
            function(weight, given, *state, rule(finite, cautious), (0.5, 0.95), together)
            assert finite != same_bits(read_master(weight), before)
        ended.append((read_master(weight), *state))
    for found, wanted in zip(*ended, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert state[-1] == 6


def test_updates_of_features_are_those_of_the_reference():
    """The second of three is not finite: its gradients count as zero."""
    shape, ended = (5, TABLES, WIDTH), []
    _, grad, first, second = (x[:5 * TABLES * WIDTH].view(shape) for x in numbers())
    for function in (feature_update, feature_update_reference):
        state = first.clone(), second.clone()
        for step, finite in enumerate((True, False, True)):
            sums = grad.clone() if finite else torch.full_like(grad, torch.nan)
            numbers_of_step = (torch.tensor(x, device=DEVICE) for x in (float(step), finite))
            function(sums, *state, *numbers_of_step, (0.5, 0.95))
            ended.append((sums, *(x.clone() for x in state)))
    for found, wanted in zip(ended[:3], ended[3:]):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=max(1e-5, torch.finfo(a.dtype).eps), atol=1e-6)


def test_nothing_is_updated_of_an_empty_weight():
    empty = torch.zeros(0, device=DEVICE)
    steps = torch.tensor(0.0, device=DEVICE)
    adam_update(Master(empty, None), empty, empty.clone(), empty.clone(), steps, rule(True), (0.5, 0.9))
    assert steps == 1


def test_what_the_kernel_does_not_take_is_refused():
    value, grad, first, second = numbers()
    steps, like, bits = torch.tensor(0.0, device=DEVICE), shared(), torch.zeros_like(value, dtype=torch.int16)

    def update(weight=Master(value, None), grad=grad, first=first, second=second, betas=(0.5, 0.9),
               rule=rule(True), **more):
        return lambda: adam_update(weight, grad, first, second, steps, rule, betas, **more)

    refused(
        ("first", update(betas=(0.0, 0.9))), ("first", update(betas=(0.5, 1.0))),
        ("first", update(first=first.half())), ("second", update(second=second[1:])),
        ("grad", update(grad=grad.view(2, -1))), ("weight", update(Master(value[::2], None))),
        ("weight", update(Master(value, bits))), ("bits", update(Master(value.bfloat16(), bits[1:]))),
        ("lr", update(rule=rule(True)._replace(lr=value))),
        ("of_row", update(shared=like._replace(of_row=like.of_row.int()))),
        ("of_row", update(shared=like._replace(of_row=like.of_row[1:], shares=like.shares[1:]))),
        ("shares", update(shared=like._replace(shares=like.shares[:, :2]))),
        ("shares", update(shared=like._replace(moved=like.moved.mT.contiguous().mT))))
    assert steps == 0


def test_sums_of_features_that_the_kernel_does_not_take_are_refused():
    sums, first, second = torch.zeros(3, FEATURES, TABLES, WIDTH, device=DEVICE).unbind()
    one = torch.tensor(1.0, device=DEVICE)

    def update(sums=sums, first=first, second=second, steps=one, finite=one, betas=(0.5, 0.9)):
        return lambda: feature_update(sums, first, second, steps, finite, betas)

    refused(
        ("first", update(betas=(0.0, 0.9))), ("first", update(betas=(0.5, 1.0))),
        ("first", update(first=first.half())), ("second", update(second=second[1:])),
        ("second", update(second=second.mT.contiguous().mT)), ("sums", update(sums=sums[..., ::2])),
        ("steps", update(steps=sums)), ("finite", update(finite=sums)))
