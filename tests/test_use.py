"""A trained model is saved, read again, sampled, scored and exported."""
import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, command, process, succeeded
from safetensors.torch import load_file

import train_gpt
from data.loader import make_batch
from data.scoring import validation_stream
from data.vocabulary import Bytes
from kernels import ngrams
from records.run import settings, weights
from records.run.log import LogError
from records.run.settings import UserError
from use import export, score
from use import model as use_model
from use import sample as use_sample
from use.cache import Reader
from use.model import PLAIN
from use.sample import choose, sample

CPU = torch.device("cpu")
TRAINED_ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHORTER = [*TINY, "--micro_batches", "2", "--batch_tokens", "128,256,384", "--final_windows", "2,3",
           "--val_window", "4", "--save", "log"]


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """The folder of a tiny model that was trained for 8 steps, in three files, and its run's report."""
    patch, runs = pytest.MonkeyPatch(), tmp_path_factory.mktemp("runs")
    patch.setenv("RUNS_PATH", str(runs))
    patch.setattr(weights, "FILE_BYTES", 300_000)
    config = train_gpt.parse(["--preset", "cpu", *SHORTER, "--data_path", str(shards)])[0]
    report = train_gpt.run(config, train_gpt.World(), time.time())
    patch.undo()
    [folder] = runs.glob("2*/model")
    return folder, report


@pytest.fixture
def saved(trained):
    return use_model.load(trained[0], CPU, **PLAIN)


def all_logits(saved, text: torch.Tensor) -> torch.Tensor:
    """The logits (n, vocabulary) at every token of text (n,), by one forward pass over all its documents."""
    starts = (text == 256).nonzero()[:, 0].tolist()
    sequences = [(text.numpy(), a, b - a) for a, b in zip(starts, [*starts[1:], len(text)])]
    model, ops = saved.model, saved.model.ops
    model.ops = ops._replace(head_loss=lambda x, head, *_, **__: use_model.logits(x, head))
    with torch.no_grad():
        found = model(make_batch(sequences, len(text), len(starts), len(text), 256), saved.step)
    model.ops = ops
    return found


def test_a_saved_model_is_whole_and_holds_only_rows_that_were_written(trained, saved):
    folder, report = trained
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert set(index["weight_map"].values()) == set(files) and len(files) > 1
    tensors = {name: x for file in files for name, x in load_file(folder / file).items()}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    numbers = torch.cat([x for name, x in tensors.items() if "numbers" in name])
    rows = torch.cat([x for name, x in tensors.items() if "rows" in name])
    assert 100 < len(numbers) < 1024 and (numbers.diff() > 0).all() and rows.any(1).all()
    facts = json.loads((folder / "config.json").read_text())
    assert facts["loss"] == report.validation_loss and facts["vocabulary"] == "bytes" and facts["steps"] == 8
    assert facts["written"] == len(numbers) and str(ROOT) not in (folder / "config.json").read_text()
    assert f"{report.validation_loss:.4f}" in (folder / "README.md").read_text()
    config = use_model.config_of(facts, folder)
    assert config.layers == train_gpt.CPU_LAYERS and config.stages[2].batch_tokens == 384
    look_up = saved.model.ops.lookup
    every = look_up(saved.model.ngrams.table, use_model.train_gpt.embedding.unsorted(torch.arange(1024)))
    assert torch.equal(every[numbers.long()], rows) and every.any(1).sum() == len(numbers)


