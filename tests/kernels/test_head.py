"""The head with its loss, and the sampled softmax."""
import numpy as np
import pytest
import torch
from checks import DEVICE, error, random, same_bits

from data.candidates import sample_candidates
from kernels.embedding import lookup_reference, unsorted
from kernels.gradients import Gradient
from kernels.loss import Mixture, Targets, among_candidates, head_loss, head_loss_reference, sampled_head_loss
from kernels.loss import head as head_module

DTYPE_OF_HEAD = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def head_inputs(n: int, width: int, vocabulary: int, targets_ahead: int, weighted: bool) -> tuple:
    x, head = random(n, width, dtype=DTYPE_OF_HEAD), random(vocabulary, width, dtype=DTYPE_OF_HEAD) / 4
    targets = torch.randint(0, vocabulary, (n,), device=DEVICE, dtype=torch.int32)
    targets[[3, 17]] = -1
    is_start = torch.zeros(n, dtype=torch.bool, device=DEVICE)
    is_start[[0, 9, 10, 31]] = True
    counts = torch.rand(1, vocabulary, device=DEVICE) * 5
    counts[0, targets[targets >= 0].long()] = 1
    weights = torch.tensor([0.75, 0.5, 0.25], device=DEVICE)[:targets_ahead]
    wanted = Targets(targets, is_start, weights)
    return x.requires_grad_(), head.requires_grad_(), wanted, counts if weighted else None


