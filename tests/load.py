"""Trials of load, too slow for the suite: `python -m tests.faults load` runs them. Limits are for 2 cores."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, environment, left_in_memory
from synthetic import write_run

from data.shards import write_shard

MANY = 20                       # runs in one process, and processes after one another
STEPS = 2_000_000
# Where there is a GPU, the runs are on it, without a wait for compilers.
DEVICES = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
ON_GPU = {"CUDA_VISIBLE_DEVICES": DEVICES} if torch.cuda.is_available() else {}
FLAGS = ["--preset", "cpu", *TINY, "--attention", "plain", "--compile", "false", "--save", ""]
# Every run of `--runs` prints what the process holds at its end.
RUNS = """
import gc, os, sys, threading
import torch, train_gpt
inner = train_gpt.run
def run(*given):
    report = inner(*given)
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    print("held", pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")),
          threading.active_count(), len(os.listdir("/proc/self/task")), gpu)
    return report
train_gpt.run = run
sys.exit(train_gpt.main(sys.argv[1:]))
"""
SCORE = """
import sys, time
from data.loader import TextSettings
from data.scoring import scored_text
settings = TextSettings(sys.argv[1], 257, 320, 256, 1, True, 0, 1, 0)
text = scored_text("val", settings, int(sys.argv[2]), 65_536, 1024)
print(text.tokens, sum(int((batch.targets >= 0).sum()) for batch in text.batches))
"""


def measured(*words: object, **variables: str) -> tuple[str, float, float]:
    """Run a Python command: what it prints, its seconds, and the most memory it held, in GB."""
    begin = time.monotonic()
    with subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, env=environment(**variables),
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said[-2000:]
    return said, time.monotonic() - begin, used.ru_maxrss * 1024 / 1e9


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """The folder of a run of two million steps, whose log is 330 MB long."""
    folder = tmp_path_factory.mktemp("long")
    # Not in this process: what it ever held would count as its children's.
    subprocess.run([sys.executable, "-m", "tests.synthetic", folder, "--steps", str(STEPS)], cwd=ROOT,
                   env=environment(), check=True)
    return next(folder.glob("2*"))


def test_runs_of_one_process_leave_nothing(shards, tmp_path):
    flags = [*FLAGS, "--data_path", shards, "--runs", MANY]
    said, *_ = measured("-c", RUNS, *flags, RUNS_PATH=str(tmp_path), **ON_GPU)
    held = np.array([line.split()[1:] for line in said.splitlines() if line.startswith("held")], int)
    assert len(held) == MANY and len(list(tmp_path.glob("2*/log.jsonl"))) == MANY
    later = held[4:]                                    # The first runs fill caches.
    assert later[-1, 0] < later[0, 0] + 20e6, f"host memory grows: {held[:, 0].tolist()}"
    assert (later[:, 1:] == later[0, 1:]).all(), f"files, threads or GPU memory grow: {held.tolist()}"


def test_processes_leave_nothing(shards, tmp_path):
    """In shared memory and among temporary files; and each log is whole."""
    temporary, memory = tmp_path / "temporary", {*os.listdir("/dev/shm")}
    temporary.mkdir()
    flags = [*FLAGS, "--data_path", shards]
    found = []
    for _ in range(MANY):
        measured("train_gpt.py", *flags, RUNS_PATH=str(tmp_path / "runs"), TMPDIR=str(temporary),
                 **ON_GPU)
        found.append({*left_in_memory(memory), *temporary.iterdir()})
    logs = [path.read_text().splitlines() for path in (tmp_path / "runs").glob("*/log.jsonl")]
    assert [json.loads(lines[-1])["kind"] for lines in logs] == ["summary"] * MANY
    assert found[-1] == found[0]                        # The first makes the folder of torch's caches.


@pytest.mark.parametrize("words", ["stats", "plot", "watch --once"])
def test_a_log_of_two_million_steps(long_run, tmp_path, words):
    command, *options = words.split()
    out = ["--out", tmp_path] * (command == "plot")
    said, seconds, memory = measured("-m", "records", command, long_run, *options, *out)
    assert seconds < 60 and memory < 2, (seconds, memory)
    assert command != "plot" or (tmp_path / "loss-time.png").stat().st_size > 10_000, said


def test_a_page_of_two_million_steps(long_run):
    """As a record's section of the page has it: four pictures, none of which grows with the steps."""
    code = ("import sys; from records.tools import plots; from records.tools.logs import read_logs\n"
            "figures = plots.figures({'long': read_logs(sys.argv[1:])})\n"
            "print(len(figures), *(len(plots.page_svg(figure, name)) for name, figure in figures.items()))")
    said, seconds, memory = measured("-c", code, long_run)
    count, *sizes = map(int, said.split())
    assert count == 4 and max(sizes) < 400_000 and seconds < 60 and memory < 2, (said, seconds, memory)


def test_a_validation_text_of_100_million_tokens(tmp_path):
    tokens = np.random.default_rng(0).integers(97, 123, 100_000_001, dtype=np.uint16)
    tokens[np.arange(0, len(tokens), 700)] = 256
    write_shard(tmp_path / "val_000000.bin", tokens)
    said, seconds, memory = measured("-c", SCORE, tmp_path, len(tokens) - 1)
    assert said.split() == ["100000000"] * 2 and seconds < 60 and memory < 3, (seconds, memory)


def test_500_folders_of_runs(tmp_path):
    """`watch` finds the newest; `stats` reads them all."""
    for seed in range(500):
        write_run(tmp_path, "short", seed, steps=20)
    for words, found in ((["watch", "--once"], "short"), (["stats", str(tmp_path)], "500 (seeds")):
        said, seconds, memory = measured("-m", "records", "--records", tmp_path / "records", *words,
                                         RUNS_PATH=str(tmp_path))
        assert seconds < 30 and memory < 1 and found in said, (words, seconds, memory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_empty_after_a_run(shards, tmp_path):
    flags = [*FLAGS, "--data_path", shards]
    measured("train_gpt.py", *flags, RUNS_PATH=str(tmp_path), **ON_GPU)
    free = torch.cuda.mem_get_info()[0]
    measured("train_gpt.py", *flags, RUNS_PATH=str(tmp_path), **ON_GPU)
    assert torch.cuda.mem_get_info()[0] >= free - 2 ** 24