SAVE = """
import re, sys, torch, train_gpt
from kernels.ngrams import table
from records.run import weights
weights.FILE_BYTES, table.PART = 100_000_000, 2 ** 16
flags = ["--preset", "cpu", "--ngram_rows", "1500000", "--steps", "2000", "--save", sys.argv[1]]
config, cpu = train_gpt.parse(flags)[0], torch.device("cpu")
model = train_gpt.GPT(config, cpu, train_gpt.Collectives(1))
model.ngrams.table.data.fill_(1.0)
log = train_gpt.RunLog("", False)
report = train_gpt.Report(log, train_gpt.Clock(cpu), 1, train_gpt.World())
def held(what):
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")       # The peak begins anew.
before = held("VmRSS")
weights.save_model(model, report, log)
print(*weights.prepare(model, train_gpt.Schedule(config)), held("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_saving_takes_no_more_than_a_run_says_before(tmp_path):
    """On the disk and of the host's memory, where all rows of a table of 384 MB were written.

    A part of the table that a real run has looked at goes back to the system at once. The small parts here
    would stay in malloc's heap, up to 60 MB of them, if they were not made to be mapped as large ones are.
    """
    words = sys.executable, "-c", SAVE, str(tmp_path / "model")
    result = succeeded(process(*words, MALLOC_MMAP_THRESHOLD_="1000000"))
    told = r"at most ([\d.]+) GB \(1,500,000 n-gram rows or fewer\), by way of ([\d.]+) GB of .* (\d+)"
    disk, memory, peak = map(float, re.search(told, result.stdout).groups())
    size = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert 0.98 * disk < size / 1e9 < disk + 0.005 and 0.5 * memory < peak / 1e9 < memory + 0.005


def test_a_log_says_how_many_rows_of_the_table_were_read(trained, shards):
    """Against the rows of all batches, hashed once more."""
    config, rows = train_gpt.parse(["--preset", "cpu", *SHORTER, "--data_path", str(shards)])[0], set()
    trainer = train_gpt.Trainer(config, train_gpt.World())
    for step in trainer.schedule:
        for batch in trainer.loader.batches(step.index):
            starts = trainer.model.positions(batch, step)[0].is_start
            index = ngrams.ngram_index_reference(batch.tokens, starts, config.ngrams, config.ngram_rows)
            rows |= set(index.tolist())
    *_, summary = map(json.loads, (trained[0].parent / "log.jsonl").read_text().splitlines())
    assert summary["ngram_rows_read"] == len(rows)


@pytest.mark.parametrize("pieces", [[1] * 120, [85, 1, 1, 12, 2, 19]], ids=["token by token", "pieces"])
def test_reading_on_gives_the_logits_of_one_forward_pass(saved, pieces):
    """At every position: across both windows, at starts of documents and just behind them."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(97, 123, (120,), generator=generator)
    text[torch.tensor([0, 78, 80, 81])] = 256
    for p in saved.model.parameters():      # After so few steps most parts hardly change a logit.
        if not p.is_meta:
            torch.nn.init.normal_(p, std=0.3, generator=generator)
    wanted = all_logits(saved, text)
    reader, found = Reader(saved), []
    first, *others = text[None].split(pieces, 1)
    found.append(reader.read(first))
    reader.spread(2)
    found = [found[0].expand(2, -1, -1), *(reader.read(piece.expand(2, -1)) for piece in others)]
    found = torch.cat(found, 1)
    for sample_logits in found:
        torch.testing.assert_close(sample_logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_model_without_ngrams_reads_on(config, tmp_path):
    save_untrained(replace(config, ngrams=()), tmp_path / "model")
    saved, text = use_model.load(tmp_path / "model", CPU, **PLAIN), torch.tensor([256, 97, 98, 99, 97])
    wanted, reader = all_logits(saved, text), Reader(saved)
    found = torch.cat([reader.read(piece) for piece in text[None].split(2, 1)], 1)[0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["bounded", "varlen", "flash4"])
def test_a_model_from_a_machine_with_another_attention(trained, tmp_path, shards, backend):
    shutil.copytree(trained[0], tmp_path / "model")
    change(tmp_path / "model", "config.json",
           lambda data: data.replace(b'"attention": "auto"', b'"attention": "%s"' % backend.encode()))
    assert backend in (tmp_path / "model/config.json").read_text()
    here, there = (use_model.load(folder, CPU) for folder in (trained[0], tmp_path / "model"))
    assert score.score_shards(there, shards, 500) == score.score_shards(here, shards, 500)


@pytest.fixture(scope="module")
def looking_back(shards, tmp_path_factory):
    """The folder of a tiny model with three heads, near matches, a copy head and gates; its run's report."""
    patch, runs = pytest.MonkeyPatch(), tmp_path_factory.mktemp("runs")
    patch.setenv("RUNS_PATH", str(runs))
    words = "--heads 3 --ngrams 2 --near_match 1,3 --copy_channels 16 --attention_gates true"
    words = ["--data_path", str(shards), *words.split()]
    config = train_gpt.parse(["--preset", "cpu", *SHORTER, *words])[0]
    report = train_gpt.run(config, train_gpt.World(), time.time())
    patch.undo()
    [folder] = runs.glob("2*/model")
    return folder, report


def test_a_model_that_looks_back_is_saved_whole(looking_back, shards):
    """Its loss to the last bit; of each token the same as together."""
    folder, report = looking_back
    saved = use_model.load(folder, TRAINED_ON)
    assert score.score_shards(saved, shards, saved.model.config.val_tokens) == report.validation_loss
    text = np.array([256, *([97, 98, 99, 100] * 5), 97])
    saved = use_model.load(folder, CPU, **PLAIN)
    total, count = score.score_documents(saved, [text])
    ends = list(score.score_endings(saved, [(text[:end + 1], 1) for end in range(1, len(text))]))
    assert sum(ends) == pytest.approx(total, rel=1e-5) and count == len(ends)


@pytest.mark.parametrize("pieces", [[1] * 90, [55, 1, 1, 12, 2, 19]], ids=["token by token", "pieces"])
def test_reading_on_looks_back_over_the_whole_document(looking_back, pieces):
    """The probability of some tokens after every position, against a forward pass with each as the target."""
    saved, generator = use_model.load(looking_back[0], CPU, **PLAIN), torch.Generator().manual_seed(2)
    text = torch.randint(97, 101, (90,), generator=generator)
    text[torch.tensor([0, 50, 52, 53])] = 256
    for name, p in saved.model.named_parameters():
        if not p.is_meta:
            torch.nn.init.normal_(p, std=0.3, generator=generator)
    saved.model.copy_head.bias.data.fill_(2.0)
    begins = [*(text == 256).nonzero()[:, 0].tolist(), len(text)]
    batch = make_batch([(text.numpy(), a, b - a) for a, b in zip(begins, begins[1:])], len(text), 4, 90, 256)
    model, ops, wanted = saved.model, saved.model.ops, {}
    model.ops = ops._replace(head_loss=score.token_losses)
    with torch.no_grad():
        for token in (97, 98, 99, 100, 5):
            wanted[token] = -model(batch._replace(targets=torch.full_like(batch.targets, token)), saved.step)
    model.ops = ops
    reader, found = Reader(saved), []
    first, *others = text[None].split(pieces, 1)
    found.append(reader.read(first))
    reader.spread(2)
    found = torch.cat([found[0].expand(2, -1, -1), *(reader.read(x.expand(2, -1)) for x in others)], 1)
    for log_p in found.log_softmax(2):
        for token, expected in wanted.items():
            torch.testing.assert_close(log_p[:, token], expected, atol=1e-4, rtol=1e-4)
    assert (wanted[97] - wanted[5]).abs().max() > 1     # where the copy head speaks


def test_a_long_prompt_is_read_in_pieces(saved, trained, monkeypatch):
    text = torch.cat([torch.tensor([256]), torch.randint(97, 123, (90,))])
    wanted = all_logits(saved, text)
    monkeypatch.setattr("use.cache.PIECE", 16)
    torch.testing.assert_close(Reader(saved).read(text[None])[0], wanted, atol=1e-4, rtol=1e-4)


def test_a_sample_keeps_no_logits_of_its_prompt(trained, saved, monkeypatch):
    prompt, read, most = Bytes().encode(b"some words" * 9), Reader.read, []
    expected = [int(token) for token in sample(saved, prompt, 3, 1, 0, temperature=0.0)]

    def counted(reader, tokens):
        most.append(tokens.shape[1])
        return read(reader, tokens)
    monkeypatch.setattr(Reader, "read", counted)
    monkeypatch.setattr(use_sample, "PIECE", 16)
    again = sample(use_model.load(trained[0], CPU, **PLAIN), prompt, 3, 1, 0, temperature=0.0)
    assert [int(token) for token in again] == expected and most == [16] * 5 + [11, 1, 1]


def texts(folder, seed: int, **how) -> list[list[int]]:
    """The tokens of three samples."""
    saved = use_model.load(folder, CPU, **PLAIN)
    return torch.stack(list(sample(saved, Bytes().encode(b"ab"), 12, 3, seed, **how)), 1).tolist()


def test_samples_follow_the_seed(trained):
    once, likeliest = texts(trained[0], 0), texts(trained[0], 0, temperature=0.0)
    assert once == texts(trained[0], 0) != texts(trained[0], 1) and once[0] != once[1]
    assert likeliest == texts(trained[0], 5, top_k=1) == texts(trained[0], 6, top_p=1e-6)


def test_a_sample_ends_with_its_document(trained, monkeypatch):
    told = iter(torch.tensor([[97, 256, 98], [256, 97, 98], [97, 97, 256], [97, 97, 97]]))
    monkeypatch.setattr("use.sample.choose", lambda *_: next(told))
    assert texts(trained[0], 0) == [[97, 256, 256], [256, 256, 256], [98, 98, 256]]


def test_top_k_and_top_p():
    generator, logits = torch.Generator().manual_seed(0), torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    def seen(*how) -> set[int]:
        return {int(choose(logits, *how, generator)) for _ in range(200)}
    assert seen(1.0, 0, 1.0) == {0, 1, 2, 3} and seen(1.0, 3, 1.0) == {1, 2, 3}
    assert seen(1.0, 0, 0.5) == {1, 2}
    assert seen(1.0, 0, 0.4) == seen(0.0, 0, 1.0) == seen(0.01, 0, 1.0) == {1}


def save_untrained(config, folder) -> None:
    """The folder of a model of two micro-batches that no step has trained."""
    config = settings.change(replace(config, save=str(folder)), micro_batches=2)
    model = train_gpt.GPT(config, CPU, train_gpt.Collectives(1))
    log = train_gpt.RunLog("", False)
    weights.save_model(model, train_gpt.Report(log, train_gpt.Clock(CPU), 1, train_gpt.World()), log)


def test_the_export_knows_every_setting_of_the_model():
    """`use/modeling_speedrun.py` is the model once more, and would not know a setting that is new.

    Who adds one brings it there and into `use/export.py`, or sees that it changes no exported model, tests a
    value of it that is not the default, and then adds its name here.
    """
    names = [field.name for field in fields(train_gpt.Config)]
    exported = ("layers width heads head_dim qk_dim attention_scale rotary_share rotary_base yarn ngrams "
                "ngram_rows value_embeddings gate_channels smear key_offset attention_gates backout "
                "late_input copy_channels")
    others = "ngram_classes near_match retrieval states canonical softmax_tokens"
    model = names[names.index("layers"):names.index("stages")]
    assert {*model} == {*exported.split(), *others.split()}


def test_saving_and_exporting_touch_nothing_else(config, tmp_path, monkeypatch):
    """Folders with like names are the user's. An older model goes; what fails leaves nothing behind."""
    (tmp_path / "plain").mkdir()
    for name in ("model.old", "model.part", "out.old", "out.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    before = sorted(path.name for path in tmp_path.iterdir())
    for _ in range(2):
        save_untrained(config, tmp_path / "model")
        (tmp_path / "model/older").touch()
    save_untrained(config, tmp_path / "model")
    assert not (tmp_path / "model/older").exists()
    saved = use_model.load(tmp_path / "model", CPU, **PLAIN)
    export.export(saved, tmp_path / "out", False, None, 0)
    after = sorted([*before, "model", "out"])
    assert sorted(path.name for path in tmp_path.iterdir()) == after
    assert all((tmp_path / name / "mine").exists() for name in before if name != "plain")
    assert len({(tmp_path / name).stat().st_mode for name in ("plain", "model", "out")}) == 1
    (tmp_path / "new").mkdir()
    for wrong in (OSError, KeyboardInterrupt):
        def replace_folder(a, b, rename=os.replace, works=iter([True, False, True]), wrong=wrong) -> None:
            if not next(works):         # the older one, the new one, and the older one back
                raise wrong
            rename(a, b)
        monkeypatch.setattr(weights.os, "replace", replace_folder)
        with pytest.raises(wrong):
            weights.publish(tmp_path / "new", tmp_path / "model")
        monkeypatch.undo()
    (tmp_path / "new").rmdir()
    assert (tmp_path / "model/config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == after
    monkeypatch.setattr(weights.TensorFiles, "flush", lambda _: open("/dev/full", "w").write("x" * 99999))
    with pytest.raises(LogError, match="the disk is full"):
        save_untrained(config, tmp_path / "another")
    with pytest.raises(OSError):
        export.export(saved, tmp_path / "another", False, None, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == after


def change(folder, name: str, edit) -> None:
    path = folder / name
    path.write_bytes(edit(path.read_bytes()))


@pytest.mark.parametrize("name, edit, parts", [
    ("model.safetensors", lambda data: data[:-5], ["model.safetensors: truncated or damaged"]),
    ("model.safetensors", lambda data: data.replace(b"head", b"feet", 1), ["is unknown|is missing"]),
    ("config.json", lambda data: b"{", ["config.json: not JSON", "no folder of a readable-speedrun-model"]),
    ("config.json", lambda data: data.replace(b"readable", b"foreign"), ["another program wrote it"]),
    ("config.json", lambda data: data.replace(b'"version": 1', b'"version": 2'), ["version 2", "up to 1"]),
    ("config.json", lambda data: data.replace(b'"smear"', b'"smudge"'), [r"does not know \(smudge\)"]),
], ids=["truncated", "renamed", "not JSON", "foreign", "newer", "unknown setting"])
def test_a_bad_model_is_refused_in_one_line(tmp_path, config, name, edit, parts):
    save_untrained(config, tmp_path / "model")
    change(tmp_path / "model", name, edit)
    with pytest.raises(UserError) as error:
        use_model.load(tmp_path / "model", CPU, **PLAIN)
    message = str(error.value)
    assert "\n" not in message and all(re.search(part, message) for part in parts), message


@pytest.mark.parametrize("tool, option, value, said", [
    (use_sample, "--temperature", "nan", "--temperature nan: it is 0, or at least 0.001"),
    (use_sample, "--temperature", "1e-320", "it is 0, or at least 0.001"),
    (use_sample, "--seed", "9" * 23, "at least 0 and at most 9,223,372,036,854,775,807"),
    (use_sample, "--samples", "99999999999", "at least 1 and at most 4,096"),
    (use_sample, "--tokens", "99999999999", "at least 1 and at most 1,000,000"),
    (use_sample, "--top-k", "9" * 23, "at least 0 and at most 65,536"),
    (score, "--tokens", "-5", "must be at least 1"),
])
def test_numbers_that_make_no_sense_are_refused(trained, tool, option, value, said):
    result = command(str(trained[0]), f"{option}={value}", program=tool.main)
    assert result.returncode == 2 and said in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [["--temperature", "0.001", "--tokens", "1000000", "--seed", 2 ** 63 - 1],
                                   ["--tokens", "2", "--samples", "4096", "--top-k", "65536"]], ids=str)
def test_the_largest_numbers_that_are_taken(trained, monkeypatch, words):
    ends = iter(range(3))
    monkeypatch.setattr(use_sample, "choose", lambda logits, *how: (
        choose(logits, *how) if next(ends, None) is not None else torch.full([len(logits)], 256)))
    result = command(str(trained[0]), *map(str, words), program=use_sample.main)
    assert "a second, on cpu" in result.stderr


def test_a_sample_from_outside(trained):
    words = ["./run.sh", "sample", "--prompt", "ab", "--tokens", "5", "--samples", "2"]
    result = process(*words, RUNS_PATH=str(trained[0].parent.parent))
    assert result.returncode == 0 and result.stdout.startswith("ab"), result.stderr
    assert "-" * 80 + "\nab" in result.stdout and "10 tokens in" in result.stderr


def test_the_validation_loss_of_a_saved_model_is_that_of_its_run(trained, shards):
    """To the last bit."""
    saved = use_model.load(trained[0], TRAINED_ON)
    assert score.score_shards(saved, shards, saved.model.config.val_tokens) == trained[1].validation_loss


@pytest.mark.parametrize("chunk", [100, 251])
def test_the_public_rule_cuts_at_its_chunks_alone(trained, shards, saved, monkeypatch, chunk):
    """Against single pieces of the text, each scored as a document."""
    tokens = saved.model.config.val_tokens
    monkeypatch.setattr(score, "PUBLIC_CHUNK", chunk)
    text = validation_stream(str(shards), 257, tokens)
    cuts = sorted({0, tokens, *range(0, tokens, chunk), *np.flatnonzero(text[:tokens] == 256)})
    total, count = score.score_documents(saved, [text[a:b + 1] for a, b in zip(cuts, cuts[1:])])
    assert count == tokens and max(np.diff(cuts)) <= saved.model.config.val_sequence_length
    assert score.score_publicly(saved, shards, tokens) == pytest.approx(total / tokens, rel=1e-6)


def test_scores_of_documents_are_those_of_single_tokens(trained, saved):
    """Also where a document is longer than a sequence, and where a batch holds several or is not full."""
    documents = [Bytes().encode(bytes(97 + (7 * i + k) % 26 for i in range(n))) for k, n in
                 enumerate((300, 2, 90, 200, 256, 257, 1))]
    total, count = score.score_documents(saved, documents)
    assert count == sum(len(tokens) - 1 for tokens in documents)
    expected = 0.0
    for tokens in documents:
        tokens = torch.from_numpy(tokens.astype(int))
        for given, wanted in zip(tokens[:-1].split(256), tokens[1:].split(256)):
            logits = Reader(use_model.load(trained[0], CPU, **PLAIN)).read(given[None])[0]
            expected += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
    assert total == pytest.approx(expected, rel=1e-5)


QUESTIONS = [
    {"ctx": "A man opens a book. He", "endings": ["reads.", "flies to the moon and sings.", "eats it", "x"],
     "label": 0, "ind": 4, "activity_label": "Reading"},
    {"query": "Water is", "choices": ["wet", "dry as dust"], "gold": "1"},
    {"question": "Two and two make", "choices": ["four", "five", "six"], "answer": 2}]


def test_multiple_choice_by_the_usual_rule(trained, saved, tmp_path):
    """Against a plain form: the loss of each ending's tokens behind its context, one text at a time."""
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    questions, right, normalised = list(score.read_questions(path)), 0, 0
    for context, endings, label in questions:
        losses = []
        for ending in endings:
            whole, k = Bytes().encode(f"{context} {ending}".encode()), len(ending) + 1
            one = saved.model.ops
            losses.append(score.score_documents(saved, [whole])[0])
            if len(whole) > k + 1:
                losses[-1] -= score.score_documents(saved, [whole[:-k]])[0]
            assert saved.model.ops is one
        right += losses.index(min(losses)) == label
        a_character = [loss / len(ending) for loss, ending in zip(losses, endings)]
        normalised += a_character.index(min(a_character)) == label
    found = score.score_questions(saved, questions, Bytes().encode)
    assert found == (3, right, normalised)
    # U+2028 and others that Unicode takes for ends of lines may stand in a question.
    question = {"ctx": "a\u2028b", "endings": ["c\u0085d", "e"], "label": 1}
    path.write_bytes(b"\r\n" + json.dumps(question, ensure_ascii=False).encode())
    assert list(score.read_questions(path)) == [("a\u2028b", ["c\u0085d", "e"], 1)]
    for line in (b"[]", b"{}", b'{"ctx": "a", "endings": ["b"], "label": 1}', b"no", b"[" * 100_000,
                 b'{"ctx": "caf\xe9", "endings": ["b"], "label": 0}',
                 b'{"ctx": "a", "endings": ["\\ud800"], "label": 0}',
                 b'{"ctx": "a", "endings": ["b"], "label": Infinity}',
                 b'{"ctx": "a", "endings": ["b"], "label": 0.5}',
                 b'{"ctx": "a", "endings": "bc", "label": 1}',
                 b'{"ctx": "a", "choices": {"text": ["b"], "label": ["A"]}, "label": 0}'):
        path.write_bytes(line)
        with pytest.raises(score.DataError, match=r"questions.jsonl:1: no question with ctx, endings, label"):
            list(score.read_questions(path))


def test_an_ending_that_is_longer_than_a_sequence_is_refused(saved):
    """One of 256 tokens, all of a sequence, is scored whole; a longer one would seem likelier than it is."""
    longest = "b" * 255                 # behind a space
    for_it, start = Bytes().encode(f" {longest}".encode()), Bytes().encode(b"some context")
    [found] = score.score_endings(saved, [(np.concatenate([start, for_it[1:]]), 256)])
    assert found == pytest.approx(score.score_documents(saved, [for_it])[0], rel=1e-5)
    assert score.score_questions(saved, [("a", [longest, "c"], 0)], Bytes().encode)[0] == 1
    questions = [("a", ["b", "c"], 0), ("a", ["b", longest + "b"], 1)]
    with pytest.raises(score.DataError, match="question 2: an ending of 257 tokens, .* at most 256 at"):
        score.score_questions(saved, questions, Bytes().encode)


def test_score_as_a_command(trained, shards, tmp_path):
    def run(*words: object) -> tuple[str, str]:
        result = command(*map(str, words), program=score.main)
        return result.stdout, result.stderr

    (tmp_path / "a.txt").write_text("some text\n" * 30)
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    said, _ = run(trained[0], tmp_path / "a.txt", "--hellaswag", tmp_path / "q.jsonl")
    told = r"([\d.]+) nats a token, ([\d.]+) bits a byte \(300 tokens, 300 bytes\)"
    nats, bits = map(float, re.search(told, said).groups())
    assert bits == pytest.approx(nats / math.log(2), abs=1e-3) and "(3 questions)" in said
    (tmp_path / "a.py").write_text("some text\n" * 30)
    (tmp_path / "a\x1b[2J.txt").write_text("some text")
    assert "a\\x1b[2J.txt: " in run(trained[0], tmp_path / "a\x1b[2J.txt")[0]
    other, _ = run(trained[0], tmp_path / "a.py", "--format", "text")
    assert other.replace("a.py", "a.txt").splitlines() == said.splitlines()[:1]
    assert " by the public rule, " in run(trained[0], "--shards", shards, "--public_rule")[0]
    for words, part in (((tmp_path, "x.txt"), "no folder of a readable-speedrun-model"),
                        ((trained[0], "x.txt"), "x.txt: no such file"),
                        ((trained[0],), "nothing to score"),
                        ((trained[0], "x.txt", "--device", "tpu9"), "--device tpu9: ")):
        said, errors = run(*words)
        assert not said and len(errors.splitlines()) == 1 and part in errors


def as_exported(folder, out, *words: str, capsys, monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", ["export", str(folder), "--out", str(out), *words])
    export.main()
    return capsys.readouterr().out


def test_transformers_computes_the_same(trained, tmp_path, capsys, monkeypatch):
    """Logits at every position of a batch of documents, one of which begins behind another; generation."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    saved, out = use_model.load(trained[0], CPU, **PLAIN), tmp_path / "out"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():           # After so few steps most parts hardly change a logit.
        for p in saved.model.parameters():
            if not p.is_meta:
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    assert "it has the" in export.export(saved, out, True, None, 0)
    from transformers import AutoModelForCausalLM
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    text = torch.randint(97, 123, (2, 110), generator=generator)
    text[:, 0] = text[1, 70] = 256
    with torch.no_grad():
        found = theirs(text, labels=text)
    wanted = torch.stack([all_logits(saved, row) for row in text])
    torch.testing.assert_close(found.logits, wanted[..., :257], atol=1e-4, rtol=1e-4)
    expected = torch.nn.functional.cross_entropy(wanted[:, :-1].flatten(0, 1), text[:, 1:].flatten())
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-4)
    written = theirs.generate(text[:1, :20], max_new_tokens=4, do_sample=False)
    reader = Reader(saved)
    after = reader.read(text[:1, :20])
    for token in written[0, 20:]:
        assert token == after[0, -1, :257].argmax()
        after = reader.read(token[None, None])


def test_transformers_computes_a_copy_head_and_gates(looking_back, tmp_path, capsys, monkeypatch):
    """Probabilities at every position, and a gradient. The table, which has rows for guesses, is left out."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    saved, generator = use_model.load(looking_back[0], CPU, **PLAIN), torch.Generator().manual_seed(3)
    model, lookup = saved.model, saved.model.ops.lookup
    model.ops = model.ops._replace(lookup=lambda table, *more: lookup(table, *more) * (not table.is_meta))
    with torch.no_grad():           # Many shares near a half, and keys that differ.
        for p in model.parameters():
            if not p.is_meta:
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
        model.copy_head.bias.fill_(3.0)
        model.copy_head.weight.mul_(8)
    export.export(saved, tmp_path / "out", False, None, 0)
    from transformers import AutoModelForCausalLM
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    text = torch.randint(97, 103, (2, 90), generator=generator)
    text[:, 0] = text[1, 50] = 256
    found = theirs(text, labels=text)
    reader = Reader(saved)
    reader.spread(len(text))
    wanted = reader.read(text).log_softmax(-1)
    torch.testing.assert_close(found.logits, wanted[..., :257], atol=1e-4, rtol=1e-4)
    expected = -wanted[:, :-1].gather(2, text[:, 1:, None]).mean()
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-4)
    found.loss.backward()
    grads = [p.grad for p in theirs.copy_head.parameters()]
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


@pytest.mark.parametrize("changes", [{"ngram_classes": True}, {"near_match": (1,)}], ids=str)
def test_a_table_that_would_be_misread_is_left_out(changes, trained, tmp_path, capsys, monkeypatch):
    """Its file looks up n-grams of tokens; rows by classes or for guesses would be taken for those."""
    def changed(*given, **how):
        saved = use_model.load(*given, **how)
        saved.model.config = replace(saved.model.config, **changes)
        return saved
    monkeypatch.setattr(export, "load", changed)
    said = as_exported(trained[0], tmp_path / "out", capsys=capsys, monkeypatch=monkeypatch)
    assert "was left out" in said


def test_a_long_table_is_left_out_at_a_price_that_is_measured(trained, shards, tmp_path, capsys, monkeypatch):
    said = as_exported(trained[0], tmp_path / "out", "--most", "0", "--shards", str(shards), capsys=capsys,
                       monkeypatch=monkeypatch)
    told = r"is ([\d.]+) nats a token, with the table ([\d.]+)\."
    without, whole = map(float, re.search(told, said).groups())
    plain = use_model.load(trained[0], TRAINED_ON, **PLAIN)
    tokens = plain.model.config.val_tokens
    costs = export.cost_of_leaving(plain, shards, tokens)
    assert costs == pytest.approx((whole, without), abs=1e-3) and costs[0] != costs[1]
    assert costs[0] == pytest.approx(score.score_shards(plain, shards, tokens), abs=1e-4)
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert "head" in names and not [name for name in names if "ngram" in name]
    # Fewer positions than a sequence has tokens, and more than training had: the losses stay the same.
    for positions in (100, 2048):
        out = tmp_path / str(positions)
        again = as_exported(trained[0], out, "--most", "0", "--shards", str(shards), "--positions",
                            str(positions), capsys=capsys, monkeypatch=monkeypatch)
        assert again.replace(str(out), "") == said.replace(str(tmp_path / "out"), "")
        assert len(load_file(out / "model.safetensors")["cos"]) == positions
        assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == positions
    with pytest.raises(SystemExit):
        as_exported(trained[0], tmp_path / "out", capsys=capsys, monkeypatch=monkeypatch)
    assert "exists; choose another --out" in capsys.readouterr().err
