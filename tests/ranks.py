"""Trials of ranks that fail in a whole run, too slow for the suite: `python -m tests.faults processes`.

Each runs on gloo, and by NCCL and by copies where there are two GPUs. Started by torchrun, this file is the
run itself: `ranks.py PLACE ACTION RANK settings` does ACTION on RANK once it comes to PLACE.
"""
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, environment, left_in_memory, read_of_process

import train_gpt
from kernels.ranks import collectives, copies, world
from kernels.ranks.watchdog import Watchdog
from records.run.log import RunLog

RECOVERY, LIMIT = 30, 200       # seconds within which all ranks have to end, and a whole run
PATIENCE, HANG = timedelta(seconds=30), 5.0         # for a rank that hangs: not ten minutes, and not one
# Few kinds of steps and few collectives, because ranks of many runs at once take turns on a GPU.
SHORT = [*TINY, *"--micro_batches 2 --adam_every 1 --steps 4 --extra_steps 1 --final_windows 5,11".split()]
TORCHRUNS = 'Traceback (most recent call last):\n  File "<frozen runpy>"'        # its own, when a rank fails
PLACES = {"warm-up": (train_gpt.Trainer, "warm_up"), "capture": (train_gpt.Trainer, "capture"),
          "steps": (train_gpt.Trainer, "step"), "validation": (train_gpt.Trainer, "validate"),
          "gloo": (collectives.Collectives, "reduce_scatter"),
          "nccl": (collectives.Collectives, "reduce_scatter"),
          "copies": (copies.PeerCopies, "reduce_scatter"), "log": (RunLog, "write"),
          "update": (train_gpt.Optimizer, "step"), "check": (train_gpt.Optimizer, "check_ranks")}
WAYS = {"gloo": [], "nccl": ["--peer_copies", "false"], "copies": []}      # how the ranks send


# ---- The run that is disturbed

def fail(action: str, where: object) -> None:
    """`where` is what the disturbed method belongs to: a trainer, an optimizer, …"""
    # This rank may come to the warm-up before rank 0 has a log.
    while not any(log.stat().st_size for log in Path(os.environ["RUNS_PATH"]).glob("2*/log.jsonl")):
        time.sleep(0.1)
    print(f"\nfault at {time.time()}", file=sys.stderr, flush=True)
    optimizer = getattr(where, "optimizer", where)
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang" | "wait":
            time.sleep(600)
        case "memory":
            if where.world.device.type == "cuda":
                torch.empty(1 << 50, device=where.world.device)     # a million GB
            raise torch.OutOfMemoryError("out of memory")
        case "mistake":
            raise ValueError("a mistake")
        case "nan weight":
            optimizer.shards["mlp"].own_weights.fill_(torch.nan)
        case "nan row":
            optimizer.shards["n-gram table"].table.weight.fill_(torch.nan)
        case "nan gradient":
            optimizer.small_grads.fill_(torch.nan)
        case "bit":             # of a group that every rank updates by itself, so that no gather repairs it
            [shard, *_] = (shard for shard in optimizer.shards.values() if shard.group.replicated)
            shard.all_weights.view(torch.uint8)[2] ^= 64
        case "gathered bit":
            optimizer.shards["mlp"].all_weights.view(-1).view(torch.uint8)[2] ^= 64


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
    if action in ("hang", "wait"):
        world.PATIENCE = collectives.PATIENCE = copies.PATIENCE = PATIENCE
        # Without a limit for hangs it is the collective that gives up.
        world.Watchdog = (partial(Watchdog, hang=HANG) if action == "hang" else
                          lambda rank, size, _: Watchdog(rank, size, patience=inf, hang=inf))
    if os.environ["RANK"] == rank:
        disturb(place, action)
    return train_gpt.main(settings)


# ---- The trials

