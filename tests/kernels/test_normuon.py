"""NorMuon's momentum against its formula; all updates go through torch.compile."""
import pytest
import torch
from checks import DEVICE, random

from kernels.optimizer import (
    Master,
    Rates,
    Rule,
    adam_update_reference,
    nesterov_momentum,
    neuron_update,
    row_adam_reference,
)


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, device=DEVICE) for value in values]


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_nesterov_momentum_looks_one_step_ahead(share):
    momentum, slow, exact, late = (torch.zeros(3, 4, 5, device=DEVICE) for _ in range(4))
    beta, finite, rates = 0.9, *numbers(True), Rates(*numbers(0.9, share), 0.99)
    for _ in range(4):
        grad = random(3, 4, 5)
        exact = beta * exact + (1 - beta) * grad.float()
        late = 0.99 * late + (1 - 0.99) * grad.float()
        out = nesterov_momentum(grad, momentum, slow if share else None, rates, finite)
        assert out.dtype == grad.dtype
        past = (1 - share) * exact + share * late
        ahead = (beta * past + (1 - beta) * grad.float()).to(grad.dtype)
        torch.testing.assert_close(out, ahead, atol=1e-6, rtol=2 * torch.finfo(grad.dtype).eps)
    torch.testing.assert_close(momentum, exact)
    kept = momentum.clone()
    still = Rates(*numbers(1.0, share), 1.0)
    nesterov_momentum(torch.full_like(grad, torch.nan), momentum, slow, still, *numbers(False))
    assert torch.equal(momentum, kept)
    torch.testing.assert_close(slow, late if share else torch.zeros_like(slow))


def test_updates_compile_without_a_break_in_the_graph():
    """With Master and Rule as arguments, and with the same results."""
    torch._dynamo.reset()
    compiled = {f: torch.compile(f, backend="eager", fullgraph=True)
                for f in (nesterov_momentum, neuron_update, adam_update_reference, row_adam_reference)}
    results = []
    for functions in ({f: f for f in compiled}, compiled):
        torch.manual_seed(0)
        for i in range(3):
            finite, lr, decay, beta, steps = numbers(True, 0.1 * (i + 1), 0.1, 0.9, float(i))
            rule, form = Rule(finite, lr, decay, True), dict(device=DEVICE)
            weight, grad, momentum = torch.randn(3, 2, 4, 6, **form)
            second, last = torch.rand(2, 4, 1, **form), torch.zeros(2, **form)
            bits = torch.zeros(2, 4, 6, dtype=torch.int16, **form)
            half = Master(weight.bfloat16(), bits)
            rates = Rates(beta, lr, 0.99)
            direction = functions[nesterov_momentum](grad, momentum, momentum.clone(), rates, finite)
            functions[neuron_update](half, direction, second, rule._replace(lr=lr.view(1, 1, 1)), 0.9, True)
            flat = weight.flatten(), grad.flatten(), momentum.flatten(), grad.square().flatten()
            functions[adam_update_reference](Master(flat[0], None), *flat[1:], steps, rule, (0.5, 0.9))
            table, rows = weight.view(2, -1).clone(), grad.view(2, -1).clone()
            squares = torch.rand(2, 6, **form)
            functions[row_adam_reference](table, rows, squares, last, steps, rule, 0.9)
            results.append([half.weight, bits, second, momentum, flat[0], table, squares, last, steps])
    for plain, fused in zip(results[:3], results[3:]):
        assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))
