"""A rank that is stopped, gone or hung is noticed by the others, which end; one that has ended is not."""
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, environment

import train_gpt
from data.shards import ShardError
from kernels.ranks.collectives import RankError, with_others
from kernels.ranks.watchdog import Judge, Told, place, progress
from records.run.checkpoint import IN_THREAD, Keeper
from records.run.ending import EXPECTED, exit_status
from records.run.settings import UserError

RANK = """
import sys, time
from kernels.ranks.collectives import RankError, with_others
from kernels.ranks.watchdog import Watchdog
rank = int(sys.argv[1])
watchdog = Watchdog(rank, int(sys.argv[2]), patience=600.0, silence=3.0)
def on_loss(reason):
    print("noted:", reason, flush=True)
    raise OSError("the disk is full")
watchdog.on_loss = on_loss
print("begun", flush=True)
if rank == 2:
    time.sleep(2)
    watchdog.close()
    print("closed", flush=True)
    sys.exit()
time.sleep(60)
"""


@contextmanager
def watching(count: int) -> Iterator[list[subprocess.Popen]]:
    """So many processes that watch each other; a third one ends after two seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=timedelta(seconds=30))
    variables = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    processes = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(count)], cwd=ROOT, text=True,
                                  env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                 for rank in range(count)]
    try:
        assert [process.stdout.readline() for process in processes] == ["begun\n"] * count
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ranks():
    """Two that go on, for the two tests in turn, and one that has ended."""
    with watching(3) as processes:
        assert processes[2].wait(20) == 0 and processes[2].stdout.read() == "closed\n"
        yield processes


def test_ranks_that_were_suspended_go_on(ranks):
    """All stopped for longer than they would wait for one, as by a queue that suspends jobs."""
    for process in ranks[1::-1]:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)             # So the first one has seen the other's last sign of life.
    time.sleep(3)
    for process in ranks[:2]:
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)             # The first one sees the other's old sign of life.
    time.sleep(3)
    assert ranks[0].poll() is None and ranks[1].poll() is None


def test_a_stopped_rank_ends_the_others(ranks):
    time.sleep(4)                   # Longer than the others would wait for the one that has ended.
    assert ranks[0].poll() is None and ranks[1].poll() is None
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert ranks[0].wait(15) == 2
    reason = f"rank 1 (process {ranks[1].pid} on "
    assert f"noted: {reason}" in ranks[0].stdout.read()
    errors = ranks[0].stderr.read()
    assert f"train_gpt.py: {reason}" in errors
    assert "the disk is full" in errors                 # It ends although the log cannot be written.
    assert ranks[1].wait(5) == -signal.SIGKILL


def test_a_lost_rank_that_is_no_more_ends_the_others():
    """Its number is no process's, as where another rank has killed it and its parent has taken note."""
    with watching(2) as ranks:
        ranks[1].kill()
        ranks[1].wait()
        assert ranks[0].wait(20) == 2


HANG = """
import time
from functools import partial
from kernels.ranks import world
from kernels.ranks.collectives import RankError, with_others
from kernels.ranks.watchdog import Watchdog
world.Watchdog = partial(Watchdog, hang=2.0)
ranks = world.World()
ranks.watched(ranks.barrier)
ranks.watched(time.sleep if ranks.rank == 1 else ranks.least, 40)
"""


