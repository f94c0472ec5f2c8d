"""Vectors of tokens from their neighbours in the text: what is counted, and which tokens come out alike."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.optimizer import TokenVectors, token_vectors
from kernels.ranks.collectives import Collectives

ALONE = SimpleNamespace(rank=0, size=1, collectives=Collectives(1))


def text_of_kinds(tokens: int = 60_000) -> np.ndarray:
    """Four kinds of 10 tokens that follow one another in a ring; 40 is rare, and 41 and 42 never occur."""
    rng = np.random.default_rng(0)
    text = (np.arange(tokens) % 4 * 10 + rng.integers(0, 10, tokens)).astype(np.uint16)
    text[np.arange(3) * 4000 + 401] = 40        # three times in the place of the second kind
    return text


def found(classes: torch.Tensor | None = None) -> torch.Tensor:
    vectors = TokenVectors(3, 43, 48, classes, torch.float32, torch.device("cpu"))
    vectors.find(text_of_kinds(), ALONE)
    return vectors.rows


def test_pairs_are_counted(monkeypatch):
    monkeypatch.setattr(token_vectors, "PIECE", 7)
    rng = np.random.default_rng(0)
    tokens, columns = rng.integers(0, 5, 100), rng.integers(0, 4, 100)      # column 3 is not counted
    wanted = np.zeros((5, 4), int)
    np.add.at(wanted, (tokens, columns), 1)
    counts = token_vectors.count_pairs(*(torch.from_numpy(x).int() for x in (tokens, columns)), (5, 3))
    assert counts.tolist() == wanted[:, :3].tolist()


def test_profiles_are_shares_that_lean_on_those_of_the_class():
    counts = torch.tensor([[90, 10], [0, 4], [20, 20]], dtype=torch.int32)
    seen = torch.tensor([100.0, 4.0, 40.0])
    everywhere = counts.sum(0) / 144
    of_class = (torch.tensor([90.0, 14.0]) + 50 * everywhere) / 154         # of tokens 0 and 1
    for classes, leaning in ((None, everywhere), (torch.tensor([0, 0, 2]), of_class)):
        wanted = ((counts[1] + 50 * leaning) / 54).sqrt() - everywhere.sqrt()
        torch.testing.assert_close(token_vectors.profiles(counts, seen, classes)[1], wanted)


def test_tokens_among_like_neighbours_are_alike():
    rows = found()
    assert rows[:41].norm(dim=1).allclose(torch.ones(41)) and rows[41:].norm(dim=1).max() < 0.01
    alike = rows @ rows.T
    for kind in range(4):
        mine = slice(10 * kind, 10 * kind + 10)
        assert alike[mine, mine].min() > 0.95 and alike[mine, :40].sort(dim=1).values[:, -11].max() < 0.5
    assert alike[40, 10:20].mean() > 0.8 and alike[40, :10].mean() < 0.3


def test_a_token_without_neighbours_is_like_its_class():
    classes = torch.arange(43)
    classes[41] = 20
    rows = found(classes)
    assert (rows[41] @ rows[20:30].T).min() > 0.9 and rows[42].norm() < 0.01


@pytest.mark.parametrize("tokens", [np.array([65_535, 0, 65_535, 7], np.uint16)])
def test_large_ids_keep_their_number(tokens):
    vectors = TokenVectors(2, 65_536, 65_536, None, torch.float32, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        given = []
        patch.setattr(token_vectors, "neighbour_vectors",
                      lambda text, *_: given.append(text) or torch.ones(65_536, 2))
        vectors.find(tokens, ALONE)
    assert given[0].tolist() == tokens.tolist() and vectors.rows.all()
