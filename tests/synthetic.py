"""Made-up runs for the tests of `records`: valid logs of a training that never was, in a little repository.

As a program it acts as a trainer.
"""
import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np

from records.run.sources import hash_sources

SOURCES = {"train_gpt.py": b"print('made up')\n", "kernels/xxt.py": b"# made up\n"}
BATCHES = (131_072, 262_144, 393_216)
# Shortened from the form of a public log: a line of the sources that looks like a result must not be taken
# for one.
FOREIGN = """print("step:1/3 val_loss:1.0000 train_time:1ms step_avg:1.00ms")
{bar}
Running Python 3.11.10 (main, Sep  7 2024, 18:35:41) [GCC 11.4.0]
Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8
Running Triton version 3.6.0
| NVIDIA-SMI 580.126.09             Driver Version: 580.126.09     CUDA Version: 13.0     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:3B:00.0 Off |                    0 |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:5B:00.0 Off |                    0 |
{bar}
step:0/3 val_loss:10.8320 train_time:0ms step_avg:0.04ms
step:1/3 train_time:376ms step_avg:375.81ms
step:2/3 train_time:596ms step_avg:298.18ms
step:3/3 train_time:{end}ms step_avg:273.12ms
step:3/3 val_loss:{loss} train_time:{end}ms step_avg:273.13ms
peak memory allocated: 37352 MiB reserved: 45542 MiB
"""


def git(repository: Path, *words: str) -> str:
    """Run git without the settings of the person who tests."""
    who = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = os.environ | who | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", *words], cwd=repository, env=environment, check=True, capture_output=True,
                          text=True).stdout.strip()


def commit_sources(repository: Path, sources: dict[str, bytes] = SOURCES) -> str:
    """Commit these files in `repository`, which is made if there is none; the commit's full name."""
    if not (repository / ".git").exists():
        git(repository, "init", "--quiet")
    for path, contents in sources.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(contents)
    git(repository, "add", *sources)
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "Made up")
    return git(repository, "rev-parse", "HEAD")


@dataclass
class MadeUp:
    """What is particular to a made-up run beside its name and seed. The loss ends near `level` ± `noise`."""
    settings: dict = field(default_factory=dict)
    command: list | None = None
    steps: int = 60
    pace_ms: float = 30.0
    level: float = 3.275
    noise: float = 0.0012
    sources: dict = field(default_factory=lambda: SOURCES)
    header: dict = field(default_factory=dict)
    day: datetime = datetime(2026, 11, 21, 10)


def write_run(runs: Path, name: str = "first", seed: int = 0, **particulars) -> Path:
    """Write the log of one finished run under `runs`; returns it. The other arguments are those of MadeUp."""
    run = MadeUp(**particulars)
    lines = made_up_lines(name, seed, run)
    lines[0] |= run.header
    day = run.day
    while (folder := runs / f"{day:%Y%m%d-%H%M%S}-{name}").exists():
        day += timedelta(seconds=1)
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "log.jsonl"


def foreign_log(folder: Path, name: str, loss: float = 3.2796, end: int = 819) -> Path:
    path = folder / f"{name}.txt"
    path.write_text(FOREIGN.format(bar="=" * 100, loss=loss, end=end))
    return path


def stage_of(step: int, steps: int) -> int:
    return 3 * (step - 1) // steps


def learning_rate(step: int, steps: int) -> float:
    return (1.0, 1.52, 1.73)[stage_of(step, steps)] * min(1.0, 0.15 + 1.42 * (1 - step / steps))


def made_up_header(name: str, seed: int, run: MadeUp) -> dict:
    config = {"steps": run.steps - 2, "extra_steps": 2, "seed": seed, "name": name,
              "batch_tokens": list(BATCHES), "windows": [[1, 3], [3, 7], [5, 11]], "adam": {"lr": 0.008},
              "lr": 0.023, **run.settings}
    versions = {"python": "3.11.7", "torch": "2.13.0", "cuda": "13.0", "triton": "3.6.0", "numpy": "2.4.6",
                "flash_attn": None}
    return {"kind": "header", "schema": 1, "name": name, "started": run.day.isoformat(), "preset": "made-up",
            "config": config, "seed": seed, "target": 3.28, "world_size": 4, "devices": ["NVIDIA H200"] * 4,
            "command": run.command or ["train_gpt.py", "--seed", str(seed), "--name", name],
            "driver": "580.95", "versions": versions, "commit": "0fbd1fe", "dirty": False,
            "sources": hash_sources(run.sources), "attention": "varlen", "fp8": True,
            "parameters": 275_000_000, "host": "a", "process": 1000 + seed}


def made_up_lines(name: str, seed: int, run: MadeUp) -> list[dict]:
    random = np.random.default_rng(list(f"{seed} {run.steps} {run.level}".encode()))
    level = run.level + run.noise * random.standard_normal()
    lines = [made_up_header(name, seed, run)]
    tokens, time_s, times = 0, 0.0, []
    for step in range(1, run.steps + 1):
        stage = stage_of(step, run.steps)
        ms = run.pace_ms * (1 + 0.8 * stage) * (1 + 0.02 * random.standard_normal() ** 2)
        tokens, time_s = tokens + BATCHES[stage], time_s + ms / 1000
        times.append(ms)
        curve = 7.5 * np.exp(-9 * step / run.steps) + 1.2 * (1 - step / run.steps)
        lines.append({"kind": "step", "step": step, "loss": level + curve + 0.05 * random.standard_normal(),
                      "lr": learning_rate(step, run.steps), "momentum": 0.95,
                      "windows": lines[0]["config"]["windows"][stage], "tokens": tokens, "ms": ms})
        if step % max(1, run.steps // 10) == 0 or step == run.steps:
            lines.append({"kind": "validation", "step": step, "loss": level + curve, "time_s": time_s,
                          "tokens": tokens})
    quantiles = dict(zip(("p50", "p95", "max"), np.quantile(times, (0.5, 0.95, 1.0)).tolist()))
    lines.append({"kind": "summary", "steps": run.steps, "time_s": time_s, "loss": lines[-1]["loss"],
                  "tokens": tokens, "tokens_per_s": tokens / time_s, "step_ms": quantiles,
                  "peak_memory_bytes": 33 << 30, "startup_s": 41.0, "compile_s": 28.5,
                  "began": 1e9, "ended": 1e9 + time_s, "paused_s": 0.0, "data": {"train": "x", "val": "x"}})
    return lines


def command(*words: object) -> int:
    """`python -m records …` in this process; returns its exit code."""
    from records.__main__ import main as records_main  # here, because the trainer below need not wait for it
    with patch.object(sys, "argv", ["records", *map(str, words)]):
        return records_main()


def main() -> None:
    """Act as a trainer: `python -m tests.synthetic RUNS --seed 0 --name x [--lr 0.02]`; at 2 it diverges."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="made-up")
    parser.add_argument("--lr", type=float, default=0.023)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    log = write_run(arguments.runs, arguments.name, arguments.seed, settings={"lr": arguments.lr},
                    steps=arguments.steps, command=["train_gpt.py", *sys.argv[2:]],
                    level=3.275 + abs(arguments.lr - 0.023))
    if arguments.lr > 1:
        reason = "step 4: the training loss is nan; stopped before its update"
        stopped = json.dumps({"kind": "stopped", "step": 3, "reason": reason}) + "\n"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]) + stopped)
        sys.exit(2)


if __name__ == "__main__":
    main()
