"""States of the training text in the score: against a plain search, and as a distribution over tokens."""
import sys

import numpy as np
import pytest
import torch
from conftest import process

import train_gpt
from kernels.loss import Mixture
from kernels.ranks.collectives import Collectives
from kernels.retrieval import Datastore, datastore

WIDTH, VOCABULARY = 80, 7
SMALL = {"CELLS": 6, "PROBES": 3, "SAMPLE": 256, "FIRST": 0}


@pytest.fixture(autouse=True)
def few_cells(monkeypatch):
    for name, size in SMALL.items():
        monkeypatch.setattr(datastore, name, size)


def batch(n: int, seed: int) -> tuple[torch.Tensor, train_gpt.Batch]:
    """Random states, and tokens of which every fifth has no target."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, n), generator=generator, dtype=torch.int32)
    targets[::5] = -1
    bounds = torch.tensor([0, n], dtype=torch.int32)
    states = torch.randn(n, WIDTH, generator=generator)
    return states, train_gpt.Batch(tokens, targets, bounds, *[tokens[:0]] * 3, n)


def empty(kept: int, text: int) -> Datastore:
    return Datastore(kept, text, torch.empty(VOCABULARY, WIDTH), Collectives(1))


def filled(sizes: tuple[int, ...] = (40, 30), kept: int = 70) -> Datastore:
    store = empty(kept, sum(sizes))
    for seed, n in enumerate(sizes):
        store.learn(*batch(n, seed))
    store.sort()
    return store


def plain(store: Datastore, seeds: dict[int, int], x: torch.Tensor, asked: train_gpt.Batch,
          text: int, ranks: int = 1) -> np.ndarray:
    """Both sums of each query by a loop over all states, (n, 2), of a training on `text` tokens."""
    kept = sum(seeds.values())      # Each of several ranks has read one of the batches.
    def key(states):
        return torch.nn.functional.normalize(states @ store.projection, dim=1)

    sums = np.zeros((len(x), 2))
    probed = (key(x) @ store.centres.T).argsort(1, descending=True)[:, :datastore.PROBES]
    for later, (seed, n) in enumerate(seeds.items()):
        states, known = batch(n, seed)
        row = torch.arange(n) + (0 if ranks > 1 else sum([*seeds.values()][:later]))
        age = datastore.DRIFT * (kept - ranks * row) / text
        weight = (datastore.SHARPNESS * (key(x) @ key(states).T - 1) + age).exp().numpy()
        cells = (key(states) @ store.centres.T).argmax(1)
        for i, j in np.ndindex(weight.shape):
            if known.targets[j] >= 0 and cells[j] in probed[i]:
                sums[i] += weight[i, j] * np.array([known.targets[j] == asked.targets[i], 1])
    return sums


@pytest.mark.parametrize("sizes, left", [((40, 30), {0: 40, 1: 30}), ((70, 40, 30), {1: 40, 2: 30})])
def test_sums_are_those_of_a_plain_search(sizes, left):
    """The second time the first states are not kept."""
    store = filled(sizes)
    x, asked = batch(25, 9)
    wanted = plain(store, left, x, asked, sum(sizes))
    torch.testing.assert_close(store.sums(x, asked).double().numpy(), wanted, rtol=1e-4, atol=0)


def test_states_beyond_the_text_are_not_kept():
    """Warm-up may take more steps than the run."""
    store, wanted = empty(70, 70), filled()
    for seed, n in enumerate((40, 30, 20)):
        store.learn(*batch(n, seed))
    store.sort()
    x, asked = batch(25, 9)
    torch.testing.assert_close(store.sums(x, asked), wanted.sums(x, asked), rtol=1e-5, atol=0)


@pytest.mark.parametrize("steps", [(8, 12, 30, 30), (8, 32, 40)])
def test_directions_are_those_of_the_states_before_the_first_that_is_kept(steps, monkeypatch):
    """The third step has it, inside or at the beginning. So few states have no more directions than a key."""
    monkeypatch.setattr(datastore, "FIRST", 1 / 2)
    store = empty(80, 80)
    assert store.size == 40
    for seed, n in enumerate(steps):
        store.before(n)
        assert (store.projection == store.directions).all() == (seed < 2)
        if seed == 2:
            newest = batch(steps[1], 1)[0]
            torch.testing.assert_close(newest @ store.projection @ store.projection.T, newest)
            torch.testing.assert_close(store.projection.T @ store.projection, torch.eye(64))
        store.learn(*batch(n, seed))
    kept = torch.cat([batch(n, seed)[0] for seed, n in enumerate(steps) if seed > 1])[-40:]
    torch.testing.assert_close(store.keys[:40], store.normed(kept))


def test_without_states_nothing_is_chosen():
    store = empty(0, 40)
    for _ in range(3):      # also in a step beyond the text
        store.before(20)
    assert (store.projection == store.directions).all()


def test_states_that_come_after_sorting_are_found_too():
    """Each state finds itself, and a run that is also scored on its way ends as another does."""
    store = empty(70, 70)
    for seed, n in enumerate((40, 30)):
        store.learn(*batch(n, seed))
        store.sort()
    for seed, n in enumerate((40, 30)):
        x, known = batch(n, seed)
        has_target = known.targets >= 0
        assert (store.sums(x, known)[has_target] >= 0.999).all()
    once, [x, asked] = filled(), batch(25, 9)
    torch.testing.assert_close(store.projection, once.projection, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(store.sums(x, asked), once.sums(x, asked), rtol=1e-2, atol=1e-9)


def test_probabilities_of_all_tokens_sum_to_one(monkeypatch):
    """Also in a mixture with another source, and where a query sees no state."""
    monkeypatch.setattr(datastore, "PROBES", 1)
    store = filled((4,), 4)
    x, asked = batch(25, 9)
    head = torch.rand(25, VOCABULARY).log_softmax(1)
    before = Mixture(torch.full((25,), -2.0), torch.full((25,), -0.1))
    for mixture in None, before:
        total = torch.zeros(25)
        for token in range(VOCABULARY):
            with torch.no_grad():
                mixed = store.mixed(mixture, x, asked._replace(targets=torch.full_like(asked.targets, token)))
            total += (head[:, token].exp() + mixed.log_odds.exp()) * mixed.log_rest.exp()
        # The other source is not one of this test: its part is what e^-2 stands for, for each token.
        other = 0 if mixture is None else (before.log_rest + before.log_odds).exp() * VOCABULARY + (
            before.log_rest.exp() - 1)
        rest = 1 - datastore.SHARE * store.sums(x, asked)[:, 1].clamp(max=1) ** datastore.RISE
        torch.testing.assert_close(total, 1 + other * rest)
    assert 0 < (store.sums(x, asked)[:, 1] > 0).float().mean() < 1


def test_in_training_the_mixture_stays_and_states_are_kept():
    store = empty(20, 20)
    mixture = Mixture(torch.zeros(20), torch.zeros(20))
    assert store.mixed(mixture, *batch(20, 0)) is mixture and store.count == 20
    store.sort()
    assert store.sums(*batch(5, 1)).any()
    store.forget()
    assert store.count == 0 and not store.sums(*batch(5, 1)).any()
    assert empty(0, 20).mixed(None, None, None) is None


def test_rehearsal_leaves_nothing():
    """Not even in the projection, which each sort changes."""
    store, fresh = filled(), empty(70, 70)
    store.rehearse()
    assert store.count == 0 and not store.edges.any() and (store.projection == fresh.projection).all()
    assert store.undo is None


def test_a_score_without_states_changes_nothing():
    store = filled()
    store.forget()
    store.sort()
    assert (store.projection == store.directions).all() and not store.sums(*batch(5, 1)).any()


def search_on_two(rank: int) -> None:
    """Each rank keeps the states of one batch, and finds those of both for queries of its own."""
    for name, size in SMALL.items():
        setattr(datastore, name, size)
    world = train_gpt.World()
    store = Datastore(70, 70, torch.empty(VOCABULARY, WIDTH), world.collectives)
    store.learn(*batch(35, rank))
    store.sort()
    x, asked = batch(25, 8 + rank)
    wanted = plain(store, {0: 35, 1: 35}, x, asked, 70, ranks=2)
    torch.testing.assert_close(store.sums(x, asked).double().numpy(), wanted, rtol=1e-4, atol=0)
    world.close()


RANKS = """
import sys; sys.path.insert(0, "tests")
from checkpoint_worker import Path, start
from test_datastore import search_on_two
start(2, Path(sys.argv[1]), search_on_two)
"""


def test_two_ranks_search_the_states_of_both(tmp_path):
    result = process(sys.executable, "-c", RANKS, str(tmp_path))
    assert result.returncode == 0, result.stderr + (tmp_path / "errors-0.txt").read_text()
