"""Writes the folder of a run, `records/runs/<time>-<name>/`: its log, and the changes since its commit.

The log is `log.jsonl`, a JSON object in each line. Where the sources had changes that are not in the commit
which the log's header names, `changes.patch` holds them.
"""
import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from records.run import LOG_NAME, PATCH_NAME
from records.run.sources import ROOT, hash_sources, project_sources, source_changes


class LogError(Exception):
    """The disk would not take what was written. The message is one line: what happened, and what to do."""


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an OSError inside the block into a LogError about `what`."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise LogError(f"cannot write {what}: {reason}; free some space or choose another place (RUNS_PATH "
                       "for logs, --write_log false for none)") from error


def place_of(path: Path) -> str:
    """A path for a person: from the working folder, if that has not been removed."""
    try:
        return os.path.relpath(path)
    except FileNotFoundError:
        return str(path)


def working_folder() -> Path:
    """The working folder, or the path "." if the folder has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()


class RunLog:
    """The log of a run, in a new folder under $RUNS_PATH or `records/runs`. Each line is whole once written.

    A log that is not `enabled` (on ranks other than the first) writes nothing. `sources` is the hash of what
    runs. `first` is the number of steps that were taken before, in the run which this one resumes. `begun_in`
    is the working folder at the start: relative paths keep their meaning if the folder is removed later.
    """

    def __init__(self, name: str, enabled: bool = True):
        self.file, self.path, self.sources, self.first = None, None, None, 0
        self.begun_in = working_folder()
        if not enabled:
            return
        runs = self.begun_in / os.environ.get("RUNS_PATH", ROOT / "records/runs")
        with disk_errors(f"the run's log in {runs}"):
            runs.mkdir(parents=True, exist_ok=True)
            folder = self.make_folder(runs, f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
            self.sources = hash_sources(project_sources())
            if patch := source_changes():
                (folder / PATCH_NAME).write_bytes(patch)
            self.path = folder / LOG_NAME
            self.file = open(self.path, "w")

    @staticmethod
    def make_folder(runs: Path, name: str) -> Path:
        """A new folder. Other runs may start in the same second, so the name may get a number."""
        for attempt in range(1, 1000):
            folder = runs / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
        raise FileExistsError(errno.EEXIST, "too many runs of one name in one second", str(runs / name))

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        """An error becomes the last line of the log, in the warm-up as well as in the run."""
        if error is not None:
            self.stopped(str(error) or "interrupted")

    def stopped(self, reason: str) -> None:
        """Add the last line of a run that did not reach its end.

        Its number of steps is that of the lines in the file. Ctrl-C may fall between any two statements, so a
        count kept beside the file could differ from it by one.
        """
        if self.file is None:
            return
        with disk_errors(f"the run's log {self.path}"):
            self.file.flush()
            with open(self.path) as lines:
                taken = sum(line.startswith('{"kind": "step"') for line in lines)
        self.write("stopped", step=self.first + taken, reason=reason)

    def write(self, kind: str, **values: object) -> None:
        """Add a line: a JSON object with its `kind` and these values. The last line closes the file."""
        if self.file is None:
            return
        with disk_errors(f"the run's log {self.path}"):
            self.file.write(json.dumps({"kind": kind} | values) + "\n")
            self.file.flush()
            if kind in ("summary", "stopped"):      # the last line
                self.file.close()
                self.file = None
