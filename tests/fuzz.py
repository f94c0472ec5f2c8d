"""Mutated logs, records, shards, models and checkpoints: none may end in anything but an error of one line.

    python -m tests.fuzz [N]        N of each kind, 10,000 if it is not given; tests/test_hostile.py tries 200

Each starts as a whole file. Bytes are flipped, cut out, doubled or replaced, or a value of its JSON becomes
another one that somebody might send: a huge number, a text with markup, a deep list.
"""
import contextlib
import copy
import functools
import gzip
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import train_gpt
from data import peek
from data.errors import DataError
from data.loader import Loader, StepShape, TextSettings
from data.shards import Manifest, publish, write_shard
from kernels.ranks.collectives import Collectives
from kernels.ranks.world import World
from records.run import checkpoint, weights
from records.run.settings import UserError
from records.tools import check, pool, record, watch
from records.tools.logs import read_log
from records.tools.report import html_page
from records.tools.schema import RecordError
from tests.synthetic import MadeUp, foreign_log, made_up_lines
from use import model

EVIL = [
    None, True, -1, 0, 10 ** 9, 10 ** 30, 1e308, -1e308, float("nan"), float("inf"), "", "x" * 5000,
    "\x1b[2J\x07", "../../../x",
    "<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "$\\frac{1}$", "\ud800", "--output=x",
    "a\nb | c <!-- /records -->", [], {}, [[]], [1, "2", None], {"": {"": {}}}, {"steps": 10 ** 9},
    ["\x1b[31m"] * 3, [{"a": 1}] * 2,
]


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four changes of bytes, anywhere or in the first 200."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, rng.choice([len(data), min(len(data), 200)])))
        length = rng.choice([1, 1, 2, 4, 30, 1000])
        match rng.randrange(5):
            case 0:
                data[at:at + 1] = bytes([(data[at:at + 1] or b"\0")[0] ^ 1 << rng.randrange(8)])
            case 1:
                del data[at:at + length]
            case 2:
                data[at:at] = data[at:at + length]
            case 3:
                data[at:at + length] = rng.randbytes(length)
            case 4:
                del data[at:]
    return bytes(data)


def mutated_json(tree: object, rng: random.Random) -> object:
    """A copy in which one value, at any depth, is an evil one, has another name, or is gone."""
    tree = copy.deepcopy(tree)
    place, key = tree, rng.choice(list(tree))
    while isinstance(place[key], dict) and place[key] and rng.random() < 0.7:
        place, key = place[key], rng.choice(list(place[key]))
    match rng.randrange(6):
        case 0:
            del place[key]
        case 1:
            place[str(rng.choice(EVIL))] = place.pop(key)
        case 2 if isinstance(place[key], list) and place[key]:
            place[key][rng.randrange(len(place[key]))] = rng.choice(EVIL)
        case _:
            place[key] = rng.choice(EVIL)
    return tree


def mutated_log(rng: random.Random) -> bytes:
    lines = [*LINES, {"kind": "stopped", "step": 3, "reason": "\x1b[31m loss is nan"}] if rng.random() < 0.1 \
        else list(LINES)
    if rng.random() < 0.7:
        for _ in range(rng.randint(1, 2)):
            at = rng.choice([0, 0, len(lines) - 1, rng.randrange(len(lines))])
            lines[at] = mutated_json(lines[at], rng)
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return mutated_bytes(text, rng) if rng.random() < 0.4 else text


LINES = made_up_lines("fuzzed", 1, MadeUp(steps=12))


def use_log(path: Path) -> None:
    """What the tools do with one log: picture, statistics, clock, and what a record says of it."""
    run = read_log(path)
    watch.picture(run, None)
    pool.summary_text(pool.summarize([run]))
    if not run.foreign:
        check.check_clock(run)
        record.record_data([run], {"title": "t", "date": "2026-11-21", "contributors": [], "parent": None,
                                   "commit": "0" * 40})


def fuzz_log(folder: Path, rng: random.Random) -> None:
    text = mutated_log(rng)
    packed = rng.random() < 0.2
    path = folder / ("log.jsonl.gz" if packed else "log.jsonl")
    if packed:
        text = gzip.compress(text, 1)
        text = mutated_bytes(text, rng) if rng.random() < 0.5 else text
    path.write_bytes(text)
    use_log(path)


def fuzz_foreign_log(folder: Path, rng: random.Random) -> None:
    path = foreign_log(folder, "a")
    path.write_bytes(mutated_bytes(path.read_bytes(), rng))
    use_log(path)


def fuzz_record(folder: Path, rng: random.Random) -> None:
    """record.json beside whole logs, and logs with another header, checked and shown on a page."""
    place = folder / "2026-11-21_fuzzed"
    (place / "runs").mkdir(parents=True, exist_ok=True)
    lines = list(LINES)
    if rng.random() < 0.5:
        lines[0] = mutated_json(lines[0], rng)
    log = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (place / "runs" / "a.jsonl.gz").write_bytes(gzip.compress(log, 1))
    (place / "record.json").write_text(json.dumps(mutated_json(RECORD, rng)))
    (place / "README.md").write_bytes(mutated_bytes(b"# T\n\n## What changed\n\n`a` <b>\n", rng))
    one = record.load(place)
    check.check(place)
    if rng.random() < 0.01:     # Pictures take a second.
        assert "<script" not in html_page([one]) and "onerror" not in html_page([one]).split("<")


