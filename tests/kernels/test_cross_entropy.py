"""The loss of softcapped logits, and its gradient."""
import pytest
import torch
from checks import DEVICE, assert_as_exact_as_pytorch, random

from kernels.loss.cross_entropy import cross_entropy, cross_entropy_reference

# Triton's interpreter truncates when it converts to bfloat16, and gets the subnormals of float8_e5m2 wrong.
ON_GPU = DEVICE.type == "cuda"
GRADS = [torch.float32, torch.bfloat16, torch.float8_e5m2] if ON_GPU else [torch.float32, torch.float16]


def counts_for(targets: torch.Tensor, vocabulary: int, parts: int = 1) -> torch.Tensor:
    """Random weights of each part's candidates, 1 for those that are its targets."""
    weights = torch.rand(parts, vocabulary, device=DEVICE) * 5
    for row, mine in zip(weights, targets.chunk(parts)):
        row[mine[mine >= 0].long()] = 1
    return weights


def odds_for(targets: torch.Tensor) -> torch.Tensor:
    """Log-odds of another source for the first target: very low, about even, very high, none."""
    given = torch.tensor([-40.0, -7.0, 60.0, -torch.inf, 3.0], device=DEVICE)
    return given.repeat(len(targets))[:len(targets)].contiguous()


@pytest.mark.parametrize("parts, mixed", [(0, False), (1, True), (3, False)])
@pytest.mark.parametrize("grad_dtype", GRADS)
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens,vocabulary,k", [(1, 2, 1), (5, 100, 2), (3, 2100, 3)])     # times parts
def test_losses_and_gradients_of_several_targets(
        tokens, vocabulary, k, logits_dtype, grad_dtype, parts, mixed):
    """Of logits whose rows lie apart, with repeated and ignored targets; also transposed, by parts."""
    weighted, parts = parts > 0, max(parts, 1)
    tokens *= parts
    logits = random(tokens, vocabulary + 5, dtype=logits_dtype)[:, 2:-3] * 8
    targets = torch.randint(-1, vocabulary, (tokens, k), device=DEVICE)
    targets[0, :] = targets[0, 0].clamp(min=0)  # one token several times
    targets[1:2] = -1  # nothing to predict
    weights = torch.tensor([1, 0.5, 0.25], device=DEVICE)[:k].contiguous()
    scale = None if grad_dtype == torch.float32 else torch.tensor(0.75 / 448, device=DEVICE)
    counts = counts_for(targets, vocabulary, parts) if weighted else None
    odds = odds_for(targets) if mixed else None
    share = torch.empty_like(odds) if mixed else None
    given = targets, weights, scale
    exact, exact_grad = cross_entropy_reference(logits.double(), *given, torch.float64, counts, odds)
    plain, plain_grad = cross_entropy_reference(logits, *given, grad_dtype, counts, odds)
    grad = torch.full((tokens, vocabulary), float("nan"), device=DEVICE).to(grad_dtype)
    shape = parts * vocabulary, tokens // parts
    transposed = torch.full(shape, float("nan"), device=DEVICE).to(grad_dtype)
    losses = cross_entropy(logits, targets, weights, grad, transposed, scale, counts, odds, share)
    assert torch.equal(transposed.float(), torch.cat([part.float().T for part in grad.chunk(parts)]))
    assert_as_exact_as_pytorch(losses, plain, exact, slack=3e-7)
    assert_as_exact_as_pytorch(grad, plain_grad, exact_grad, slack=3e-7)
    again = cross_entropy(logits, targets.int(), weights, candidate_weights=counts, log_odds=odds)
    assert torch.equal(losses, again)
    assert losses[1:2].eq(0).all() and grad[1:2].float().eq(0).all()


def test_the_gradient_may_be_written_over_the_logits():
    logits, targets = random(4, 2100), torch.randint(0, 2100, (4, 2), device=DEVICE)
    weights, grad = torch.tensor([1, 0.5], device=DEVICE), torch.empty_like(logits)
    losses = cross_entropy(logits, targets, weights, grad)
    assert torch.equal(losses, cross_entropy(logits, targets, weights, grad=logits))
    assert torch.equal(grad, logits)


