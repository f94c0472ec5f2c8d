"""Trials of ranks that fail in a whole run, too slow for the suite: `python -m tests.faults processes`.

Each runs on gloo, and by NCCL and by copies where there are two GPUs. Started by torchrun, this file is the
run itself: `ranks.py PLACE ACTION RANK settings` does ACTION on RANK once it comes to PLACE.
"""
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, environment

import train_gpt
from kernels.ranks import collectives, world
from kernels.ranks.watchdog import Watchdog
from records.run.log import RunLog

RECOVERY = 30                   # seconds within which all ranks have to end
PATIENCE, HANG = timedelta(seconds=30), 5.0         # for a rank that hangs: not ten minutes, and not one
TORCHRUNS = 'Traceback (most recent call last):\n  File "<frozen runpy>"'        # its own, when a rank fails
PLACES = {"warm-up": (train_gpt.Trainer, "warm_up"), "capture": (train_gpt.Trainer, "capture"),
          "steps": (train_gpt.Trainer, "step"), "validation": (train_gpt.Trainer, "validate"),
          "gloo": (collectives.Collectives, "reduce_scatter"),
          "nccl": (collectives.Collectives, "reduce_scatter"),
          "copies": (collectives.PeerCopies, "reduce_scatter"), "log": (RunLog, "write")}
WAYS = {"gloo": [], "nccl": ["--peer_copies", "false"], "copies": []}      # how the ranks send


# ---- The run that is disturbed

def fail(action: str, trainer: train_gpt.Trainer) -> None:
    # This rank may come to the warm-up before rank 0 has a log.
    while not any(log.stat().st_size for log in Path(os.environ["RUNS_PATH"]).glob("2*/log.jsonl")):
        time.sleep(0.1)
    print(f"\nfault at {time.time()}", file=sys.stderr, flush=True)
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(600)
        case "memory":
            raise torch.OutOfMemoryError("out of memory")
        case "mistake":
            raise ValueError("a mistake")
        case "nan":
            trainer.optimizer.shards["mlp"].weight.fill_(torch.nan)
        case "bit":             # of a group that every rank updates by itself, so that no gather repairs it
            [shard, *_] = (shard for shard in trainer.optimizer.shards.values() if shard.group.replicated)
            shard.weights.view(torch.uint8)[2] ^= 64


def disturb(place: str, action: str) -> None:
    """Change the program: the first call of `place` does `action`; behind the warm-up, unless it is there."""
    def before(owner: type, name: str, do) -> None:
        inner = getattr(owner, name)

        def method(self, *given, **named):
            do(self)
            return inner(self, *given, **named)
        setattr(owner, name, method)

    def once(self) -> None:
        if action not in done and (place in ("warm-up", "capture") or "first step" in done):
            done.add(action)
            fail(action, self)

    done = set()
    before(*PLACES[place], once)
    before(train_gpt.Report, "add", lambda _: done.add("first step"))


def main() -> int:
    place, action, rank, *settings = sys.argv[1:]
    if action == "hang":
        world.PATIENCE = collectives.PATIENCE = PATIENCE
        world.Watchdog = partial(Watchdog, hang=HANG)
    if os.environ["RANK"] == rank:
        disturb(place, action)
    return train_gpt.main(settings)


# ---- The trials

