"""NorMuon's momentum and its step against their formulas; all updates go through torch.compile."""
import pytest
import torch
from checks import DEVICE, in_halves, random, refused

from kernels.optimizer import (
    Master,
    Rates,
    Rule,
    adam_update_reference,
    nesterov_momentum,
    nesterov_momentum_reference,
    neuron_update,
    neuron_update_reference,
    read_master,
    row_adam_reference,
)

SHAPE = 3, 10, 300          # of matrices: two programs each, in two chunks of columns


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, device=DEVICE) for value in values]


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("function", [nesterov_momentum, nesterov_momentum_reference])
def test_nesterov_momentum_looks_one_step_ahead(function, share):
    momentum, slow, exact, late = (torch.zeros(3, 4, 5, device=DEVICE) for _ in range(4))
    beta, finite, rates = 0.9, *numbers(True), Rates(*numbers(0.9, share), 0.99)
    for _ in range(4):
        grad = random(3, 4, 5)
        exact = beta * exact + (1 - beta) * grad.float()
        late = 0.99 * late + (1 - 0.99) * grad.float()
        out = function(grad, momentum, slow if share else None, rates, finite)
        assert out.dtype == grad.dtype
        past = (1 - share) * exact + share * late
        ahead = (beta * past + (1 - beta) * grad.float()).to(grad.dtype)
        torch.testing.assert_close(out, ahead, atol=1e-6, rtol=2 * torch.finfo(grad.dtype).eps)
    torch.testing.assert_close(momentum, exact)
    kept = momentum.clone()
    still = Rates(*numbers(1.0, share), 1.0)
    function(torch.full_like(grad, torch.nan), momentum, slow, still, *numbers(False))
    assert torch.equal(momentum, kept)
    torch.testing.assert_close(slow, late if share else torch.zeros_like(slow))


@pytest.mark.parametrize("halves, cautious, neuron_norm",
                         [(True, True, True), (False, False, True), (True, False, False)])
@pytest.mark.parametrize("function", [neuron_update, neuron_update_reference])
def test_neurons_are_updated_by_the_formula(function, halves, cautious, neuron_norm):
    """Of updates that are transposed in memory. The second step is not finite and moves no weight."""
    torch.manual_seed(0)
    value, second = torch.randn(SHAPE, device=DEVICE), torch.rand(3, 10, 1, device=DEVICE)
    weight = in_halves(value) if halves else Master(value.clone(), None)
    lr, mean, (decay,) = torch.rand(3, 1, 1, device=DEVICE), second.clone(), numbers(0.4)
    for finite in (True, False, True):
        update = random(3, 300, 10).mT
        function(weight, update, second, Rule(*numbers(finite), lr, decay, cautious), 0.9, neuron_norm)
        step = update.float()
        if neuron_norm:
            mean = 0.9 * mean + 0.1 * step.square().mean(2, keepdim=True)
            scaled = step / mean.sqrt()
            step = scaled * (step.square().sum((1, 2), True) / scaled.square().sum((1, 2), True)).sqrt()
        if finite:
            agree = (step * value > 0) if cautious else 1
            value = value - lr * (step + decay * value * agree)
        torch.testing.assert_close(read_master(weight), value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second, mean)


@pytest.mark.parametrize("function", [neuron_update, neuron_update_reference])
def test_neurons_without_an_update_stay_and_one_that_is_no_number_shows(function):
    """Its mean square spoils its whole matrix and no other, instead of passing for the least there is."""
    (finite, decay), lr = numbers(True, 0.0), torch.ones(3, 1, 1, device=DEVICE)
    weight, update, second = random(*SHAPE).float(), random(*SHAPE), torch.zeros(3, 10, 1, device=DEVICE)
    update[0], second[1, 9], before = 0, torch.nan, weight.clone()
    function(Master(weight, None), update, second, Rule(finite, lr, decay, False), 0.9, True)
    assert torch.equal(weight[0], before[0]) and weight[1].isnan().all() and weight[2].isfinite().all()


