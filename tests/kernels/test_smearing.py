"""A share of each token's predecessor in its embedding."""
import pytest
import torch
from checks import DEVICE, random

from kernels.embedding import smear, smear_reference


def test_the_first_token_has_no_predecessor_and_without_a_gate_rows_are_normed():
    rows, gate, strength = random(7, 16), random(3, dtype=torch.float32), torch.tensor(0.7, device=DEVICE)
    is_start = torch.arange(7, device=DEVICE) % 4 == 0
    first = is_start.clone()
    first[0] = False
    assert torch.equal(smear(rows, first, gate, strength), smear(rows, is_start, gate, strength))
    assert torch.equal(smear(rows, is_start, None, strength), smear_reference(rows, is_start, None, strength))


def test_smear_refuses_what_it_cannot_do():
    rows, is_start = random(6, 16), torch.zeros(6, dtype=torch.bool, device=DEVICE)
    gate, strength = random(3, dtype=torch.float32), torch.ones((), device=DEVICE)
    long = random(17, dtype=torch.float32)
    for name, arguments in (
            ("rows", (rows.T, is_start, gate, strength)), ("is_start", (rows, is_start[:5], gate, strength)),
            ("is_start", (rows, is_start.int(), gate, strength)), ("gate", (rows, is_start, long, strength)),
            ("gate", (rows, is_start, gate.double(), strength)), ("strength", (rows, is_start, gate, gate))):
        with pytest.raises(ValueError, match=f"{name} must be"):
            smear(*arguments)
    assert smear(rows[:0], is_start[:0], gate, strength).shape == (0, 16)