def test_a_rank_that_hangs_in_a_step_ends_all():
    """Its threads live, but its program has not come as far as the other one's, which waits."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = [subprocess.Popen([sys.executable, "-c", HANG], cwd=ROOT, text=True, stderr=subprocess.PIPE,
                                  env=environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
                                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
                 for rank in range(2)]
    errors = [process.communicate(timeout=30)[1] for process in processes]
    assert re.search(rf"^train_gpt.py: waited \d s for rank 1 \(process {processes[1].pid} on .*\), which "
                     r"stands at kernels/ranks/world.py:\d+ \(watched\)$", errors[0], re.M), errors
    assert processes[0].returncode == 2 and processes[1].returncode != 0 and "waited" not in errors[1]


@pytest.mark.parametrize("ranks, found", [      # of each: its count after t seconds, and whether in a step
    (lambda t: [(t, True), (t, True)], None),
    (lambda t: [(t, True), (min(t, 10), True)], None),                          # The other one goes on.
    (lambda t: [(min(t, 10), True), (min(t, 10), True)], None),                 # Nobody is behind.
    (lambda t: [(min(t, 11), False), (min(t, 10), True)], (72, [1])),
    (lambda t: [(min(t, 10), True), (min(t, 11), True), (min(t, 10), True)], (72, [0, 2])),
    (lambda t: [(min(t, 11), True), (min(t, 10), False)], (552, [1])),          # not in a step
    (lambda t: [(min(t, 10), True), (min(t, 11), True), (min(t, 10), False)], (552, [0, 2])),
    (lambda t: [(min(t // 20, 3), True), (min(t // 20, 2), True)], (60 + 191, [1])),    # Steps take 20 s.
    (lambda t: [(min(t // 20, 3), False), (min(t // 20, 2), t >= 50)], (60 + 61, [1])),     # Others do.
    (lambda t: [(min(t // 99, 3), True), (min(t // 99, 2), True)], (297 + 541, [1])),   # 10 take too long.
])
def test_who_hangs(ranks: Callable[[int], list[tuple[int, bool]]], found: tuple[int, list[int]] | None):
    judge = Judge(len(ranks(0)), hang=60.0, patience=540.0, now=0.0)
    judged = ((t, judge.hung([Told(*one) for one in ranks(t)], float(t))) for t in range(1, 1000))
    assert next(((t, hung) for t, hung in judged if hung), None) == found


@pytest.mark.parametrize("error, reason", [
    ("[gloo/buffer.cc:81] Timed out", "Timed out"),
    ("NCCL error in: x.cpp:1, unhandled system error\nncclSystemError: A call failed.\nLast error:\n"
     "Error while creating /dev/shm/nccl-a", "Error while creating /dev/shm/nccl-a"),
], ids=["gloo", "nccl"])
def test_a_collective_that_fails_ends_in_one_line(error, reason):
    with pytest.raises(RankError, match=rf"^another rank .* for 600 s \({reason}\)$"), with_others():
        raise RuntimeError(error)


@pytest.mark.parametrize("kind", [torch.AcceleratorError, torch.OutOfMemoryError])
def test_a_failure_of_this_gpu_is_not_blamed_on_another_rank(kind):
    with pytest.raises(kind, match="^CUDA"), with_others():
        raise kind("CUDA")


def test_what_ranks_agree_on_for_a_checkpoint_ends_in_one_line_and_is_counted(monkeypatch):
    """But not in the thread that writes it: the watchdog looks at the program."""
    def fail(*_) -> None:
        raise RuntimeError("[gloo/pair.cc:537] Read error")
    monkeypatch.setattr(dist, "all_reduce", fail)
    for group, counted in ((IN_THREAD, 0), (1, 1)):
        before = progress.count
        with pytest.raises(RankError, match=r"has ended, or has not answered for 600 s \(Read error\)"):
            Keeper.agreed(SimpleNamespace(groups=[None, None]), True, group)
        assert progress.count == before + counted


def test_the_place_is_that_of_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(place()))
    thread.start()
    thread.join()
    assert re.fullmatch(r"tests/test_watchdog.py:\d+ \(test_the_place_\w+\)", found[0])


def test_a_gpu_that_gives_up_ends_in_one_line(capsys):
    error = torch.AcceleratorError("CUDA error: unspecified launch failure\nMore.")
    assert exit_status(error, 0) == 2 and isinstance(error, EXPECTED)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("train_gpt.py: CUDA error: unspecified launch failure; this GPU failed, or waited")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory\nMore."), ShardError("bad")])
def test_a_rank_that_fails_alone_says_so_itself(monkeypatch, capsys, error):
    """In one line, after it has left rank 0 time to say the same."""
    def fail(argv):
        raise error

    slept = []
    monkeypatch.setattr(train_gpt, "parse", fail)
    monkeypatch.setattr(train_gpt.time, "sleep", slept.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert train_gpt.main([]) == 2 and slept == [2]
    assert capsys.readouterr().err == f"train_gpt.py: rank 3: {str(error).splitlines()[0]}\n"


def test_what_a_failed_run_holds_is_not_given_back():
    """Giving it back could wait for a GPU for ever."""
    def run() -> None:
        trainer = Trainer()
        held.append(weakref.ref(trainer))
        raise UserError("no")

    def main() -> int:
        try:
            run()
        except EXPECTED as error:
            return exit_status(error, 0)

    class Trainer:
        pass

    held = []
    assert main() == 2 and held[0]() is not None


def test_a_program_that_failed_is_left_at_once():
    """Nothing is freed then; one that did not fail ends as usual."""
    program = ("import atexit, os; from records.run.ending import leave; atexit.register(print, 'freed'); "
               "status = 2 if os.fork() else 0; status and print(os.wait()[1]); "
               "print('said', status, end=' '); leave(status)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "said 0 freed\n0\nsaid 2 ")
