"""A rank that is stopped or gone is noticed by the others, which end; one that has ended is not missed."""
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, environment

import train_gpt
from data.shards import ShardError
from records.run.ending import EXPECTED, exit_status

RANK = """
import sys, time
from kernels.ranks.watchdog import Watchdog
rank = int(sys.argv[1])
watchdog = Watchdog(rank, 3, silence=3.0)
watchdog.on_loss = lambda reason: print("noted:", reason, flush=True)
print("begun", flush=True)
if rank == 2:
    time.sleep(2)
    watchdog.close()
    print("closed", flush=True)
    sys.exit()
time.sleep(60)
"""


@pytest.fixture
def ranks():
    """Three processes that watch each other; the last one ends after two seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=timedelta(seconds=30))
    variables = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    processes = [subprocess.Popen([sys.executable, "-c", RANK, str(rank)], cwd=ROOT, env=variables, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_a_stopped_rank_ends_the_others(ranks):
    assert [process.stdout.readline() for process in ranks] == ["begun\n"] * 3
    assert ranks[2].wait(20) == 0 and ranks[2].stdout.read() == "closed\n"
    time.sleep(4)                                       # Longer than the others would wait for it.
    assert ranks[0].poll() is None and ranks[1].poll() is None
    os.kill(ranks[1].pid, signal.SIGSTOP)
    assert ranks[0].wait(15) == 2
    reason = f"rank 1 (process {ranks[1].pid} on "
    assert f"noted: {reason}" in ranks[0].stdout.read()
    assert f"train_gpt.py: {reason}" in ranks[0].stderr.read()
    assert ranks[1].wait(5) == -signal.SIGKILL


HANG = """
import time
from datetime import timedelta
from kernels.ranks import world
world.PATIENCE = timedelta(seconds=3)
ranks = world.World()
ranks.barrier()
if ranks.rank == 1:
    time.sleep(30)
try:
    ranks.barrier()
except world.RankError as error:
    print(error)
"""


def test_a_rank_that_hangs_is_not_awaited_for_ever():
    """Its threads live, so that the watchdog is content; the collective itself gives up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [sys.executable, "-c", HANG]
    processes = [subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  env=environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
                                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
                 for rank in range(2)]
    said, errors = processes[0].communicate(timeout=25)
    processes[1].kill()
    processes[1].communicate()
    assert said.startswith("another rank has ended, or has not answered for "), errors


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
    monkeypatch.setattr(train_gpt.signal, "signal", lambda *_: None)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert train_gpt.main([]) == 2 and slept == [2]
    assert capsys.readouterr().err == f"train_gpt.py: rank 3: {str(error).splitlines()[0]}\n"
