"""A float32 master weight in two halves, and the step that moves it."""
import torch
from checks import DEVICE, in_halves

from kernels.optimizer.master_weight import Master, Rule, apply_update, read_master


def rule(lr: float, decay: float, finite: bool = True, cautious: bool = False) -> Rule:
    return Rule(*(torch.tensor(x, device=DEVICE) for x in (finite, lr, decay)), cautious)


def test_two_halves_hold_every_bit():
    signs = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf])
    value = torch.cat([torch.randn(1000), torch.randn(1000) * 1e-30, signs]).to(DEVICE)
    master = in_halves(value)
    assert torch.equal(read_master(master).view(torch.int32), value.view(torch.int32))
    finite = value[:2000]
    assert ((master.weight[:2000].float() - finite).abs() <= finite.abs() * 2**-7).all()


def test_a_step_in_halves_is_that_in_float32():
    start, update = torch.randn(2, 500, device=DEVICE)
    halves, plain = in_halves(start), Master(start.clone(), None)
    for _ in range(20):  # Each step is far below the last bit of bfloat16.
        for master in (halves, plain):
            apply_update(master, update, rule(1e-5, 0.1))
    assert torch.equal(read_master(halves), plain.weight) and not torch.equal(plain.weight, start)
    torch.testing.assert_close(plain.weight, start - 20e-5 * (update + 0.1 * start), atol=1e-6, rtol=1e-5)


def test_cautious_decay_acts_only_where_it_agrees_with_the_update():
    weight = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0], device=DEVICE)
    update = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0], device=DEVICE)
    apply_update(Master(weight, None), update, rule(0.5, 0.1, cautious=True))
    torch.testing.assert_close(weight, torch.tensor([1.4, 2.5, -2.5, -1.4, 2.0], device=DEVICE))


def test_a_step_that_is_not_finite_changes_nothing():
    start = torch.randn(50, device=DEVICE)
    master = in_halves(start)
    apply_update(master, torch.full_like(start, torch.nan), rule(0.5, 0.1, finite=False))
    assert torch.equal(read_master(master), start)