def mixture(n: int) -> Mixture:
    """Of another source that knows every third target, some better than the head, some worse."""
    log_odds = torch.linspace(-20, 5, n, device=DEVICE)
    log_odds[::3] = -torch.inf
    return Mixture(log_odds.requires_grad_(), -torch.rand(n, device=DEVICE).requires_grad_())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("targets_ahead", [1, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_head_loss_is_its_reference(targets_ahead, weighted, mixed):
    """Losses and all gradients, with an incoming gradient that is not 1."""
    x, head, wanted, counts = head_inputs(40, 32, 320, targets_ahead, weighted)
    wanted = wanted._replace(mixture=mixture(40) if mixed else None)
    results = []
    for function in (head_loss_reference, head_loss):
        total, next_token = function(x, head, wanted, False, counts)
        grads = torch.autograd.grad(3 * total, (x, head, *(wanted.mixture or ())))
        results.append([total, next_token, *grads])
    tolerance = 2e-2 if DEVICE.type == "cuda" else 1e-4
    for reference, kernel in zip(*results):
        assert error(kernel.detach(), reference.detach().double()) < tolerance


def test_beside_another_source_the_head_learns_as_if_alone():
    x, head, wanted, _ = head_inputs(40, 32, 320, 3, False)
    for function in (head_loss_reference, head_loss):
        sources = [wanted._replace(mixture=other) for other in (None, mixture(40))]
        totals = [function(x, head, given, False)[0] for given in sources]
        alone, mixed = (torch.autograd.grad(total, (x, head)) for total in totals)
        assert all(map(same_bits, alone, mixed))


def test_head_loss_in_fp8_is_as_near_to_full_precision_as_its_reference():
    n, width, vocabulary = 64, 32, 320
    x, head = (random(rows, width, dtype=torch.float32) for rows in (n, vocabulary))
    x, head = x.to(DTYPE_OF_HEAD).requires_grad_(), (head / 8).to(DTYPE_OF_HEAD).requires_grad_()
    targets = torch.randint(0, vocabulary, (n,), device=DEVICE, dtype=torch.int32)
    is_start, weights = torch.zeros(n, dtype=torch.bool, device=DEVICE), torch.ones(1, device=DEVICE)
    results = []
    for function, fp8 in ((head_loss_reference, False), (head_loss_reference, True), (head_loss, True)):
        total, _ = function(x, head, Targets(targets, is_start, weights), fp8)
        results.append([total.detach(), *torch.autograd.grad(2 * total, (x, head))])
    for exact, reference, kernel, slack in zip(*results, (3e-3, 0, 0)):  # one loss may be right by luck
        assert error(kernel, exact.double()) <= 2 * error(reference, exact.double()) + slack


@pytest.mark.parametrize("fp8", [False, True])
def test_validation_makes_no_gradient(fp8, monkeypatch):
    """Parameters want a gradient wherever they are; without autograd nobody would read it."""
    *inputs, _ = head_inputs(48, 32, 320, 1, False)
    made, inner = [], head_module.cross_entropy
    monkeypatch.setattr(head_module, "cross_entropy", lambda *x: (made.append(x[3]), inner(*x))[1])
    expected = head_loss(*inputs, fp8)[0]
    with torch.no_grad():
        assert head_loss(*inputs, fp8)[0] == expected.detach()
    assert made[0] is not None and made[1] is None


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_heads_gradient_goes_where_it_is_told(accumulate, fp8):
    """With the bits that autograd gives `head.grad`; x's gradient is the same."""
    *inputs, _ = head_inputs(48, 32, 320, 3, False)
    found = []
    for told in (False, True):
        torch.manual_seed(1)
        x, head = (leaf.detach().requires_grad_() for leaf in inputs[:2])
        old = random(320, 32, dtype=head.dtype)
        head.grad = old.clone() if accumulate else None
        grad = Gradient(old.clone(), accumulate) if told else None
        total, _ = head_loss(x, head, *inputs[2:], fp8, grad=grad)
        (2 * total).backward()
        found.append((x.grad, grad.buffer if told else head.grad))
        assert not told or head.grad is None or torch.equal(head.grad, old)
    assert all(same_bits(a, b) for a, b in zip(*found))


def test_sampled_softmax_is_the_full_one_on_average():
    """In float64 over many samples: Σ e^s without bias; loss and gradients, of a logarithm, nearly."""
    n, width, vocabulary, count, samples = 20, 8, 300, 120, 500
    x, head = (random(rows, width, dtype=torch.float64).div(2).requires_grad_() for rows in (n, vocabulary))
    targets = torch.randint(0, vocabulary, (n,), device=DEVICE, dtype=torch.int32)
    targets[5] = -1
    is_start, weights = torch.zeros(n, dtype=torch.bool, device=DEVICE), torch.ones(2, device=DEVICE).double()
    generator, results, totals = np.random.default_rng(0), [], []
    importance = generator.uniform(1, 3, vocabulary)
    scored = targets >= 0

    def evaluate(rows, wanted, counts):
        loss, _ = head_loss_reference(x, rows, Targets(wanted, is_start, weights), False, counts)
        found = loss.view(1), *torch.autograd.grad(loss, (x, head))
        return torch.cat([g.flatten() for g in found]).detach()

    full = evaluate(head, targets, None)
    exponentials = (23 * ((x @ head.T + 5) / 7.5).sigmoid()).exp().detach()
    for _ in range(samples):
        drawn = sample_candidates(targets.cpu().numpy(), count, importance, generator)
        candidates, counts = (torch.from_numpy(x).to(DEVICE) for x in drawn)
        places = among_candidates(targets, candidates[None])
        assert torch.equal(candidates[places[scored].long()], targets[scored]) and places[5] == -1
        assert counts[places[scored].long()].eq(1).all()
        results.append(evaluate(head[candidates.long()], places, counts[None]))
        totals.append(exponentials[:, candidates.long()] @ counts.double())
    totals, results = torch.stack(totals), torch.stack(results)
    deviations = (totals.mean(0) - exponentials.sum(1)) / (totals.std(0) / samples ** 0.5)
    assert deviations.abs().max() < 4.5
    for part in (slice(0, 1), slice(1, 1 + n * width), slice(1 + n * width, None)):
        assert (results[:, part].mean(0) - full[part]).norm() < 0.02 * full[part].norm()


@pytest.mark.parametrize("function, fp8", [
    (head_loss_reference, False), (head_loss, False), (head_loss, True)])
def test_parts_are_as_if_alone(function, fp8):
    x, head, wanted, _ = head_inputs(48, 32, 320, 3, False)
    log_odds, log_rest = mixture(48)
    generator, drawn = np.random.default_rng(0), []
    for targets in wanted.targets.cpu().numpy().reshape(3, 16):
        drawn.append(sample_candidates(targets, 208, np.ones(320), generator))
    candidates, weights = (torch.from_numpy(np.stack(each)).to(DEVICE) for each in zip(*drawn))

    def run(x, part: slice, *sample) -> tuple[torch.Tensor, ...]:
        given = Targets(wanted.targets[part], wanted.is_start[part], wanted.weights,
                        Mixture(log_odds[part], log_rest[part]))
        total, next_token = sampled_head_loss(
            function, lookup_reference, unsorted, x, head, given, sample, fp8)
        return total, next_token, *torch.autograd.grad(3 * total, (x, head))

    whole = run(x, slice(None), candidates, weights)
    parts = [slice(16 * i, 16 * i + 16) for i in range(3)]
    alone = [run(x.detach()[part].requires_grad_(), part, candidates[i:i + 1], weights[i:i + 1])
             for i, part in enumerate(parts)]
    assert wanted.is_start.sum() == 4       # It is the caller's.
    tolerance = 1e-2 if DEVICE.type == "cuda" else 1e-5
    for i, join in enumerate((sum, sum, torch.cat, sum)):
        assert error(whole[i].detach(), join([part[i].detach().double() for part in alone])) < tolerance
