"""The n-gram table as a module: its hash, what it looks up, where gradients go."""
from types import SimpleNamespace

import pytest
import torch
from checks import DEVICE, DTYPE, random, refused, same_bits

from kernels import embedding, ngrams
from kernels.ranks import Collectives
from kernels.retrieval import suffix_keys, suffix_keys_reference


def table(lengths: tuple[int, ...] = (2, 3), rows: int = 1009, layers: int = 3) -> ngrams.NGrams:
    model = ngrams.NGrams(lengths, rows, 16, layers, Collectives(1), DTYPE, DEVICE)
    model.find_by(ngrams.ngram_index)
    model.initialise()
    return model


def batch_of(tokens: torch.Tensor, is_start: torch.Tensor) -> SimpleNamespace:
    """What of a batch a table reads; its rows are not known."""
    ends = torch.tensor([len(tokens)], device=DEVICE)
    cu_seqlens = torch.cat([is_start.nonzero()[:, 0], ends]).int()
    return SimpleNamespace(tokens=tokens, cu_seqlens=cu_seqlens, rows=tokens[:0].int())


@pytest.mark.parametrize("hash_rows", [ngrams.ngram_index, ngrams.ngram_index_reference])
@pytest.mark.parametrize("lengths", [(2,), (3, 1), (2, 3, 4, 5, 6)])
def test_the_same_last_tokens_find_the_same_row(lengths, hash_rows):
    """The row depends on those tokens, on their order, and on where the sequence starts; on nothing else."""
    tokens = torch.tensor([7, 1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 7, 7, 1, 2], device=DEVICE)
    is_start = torch.zeros(19, dtype=torch.bool, device=DEVICE)
    is_start[[0, 9, 16]] = True
    found = hash_rows(tokens, is_start, lengths, 10_007).view(19, len(lengths)).T
    assert found.dtype == torch.int32 and found.min() >= 0 and found.max() < 10_007
    for rows, length in zip(found.tolist(), lengths):
        # Seven equal tokens, of which the first sequence has another one before them.
        same = [rows[1 + i] == rows[9 + i] for i in range(7)]
        assert same == [i + 1 >= length for i in range(7)]
        assert rows[0] == rows[16] and rows[17] == rows[1] and rows[18] == rows[2]
        if length > 1:
            swapped = hash_rows(tokens[[0, 2, 1]], is_start[:3], (length,), 10_007)
            assert swapped[2] != rows[2]