def test_nothing_is_updated_of_no_matrices():
    empty, (one,) = torch.zeros(0, 4, 6, device=DEVICE), numbers(1.0)
    assert nesterov_momentum(empty, empty, None, Rates(one, one, 0.9), one).shape == empty.shape
    rule = Rule(one, empty[:, :1, :1].contiguous(), one, True)
    neuron_update(Master(empty, None), empty, empty[..., :1].contiguous(), rule, 0.9, True)


def test_what_the_kernels_do_not_take_is_refused():
    x, (one,), lr = torch.zeros(2, 4, 6, device=DEVICE), numbers(1.0), torch.ones(2, 1, 1, device=DEVICE)
    bits, second, strided = x.short(), x[..., :1].contiguous(), x.mT.contiguous().mT

    def momentum(grad=x, momentum=x, slow=None, beta=one, share=one, finite=one):
        return lambda: nesterov_momentum(grad, momentum, slow, Rates(beta, share, 0.9), finite)

    def update(weight=Master(x, None), update=x, second=second, finite=one, lr=lr, decay=one):
        return lambda: neuron_update(weight, update, second, Rule(finite, lr, decay, True), 0.9, True)

    refused(
        ("grad", momentum(grad=x.mT)), ("momentum", momentum(momentum=x.half())),
        ("slow", momentum(slow=x[1:])), ("slow", momentum(slow=strided)),
        ("beta", momentum(beta=x)), ("slow_share", momentum(share=x)), ("finite", momentum(finite=x)),
        ("update", update(update=x[0])), ("update", update(update=x.new_zeros(2, 4, 8193))),
        ("weight", update(Master(x[1:], None))), ("weight", update(Master(x, bits))),
        ("weight", update(Master(strided, None))), ("bits", update(Master(x.bfloat16(), bits[1:]))),
        ("second", update(second=second[..., 0])), ("second", update(second=second.half())),
        ("lr", update(lr=one)), ("decay", update(decay=x)), ("finite", update(finite=x)))


def test_updates_compile_without_a_break_in_the_graph():
    """With Master and Rule as arguments, and with the same results."""
    torch._dynamo.reset()
    references = (nesterov_momentum_reference, neuron_update_reference, adam_update_reference,
                  row_adam_reference)
    compiled = [torch.compile(f, backend="eager", fullgraph=True) for f in references]
    results = []
    for nesterov, neuron, adam, row_adam in (references, compiled):
        torch.manual_seed(0)
        for i in range(3):
            finite, lr, decay, beta, steps = numbers(True, 0.1 * (i + 1), 0.1, 0.9, float(i))
            rule, form = Rule(finite, lr, decay, True), dict(device=DEVICE)
            weight, grad, momentum = torch.randn(3, 2, 4, 6, **form)
            second, last = torch.rand(2, 4, 1, **form), torch.zeros(2, **form)
            bits = torch.zeros(2, 4, 6, dtype=torch.int16, **form)
            half = Master(weight.bfloat16(), bits)
            direction = nesterov(grad, momentum, momentum.clone(), Rates(beta, lr, 0.99), finite)
            neuron(half, direction, second, rule._replace(lr=lr.view(1, 1, 1)), 0.9, True)
            flat = weight.flatten(), grad.flatten(), momentum.flatten(), grad.square().flatten()
            adam(Master(flat[0], None), *flat[1:], steps, rule, (0.5, 0.9))
            table, rows = weight.view(2, -1).clone(), grad.view(2, -1).clone()
            squares = torch.rand(2, 6, **form)
            row_adam(table, rows, squares, last, steps, rule, 0.9)
            results.append([half.weight, bits, second, momentum, flat[0], table, squares, last, steps])
    for plain, fused in zip(results[:3], results[3:]):
        assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))
