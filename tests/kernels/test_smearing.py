"""A share of each token's predecessor in its embedding."""
import pytest
import torch
from checks import DEVICE, assert_as_exact_as_pytorch, random

from kernels.embedding import smear, smear_reference
from kernels.embedding.smearing import BACKWARD_CONFIGS, CONFIGS, smear_backward, smear_forward

MANY = 1040 if DEVICE.type == "cuda" else 75  # tokens, of any tile more than one and no multiple


@pytest.mark.parametrize("n, width, channels", [(1, 16, 3), (37, 48, 12), (MANY, 272, 12)])
def test_smear_and_its_gradients_in_every_configuration(n, width, channels):
    """With sequences of one token and of many; the first token has no predecessor."""
    rows, grad = random(n, width), random(n, width)
    is_start = torch.rand(n, device=DEVICE) < 0.3
    is_start[0] = True
    gate, strength = random(channels, dtype=torch.float32) / 2, torch.tensor(0.7, device=DEVICE)
    inputs, exact, plain = (rows, gate, strength), [], []
    for double, results in ((True, exact), (False, plain)):
        leaves = [(x.double() if double else x.detach().clone()).requires_grad_() for x in inputs]
        out = smear_reference(leaves[0], is_start, *leaves[1:])
        results += [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = smear(leaves[0], is_start, *leaves[1:])
    results = out, *torch.autograd.grad(out, leaves, grad)
    for ours, reference, right in zip(results, plain, exact, strict=True):
        if right.any():  # with one token the gate's gradient is zero
            assert_as_exact_as_pytorch(ours, reference, right, slack=1e-6)
        else:
            assert not ours.any()
    given = rows, is_start, gate, strength
    for tuned in CONFIGS:
        assert_as_exact_as_pytorch(smear_forward(*given, tuned), plain[0], exact[0])
    for tuned in BACKWARD_CONFIGS:
        results = smear_backward(grad, *given, tuned)
        assert_as_exact_as_pytorch(results[0], plain[1], exact[1])
        assert all(map(torch.equal, results, smear_backward(grad, *given, tuned)))


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
