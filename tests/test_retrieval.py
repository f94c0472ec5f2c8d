"""Guesses and counts: against a plain search, what they may depend on, and in whole runs."""
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from conftest import TINY, process

import train_gpt
from kernels import ngrams
from kernels.loss import Mixture
from kernels.ranks.collectives import Collectives
from kernels.retrieval import Guesses, TextCounts, counts, near_guesses, suffix_keys_reference
from kernels.sequence import starts
from records.run.log import RunLog
from records.run.settings import UserError, change
from records.tools.classes import table_class
from records.tools.logs import read_log

CPU = torch.device("cpu")
LENGTHS = 1, 3, 5
SHORT = ("--head_dim 16 --qk_dim 16 --ngrams 2 --near_match 1,2 --retrieval 1,2 --micro_batches 2 --steps 4 "
         "--extra_steps 1 --batch_tokens 128,256,384 --val_every 0 --val_tokens 512 --save=")


def random_batches(steps: int, micro_batches: int, n: int, vocabulary: int) -> list[list[train_gpt.Batch]]:
    """Steps of micro-batches with short sequences of few different tokens, so that much is found again."""
    rng, made = np.random.default_rng(0), []
    for _ in range(steps * micro_batches):
        begins = np.union1d([0], rng.choice(n, 6)).tolist()
        tokens, targets = torch.from_numpy(rng.integers(0, vocabulary, (2, n)).astype(np.int32))
        cu_seqlens = torch.tensor(begins + [n] * (8 - len(begins)), dtype=torch.int32)
        made.append(train_gpt.Batch(tokens, targets, cu_seqlens, tokens[:0], tokens[:0], tokens[:0], n))
    return [made[i:i + micro_batches] for i in range(0, len(made), micro_batches)]


def sequences(batch: train_gpt.Batch) -> Iterator[list[int]]:
    """Its sequences, whose tokens count from 1."""
    bounds = batch.cu_seqlens.unique().tolist()
    yield from ((batch.tokens[a:b] + 1).tolist() for a, b in zip(bounds, bounds[1:]))


def remember(known: dict, sequence: list[int]) -> None:
    """The last token followed each end of the text before it."""
    for length in LENGTHS:
        if length < len(sequence):
            known[(length, *sequence[-length - 1:-1])] = sequence[-1]


def found_in(known: dict, ended: list[int]) -> tuple[int, int]:
    """What followed the longest known end of text, and its length's number; or 0."""
    for i, length in reversed([*enumerate(LENGTHS, 1)]):
        if length <= len(ended) and (length, *ended[-length:]) in known:
            return known[(length, *ended[-length:])], i
    return 0, 0


def test_near_guesses_are_those_of_a_plain_search():
    [[batch]] = random_batches(1, 1, 400, 3)
    is_start, expected = starts(batch.cu_seqlens, 400), []
    for sequence in sequences(batch):
        known = {}
        for i in range(len(sequence)):
            remember(known, sequence[:i + 1])       # It has seen sequence[i], and no more.
            expected.append(found_in(known, sequence[:i + 1]))
    keys = suffix_keys_reference(batch.tokens, is_start, LENGTHS)
    guess, number = near_guesses(batch.tokens, is_start, keys)
    assert list(zip(guess.tolist(), number.tolist())) == expected
    assert {number for _, number in expected} == {0, 1, 2, 3}
    alone, found = near_guesses(batch.tokens, is_start, keys[:1])
    thrice, numbers = near_guesses(batch.tokens, is_start, keys[:1].expand(3, -1))
    assert torch.equal(thrice, alone) and torch.equal(numbers, 3 * found)   # Lengths stay apart.


def n_grams(sequence: list[int]) -> Iterator[tuple[int, ...]]:
    """Those that end at each token, of up to four tokens, with zeros before the sequence."""
    for i in range(len(sequence)):
        last = [0, 0, 0, *sequence][i:i + 4]
        yield from (tuple(last[-length:]) for length in (1, 2, 3, 4))


@pytest.mark.parametrize("lengths, alone", [((1, 2, 3), False), ((3,), True)])
def test_counts_are_those_of_a_dictionary(lengths, alone, monkeypatch):
    """Those of a text in four parts, whose borders lie inside sequences, mixed into a head's probability."""
    monkeypatch.setattr(counts, "PART", 400)
    [*trained, [scored, _]], known = random_batches(6, 2, 140, 9), Counter()
    text = TextCounts(lengths, 5 * 2 * 140, CPU)
    text.forget()
    for step in trained:
        text.learn(step, Collectives(1).all_gathered)
    text.sort()
    assert len(text.parts) == 4
    for part in text.written().split(400):
        begins = [0, *(i for i in range(1, len(part)) if part[i] < 0), len(part)]
        for a, b in zip(begins, begins[1:]):
            known.update(n_grams(part[a:b].abs().tolist()))
    head, odds, rest = torch.rand(3, 140, generator=torch.Generator().manual_seed(0)).double()
    mixture = None if alone else Mixture(odds.log(), rest.log())
    with torch.no_grad():
        mixed = text.mixed(mixture, scored, starts(scored.cu_seqlens, 140))
    i, unseen = 0, 0
    for sequence in sequences(scored):
        for place in range(len(sequence)):
            target = int(scored.targets[i]) + 1
            p = head[i] if alone else rest[i] * (head[i] + odds[i])
            for length in lengths:
                context = tuple([0, 0, 0, *sequence[:place + 1]][-length:])
                if times := known[context]:
                    p = 0.995 * p + 0.005 * known[(*context, target)] / times
                unseen += not times
            found = mixed.log_rest[i].exp() * (head[i] + mixed.log_odds[i].exp())
            assert found.item() == pytest.approx(float(p), rel=1e-5)
            i += 1
    assert i == 140 and 0 < unseen < 200


