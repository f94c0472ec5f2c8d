"""Passages that the text has had before are found and left out, and nothing else is."""
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt
from data import packing
from data.loader import Loader, StepShape, TextSettings
from data.packing import ShardedText
from data.repeats import SHORTEST, Repeats
from data.shards import ShardError, open_shard, write_shard

START = 50_000


def words(count: int, seed: int = 0) -> np.ndarray:
    """Tokens (count,) uint16, of which none starts a document."""
    return np.random.default_rng(seed).integers(0, START, count).astype(np.uint16)


def test_a_passage_that_came_before_is_left_out_but_for_its_ends():
    """Its ends are where its first and last remembered hash are: every second one is remembered."""
    repeats, old, dropped = Repeats(100_000, 32), words(20_000), []
    assert np.array_equal(repeats.drop(old, START), old)
    for seed in range(1, 41):
        before, after = words(300, seed), words(300, -seed % 1000)
        passage = old[400 * seed:400 * seed + 100]
        kept = repeats.drop(np.concatenate([before, passage, after]), START)
        dropped.append(700 - len(kept))
        left = kept[300:len(kept) - 300]
        assert np.array_equal(kept[:300], before) and np.array_equal(kept[len(kept) - 300:], after)
        assert any(np.array_equal(left, np.delete(passage, slice(i, i + dropped[-1]))) for i in range(100))
    assert np.mean(dropped) > 95 and max(dropped) <= 100


@pytest.mark.parametrize("length, goes", [(SHORTEST - 4, False), (31, False), (42, True)])
def test_only_long_passages_are_left_out(length, goes):
    repeats, old = Repeats(100_000, 32), words(20_000)
    repeats.drop(old, START)
    for i in range(50):
        text = np.concatenate([words(50, i + 1), old[300 * i:300 * i + length], words(50, i + 100)])
        assert (len(repeats.drop(text, START)) < len(text)) == goes


def test_a_passage_ends_where_one_token_differs():
    repeats, old = Repeats(100_000, 32), words(400)
    repeats.drop(old, START)
    changed = old.copy()
    changed[100::100] += 1
    kept = repeats.drop(changed, START)
    assert {100, 200, 300} <= {int(np.flatnonzero(changed == token)[0]) for token in kept}
    assert 3 <= len(kept) < 100


def test_what_a_text_repeats_of_itself_stays():
    passage = words(100)
    text = np.concatenate([passage, words(50, 1), passage])
    assert np.array_equal(Repeats(1000, 16).drop(text, START), text)


def test_starts_of_documents_stay_unless_the_document_goes():
    a, b, new = words(100, 1), words(100, 2), words(50, 3)
    for text in a, b:
        text[0] = START
    repeats = Repeats(100_000, 16)
    repeats.drop(np.concatenate([a, b]), START)
    kept = repeats.drop(np.concatenate([a, new, b, [START], new]).astype(np.uint16), START)
    starts = np.flatnonzero(kept == START)
    # Of a and b at most their ends are left, which no remembered hash reaches.
    assert kept[0] == START and starts[-1] == len(kept) - 51 and np.array_equal(kept[-50:], new)
    assert 101 <= len(kept) < 150 and (np.diff(starts) > 1).all()


def test_a_document_of_which_nothing_is_left_goes_with_its_start():
    repeats, new, lengths = Repeats(100_000, 16), np.append(START, words(50)).astype(np.uint16), []
    for seed in range(1, 41):
        old = np.append(START, words(200, seed)).astype(np.uint16)
        repeats.drop(old, START)
        kept = repeats.drop(np.concatenate([old, new + (np.arange(51) > 0) * seed]).astype(np.uint16), START)
        starts = np.flatnonzero(kept == START)
        assert len(starts) == 1 + (len(kept) > 51) and starts[-1] == len(kept) - 51
        lengths.append(len(kept))
        kept = repeats.drop(np.concatenate([new[:1], words(50, seed + 100), old]), START)      # at the end
        assert kept[-1] != START and 51 <= len(kept) < 80
    assert 5 < lengths.count(51) < 35 and max(lengths) < 80


def test_new_text_stays_when_the_memory_is_as_full_as_it_gets():
    repeats = Repeats(400_000, SHORTEST)
    texts = [words(100_000, seed) for seed in range(4)]
    assert sum(100_000 - len(repeats.drop(text, START)) for text in texts) < 400
    assert len(repeats.seen) <= 4 * 400_000


@pytest.mark.parametrize("length", [0, 1, 12, 13, 14])
def test_short_texts(length):
    repeats, text = Repeats(100, 16), words(length)
    assert all(np.array_equal(repeats.drop(text, START), text) for _ in range(2))


def test_passages_that_are_too_short_to_tell_are_refused():
    with pytest.raises(ValueError, match="at least 16 tokens can be found, not of 15"):
        Repeats(100, 15)


@pytest.fixture
def twice(tmp_path, config):
    """A configuration whose second shard has the first half of the first one, and new documents."""
    first, new = words(20_000) % 250, words(10_000, 1) % 250
    for text in first, new:
        text[::97] = 256
    write_shard(tmp_path / "train_000000.bin", first)
    write_shard(tmp_path / "train_000001.bin", np.concatenate([first[:97 * 100], new]))
    write_shard(tmp_path / "val_000000.bin", first[:3000])
    return replace(config, data_path=str(tmp_path), drop_repeats=32, keep_tails=True)


def sharded(config, drop_repeats: int) -> ShardedText:
    paths = sorted(train_gpt.Path(config.data_path).glob("train_*"))
    return ShardedText(paths, 257, 256, True, drop_repeats, 40_000)


def text_of(config, drop_repeats: int) -> list[np.ndarray]:
    text = sharded(config, drop_repeats)
    return [text.open(part)[0] for part in range(len(text))]