RECORD = {
    "schema": 2, "title": "T", "date": "2026-11-21", "contributors": ["a"], "parent": None,
    "hardware": ["NVIDIA H200"], "driver": "580", "versions": {"torch": "2.13"}, "commit": "0" * 40,
    "preset": "made-up", "sources": "x", "target": 3.28, "seeds": [1], "mean_loss": 3.2,
    "standard_deviation_loss": None, "mean_time_s": 1.0,
    "standard_deviation_time_s": None, "p_value": None,
    "runs": [{"log": "runs/a.jsonl.gz", "sha256": "x", "seed": 1, "loss": 3.2, "time_s": 1.0}],
}


def fuzz_shard(folder: Path, rng: random.Random) -> None:
    """A mutated shard, looked into and loaded as a training run does; sometimes its manifest instead."""
    place = folder / "shards"
    mutate_one(place, make_shards, rng)
    if rng.random() < 0.5:
        (place / "manifest.json").unlink()
    Manifest(place).changed()
    shards, bos = peek.open_all([place / "train_000000.bin"])
    peek.table(shards), peek.histogram(shards[0].lengths), peek.schedule_fit(shards[0].lengths, 4000, bos)
    text = TextSettings(str(place), 257, 320, 256, 3, bool(rng.randrange(2)), rng.choice([0, 16]), 2, 0)
    list(Loader(text, [StepShape(512, 128, 0)] * 3, 0, 1, None).batches(2))


def make_shards(place: Path) -> None:
    (place / "new").mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, 256, 4000)
    tokens[::90] = 256
    write_shard(place / "new" / "train_000000.bin", tokens)
    write_shard(place / "new" / "val_000000.bin", tokens[:2000])
    publish(place / "new", place)


def mutate_one(place: Path, make: Callable[[Path], None], rng: random.Random) -> None:
    """Bring a folder back to what `make` wrote into it, and change one of its files."""
    if place not in ORIGINALS:
        make(place)
        ORIGINALS[place] = {p.name: p.read_bytes() for p in place.iterdir() if p.is_file()}
    for name, contents in ORIGINALS[place].items():
        (place / name).write_bytes(contents)
    name = rng.choice([name for name in ORIGINALS[place] if not name.endswith(".md")])
    contents = ORIGINALS[place][name]
    if name.endswith(".json") and rng.random() < 0.5:
        contents = json.dumps(mutated_json(json.loads(contents), rng)).encode()
    else:
        contents = mutated_bytes(contents, rng)
    (place / name).write_bytes(contents)


@functools.cache
def tiny_trainer(**changes: object) -> SimpleNamespace:
    """As much of a trainer as is saved: a model and its optimizer, after a step that wrote some rows."""
    config, world = replace(TINY, **changes), World()
    gpt = train_gpt.GPT(config, CPU, Collectives(1))
    optimizer = train_gpt.Optimizer(gpt, config, world)
    table = optimizer.shards["n-gram table"].table
    table.weight[::9], table.last[::9] = 1.0, 1.0
    return SimpleNamespace(config=config, model=gpt, optimizer=optimizer, world=world,
                           schedule=train_gpt.Schedule(config))


@torch.no_grad()
def make_model(place: Path) -> None:
    report = SimpleNamespace(rank=0, losses=[1.0], tokens=1, clock=SimpleNamespace(seconds=1.0),
                             validation_loss=1.0, scores={})
    with contextlib.redirect_stdout(None):
        weights.save_model(tiny_trainer(save=str(place)).model, report, train_gpt.RunLog("", False))


def fuzz_model(folder: Path, rng: random.Random) -> None:
    mutate_one(folder / "model", make_model, rng)
    saved = model.load(folder / "model", CPU, **model.PLAIN)
    model.vocabulary_of(saved.facts, None)
    if saved.written:
        saved.written(torch.arange(20))


@torch.no_grad()
def make_checkpoint(place: Path) -> None:
    trainer = tiny_trainer(checkpoint=str(place.parent), checkpoint_every=1)
    with checkpoint.Keeper(trainer, train_gpt.RunLog("", False)) as keeper:
        keeper.after(1)         # of two for Adam, so that there are gradients as well


def fuzz_checkpoint(folder: Path, rng: random.Random) -> None:
    mutate_one(folder / "step-0000001", make_checkpoint, rng)
    checkpoint.restore(tiny_trainer(), checkpoint.find(replace(TINY, resume=str(folder))))


CPU = torch.device("cpu")
TINY = train_gpt.parse("--preset cpu --width 32 --head_dim 16 --qk_dim 16 --ngram_rows 1024 --window_block 4 "
                       "--data_path x --attention plain --compile false".split())[0]
ORIGINALS: dict[Path, dict[str, bytes]] = {}
KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "logs": fuzz_log, "foreign logs": fuzz_foreign_log, "records": fuzz_record, "shards": fuzz_shard,
    "models": fuzz_model, "checkpoints": fuzz_checkpoint,
}


def fuzz(kind: str, folder: Path, seeds: range) -> tuple[int, dict[int, BaseException]]:
    """How many were refused, and by seed the errors that were not of one line."""
    refused, broken = 0, {}
    for seed in seeds:
        try:
            KINDS[kind](folder, random.Random(f"{kind} {seed}"))
        except (RecordError, DataError, UserError) as error:
            refused += 1
            if "\n" in str(error):
                broken[seed] = error
        except Exception as error:
            broken[seed] = error
    return refused, broken


def main() -> int:
    count, failed = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, 0
    for kind in KINDS:
        begin = time.time()
        with tempfile.TemporaryDirectory() as folder:
            refused, broken = fuzz(kind, Path(folder), range(count))
        print(f"{kind}: {count:,} mutated, {refused:,} refused in one line, {len(broken)} broke a tool, "
              f"{time.time() - begin:.0f} s")
        for seed, error in list(broken.items())[:20]:
            print(f"  seed {seed}: {type(error).__name__}: {str(error)[:200]}")
        failed += len(broken)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
