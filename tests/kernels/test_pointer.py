"""The copy head: what followed like states in the same sequence, and its share in a probability."""
from itertools import pairwise

import pytest
import torch
from checks import DEVICE, DTYPE, assert_as_exact_as_pytorch, random, refused

from kernels.copying import CopyHead, pointer_sums, pointer_sums_reference, project, project_reference
from kernels.copying.head import CONFIGS
from kernels.example import both_ways
from kernels.loss import Targets, head_loss_reference
from kernels.sequence import Sequences

LENGTHS, CHANNELS, VOCABULARY = [1, 2, 67, 1, 30], 16, 9


def batch(generator_seed: int = 0) -> tuple:
    torch.manual_seed(generator_seed)
    n = sum(LENGTHS)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE, torch.int32)
    return random(n, CHANNELS), random(n, CHANNELS), torch.randint(VOCABULARY, (n,), device=DEVICE), \
        Sequences.of(bounds, max(LENGTHS), n)


def explicit(q, k, tokens, sequences) -> torch.Tensor:
    """Σ e^s of the states that each token followed, (n, VOCABULARY) float64, pair by pair."""
    mass = torch.zeros(len(q), VOCABULARY, dtype=torch.float64, device=DEVICE)
    for begin, end in pairwise(sequences.bounds.tolist()):
        for t in range(begin + 1, end):
            mass[t].index_add_(0, tokens[begin + 1:t + 1], (0.3 * k[begin:t].double() @ q[t].double()).exp())
    return mass


@pytest.mark.parametrize("function, options", [
    (pointer_sums_reference, {"block": 256}), (pointer_sums_reference, {"block": 7}),
    (pointer_sums, {"tuned": ((32, 16, 4, 2), (32, 16, 4, 2), (16, 32, 4, 2))})])
def test_sums_are_those_of_an_explicit_loop(function, options):
    q, k, tokens, sequences = batch()
    wanted = explicit(q, k, tokens, sequences)
    exact = 1e-5 if DTYPE is torch.float32 else 1e-2
    for token in range(VOCABULARY):
        target = torch.full_like(tokens, token)
        matching, every = function(q, k, tokens, target, sequences, 0.3, **options)
        for got, sums in ((matching, wanted[:, token]), (every, wanted.sum(1))):
            torch.testing.assert_close(got.double(), sums.log(), rtol=exact, atol=exact)


@pytest.mark.parametrize("function", [pointer_sums, pointer_sums_reference])
def test_later_tokens_and_other_sequences_change_nothing(function):
    q, k, tokens, sequences = batch()
    targets = torch.randint(VOCABULARY, tokens.shape, device=DEVICE)
    before = function(q, k, tokens, targets, sequences, 0.3)
    at = 40     # in the third sequence, which begins at 3
    changed = [x.clone() for x in (q, k, tokens)]
    for x, y in zip(changed, batch(1)):
        x[:3], x[at + 1:] = y[:3], y[at + 1:]
    after = function(*changed, targets, sequences, 0.3)
    for x, y in zip(before, after):
        assert torch.equal(x[3:at + 1], y[3:at + 1]) and not torch.equal(x[at + 1:], y[at + 1:])


def test_without_a_match_nothing_is_learned_and_bad_inputs_are_refused():
    q, k, tokens, sequences = batch()
    for function in (pointer_sums, pointer_sums_reference):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        matching, every = function(
            *leaves, tokens, torch.full_like(tokens, VOCABULARY), sequences, 0.3)
        assert matching.isneginf().all() and every.isneginf().sum() == len(LENGTHS)
        for grad in torch.autograd.grad(matching, leaves, torch.ones_like(matching)):
            assert torch.equal(grad, torch.zeros_like(grad))
        none = Sequences.of(sequences.bounds[:1], 1, 0)
        assert function(q[:0], k[:0], tokens[:0], tokens[:0], none, 0.3)[0].shape == (0,)
    for name, given in (("q", (q[:, :9], k, tokens, tokens)), ("k", (q, k[1:], tokens, tokens)),
                        ("tokens", (q, k, tokens[1:], tokens)), ("targets", (q, k, tokens, tokens.float()))):
        with pytest.raises(ValueError, match=f"{name} must be"):
            pointer_sums(*given, sequences, 0.3)


