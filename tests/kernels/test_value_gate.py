"""The gate of value rows: how much of its value row each head takes, and the gradients added in place."""
import pytest
import torch
from checks import DEVICE, assert_as_exact_as_pytorch, random

from kernels.attention.inputs import Rows
from kernels.attention.value_gate import value_mix, value_mix_backward, value_mix_reference


def reference_rows_grad(dtype, mix_grad, seen, rows, gate) -> torch.Tensor:
    leaf = rows.detach().to(dtype).requires_grad_()
    mix = value_mix_reference(seen.to(dtype), leaf, gate.to(dtype))
    return torch.autograd.grad(mix, leaf, mix_grad.to(dtype))[0]


@pytest.mark.parametrize("n, heads, channels", [(1, 1, 1), (300, 3, 6), (128, 6, 8)])
def test_gradients_of_the_gates_inputs_are_added_to_what_is_there(n, heads, channels):
    """To those of value rows in their first channels alone; to those of `seen` where these are given."""
    seen, rows = random(n, 2 * channels)[:, channels:], random(n, 3 * channels)
    gate, mix_grad = random(heads, 2 * channels, dtype=torch.float32), random(n, heads, dtype=torch.float32)
    mix, old = value_mix(seen, Rows(rows), gate), random(n, 3 * channels)
    seen_grad, gate_grad = value_mix_backward(mix_grad, mix, seen, Rows(rows), gate, old.clone())
    rows_grad, wide = old.clone(), random(n, 2 * channels)
    before = wide.clone()
    added, same = value_mix_backward(
        mix_grad, mix, seen, Rows(rows), gate, rows_grad, wide[:, 1:channels + 1])
    assert added.data_ptr() == wide[:, 1:].data_ptr() and torch.equal(same, gate_grad)
    exact, plain = (
        reference_rows_grad(dtype, mix_grad, seen, rows, gate) for dtype in (torch.float64, rows.dtype))
    assert_as_exact_as_pytorch(rows_grad, old + plain, old.double() + exact)
    rounding = 2e-2 if DEVICE.type == "cuda" else 1e-5
    torch.testing.assert_close(added, before[:, 1:channels + 1] + seen_grad, rtol=rounding, atol=rounding)
    assert torch.equal(rows_grad[:, channels:], old[:, channels:])
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, channels + 1:], before[:, channels + 1:])


@pytest.mark.parametrize("n, heads, channels", [(1, 1, 1), (300, 3, 6), (128, 6, 8)])
def test_value_mix_takes_scaled_channels_and_keeps_them(n, heads, channels):
    """As where x is FP8: it is read with a factor, and what the gate saw is kept for the backward pass."""
    seen, rows = random(n, 2 * channels)[:, channels:], random(n, 3 * channels)
    gate = random(heads, 2 * channels, dtype=torch.float32)
    mix, kept = value_mix(seen, Rows(rows), gate), torch.empty_like(seen.contiguous())
    again = value_mix(seen * 4, Rows(rows), gate, 0.25, kept)
    assert torch.equal(kept, seen)
    # On a GPU these are two kernels, in which the compiler contracts products and sums differently.
    torch.testing.assert_close(again, mix, rtol=1e-5 if DEVICE.type == "cuda" else 0, atol=0)


def test_value_mix_refuses_what_it_cannot_do():
    seen, rows, gate = random(10, 6), random(10, 32), random(2, 12, dtype=torch.float32)
    for wrong in (
        (seen[:3], rows, gate), (seen.mT, rows, gate), (seen, rows.mT, gate), (seen, rows, gate[:, :5]),
        (seen, rows, gate.double()), (seen, rows[:, :5], gate),
    ):
        with pytest.raises(ValueError, match="must be"):
            value_mix(wrong[0], Rows(wrong[1]), wrong[2])
    with pytest.raises(ValueError, match="kept must be"):
        value_mix(seen, Rows(rows), gate, 1.0, seen.mT)
    mix = value_mix(seen, Rows(rows), gate)
    wrong = (mix[:3], rows, None), (mix, rows[:3], None), (mix, rows, seen[:3])
    for mix_grad, rows_grad, seen_grad in wrong:
        with pytest.raises(ValueError, match="grad must be"):
            value_mix_backward(mix_grad, mix, seen, Rows(rows), gate, rows_grad, seen_grad)
