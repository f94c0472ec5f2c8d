"""Writes the folder of a run: `records/runs/<time>-<name>/log.jsonl`, a JSON object a line, and the sources once by hash."""
import errno
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch

from records.run.sources import ROOT, keep_sources, project_sources


class LogError(Exception):
    """The disk would not take what was written. The message is one line: what happened, and what to do."""


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise LogError(f"cannot write {what}: {reason}; free some space or choose another place (RUNS_PATH for logs, --write_log false "
                       "for none)") from error


class RunLog:
    """The log of a run, in the folder that $RUNS_PATH names or `records/runs`; each line is whole when written.

    One that is not `enabled` (ranks other than the first) writes nothing.
    """

    def __init__(self, name: str, enabled: bool = True):
        self.file, self.path, self.sources = None, None, None
        if not enabled:
            return
        runs = Path(os.environ.get("RUNS_PATH", ROOT / "records/runs"))
        with disk_errors(f"the run's log in {runs}"):
            runs.mkdir(parents=True, exist_ok=True)
            folder = self.make_folder(runs, f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
            self.sources = keep_sources(project_sources(), runs, scratch=folder / "sources")
            self.path = folder / "log.jsonl"
            self.file = open(self.path, "w")

    @staticmethod
    def make_folder(runs: Path, name: str) -> Path:
        """A new folder; others may start in the same second."""
        for attempt in range(1, 1000):
            folder = runs / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
        raise FileExistsError(errno.EEXIST, "too many runs of one name in one second", str(runs / name))

    def write(self, kind: str, **values: object) -> None:
        if self.file is None:
            return
        with disk_errors(f"the run's log {self.path}"):
            self.file.write(json.dumps({"kind": kind} | values) + "\n")
            self.file.flush()


def save_weights(weights: dict[str, torch.Tensor], path: str) -> None:
    """Write the weights as one file, which is there whole or not at all."""
    with disk_errors(f"the weights to {path}"):
        with open(f"{path}.part", "wb") as f:
            torch.save(weights, f)
        os.replace(f"{path}.part", path)
