"""What the training text holds of the validation text, and texts that are scored beside it."""
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import command

from data import overlap, scoring
from data.loader import TextSettings
from data.scoring import check_scores, other_texts, scored_text
from data.shards import ShardError, find_shards, open_shard, write_shard


@pytest.fixture
def texts(tmp_path):
    """Two training shards and a validation shard of few different tokens, with a copied passage."""
    random = np.random.default_rng(1)
    training, validation = (random.integers(0, 30, size).astype(np.uint16) for size in (3000, 800))
    training[random.choice(3000, 60)] = validation[random.choice(800, 20)] = 256
    validation[100:160] = training[500:560]
    shards = {"train_000000": training[:1500], "train_000001": training[1500:], "val_000000": validation}
    for name, tokens in shards.items():
        write_shard(tmp_path / f"{name}.bin", tokens)
    return tmp_path, shards


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 13, 50])
def test_ngrams_are_found_as_by_a_plain_search(texts, n, monkeypatch):
    """Also across the pieces that the shards are read in; an n-gram never spans two documents."""
    monkeypatch.setattr(overlap, "PIECE", 200)
    folder, shards = texts

    def ngrams(tokens) -> dict[int, tuple]:
        windows = {i: tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)}
        return {i: window for i, window in windows.items() if 256 not in window[1:]}

    training = {*ngrams(shards["train_000000"]).values(), *ngrams(shards["train_000001"]).values()}
    expected = [i for i, window in ngrams(shards["val_000000"]).items() if window in training]
    found = overlap.found_in_training(shards["val_000000"], find_shards(folder, "train"), n, 256)
    assert found.tolist() == expected and (expected or n == 50)
    inside = np.zeros(800, bool)
    for start in expected:
        inside[start:start + n] = True
    assert (overlap.lies_in(found, n, 800) == inside).all()


def test_the_start_of_a_document_is_found_or_named(texts):
    """A wrong one would give other figures, since n-grams would span documents."""
    folder, _ = texts

    def said(*words: str) -> str:
        result = command(str(folder), *words, program=overlap.main)
        return result.stdout or result.stderr

    assert said() == said("--document_start", "256") != said("--document_start", "7") and "13 " in said()
    assert "--document_start 50256: no shard holds it; leave it out for the largest id, 256\n" in said(
        "--document_start", "50256")
    write_shard(folder / "train_000002.bin", np.arange(100, dtype=np.uint16))
    assert "the largest ids of the shards are 99, 256: " in said()
    assert said("--document_start", "256").startswith("  n ")


def test_the_two_parts_of_the_validation_text_add_up(texts, config, monkeypatch):
    folder, _ = texts
    settings = replace(TextSettings.of(config), folder=str(folder))
    size = (700, 256, 64)
    assert list(other_texts(settings, (), *size, 1)) == []                   # not marked yet
    done = command(str(folder), "--document_start", "256", "--tokens", "700", program=overlap.main)
    assert [row.split()[0] for row in done.stdout.splitlines()[1:]] == ["3", "5", "8", "13", "50"]
    whole, parts = scored_text("val", settings, *size), list(other_texts(settings, (), *size, 1))
    assert [text.name for text in parts] == ["val repeated", "val new"]
    assert sum(text.tokens for text in parts) == whole.tokens == 700 and 40 < parts[0].tokens < 400
    for i, batch in enumerate(whole.batches):
        scored = [text.batches[i].targets for text in parts]
        assert torch.equal(torch.maximum(*scored), batch.targets) and (torch.minimum(*scored) == -1).all()
        assert all(torch.equal(text.batches[i].tokens, batch.tokens) for text in parts)
    for marks, name in ((np.zeros(701, bool), "val new"), (np.ones(701, bool), "val repeated")):
        with monkeypatch.context() as patch:                # Where one of them is empty it is not scored.
            patch.setattr(scoring, "marked_tokens", lambda *_: marks)
            assert [text.name for text in other_texts(settings, (), *size, 1)] == [name]
    write_shard(folder / "train_000001.bin", np.full(9, 256, np.uint16))    # The marks are of other shards.
    overlap.fingerprint.cache_clear()
    assert list(other_texts(settings, (), *size, 1)) == []


def test_other_texts_are_scored_where_they_lie(shards, tmp_path, config):
    settings = TextSettings.of(config)
    tokens = open_shard(find_shards(shards, "val")[0])
    write_shard(tmp_path / "val_000000.bin", tokens[:500])
    (text,) = other_texts(settings, (f"mine={tmp_path}:400", "gone:100"), 700, 256, 64, 1)
    assert text.name == "mine" and text.tokens == 400 and len(text.sha256) == 64
    scored = torch.cat([batch.targets[batch.targets >= 0] for batch in text.batches])
    assert scored.tolist() == tokens[1:401].tolist()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 700),
                                    lambda path: path.write_bytes(b"")])
def test_another_text_that_goes_during_a_run_does_not_cost_it(shards, tmp_path, config, capsys, damage):
    for name in ("mine", "lost"):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "val_000000.bin", open_shard(find_shards(shards, "val")[0])[:500])
    wanted = [f"{name}={tmp_path / name}:400" for name in ("lost", "mine")]
    check_scores(wanted)
    damage(tmp_path / "lost" / "val_000000.bin")
    (text,) = other_texts(TextSettings.of(config), wanted, 700, 256, 64, 1)
    assert text.name == "mine"
    assert capsys.readouterr().err.startswith("WARNING: --score lost was left out: ")


@pytest.mark.parametrize("wanted, message", [
    ("clean", "write name=FOLDER:TOKENS"), ("clean:many", "write name=FOLDER:TOKENS"), (":5", "write name="),
    ("val=x:5", "write name=FOLDER:TOKENS"), ("a=gone:5", "no val shards"),
    ("a={folder}:9000000", "validation tokens, at most"),
])
def test_texts_that_cannot_be_scored_are_refused_before_the_run(shards, wanted, message):
    with pytest.raises(ShardError, match=message):
        check_scores((wanted.format(folder=shards),))