def test_infinite_logits_have_losses_and_nan_and_wrong_targets_show():
    logits = random(4, 300).float()
    logits[0, 5:9] = torch.tensor([-float("inf"), -1e4, 1e4, float("inf")], device=DEVICE)
    logits[1, 7] = float("nan")
    targets = torch.tensor([[7], [3], [300], [4]], device=DEVICE)
    weights, grad = torch.ones(1, device=DEVICE), torch.empty_like(logits)
    losses = cross_entropy(logits, targets, weights, grad)
    rows = torch.tensor([0, 3], device=DEVICE)
    plain, plain_grad = cross_entropy_reference(logits[rows], targets[rows], weights, None, torch.float32)
    torch.testing.assert_close(losses[rows], plain)
    torch.testing.assert_close(grad[rows], plain_grad)
    assert losses[1:3].isnan().all() and grad[1:3].isnan().all()


def test_the_references_gradient_is_that_of_its_loss():
    logits = random(3, 50).double().requires_grad_()
    targets, weights = torch.randint(-1, 50, (3, 2), device=DEVICE), torch.tensor([1, 0.5], device=DEVICE)
    for counts, odds in ((None, None), (counts_for(targets, 50), None), (None, odds_for(targets))):
        losses, grad = cross_entropy_reference(logits, targets, weights, None, torch.float64, counts, odds)
        torch.testing.assert_close(torch.autograd.grad((losses * weights).sum(), logits)[0], grad)


def test_cross_entropy_refuses_what_it_cannot_do():
    logits, targets, weights = random(3, 50), torch.zeros(3, 2, dtype=torch.long), torch.ones(2)
    for wrong in ((logits.T, targets, weights), (logits, targets[:2], weights),
                  (logits, targets.float(), weights), (logits, targets, weights[:1]),
                  (logits, targets, torch.ones(4)[::2]),
                  (logits, targets, weights, logits[:2]),
                  (logits, targets, weights, logits, logits), (logits, targets, weights, None, logits.T),
                  (logits, targets, weights, None, None, weights),
                  (logits, targets, weights, None, None, None, torch.ones(50)),
                  (logits, targets, weights, None, None, None, torch.ones(2, 50)),
                  (logits, targets, weights, None, None, None, torch.ones(3, 49)),
                  (logits, targets, weights, logits, logits.T.contiguous(), None, torch.ones(3, 50)),
                  (logits, targets, weights, None, None, None, None, weights),
                  (logits, targets, weights, None, None, None, None, torch.zeros(3), weights)):
        with pytest.raises(ValueError, match="must be"):
            cross_entropy(*wrong)
    assert cross_entropy(logits[:0], targets[:0], weights).shape == (0, 2)


@pytest.mark.skipif(not ON_GPU, reason="needs tens of GB and a GPU")
def test_more_than_2_to_the_31_logits():
    tokens, vocabulary = 43_008, 50_304
    logits, targets = random(tokens, vocabulary), torch.randint(0, vocabulary, (tokens, 2), device=DEVICE)
    weights, scale = torch.tensor([1, 0.5], device=DEVICE), torch.tensor(0.75 / 448, device=DEVICE)
    grad = torch.empty_like(logits, dtype=torch.float8_e5m2)
    transposed = grad.new_empty(vocabulary, tokens)
    assert logits.numel() > 2**31
    losses = cross_entropy(logits, targets, weights, grad, transposed, scale)
    last = slice(-64, None)
    given = targets[last], weights, scale
    exact, exact_grad = cross_entropy_reference(logits[last].double(), *given, torch.float64)
    plain, plain_grad = cross_entropy_reference(logits[last], *given, grad.dtype)
    assert_as_exact_as_pytorch(losses[last], plain, exact, slack=3e-7)
    assert_as_exact_as_pytorch(grad[last], plain_grad, exact_grad)
    assert torch.equal(transposed[:, last].float(), grad[last].float().T) and losses.isfinite().all()