@pytest.mark.parametrize("part", [300, 1000, 2500, 1 << 20])
def test_parts_hold_the_text_in_order(twice, monkeypatch, part):
    """Whole documents, whatever the parts' size; what was there before is missing."""
    monkeypatch.setattr(packing, "PART", part)
    monkeypatch.setattr(packing, "LOOKED", 64)
    shards = [open_shard(path) for path in sorted(train_gpt.Path(twice.data_path).glob("train_*"))]
    whole = text_of(twice, 0)
    assert np.array_equal(np.concatenate(whole), np.concatenate(shards))
    assert len(whole) == sum(-(-len(shard) // part) for shard in shards)
    assert all(not len(tokens) or tokens[0] == 256 for tokens in whole)
    kept = np.concatenate(text_of(twice, 32))
    assert np.array_equal(kept[:20_000], shards[0]) and np.array_equal(kept[-10_000:], shards[1][-10_000:])
    assert 30_000 <= len(kept) < 30_000 + 2000


def test_parts_are_read_in_order_whichever_is_wanted(twice, monkeypatch):
    monkeypatch.setattr(packing, "PART", 1000)
    expected, text = text_of(twice, 32), sharded(twice, 32)
    for part in (25, 3, 39, 0):
        assert np.array_equal(text.open(part)[0], expected[part])
    assert list(text.opened) == list(range(40)) and len(text.repeats.seen) >= 2 * 40_000


def test_a_document_may_be_longer_than_parts(tmp_path, monkeypatch):
    """Its other parts are empty, and it is gone through once, also where another thread asks first."""
    tokens, looked = words(9000) % 250, []
    tokens[[350, 400, 7300]] = 256
    write_shard(tmp_path / "train_000000.bin", tokens)
    monkeypatch.setattr(packing, "PART", 300)
    monkeypatch.setattr(packing, "LOOKED", 50)
    really = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda x: looked.append(len(x)) or really(x))
    text = ShardedText([tmp_path / "train_000000.bin"], 257, 256, True)
    parts = [text.open(part)[0] for part in range(len(text))]
    assert [len(part) for part in parts] == [0, 6950] + [0] * 22 + [1700] + [0] * 5
    assert sum(looked) < 3 * 9000


def test_a_bad_token_before_the_first_document_is_found(tmp_path):
    tokens = np.concatenate([[300], np.full(50, 256)])
    write_shard(tmp_path / "train_000000.bin", tokens)
    with pytest.raises(ShardError, match="token id 300"):
        ShardedText([tmp_path / "train_000000.bin"], 257, 256, True).open(0)


def test_each_shard_holds_one_file_open(twice, monkeypatch):
    monkeypatch.setattr(packing, "PART", 10)
    before = len(list(train_gpt.Path("/proc/self/fd").iterdir()))
    text = sharded(twice, 0)
    assert sum(len(text.open(part)[0]) for part in range(len(text))) == 39_700
    assert len(list(train_gpt.Path("/proc/self/fd").iterdir())) <= before + 2


def test_batches_leave_repeats_out_and_the_validation_text_does_not(twice):
    shape = StepShape(2048, 97, 0)
    settings, cpu = TextSettings.of(replace(twice, micro_batches=2)), torch.device("cpu")
    loaders = [Loader(settings, [shape] * 14, rank, 2, cpu) for rank in (0, 1)]
    seen = torch.cat([batch.tokens for index in range(14)
                      for loader in loaders for batch in loader.batches(index)]).numpy()
    assert np.array_equal(seen, np.concatenate(text_of(twice, 32))[:len(seen)])
    assert loaders[0].plan.text.repeats and not loaders[0].rehearsal([shape]).plan.text.repeats


def test_a_later_epoch_and_a_restart_have_the_same_batches(twice, monkeypatch):
    monkeypatch.setattr(packing, "PART", 1000)
    shapes = [StepShape(4096, 97, 0)] * 20
    settings = TextSettings.of(replace(twice, micro_batches=1, epochs=3))
    whole = Loader(settings, shapes, 0, 1, torch.device("cpu"))
    fast = [batch.tokens for batches in whole.prefetch(range(20)) for batch in batches]
    again = Loader(settings, shapes, 0, 1, torch.device("cpu"))
    late = [batch.tokens for batches in again.prefetch(range(11, 20)) for batch in batches]
    assert all(map(torch.equal, fast[11:], late))
    text = np.concatenate(text_of(twice, 32))
    assert np.array_equal(torch.cat(fast).numpy(), np.concatenate([text, text, text])[:20 * 4096])
    steps = 2 * len(text) // 4096 - 1                   # nearly two whole readings
    whole = Loader(replace(settings, epochs=2), shapes[:1] * steps, 0, 1, torch.device("cpu"))
    assert len(list(whole.prefetch(range(steps)))) == steps > 12


def test_the_text_may_end_sooner_than_its_size_says(twice):
    settings = TextSettings.of(replace(twice, micro_batches=1))
    loader = Loader(settings, [StepShape(2048, 97, 0)] * 19, 0, 1, torch.device("cpu"))
    message = "39,700 tokens last for 1[45] of 19 steps without the passages that"
    with pytest.raises(ShardError, match=message):
        list(loader.prefetch(range(19)))


def test_parts_that_no_step_needs_are_not_read(twice, monkeypatch):
    monkeypatch.setattr(packing, "PART", 1000)
    loader = Loader(TextSettings.of(twice), [StepShape(2048, 97, 0)] * 2, 0, 1, torch.device("cpu"))
    list(loader.plan.of(1))
    for part in range(len(loader.plan.text)):
        loader.read_ahead(part)
    assert 5 <= len(loader.plan.text.opened) <= 6 < len(loader.plan.text)