def launch(folder: Path, way: str, *arguments: str) -> tuple[int, str, float]:
    """torchrun with two ranks: its status, what they said, and the seconds from the fault to the end.

    Behind it no process of the run is alive, its port is free, and its log holds whole lines.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    devices = "" if way == "gloo" else os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    variables = environment(RUNS_PATH=str(folder), PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=devices)
    words = ["--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}", __file__, *arguments,
             "--preset", "cpu", *TINY, "--attention", "plain", "--compile", "false", *WAYS[way]]
    memory = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240, env=variables)
    ended = time.time()
    left = [path for path in Path("/proc").glob("[0-9]*/environ")
            if path.exists() and str(folder).encode() in read(path)]
    assert not left and set(os.listdir("/dev/shm")) <= memory, (left, done.stdout)
    socket.create_server(("127.0.0.1", port)).close()
    since = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("fault at")]
    return done.returncode, done.stdout, ended - since[0] if since else 0.0


def read(path: Path) -> bytes:
    """What is in a file of /proc, which may be another user's, or gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def last_line(folder: Path) -> dict:
    """Of the log of the one run in `folder`, all of whose lines are whole."""
    [log] = folder.glob("2*/log.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()][-1]


@pytest.fixture(params=WAYS)
def way(request) -> str:
    if request.param != "gloo" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return request.param


FAULTS = [          # where, what, on which rank, what is said
    *((place, "kill", 1, "SIGKILL") for place in ("warm-up", "capture", "steps", "collective", "validation")),
    *((place, "stop", 1, "rank 1 (process ") for place in ("warm-up", "capture", "collective", "validation")),
    ("steps", "stop", 0, "rank 0 (process "), ("log", "kill", 0, "SIGKILL"),
    ("collective", "hang", 1, "s for rank 1 (process "), ("steps", "hang", 0, "s for rank 0 (process "),
    ("validation", "hang", 1, "s for rank 1 (process "),
    ("steps", "memory", 1, "train_gpt.py: rank 1: out of memory"), ("steps", "mistake", 1, "a mistake"),
]


@pytest.mark.parametrize("place, action, rank, said", FAULTS, ids=[f"{a}-{b}-{c}" for a, b, c, _ in FAULTS])
def test_a_rank_that_fails_ends_all(way, shards, tmp_path, record_property, place, action, rank, said):
    """In time, with a line that says which and why; the log says `stopped`, unless rank 0 is killed."""
    if place == "capture" and way == "gloo":
        pytest.skip("nothing is captured on a CPU")
    flags = ["--data_path", str(shards)]
    if place == "collective":           # A replayed graph would not come by the place.
        place, flags = way, [*flags, "--capture", "false"]
    record_property("seconds", all_end(tmp_path, way, place, action, rank, said, *flags))


@pytest.mark.parametrize("action, said", [("nan", "train_gpt.py: step 2: the training loss is nan"),
                                          ("bit", "group 'scalars' of rank 0, 1 differ")])
def test_numbers_of_one_rank(way, shards, tmp_path, action, said):
    all_end(tmp_path, way, "steps", action, 1, said, "--data_path", str(shards), "--check_ranks", "1")


def all_end(folder: Path, way: str, place: str, action: str, rank: int, said: str, *flags: str) -> float:
    """Returns the seconds from the fault to the end."""
    status, found, seconds = launch(folder, way, place, action, str(rank), *flags)
    assert status != 0 and said in found and seconds > 0, found
    # A rank is watched for a hang only inside its steps. Elsewhere it has as long as a collective.
    waits = PATIENCE.total_seconds() if (place, action) == ("validation", "hang") else 0
    assert seconds < RECOVERY + waits, (seconds, found)
    assert ("Traceback" in found.replace(TORCHRUNS, "")) == (action == "mistake"), found
    says_so = rank == 1 or action == "hang"
    assert (last_line(folder)["kind"] == "stopped") == says_so, found
    return seconds


def test_deterministic_runs_are_equal(way, shards, tmp_path):
    """Two whole runs, by every loss in their logs."""
    flags = ["--data_path", str(shards), "--deterministic", "true"]
    for name in "ab":
        status, found, _ = launch(tmp_path / name, way, "steps", "kill", "none", *flags)
        assert status == 0, found
    losses = [[line["loss"] for line in map(json.loads, log.read_text().splitlines()) if "loss" in line]
              for log in tmp_path.glob("?/2*/log.jsonl")]
    assert len(losses[0]) == 8 + 3 + 1 and losses[0] == losses[1]


if __name__ == "__main__":
    exit_status = main()
    if exit_status:
        os._exit(exit_status)