@pytest.mark.parametrize("n", [0, 1, 20, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hashes_have_the_bits_of_the_reference(n, dtype):
    """Also where products overflow and hashes are negative, and where ends are longer than their sequence."""
    tokens = torch.randint(-2 ** 31, 2 ** 31 - 1, (n,), device=DEVICE).to(dtype)
    tokens *= 1 if dtype is torch.int32 else 2 ** 30 + 1
    is_start = torch.rand(n, device=DEVICE) < 0.2
    is_start[:1] = True
    for tuned in ((16, 1), (256, 4)):
        for count in (1, 7, 2 ** 28, 2 ** 31 - 1):
            given = tokens, is_start, (1, 6, 2, 2), count
            found = ngrams.ngram_index(*given, tuned=tuned)
            assert same_bits(found, ngrams.ngram_index_reference(*given))
            assert found.shape == (4 * n,) and not n or 0 <= found.min() and found.max() < count
        for starts in (is_start, torch.arange(n, device=DEVICE) == 0):
            keys = suffix_keys_reference(tokens, starts, (3, 24, 1))
            assert same_bits(suffix_keys(tokens, starts, (3, 24, 1), tuned), keys) and keys.shape == (3, n)
    assert n < 20 or keys.min() < 0 < keys.max()
    classes = torch.randint(-3, 9, (50,), device=DEVICE).to(dtype)
    given = tokens.remainder(50), is_start, (2, 3), 1009, classes
    assert same_bits(ngrams.ngram_index(*given), ngrams.ngram_index_reference(*given))
    unmarked = is_start.clone().index_fill_(0, torch.zeros(min(n, 1), dtype=torch.long, device=DEVICE), False)
    assert same_bits(suffix_keys(tokens, unmarked, (3, 24)), suffix_keys(tokens, is_start, (3, 24)))


def test_keys_are_equal_where_the_last_tokens_are():
    """Of few different tokens, so that many ends are equal; before a sequence lies a token of its own."""
    tokens, is_start = torch.randint(2, (200,), device=DEVICE), torch.arange(200, device=DEVICE) % 40 == 0
    for length, keys in zip((1, 3, 8), suffix_keys(tokens, is_start, (1, 3, 8)).tolist()):
        firsts = [max(i - length + 1, i // 40 * 40) for i in range(200)]
        ends = [(*[0] * (length - i + first - 1), *(tokens[first:i + 1] + 1).tolist())
                for i, first in enumerate(firsts)]
        assert len(set(ends)) == len(set(keys)) == len(set(zip(ends, keys))) > 1


def test_what_the_hash_refuses():
    tokens, is_start = torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.ones(5, device=DEVICE) > 0
    cases = (("tokens", tokens.short(), is_start), ("tokens", tokens[::2], is_start[:3]),
             ("is_start", tokens, is_start[1:]), ("is_start", tokens, tokens),
             ("classes", tokens, is_start, tokens.float()), ("classes", tokens, is_start, tokens[::2]))
    refused(*((name, lambda given=given: ngrams.ngram_index(*given[:2], (2,), 7, *given[2:]))
              for name, *given in cases))
    refused(("tokens", lambda: suffix_keys(tokens[:, None], is_start, (1,))))


def test_tokens_of_other_ranks_count_in_rank_order():
    """Here the other rank has the same tokens."""
    class Both(Collectives):
        def all_gathered(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x])

    model = ngrams.NGrams((2, 3), 1009, 16, 3, Both(2), DTYPE, DEVICE)
    model.find_by(ngrams.ngram_index)
    tokens, is_start = torch.arange(5, device=DEVICE), torch.arange(5, device=DEVICE) == 0
    index = model.index(batch_of(tokens, is_start))
    alone = ngrams.ngram_index(tokens, is_start, (2, 3), 1009)
    assert torch.equal(index, torch.cat([alone, alone]))
    known = SimpleNamespace(rows=alone + 1)     # found before, by whoever brought the batch
    assert torch.equal(model.index(known), torch.cat([alone, alone]) + 1)
    assert model.table.shape == (1009, 8) and model.numbers_elsewhere() == 1009 * 8


@pytest.mark.parametrize("by_kernels", [False, True])
def test_each_layer_gets_the_rows_of_its_tokens_and_the_table_their_gradient(by_kernels):
    """With kernels the rows are listed and their gradient stands there; otherwise it is dense."""
    model = table()
    state = model.optimizer_state(4, 100 if by_kernels else None)
    with torch.no_grad():
        model.table.copy_(random(*model.table.shape))
    tokens, is_start = torch.arange(20, device=DEVICE) % 4, torch.arange(20, device=DEVICE) % 10 == 0
    index = model.index(batch_of(tokens, is_start))
    lookup, sort = embedding.lookup_reference, embedding.unsorted
    if by_kernels:
        lookup, sort = embedding.lookup, embedding.sort_beside
    sent = model.send(index, lookup, sort, ngrams.share_values_reference)
    assert sent.by_layer is None  # nobody has waited for the rows
    values = [sent.values(layer) for layer in range(3)]
    assert values[0] is sent.values(0) and sent.exchange.sent is None
    rows = model.table[index.long()].view(20, 2, 16)
    assert all(torch.equal(value.rows, rows) and torch.equal(value.scale, model.scales[layer])
               for layer, value in enumerate(values))
    sum((value.rows.float() * value.scale[:, None]).sum() for value in values).backward()
    each = torch.full((40, 16), 3 * 0.05, device=DEVICE)
    exact = torch.zeros(1009, 16, device=DEVICE).index_add_(0, index.long(), each)
    grad = state.gradients
    if by_kernels:
        assert model.table.grad is None and grad is model.row_gradients
        grad = torch.where(grad.place[:, None] > 0, grad.grads[grad.place.long()], 0)
    torch.testing.assert_close(grad.float(), exact, rtol=0.02, atol=1e-3)
    torch.testing.assert_close(model.scales.grad, rows.float().sum((0, 2)).expand(3, 2), rtol=1e-2, atol=1e-2)


def test_written_rows_come_in_parts(monkeypatch):
    monkeypatch.setattr(ngrams.table, "PART", 100)
    model, written = table(), torch.tensor([0, 99, 100, 1008])
    with torch.no_grad():
        model.table[written.to(DEVICE)] = random(4, 16)
    parts = list(model.written_rows())
    numbers, rows = map(torch.cat, zip(*parts))
    assert len(parts) == 11 and torch.equal(numbers, written.int())
    assert torch.equal(rows, model.table.detach().cpu()[written]) and model.numbers_elsewhere() == 0


@pytest.mark.parametrize("lengths, rows", [((2, 3), 0), ((), 1009)])
def test_without_rows_or_lengths_there_is_no_table(lengths, rows):
    model, tokens = table(lengths, rows), torch.zeros(3, dtype=torch.long, device=DEVICE)
    batch = batch_of(tokens, tokens == 0)
    index = model.index(batch)
    sent = model.send(index, embedding.lookup, embedding.sort_rows, ngrams.share_values)
    assert not len(model.find(batch)) and index is None and sent.values(0) is None
    assert not list(model.parameters()) and model.numbers_elsewhere() == 0


def test_a_new_table_is_zero_and_a_row_costs_what_it_says():
    """Weights, mean squares and the number of its last update, beside its place in the list of gradients."""
    model = table()
    assert not model.table.any() and model.scales.eq(0.05).all() and model.scales.shape == (3, 2)
    assert model.optimizer_state(4, 10).gradients.place.nbytes == 1009 * 4
    here = ngrams.NGrams((2,), 1009, 16, 1, Collectives(2), torch.bfloat16, torch.device("meta"))
    state = here.optimizer_state(4, None)
    assert sum(x.nbytes for x in (state.weight, state.second, state.last)) == 1009 * (2 * 8 + 4 * 2 + 4)