def test_where_there_are_gradients_nothing_is_counted():
    [[batch]], mixture = random_batches(1, 1, 30, 3), Mixture(torch.zeros(30), torch.zeros(30))
    text, is_start = TextCounts((1,), 30, CPU), starts(batch.cu_seqlens, 30)
    assert text.mixed(mixture, batch, is_start) is mixture and text.mixed(None, batch, is_start) is None
    with torch.no_grad():
        assert text.mixed(mixture, batch, is_start) is not mixture
        assert TextCounts((), 30, CPU).mixed(mixture, batch, is_start) is mixture


def test_the_largest_vocabulary_can_be_counted():
    """Its last token fills all bits but one; an n-gram's next one is still a number."""
    largest = counts.LARGEST_VOCABULARY
    text = TextCounts((1, 3), 8, CPU)
    tokens = torch.tensor([largest - 1] * 8).int()
    batch = train_gpt.Batch(tokens, tokens, torch.tensor([0, 8]).int(), tokens[:0], tokens[:0], tokens[:0], 8)
    text.learn([batch], Collectives(1).all_gathered)
    text.sort()
    keys = counts.pack(*counts.last_tokens(tokens + 1, starts(batch.cu_seqlens, 8)))
    assert [text.occurrences(keys[-1:], length).item() for length in (1, 2, 3, 4)] == [8, 7, 6, 5]


def test_a_guess_depends_on_no_later_token():
    """Another token j changes no row of a token before j, nor one of another sequence; and some behind it."""
    [[batch]] = random_batches(1, 1, 120, 3)
    guesses, is_start = Guesses((1, 3), suffix_keys_reference), starts(batch.cu_seqlens, 120)
    rows, sequence, changed = guesses.rows(batch.tokens, is_start, 10 ** 6), is_start.cumsum(0), 0
    assert rows.shape == (120, 1) and rows.dtype == torch.int32 and rows.min() >= 0 and rows.max() < 10 ** 6
    for j in range(120):
        other = batch.tokens.clone()
        other[j] = (other[j] + 1) % 3
        differs = (guesses.rows(other, is_start, 10 ** 6) != rows).any(1)
        assert not differs[:j].any() and not differs[sequence != sequence[j]].any()
        changed += bool(differs[j])
    assert changed > 60 and len(rows.unique()) > 5


def test_a_score_counts_no_later_token_and_no_other_sequence():
    """Another target changes its own place alone, and another token at most the next two places."""
    *trained, [batch] = random_batches(3, 1, 120, 3)
    text, is_start = TextCounts((1, 2, 3), 240, CPU), starts(batch.cu_seqlens, 120)
    for step in trained:
        text.learn(step, Collectives(1).all_gathered)
    text.sort()
    sequence = is_start.cumsum(0)
    with torch.no_grad():
        first = text.mixed(None, batch, is_start)
        for j in range(0, 120, 7):
            tokens = batch.tokens.clone()
            tokens[j] = (tokens[j] + 1) % 3
            other = text.mixed(None, batch._replace(tokens=tokens), is_start)
            differs = (other.log_odds != first.log_odds) | (other.log_rest != first.log_rest)
            assert not differs[:j].any() and not differs[sequence != sequence[j]].any() and differs[j]
            assert not differs[j + 3:].any()
            targets = batch.targets.clone()
            targets[j] = (targets[j] + 1) % 3
            other = text.mixed(None, batch._replace(targets=targets), is_start)
            assert torch.equal(other.log_rest, first.log_rest)
            assert (other.log_odds != first.log_odds).nonzero().tolist() == [[j]]


def test_what_fills_a_batch_up_is_no_text():
    """Token 0, without targets, behind the last sequence."""
    text = TextCounts((1, 2), 64, CPU)
    tokens = torch.tensor([9, 0, 0, 7, 5] + [0] * 11)
    batch = train_gpt.Batch(tokens.int(), torch.tensor([0, 0, 7, 5, 6] + [-1] * 11).int(),
                            torch.tensor([0, 5, 16]).int(), *[tokens[:0].int()] * 3, 11)
    text.learn([batch], Collectives(1).all_gathered)
    assert text.written().tolist() == [-10, 1, 1, 8, 6] + [0] * 11
    text.sort()
    assert text.occurrences(counts.pack(*torch.tensor([1, 0, 0, 0])[:, None]), 1) == 2


