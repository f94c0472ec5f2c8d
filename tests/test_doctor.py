"""The page about a machine: what it says of one in order, and of machines that were made slow."""
import multiprocessing
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, process, succeeded

import train_gpt
from records.run import machine
from records.run.fit import fit
from records.tools import doctor

CPU = SimpleNamespace(device=torch.device("cpu"), size=1, rank=0, barrier=lambda: None)


def verdicts(lines) -> dict[str, str]:
    """The verdict of each line by what it is about."""
    return {line.text.split(":")[0]: line.verdict for line in lines}


def burn() -> None:
    while True:
        pass


@pytest.fixture
def quick(monkeypatch):
    """One repetition of each measurement, and no start of a whole program."""
    monkeypatch.setattr(doctor, "timed", lambda device, work, seconds=0: (work(), 1e-3)[1])
    monkeypatch.setattr(doctor, "ON_THE_FIRST", (doctor.versions, doctor.disk, doctor.pairs))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks have CPUs, and a GPU left out is a finding")
def test_two_ranks_look_at_a_machine(shards):
    """The whole program; a CPU has what each rank multiplies and what they exchange."""
    words = "-m torch.distributed.run --standalone --nproc_per_node=2 -m records.tools.doctor"
    result = succeeded(process(sys.executable, *words.split(), DATA_PATH=str(shards)))
    first, *lines, last = result.stdout.splitlines()
    assert first.startswith("2 x ") and last == "in order" or last.endswith("slow, 0 broken")
    assert {line.split()[0] for line in lines} <= {"ok", "slow"}
    for part in ("torch: ", "host cores: ", "shards, reading: ", "a start: ", "/dev/shm: ", "disk, writing: ",
                 "0: matmul: ", "1: matmul: ", "0: sums and gathers of 2 ranks by gloo: "):
        assert part in result.stdout


def test_a_runs_log_gets_the_figures(config, quick, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10 ** 8))
    world = train_gpt.World()
    # Two GPUs that are made up; another process would look for real ones.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(doctor, "copies",
                        lambda count: [doctor.rated(f"copies of {count} GPUs", 120, 100, "GB/s", "")])
    fit(train_gpt.settings.change(config, doctor=True), (), world, train_gpt.Trainer)
    found = world.found["doctor"]
    assert found["figures"]["disk_free_gb"] == 0.1 and found["figures"]["matmul, TFLOP/s"] > 0
    assert found["figures"]["copies of 2 GPUs, GB/s"] == 120
    [finding] = [finding for finding in found["findings"] if finding.startswith("broken")]
    assert "0.1 GB free; logs need some; make room" in finding
    assert f"doctor: {finding}" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs to choose its core")
def test_one_core_that_a_neighbour_uses(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    neighbours = [multiprocessing.Process(target=burn, daemon=True) for _ in range(2)]
    try:
        for neighbour in neighbours:
            neighbour.start()                   # on the same core
        time.sleep(0.1)
        found = verdicts(doctor.host(CPU))
    finally:
        for neighbour in neighbours:
            neighbour.kill()
        os.sched_setaffinity(0, cores)
    assert found["host cores"] == "slow" and found["a core's share for us"] == "slow"


def test_rates_and_what_could_not_be_tried(monkeypatch):
    assert doctor.rated("x", 75, 100, "GB/s", "do this") == doctor.Line(
        "slow", "x: 75 GB/s, 25% less than the 100 of a machine in order; do this", {"x, GB/s": 75})
    assert doctor.rated("x", 75, None, "GB/s", "")[:2] == ("ok", "x: 75 GB/s")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: (_ for _ in ()).throw(OSError("gone")))
    monkeypatch.setattr(doctor, "working_folder", lambda: ROOT)
    assert doctor.found(doctor.disk, CPU) == [doctor.Line("broken", "disk could not be tried: gone")]


def test_a_gpu_that_is_hidden_or_has_the_wrong_torch(monkeypatch):
    monkeypatch.setattr(doctor, "output_of", lambda *_: "GPU 0: a card")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    for hidden, advice in (("", "CUDA_VISIBLE_DEVICES hides it"), ("0", "install torch's CUDA build")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        old, unseen = doctor.versions(CPU)
        assert (old.verdict, unseen.verdict) == ("broken", "broken") and advice in unseen.text


@pytest.mark.parametrize("capability, faulty", [((10, 0), True), ((9, 0), False)])
def test_a_pair_that_is_known_to_fail(monkeypatch, capability, faulty):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(doctor, "version", lambda _: "3.7.1")
    monkeypatch.setattr(doctor, "gpu_states", lambda _: [{"driver": "580.1"}])
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["triton==3.7.1 ; platform_system == 'Linux'"])
    lines = list(doctor.versions(SimpleNamespace(device=torch.device("cuda", 0))))
    assert "driver: 580.1, CUDA of torch: " in lines[1].text and verdicts(lines)["Triton"] == "ok"
    assert [line.text for line in lines if line.verdict == "broken"] == [
        f"triton 3.7.1: {doctor.FAULTY[0][-1]}"] * faulty


def test_a_gpu_is_asked_while_it_works(monkeypatch):
    """For as long as nvidia-smi takes; it may not know a number."""
    work = []
    monkeypatch.setattr(torch, "ones", lambda *_, **__: 1.0)
    monkeypatch.setattr(torch, "mm", lambda a, b: work.append(a * b))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))

    def answer(*command: str) -> str:
        before = len(work)
        while len(work) < before + 20:
            time.sleep(0.001)
        return "1980, [N/A]" if command[-1] == "GPU-1-2" else ""

    monkeypatch.setattr(doctor, "output_of", answer)
    assert doctor.ask_under_load(torch.device("cuda", 0), "clocks.sm", "power.limit") == [1980.0, None]
    monkeypatch.setattr(doctor, "output_of", lambda *_: None)
    assert doctor.ask(torch.device("cuda", 0), "clocks.sm", "power.limit") == [None, None]


def test_a_log_has_the_states_of_the_gpus_that_its_run_sees(monkeypatch):
    """Of a host's three the third and the second; all where nvidia-smi calls them by other names."""
    names = ["3-3", "2-2"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=names[i]))
    rows = "\n".join(f"GPU-{i}-{i}, 580.1, 700.00, {i}000, [N/A], 40" for i in (1, 2, 3))
    monkeypatch.setattr(machine, "output_of", lambda *command: rows if "uuid" in command[1] else "")
    states = machine.gpu_states(torch.device("cuda"))
    assert [state["sm_mhz"] for state in states] == [3000.0, 2000.0]
    assert states[0] == {"driver": "580.1", "power_limit_w": 700.0, "sm_mhz": 3000.0, "memory_mhz": None,
                         "celsius": 40.0}
    names[:] = ["a", "b"]
    assert len(machine.gpu_states(torch.device("cuda"))) == 3
    monkeypatch.setattr(machine, "output_of", lambda *_: None)
    assert machine.gpu_states(torch.device("cuda")) == machine.gpu_states(torch.device("cpu")) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pairs_of_gpus_leave_their_memory():
    torch.cuda.init()
    free = [torch.cuda.mem_get_info(n)[0] for n in (0, 1)]
    lines = doctor.found(doctor.pairs, SimpleNamespace())
    names = {"GPU 0 to 1, GB/s", "GPU 1 to 0, GB/s"}
    assert names <= {key for line in lines for key in line.figures}
    assert all(before - torch.cuda.mem_get_info(n)[0] < 2 ** 26 for n, before in enumerate(free))
