"""The plain-text logs of the public NanoGPT speedrun, read into the same `Run` as ours.

Such a log is: the sources, a line of `=`, the environment (`Running Python …`, `nvidia-smi`), a line of `=`,
then

    step:250/1390 val_loss:4.4888 train_time:7930ms step_avg:31.72ms
    step:251/1390 train_time:7962ms step_avg:31.72ms
    peak memory allocated: 37352 MiB reserved: 45542 MiB

It has no seed, no target (the speedrun's is taken), no training loss and no token count; its times are whole
milliseconds.
"""
import hashlib
import re
from pathlib import Path

import numpy as np

from records.tools.schema import RecordError, Run
from records.tools.stats import TARGET

SEPARATOR = re.compile(r"^={20,400}[ \t\r]{0,9}$", re.M)
# Every repetition has an end, so that no text takes long to search.
STEP = re.compile(r"^step:(\d{1,9})/(\d{1,9}) (?:val_loss:(\S{1,40}) )?(?:train_loss:\S{1,40} )?"
                  r"train_time:(\d{1,12}(?:\.\d{1,9})?)ms", re.M)
PEAK = re.compile(r"^peak memory allocated: (\d{1,12}) MiB", re.M)
VERSIONS = {"python": r"^Running Python (\S+)", "torch": r"^Running PyTorch (\S+)",
            "cuda": r"compiled for CUDA (\S+)", "triton": r"^Running Triton version (\S+)"}
DRIVER = r"Driver Version: (\S+)"
DEVICE = re.compile(r"^\| {1,9}\d{1,4} {1,9}(NVIDIA .{1,80}?) {1,60}(?:On|Off) {1,20}\|", re.M)


def parse_foreign(text: str, path: Path) -> Run:
    """The text of a plain-text log as a `Run`; RecordError if it holds no step lines."""
    *before, body = SEPARATOR.split(text)  # the sources may quote log lines, so only what follows them counts
    lines = [(int(step), int(total), loss, float(ms)) for step, total, loss, ms in STEP.findall(body)]
    if not lines:
        raise RecordError(f"{path}: neither a log.jsonl nor a plain-text log with lines 'step:1/100 "
                          "train_time:…ms'")
    run = Run(path, header(before, path, total=lines[-1][1]), steps(lines, path), validations(lines, path),
              foreign=True)
    if run.header["sources"] is None:
        run.warnings.append("no sources in the log: its configuration cannot be compared")
    step, total, _, ms = lines[-1]
    losses = run.validations["loss"]
    if step == total and len(losses) and run.validations["step"][-1] == total:
        peak = PEAK.search(body)
        run.summary = {"steps": total, "time_s": ms / 1000, "loss": float(losses[-1]),
                       "peak_memory_bytes": int(peak[1]) << 20 if peak else None}
    else:
        run.warnings.append(f"not finished: ends at step {step} of {total}, without the last validation")
    return run


def header(before: list[str], path: Path, total: int) -> dict:
    """The header's fields, as far as the sources and the environment before the steps tell them."""
    # All parts before the last are sources, even if these hold such a line.
    environment = before.pop() if len(before) > 1 else ""

    def find(pattern: str) -> str | None:
        match = re.search(pattern, environment, re.M)
        return match[1].rstrip(",") if match else None

    sources = "\n".join(before).strip()
    devices = DEVICE.findall(environment)
    return {"name": path.stem, "seed": None, "preset": None, "target": TARGET, "config": {"steps": total},
            "world_size": len(devices) or None, "devices": devices, "driver": find(DRIVER),
            "versions": {name: find(pattern) for name, pattern in VERSIONS.items()}, "commit": None,
            "sources": hashlib.sha256(sources.encode()).hexdigest() if sources else None}


def steps(lines: list[tuple], path: Path) -> dict[str, np.ndarray]:
    """The training steps' numbers and milliseconds. Where steps are missing, the next one has their mean."""
    training = [(step, ms) for step, _, loss, ms in lines if not loss]
    number = np.array([step for step, _ in training], np.int64)
    if np.any(np.diff(number, prepend=0) <= 0):
        raise RecordError(f"{path}: steps do not rise; two runs wrote into one log")
    elapsed = np.array([ms for _, ms in training], np.float64)
    return {"step": number, "ms": np.diff(elapsed, prepend=0.0) / np.diff(number, prepend=0)}


def validations(lines: list[tuple], path: Path) -> dict[str, np.ndarray]:
    rows = [(step, loss, ms / 1000) for step, _, loss, ms in lines if loss]
    try:
        return {"step": np.array([row[0] for row in rows], np.int64),
                "loss": np.array([float(row[1]) for row in rows]),
                "time_s": np.array([row[2] for row in rows])}
    except ValueError as error:
        raise RecordError(f"{path}: a val_loss is no number: {error}") from None
