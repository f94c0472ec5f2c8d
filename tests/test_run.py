"""The program from outside: its log, its messages for bad input, interrupts, imports, a laptop's preset."""
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, command, environment, process, succeeded, write_documents
from safetensors.torch import load, load_file
from torch.distributed.run import get_args_parser

import train_gpt
from data.errors import open_streams
from data.shards import HEADER_BYTES, ShardError
from kernels.retrieval import Datastore, datastore
from records.run import explain, settings, sources, terminal
from records.run.log import LogError
from records.run.settings import UserError

SHORT = ["--preset", "cpu", *TINY, "--micro_batches", "2", "--batch_tokens", "128,256,384"]
SHORTER = [*SHORT, "--steps", "3", "--extra_steps", "0", "--val_every", "0"]


def read_log(runs) -> list[dict]:
    [log] = runs.glob("2*/log.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def refused(result: subprocess.CompletedProcess, *parts: str) -> None:
    """One line on stderr that holds all the parts, and an exit status that is not 0."""
    assert result.returncode not in (0, 1), result.stderr
    message = [line for line in result.stderr.splitlines() if line.startswith("train_gpt.py: ")]
    assert len(message) == 1 and "Traceback" not in result.stderr, result.stderr
    assert all(part in message[0] for part in parts), message[0]


@pytest.fixture(scope="module")
def first(shards, tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A run in a process of its own, and the folder of its log and model."""
    folder = tmp_path_factory.mktemp("first")
    words = [sys.executable, "train_gpt.py", *SHORT, "--name", "short", "--seed", "1", "--save",
             str(folder / "model")]
    return succeeded(process(*words, DATA_PATH=str(shards), RUNS_PATH=str(folder))), folder


@pytest.mark.parametrize("dirty, said", [(True, "changes or new files"), (None, "no commit"), (False, "")])
def test_a_run_says_that_no_record_can_be_made_of_it(dirty, said):
    facts = {"preset": "cpu", "parameters": 5, "dtype": "torch.float32", "attention": "plain",
             "attention_note": "", "fp8_parts": [], "candidates": [], "epochs": 0.5, "dirty": dirty}
    lines = explain.announcement(facts, "1 x CPU").splitlines()
    [line] = [line for line in lines if "no record can be made" in line] or [""]
    assert said in line and bool(line) == bool(said)


def test_a_run_writes_its_log(first):
    result, folder = first
    said = r"validation loss \d\.\d{4} nats a token = \d\.\d{3} bits per byte after 8 steps"
    assert re.search(said, result.stdout)
    assert "attention: plain" in result.stdout and "FP8: no part; the rest: torch.float32" in result.stdout
    header, *events = read_log(folder)
    assert header["kind"] == "header" and header["name"] == "short" and header["seed"] == 1
    assert header["config"]["steps"] == 6 and header["config"]["batch_tokens"] == [128, 256, 384]
    assert header["fp8"] is False and header["fp8_parts"] == []
    assert header["versions"]["torch"] == torch.__version__ and header["world_size"] == 1
    assert ("no record can be made of this run" in result.stdout) == (header["dirty"] is not False)
    assert {"NorMuon", "Adam", "RowAdam"} == {group["algorithm"] for group in header["groups"]}
    ran = sources.project_sources()
    assert header["sources"] == sources.hash_sources(ran)
    assert {"train_gpt.py", "kernels/optimizer/adam.py", "data/loader.py", "records/run/log.py"} <= ran.keys()
    patches = [patch.read_bytes() for patch in folder.glob("2*/changes.patch")]
    assert patches == [changes for changes in [sources.source_changes()] if changes]
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 9))
    assert all({"loss", "lr", "momentum", "windows", "tokens", "ms"} <= event.keys() for event in steps)
    assert [event["step"] for event in events if event["kind"] == "validation"] == [3, 6, 8]
    summary = events[-1]
    assert summary["kind"] == "summary" and summary["steps"] == 8
    assert summary["tokens"] == 2 * (128 + 256) + 4 * 384 and summary["loss"] == events[-2]["loss"]
    assert summary["step_ms"]["p50"] <= summary["step_ms"]["p95"] <= summary["step_ms"]["max"]
    assert sum(event["ms"] for event in steps) / 1e3 == pytest.approx(summary["time_s"], rel=0.05)
    weights = load_file(folder / "model/model.safetensors")
    assert weights["bank.0"].shape == (192, 64) and weights["ngrams.rows.0"].shape[1] == 32
    assert weights["head"].shape == (320, 64)


def test_runs_of_one_process_are_those_of_several(first, tmp_path, shards):
    """One after the other, each with its own seed and log, of the same sources."""
    assert command(*SHORT, "--runs", "2", DATA_PATH=str(shards), RUNS_PATH=str(tmp_path)).returncode == 0
    logs = [[json.loads(line) for line in log.open()] for log in tmp_path.glob("2*/log.jsonl")]
    losses = {log[0]["seed"]: [event["loss"] for event in log[1:]] for log in logs}
    alone, *events = read_log(first[1])
    assert losses[1] == [event["loss"] for event in events] != losses[0] and len(losses) == 2
    assert {log[0]["sources"] for log in logs} == {alone["sources"]}


def test_no_shards(tmp_path, monkeypatch):
    monkeypatch.delenv("DATA_PATH", raising=False)
    result = command(*SHORT, DATA_PATH=str(tmp_path))
    refused(result, str(tmp_path), "no val shards", "set DATA_PATH", "python -m data.fineweb",
            "--preset cpu and DATA_PATH unset")
    with pytest.raises((UserError, ShardError), match="an unset DATA_PATH.*--preset cpu$"):
        train_gpt.Trainer(train_gpt.parse(["--preset", "corpus"])[0], train_gpt.World())


@pytest.mark.parametrize("damage, parts", [
    (lambda data: data[:-100], ["truncated", "fetch it again"]),
    (lambda data: b"\x7fELF" + data[4:], ["not a token shard", "magic 20240520"]),
    (lambda data: b"", ["not a token shard", "an empty file"]),
    (lambda data: data[:4] + b"\x07" + data[5:], ["shard version 7"]),
    (lambda data: data[:HEADER_BYTES] + b"\xff\xff" + data[HEADER_BYTES + 2:],
     ["token id 65535", "vocabulary of 257", "--vocab_size 65536"]),
    (lambda data: data[:HEADER_BYTES] + b"a\x00" * ((len(data) - HEADER_BYTES) // 2),
     ["no document starts with token 256", "--vocab_size 98"]),
], ids=["truncated", "foreign", "empty", "version", "vocabulary", "no documents"])
def test_bad_shard(tmp_path, damage, parts):
    write_documents(tmp_path, {"train_000000": [100] * 300, "val_000000": [300] * 10})
    path = tmp_path / "train_000000.bin"
    path.write_bytes(damage(path.read_bytes()))
    result = command(*SHORT, DATA_PATH=str(tmp_path), RUNS_PATH=str(tmp_path / "runs"))
    refused(result, str(path), *parts)


def test_too_few_tokens(tmp_path):
    write_documents(tmp_path, {"train_000000": [50] * 15, "val_000000": [100] * 30})
    result = command(*SHORT, DATA_PATH=str(tmp_path))
    refused(result, "750 tokens last for", "python -m data.fineweb", "--epochs 5")
    result = command(*SHORTER, "--epochs", "5", "--write_log", "false", DATA_PATH=str(tmp_path))
    said = r"data: the schedule takes about \d\.\d\d epochs of 1 shards; tokens repeat after the first"
    assert re.search(said, result.stdout), result.stderr


def test_a_bad_setting_from_outside():
    refused(process(sys.executable, "train_gpt.py", "--stepz", "3"), "unknown setting '--stepz'", "--steps")


def test_settings_reach_the_configuration(monkeypatch):
    assert train_gpt.parse(["--preset", "cpu"])[0].fp8 == ("head", "attention", "mlp")
    monkeypatch.setenv("DISABLE_FP8", "1")
    monkeypatch.setenv("DATA_PATH", "elsewhere")
    config = train_gpt.parse(["--preset", "cpu"])[0]
    assert not config.fp8 and config.data_path == "elsewhere"


@pytest.mark.parametrize("changes, ranks, said", [
    ({}, 3, "3 ranks do not divide the 8 micro-batches of a step and the width of a head, 128; use 1, 2, 4"),
    ({"ngrams": (), "micro_batches": 9}, 2, "2 ranks .* the width of a head, 0; use 1, 3, 9"),
    ({"average_steps": 5, "ngram_rows": 0, "micro_batches": 5}, 5, "5 ranks do not divide the 50304"),
    *(({"ngram_block": block}, 4, f"{block}: use a power of two that divides a rank's 32 columns")
      for block in (0, 3, 12, 64))])
def test_ranks_and_blocks_that_do_not_divide(changes, ranks, said):
    with pytest.raises(UserError, match=said):
        world = SimpleNamespace(size=ranks, device=torch.device("cpu"))
        train_gpt.Trainer(replace(train_gpt.SPEEDRUN, **changes), world)


def test_a_non_finite_loss_stops_the_run(tmp_path, shards):
    result = command(*SHORTER, "--adam_lr", "1e30", DATA_PATH=str(shards), RUNS_PATH=str(tmp_path))
    refused(result, "the training loss is nan", "stopped before its update")
    step = int(re.search(r"step (\d+): the training loss", result.stderr)[1])
    events = read_log(tmp_path)
    logged = [event for event in events if event["kind"] == "step"]
    assert events[-1]["kind"] == "stopped" and events[-1]["step"] == step - 1 == len(logged)


def test_a_non_finite_last_update_scores_nothing(tmp_path, shards):
    """No training loss follows it, so that of validation is the first to tell."""
    words = ["--lr_scale", "1,1,1e30", "--steps", "3", "--extra_steps", "0", "--adam_every", "1"]
    result = command(*SHORTER, *words, "--save", str(tmp_path / "model"), DATA_PATH=str(shards),
                     RUNS_PATH=str(tmp_path))
    refused(result, "after step 3: the validation loss is nan; nothing is scored")
    *events, last = read_log(tmp_path)
    assert last["kind"] == "stopped" and last["step"] == 3 and not (tmp_path / "model").exists()
    assert [event["kind"] for event in events[1:]] == ["step"] * 3


@pytest.mark.parametrize("error, file, status", [
    (json.JSONDecodeError("Expecting value", "{", 1), "/triton/compiler/compiler.py", 2),
    (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "/torch/_inductor/runtime.py", 2),
    (NameError("x is not defined"), "/triton/compiler/compiler.py", None),
    (ValueError("a"), "/mine.py", None),
], ids=["JSON", "kernel", "a mistake in a kernel", "a mistake"])
def test_a_damaged_cache_of_kernels(tmp_path, shards, monkeypatch, error, file, status):
    """What compilers raise then, also behind another error; a mistake keeps its traceback."""
    names = {}
    exec(compile("def fail(error):\n    raise error", file, "exec"), names)

    def warm_up(trainer):
        try:
            names["fail"](error)
        except Exception as cause:
            raise RuntimeError("compiler failed") from cause

    monkeypatch.setattr(train_gpt.Trainer, "warm_up", warm_up)
    words = dict(DATA_PATH=str(shards), RUNS_PATH=str(tmp_path))
    if status is None:
        with pytest.raises(RuntimeError, match="compiler failed"):
            command(*SHORTER, **words)
        return
    refused(command(*SHORTER, **words), "a compiled kernel is damaged", str(error), "TRITON_CACHE_DIR")
    assert "a compiled kernel is damaged" in read_log(tmp_path)[-1]["reason"]


def test_a_full_disk(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNS_PATH", str(tmp_path / "runs"))
    log = train_gpt.RunLog("short")
    log.file = open("/dev/full", "w")
    with pytest.raises(LogError, match="log.jsonl: the disk is full; free some space"):
        log.write("step", step=1)
    (tmp_path / "file").write_text("")
    result = command(*SHORT, DATA_PATH=str(shards), RUNS_PATH=str(tmp_path / "file" / "runs"))
    refused(result, "cannot write the run's log", "RUNS_PATH")
    result = command(*SHORTER, "--save", "/dev/full/model", DATA_PATH=str(shards), RUNS_PATH=str(tmp_path))
    refused(result, "/dev/full")


def test_a_run_outlives_its_folder_and_names_that_are_no_text(tmp_path, shards, monkeypatch):
    """The working folder is removed meanwhile; names hold bytes that are not UTF-8, and steer a terminal."""
    data, runs, begun_in = tmp_path / "data\udcff", tmp_path / "runs", tmp_path / "folder"
    data.symlink_to(shards)
    begun_in.mkdir()
    warm_up = train_gpt.Trainer.warm_up

    def remove(trainer: train_gpt.Trainer) -> None:
        warm_up(trainer)
        begun_in.rmdir()

    monkeypatch.setattr(train_gpt.Trainer, "warm_up", remove)
    monkeypatch.chdir(begun_in)
    words = [*SHORTER, "--name", "a\udcff\x1b[31m", "--save", "model\udcff\x1b[2J"]
    result = succeeded(command(*words, DATA_PATH=str(data), RUNS_PATH=str(runs)))
    assert read_log(runs)[-1]["kind"] == "summary"
    saved = begun_in / "model\udcff\x1b[2J"
    assert load((saved / "model.safetensors").read_bytes())
    assert "# a?\x1b" in (saved / "README.md").read_text("utf-8")
    *_, log, model = result.stdout.splitlines()
    assert log.startswith("log ") and model.startswith("model ") and "\x1b" not in result.stdout
    assert all(r"\udcff\x1b[" in line for line in (log, model))


def test_a_model_is_saved_before_anything_is_printed(tmp_path, shards, monkeypatch):
    def fail(report: train_gpt.Report) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_gpt.Report, "say", fail)
    result = command(*SHORTER, "--save", "log", DATA_PATH=str(shards), RUNS_PATH=str(tmp_path))
    refused(result, "No space left")
    assert read_log(tmp_path)[-1]["kind"] == "summary" and list(tmp_path.glob("*/model/model.safetensors"))


@pytest.mark.parametrize("failed, number", [("stdout", errno.EPIPE), ("stdout", errno.ENOSPC),
                                            ("stderr", errno.EPIPE), ("stderr", errno.ENOSPC)])
def test_streams_that_fail(failed, number, monkeypatch, tmp_path):
    """A reader that goes costs no run; a full disk below standard output is told, at its first line."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", (tmp_path / "stdout").open("w"))
    monkeypatch.setattr(sys, failed, open("/dev/full" if number == errno.ENOSPC else write, "w"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    terminal.outlive_terminal()
    expected = pytest.raises(OSError) if (failed, number) == ("stdout", errno.ENOSPC) else nullcontext()
    with expected:
        for i in range(3):
            print(i, file=getattr(sys, failed), flush=True)


@pytest.mark.parametrize("prepare", [terminal.outlive_terminal, open_streams])
def test_streams_that_are_closed(prepare, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    prepare()
    print("é\udcff")
    print("é\udcff", file=sys.stderr, flush=True)


def test_a_hangup_ends_a_run_once_and_not_below_nohup(monkeypatch):
    monkeypatch.setattr(signal, "signal", (handlers := {}).__setitem__)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    assert terminal.ending_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    with pytest.raises(KeyboardInterrupt):
        terminal.interrupt(signal.SIGHUP, None)
    assert handlers == {signal.SIGHUP: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    assert terminal.ending_signals() == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupt_leaves_a_complete_log(tmp_path, shards, number):
    words = [sys.executable, "train_gpt.py", *SHORT, "--steps", "600", "--epochs", "2000", "--val_every",
             "50"]
    variables = environment(DATA_PATH=str(shards), RUNS_PATH=str(tmp_path))
    # `nohup` would have the tests, and the run with them, ignore that the terminal goes.
    heed = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    running = subprocess.Popen(words, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True,
                               preexec_fn=heed)

    def has_begun() -> bool:
        return any('"step"' in log.read_text() for log in tmp_path.glob("2*/log.jsonl"))

    deadline = time.time() + 60
    while time.time() < deadline and not has_begun():
        time.sleep(0.2)
    running.send_signal(number)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130 and "Traceback" not in errors
    assert "interrupted; the log so far is complete" in errors
    *events, last = read_log(tmp_path)[1:]
    steps = [event for event in events if event["kind"] == "step"]      # Validations have lines, too.
    assert last == {"kind": "stopped", "step": len(steps), "reason": "interrupted"} and steps


@pytest.mark.parametrize("rank, said", [("0", "train_gpt.py: interrupted\n"), ("1", "")])
def test_interrupt_while_modules_are_imported(rank, said):
    variables = environment(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank)
    running = subprocess.Popen([sys.executable, "train_gpt.py", "--explain"], cwd=ROOT, env=variables,
                               stderr=subprocess.PIPE, text=True)
    while "/torch/lib/" not in Path(f"/proc/{running.pid}/maps").read_text():
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=60)[1] == said
    assert running.returncode == -signal.SIGINT     # which a shell calls 130


def files_of_the_project() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*") if not {"__pycache__", ".git", ".venv"} & {*p.parts})


def test_importing_does_nothing(tmp_path):
    before = files_of_the_project()
    program = ("import sys, socket\n"
               "sys.argv = ['x', '--no-such-setting']\n"
               "def refuse(*a, **k): raise AssertionError('network')\n"
               "socket.socket.connect = refuse\n"
               f"sys.path.insert(0, {str(ROOT)!r})\n"
               "import train_gpt, torch, threading\n"
               "assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()\n"
               "assert threading.active_count() == 1\n")
    result = process(sys.executable, "-c", program, cwd=tmp_path)
    assert result.returncode == 0 and not result.stdout and not result.stderr, result.stderr
    assert before == files_of_the_project() and not any(tmp_path.iterdir())


def test_the_preset_for_a_laptop(tmp_path):
    """`./run.sh` with nothing installed: 2 ranks, the embedded corpus, from about 5.5 to under 2 nats a byte.

    In fewer and smaller steps than by default, with half of the rows of n-grams, and validated at their end
    alone, on the text's first quarter. Small steps lower the loss by more for the same time.
    """
    words = ("--steps 80 --extra_steps 4 --batch_tokens 512,768,1024 --ngram_rows 32768 --val_every 0 "
             "--val_tokens 16384")
    result = succeeded(process("./run.sh", *words.split(), RUNS_PATH=str(tmp_path)))
    header, *events = read_log(tmp_path)
    assert header["world_size"] == 2 and header["preset"] == "cpu"
    assert 5.2 < events[0]["loss"] < 5.9
    losses = [e["loss"] for e in events if e["kind"] == "validation"]
    assert losses[-1] < 2.0 and events[-1]["loss"] == losses[-1]
    assert "bits per byte" in result.stdout


@pytest.mark.parametrize("arguments, fetches", [
    ([], True), (["--preset", "speedrun"], True), (["--preset", "sprint"], False),
    (["--preset=corpus"], False)])
def test_a_machine_with_a_gpu_fetches_fineweb(tmp_path, arguments, fetches):
    """With no shards `run.sh` says what it fetches. Nothing trains where the fetch fails, as one without a
    network does (tests/test_data.py). Presets that have no shards of their own want yours."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "python").write_text("#!/bin/sh\ntest \"$1\" = -c && exit\necho \"$@\"\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0",
                 "DATA_PATH": str(tmp_path / "shards"), "PYTHON": str(tmp_path / "python")}
    result = process("./run.sh", *arguments, **variables)
    if not fetches:
        assert result.returncode == 0 and "FineWeb" not in result.stderr
        return
    assert result.returncode == 2 and f"no shards in {tmp_path}/shards: fetching FineWeb" in result.stderr
    assert "--preset cpu" in result.stderr
    assert result.stdout == f"-m data.fineweb --out {tmp_path}/shards\n"


def losses_in(runs: Path) -> list[float]:
    """Of every step and validation of the one run in a folder."""
    return [event["loss"] for event in read_log(runs) if event["kind"] in ("step", "validation")]


def losses_on(nodes: list[str], ranks: int, folder: Path, shards: Path) -> list[float]:
    """The losses of a run of `ranks` processes on each of some nodes, which see only their own GPUs.

    A node is a launcher of its own. Its name is what NCCL takes for the machine's.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = (f"-m torch.distributed.run --nnodes={len(nodes)} --nproc_per_node={ranks} --rdzv_backend=c10d "
             f"--rdzv_endpoint=127.0.0.1:{port} --local_addr=127.0.0.1 train_gpt.py --seed 1")
    words = [*words.split(), *SHORT, "--attention", "plain", "--compile", "false"]
    words += ["--deterministic", "true"] if nodes[0] else []    # A CPU is deterministic anyway.
    variables = {"DATA_PATH": str(shards), "RUNS_PATH": str(folder), "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                 "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    launchers = [subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                                  env=environment(CUDA_VISIBLE_DEVICES=gpus, NCCL_HOSTID=f"node{i}",
                                                  **variables)) for i, gpus in enumerate(nodes)]
    for launcher in launchers:
        errors = launcher.communicate(timeout=300)[1]
        assert launcher.returncode == 0, errors
    assert read_log(folder)[0]["world_size"] == len(nodes) * ranks
    return losses_in(folder)


@pytest.mark.parametrize("gpus", ["", "0,1"], ids=["gloo", "nccl"])
def test_two_nodes_train_as_one_does(first, tmp_path, shards, gpus):
    """Two CPUs train as one process does, two GPUs as the two of one node, where copies add up."""
    if gpus and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    apart = losses_on(gpus.split(",") if gpus else ["", ""], 1, tmp_path / "apart", shards)
    alone = losses_on([gpus], 2, tmp_path / "alone", shards) if gpus else losses_in(first[1])
    assert len(alone) == 8 + 3 and apart == pytest.approx(alone, rel=1e-3 if gpus else 1e-5)


def test_no_setting_is_one_of_the_launchers():
    """torchrun would take `--log`, short for its --log-dir, even after the script's name."""
    options = [option for action in get_args_parser()._actions for option in action.option_strings]
    names = [*settings.defaults(train_gpt.SPEEDRUN), "preset", "timetable", "explain"]
    assert not [name for name in names if any(option.startswith(f"--{name}") for option in options)]


def test_the_preset_of_six_layers_trains(tmp_path, shards, monkeypatch):
    """`records/recipes/sprint.py` at a tiny width on bytes, with counts and states in its scores.

    Directions of states are chosen after the first step, since the second one passes an eighth of the run.
    """
    chosen, choose = [], Datastore.choose
    monkeypatch.setattr(Datastore, "choose", lambda store: (chosen.append(store.passed), choose(store)))
    for name, size in {"CELLS": 16, "SAMPLE": 1024}.items():    # not k-means of 131,072 keys
        monkeypatch.setattr(datastore, name, size)
    words = ("--preset sprint --vocab_size 257 --batch_tokens 128,256,384 --micro_batches 2 --steps 3 "
             "--extra_steps 1 --val_every 2 --softmax_samples 16 --ngram_block 16 --ngram_classes false "
             "--canonical false --shared_updates false --drop_repeats 0 --score= --save=").split()
    variables = {"DATA_PATH": str(shards), "RUNS_PATH": str(tmp_path)}
    succeeded(command(*TINY, *words, **variables))
    header, *events = read_log(tmp_path)
    assert header["preset"] == "sprint" and len(header["config"]["layers"]) == 6
    assert header["config"]["states"] and header["config"]["retrieval"] and chosen == [128]
    assert events[-1]["kind"] == "summary" and events[-1]["steps"] == 4


def test_a_preset_with_layers_of_its_own_trains(tmp_path, shards):
    """`records/recipes/medium.py`, 16 layers deep, at a tiny width on bytes."""
    words = ("--preset medium --vocab_size 257 --batch_tokens 128,256,384 --micro_batches 2 --steps 3 "
             "--extra_steps 1 --val_every 0 --softmax_samples 16 --ngrams 2,3 --ngram_block 16").split()
    variables = {"DATA_PATH": str(shards), "RUNS_PATH": str(tmp_path)}
    result = succeeded(command(*TINY, *words, **variables))
    header, *events = read_log(tmp_path)
    assert header["preset"] == "medium" and len(header["config"]["layers"]) == 16
    assert header["candidates"] == [256, 256, 256]
    assert "sampled softmax: 256, 256, 256 of 320 logits a token" in result.stdout
    assert events[-1]["kind"] == "summary" and events[-1]["steps"] == 4