@pytest.mark.parametrize("n", [0, 1, 83])
@pytest.mark.parametrize("size", [1.0, 1e-4])      # So small states show what norms add to a mean square.
def test_queries_and_keys_are_as_exact_as_pytorch(n, size):
    """With the gradients of all four, which one result alone may have."""
    x, weight = random(n, 48) * size, random(2 * CHANNELS, 48)
    gate, bias = (torch.randn(length, device=DEVICE) for length in (CHANNELS, 1))
    given = x, weight, gate, bias
    grads = random(n, CHANNELS), random(n, CHANNELS), torch.rand(n, device=DEVICE)
    for kept in ((1, 1, 1), (0, 0, 1), (1, 0, 0)):
        wanted = tuple(grad * factor for grad, factor in zip(grads, kept))
        exact, plain = (both_ways(project_reference, lambda: wanted, (0, 1, 2, 3))(*inputs)
                        for inputs in ([tensor.double() for tensor in given], given))
        for tuned in CONFIGS[:2]:
            results = both_ways(lambda *inputs: project(*inputs, tuned), lambda: wanted, (0, 1, 2, 3))(*given)
            assert results[0].is_contiguous() and results[1].is_contiguous()
            for result, in_pytorch, in_double in zip(results, plain, exact, strict=True):
                if not in_double.any():
                    assert result.shape == in_pytorch.shape and not result.any()
                else:
                    assert_as_exact_as_pytorch(result, in_pytorch, in_double, 1e-6)


def test_what_the_copy_heads_inputs_must_be():
    gate, bias = (torch.zeros(length, device=DEVICE) for length in (CHANNELS, 1))
    given = [random(5, 48), random(2 * CHANNELS, 48), gate, bias]
    refused(*((name, lambda place=place, x=x: project(*given[:place], x, *given[place + 1:]))
              for place, name, x in ((0, "x", given[0].double()), (0, "x", given[0][0]),
                                     (1, "weight", given[1][1:]), (1, "weight", given[1].double()),
                                     (2, "gate", given[2][:9]), (2, "gate", given[2].half()),
                                     (3, "bias", given[3].double()), (3, "bias", given[2]))))


def test_like_states_find_each_other_before_anything_is_learned():
    """A token that came before in the same sequence gets a share at once, a small one; another gets none."""
    copies = CopyHead(CHANNELS, 32, 0.3, torch.float32, DEVICE)
    copies.initialise(0.1, torch.Generator(DEVICE).manual_seed(0))
    tokens = torch.tensor([1, 2, 3, 4, 5, 1], device=DEVICE)
    x = torch.randn(6, 32, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)[tokens]
    bounds, rest = torch.tensor([0, 6], device=DEVICE, dtype=torch.int32), copies.bias.item()
    sequences = Sequences.of(bounds, 6, 6)
    q, k, _ = project_reference(x, copies.weight, copies.gate, copies.bias)
    shares = {token: (pointer_sums_reference(q, k, tokens, torch.full_like(tokens, token), sequences, 0.3)[0]
                      - rest).sigmoid()[-1].item() for token in range(7)}
    assert max(shares, key=shares.get) == 2 and 0.005 < shares[2] < 0.01     # what followed the first 1
    assert shares[6] == 0


def test_the_mixture_of_both_sources_is_a_probability():
    """Over the vocabulary the mixed probabilities of each token's next token sum to 1, copied or not."""
    class Words:
        """What the copy head takes of a batch."""
    _, _, tokens, sequences = batch()
    n, width = len(tokens), 32
    x, head = (torch.randn(rows, width, device=DEVICE) for rows in (n, VOCABULARY))
    copies = CopyHead(CHANNELS, width, 0.3, torch.float32, DEVICE)
    copies.initialise(0.1, torch.Generator(DEVICE).manual_seed(0))
    copies.bias.data.fill_(1.0)     # a share of a half and more
    words, total, copied = Words(), torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    words.tokens = tokens
    for token in range(VOCABULARY):
        words.targets = torch.full((n,), token, device=DEVICE, dtype=torch.int32)
        mixture = copies.mixture(x, words, sequences, project_reference, pointer_sums_reference)
        for t in range(n):
            only = words.targets.clone().fill_(-1).index_fill_(0, torch.tensor(t, device=DEVICE), token)
            wanted = Targets(only, only < n, torch.ones(1, device=DEVICE), mixture)
            total[t] += (-head_loss_reference(x, head, wanted, False)[1]).exp().detach()
        copied += (mixture.log_odds + mixture.log_rest).exp().detach()
    torch.testing.assert_close(total, torch.ones(n, device=DEVICE), rtol=0, atol=1e-4)
    torch.testing.assert_close(copied, 1 - mixture.log_rest.exp().detach(), rtol=0, atol=1e-4)
    assert copied[sequences.bounds[:-1].long()].eq(0).all() and copied.mean() > 0.5