def launch(folder: Path, way: str, *arguments: str, port: int = 0,
           inside: tuple[str, ...] = ()) -> tuple[int, str, float]:
    """torchrun with two ranks: its status, what they said, and the seconds from the fault to the end.

    Behind it no process of the run is alive, its port is free, and its log holds whole lines. `inside` is a
    command that runs torchrun.
    """
    devices = "" if way == "gloo" else os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    variables = environment(RUNS_PATH=str(folder), CUDA_VISIBLE_DEVICES=devices, PYTHONFAULTHANDLER="1",
                            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    port, memory = port or free_port(), set(os.listdir("/dev/shm"))
    words = ["--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}", __file__, *arguments,
             "--preset", "cpu", *SHORT, "--attention", "plain", "--compile", "false", *WAYS[way]]
    running = subprocess.Popen([*inside, sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables, text=True)
    try:
        found, _ = running.communicate(timeout=LIMIT)
        ended = time.time()
    except subprocess.TimeoutExpired:
        end(folder, signal.SIGABRT)     # By which Python says where it stands.
        time.sleep(5)
        end(folder, signal.SIGKILL)
        found, _ = running.communicate(timeout=30)
        raise AssertionError(f"it is not over after {LIMIT} s: {found}") from None
    finally:
        left = end(folder, signal.SIGKILL)
    assert not left and not (files := left_in_memory(memory)), (left, files, found)
    socket.create_server(("127.0.0.1", port)).close()
    since = [float(line.split()[-1]) for line in found.splitlines() if line.startswith("fault at")]
    return running.returncode, found, ended - since[0] if since else 0.0


def free_port() -> int:
    """One that the system gives to nobody who asks for any: other runs start beside this one."""
    port = random.SystemRandom().randrange(20_000, 32_000)
    socket.create_server(("127.0.0.1", port)).close()
    return port


def end(folder: Path, number: signal.Signals) -> list[int]:
    """Send this to the processes that are alive and write their logs into this folder; returns them."""
    left = processes_of(folder)
    for process in left:
        os.kill(process, number)
    return left


def processes_of(folder: Path) -> list[int]:
    """Those that are alive and write their logs into this folder."""
    mark = f"RUNS_PATH={folder}\0".encode()
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ")
            if mark in read_of_process(path)]


def last_line(folder: Path) -> dict:
    """Of the log of the one run in `folder`, all of whose lines are whole."""
    [log] = folder.glob("2*/log.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()][-1]


@pytest.fixture(params=WAYS)
def way(request) -> str:
    if request.param != "gloo" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return request.param


GIVES_UP = {"gloo": "has not answered for 30 s", "nccl": "SIGABRT", "copies": "waited too long for a rank"}
FAULTS = [          # where, what, on which rank, and a pattern of what is said
    *((place, "kill", 1, "SIGKILL") for place in ("warm-up", "capture", "steps", "collective", "validation")),
    *((place, "stop", 1, r"rank 1 \(process ") for place in
      ("warm-up", "capture", "collective", "validation")),
    ("steps", "stop", 0, r"rank 0 \(process "), ("log", "kill", 0, "SIGKILL"),
    ("collective", "hang", 1, r"s for rank 1 \(process "), ("steps", "hang", 0, r"s for rank 0 \(process "),
    ("validation", "hang", 1, r"s for rank 1 \(process "), ("collective", "wait", 1, GIVES_UP),
    ("steps", "memory", 1, "train_gpt.py: rank 1: .*out of memory"), ("steps", "mistake", 1, "a mistake"),
]
TRIALS = [(way, *fault) for way in WAYS for fault in FAULTS if (way, fault[0]) != ("gloo", "capture")]


@pytest.mark.parametrize("way, place, action, rank, said", TRIALS, indirect=["way"],
                         ids=["-".join(map(str, trial[:4])) for trial in TRIALS])
def test_a_rank_that_fails_ends_all(way, shards, tmp_path, record_property, place, action, rank, said):
    """In time, with a line that says which and why; the log says `stopped`, unless rank 0 is killed.

    NCCL kills a process in which a collective has waited for too long.
    """
    flags, said = ["--data_path", str(shards)], said[way] if action == "wait" else said
    if place == "collective":           # A replayed graph would not come by the place.
        place, flags = way, [*flags, "--capture", "false"]
    record_property("seconds", all_end(tmp_path, way, place, action, rank, said, *flags))


NUMBERS = [         # where, what, and what is said
    ("steps", "nan weight", "train_gpt.py: step 2: the training loss is nan"),
    ("steps", "nan row", "train_gpt.py: step 2: the training loss is nan"),
    ("update", "nan gradient", "train_gpt.py: (rank 1: )?step 3: the training loss is nan"),
    ("steps", "bit", "group 'scalars' of rank 0, 1 differ"),
    ("check", "gathered bit", "group 'mlp' of rank 0, 1 differ"),
]


@pytest.mark.parametrize("place, action, said", NUMBERS, ids=[action for _, action, _ in NUMBERS])
def test_numbers_of_one_rank(way, shards, tmp_path, place, action, said):
    """A gradient that is nan is noticed by the next step's loss, and so is what it makes of the weights."""
    flags = ["--data_path", str(shards), "--check_ranks", "1", *["--capture", "false"] * (place == "update")]
    all_end(tmp_path, way, place, action, 1, said, *flags)


def all_end(folder: Path, way: str, place: str, action: str, rank: int, said: str, *flags: str) -> float:
    """Returns the seconds from the fault to the end."""
    status, found, seconds = launch(folder, way, place, action, str(rank), *flags)
    assert status != 0 and re.search(said, found) and seconds > 0, found
    # A rank is watched for a hang only inside its steps. Elsewhere it has as long as a collective.
    waits = PATIENCE.total_seconds() if action == "wait" or (place, action) == ("validation", "hang") else 0
    assert seconds < RECOVERY + waits, f"{seconds:.1f} s\n{found}"
    assert ("Traceback" in found.replace(TORCHRUNS, "")) == (action == "mistake"), found
    says_so = (rank == 1 or action == "hang") and said != GIVES_UP["nccl"]
    assert (last_line(folder)["kind"] == "stopped") == says_so, found
    return seconds


def test_deterministic_runs_are_equal(way, shards, tmp_path):
    """Two whole runs, by every loss in their logs and every bit of the weights that they save."""
    flags = ["--data_path", str(shards), "--deterministic", "true"]
    for name in "ab":
        status, found, _ = undisturbed(tmp_path / name, way, *flags)
        assert status == 0, found
    losses = [[line["loss"] for line in map(json.loads, log.read_text().splitlines()) if "loss" in line]
              for log in tmp_path.glob("?/2*/log.jsonl")]
    assert len(losses[0]) == 5 + 2 + 1 and losses[0] == losses[1]
    weights = [model.read_bytes() for model in sorted(tmp_path.glob("?/2*/model/*.safetensors"))]
    assert len(weights) == 2 and weights[0] == weights[1]


def undisturbed(folder: Path, way: str, *flags: str, **more: object) -> tuple[int, str, float]:
    return launch(folder, way, "steps", "kill", "none", *flags, **more)


def test_the_next_run_starts_at_once(way, shards, tmp_path):
    """On the port of a run that was killed."""
    flags, port = ["--data_path", str(shards)], free_port()
    status, found, _ = launch(tmp_path / "killed", way, "steps", "kill", "1", *flags, port=port)
    assert status != 0 and "SIGKILL" in found, found
    status, found, _ = undisturbed(tmp_path / "next", way, *flags, port=port)
    assert status == 0 and last_line(tmp_path / "next")["kind"] == "summary", found


# Devices without shared memory, as in a container that was given none.
BARE = """folder=$(mktemp -d) && mount -t tmpfs none "$folder" || exit 1
cp -a /dev/. "$folder" 2> /dev/null
rm -rf "$folder/shm" && mount --move "$folder" /dev && rmdir "$folder" && test ! -e /dev/shm"""
SHARED_MEMORY = {"full": "mount -t tmpfs -o nr_inodes=1 none /dev/shm",
                 "read-only": "mount -t tmpfs -o ro none /dev/shm", "missing": BARE}


@pytest.mark.parametrize("kind", SHARED_MEMORY)
def test_shared_memory_that_takes_no_file(way, shards, tmp_path, kind):
    """A run works without, or says in a line that it cannot start."""
    inside = "unshare", "--mount", "sh", "-c", f'{SHARED_MEMORY[kind]} && exec "$@"', "sh"
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    status, found, _ = undisturbed(tmp_path, way, "--data_path", str(shards), inside=inside)
    refused = "\ntrain_gpt.py: " in f"\n{found}" and "Traceback" not in found.replace(TORCHRUNS, "")
    assert status == 0 or refused and way != "gloo", found


if __name__ == "__main__":
    exit_status = main()
    if exit_status:
        os._exit(exit_status)