@pytest.mark.parametrize("near", [(), (2,)])
def test_rows_of_guesses_follow_those_of_n_grams(near):
    table = ngrams.NGrams((2, 3), 1009, 16, 3, Collectives(1), torch.float32, CPU)
    guesses, [[batch]] = Guesses(near, suffix_keys_reference), random_batches(1, 1, 60, 3)
    table.find_by(ngrams.ngram_index_reference, guesses)
    table.initialise()
    is_start = starts(batch.cu_seqlens, 60)
    rows = table.find(batch).view(60, -1)
    assert rows.shape[1] == table.heads == table.scales.shape[1] == 2 + len(near)
    alone = ngrams.ngram_index_reference(batch.tokens, is_start, (2, 3), 1009)
    assert torch.equal(rows[:, :2].flatten(), alone)
    if near:
        assert torch.equal(rows[:, 2:], guesses.rows(batch.tokens, is_start, 1009))


def test_counts_are_of_what_was_trained_on_and_of_nothing_else(config):
    """After warm-up nothing, after a step all of its micro-batches in order; validation adds nothing."""
    config = change(config, retrieval=(1, 2), steps=3, extra_steps=1, micro_batches=2,
                    batch_tokens=(128, 256, 384))
    trainer = train_gpt.Trainer(config, train_gpt.World())
    counted, device = trainer.model.memory.counts, trainer.world.device
    text = torch.empty(0, dtype=torch.int32, device=device)
    nothing = counts.pack(*torch.zeros(4, 1, dtype=torch.int32, device=device))
    trainer.rehearse()
    assert not counted.text.any() and not counted.count and all((x == nothing).all() for x in counted.parts)
    for step in trainer.schedule:
        batches = trainer.loader.batches(step.index)
        trainer.step(step, batches)
        for batch in (train_gpt.to_device(batch, device) for batch in batches):
            sign = 1 - 2 * starts(batch.cu_seqlens, len(batch.tokens)).int()
            text = torch.cat([text, ((batch.tokens + 1) * sign).masked_fill(batch.targets < 0, 0)])
        assert torch.equal(counted.written(), text)
    without = trainer.validate(trainer.schedule.validation(4))
    counted.sort()
    [keys] = counted.parts
    assert trainer.validate(trainer.schedule.validation(4)) != without
    assert len(text) == len(counted.text) and torch.equal(counted.written(), text)
    assert torch.equal(keys, counts.pack(*counts.last_tokens(text.abs(), text < 0)).sort().values)
    first = keys.clone()
    counted.forget()
    train_gpt.train(trainer, RunLog("short", enabled=False), {"startup_s": 0.0})
    assert torch.equal(keys, first)


RUNS = """
import sys; sys.path.insert(0, "tests")
from checkpoint_worker import Path, run, start
out, settings, kept = Path(sys.argv[1]), sys.argv[2:], sys.argv[1] + "/kept"
start(1, out, run, 0, [*settings, "--name", "one", "--checkpoint", kept, "--checkpoint_every", "2"])
start(2, out, run, 0, [*settings, "--name", "on", "--resume", kept + "/step-0000002"])
"""


def test_two_ranks_go_on_from_one_and_end_as_it_does(shards, tmp_path):
    settings = ["--preset", "cpu", "--data_path", str(shards), *TINY, *SHORT.split()]
    result = process(sys.executable, "-c", RUNS, str(tmp_path), *settings)
    assert result.returncode == 0, result.stderr + (tmp_path / "errors-0.txt").read_text()
    one, on = (read_log(next(tmp_path.glob(f"2*-{name}/log.jsonl"))) for name in ("one", "on"))
    assert on.steps["step"].tolist() == [3, 4, 5] and on.header["resumed"]["ranks"] == 1
    assert on.steps["loss"].tolist() == pytest.approx(one.steps["loss"][2:].tolist(), rel=1e-5)
    assert on.loss == pytest.approx(one.loss, rel=1e-5)
    assert table_class(one.header) == "at most 0.3 G + retrieval"


@pytest.mark.parametrize("arguments, message", [
    ("--near_match 0", "--near_match 0: expected a whole number from 1 to 64"),
    ("--near_match 4", "--ngrams 2,4 --near_match 4: each takes a head"),
    ("--near_match 4 --ngram_rows 0 --width 192", "--ngram_rows 0: near_match needs"),
    ("--retrieval 3,4", "--retrieval 3,4: contexts of up to 3 tokens are counted"),
    ("--retrieval 2 --vocab_size 65535", "--retrieval 2 --vocab_size 65535: at most 65534 different tokens"),
    ("--retrieval 2", "--save log with --retrieval: a model without its counts"),
    ("--states 9", "--save log with --states: a model without its counts or states"),
    ("--states 9 --save= --checkpoint x --checkpoint_every 1", "a checkpoint has no states"),
])
def test_settings_that_cannot_work(arguments, message):
    with pytest.raises(UserError, match=message):
        train_gpt.parse(["--preset", "cpu", *arguments.split()])
