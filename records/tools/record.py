"""Record folders: made from finished runs and loaded; `check.py` holds them against their own logs.

    records/2026-11-21_first/
        README.md       what changed, why it works, how to run it again, and a generated table of the runs
        record.json     FIELDS: numbers that follow from the logs, and the commit that all of these runs ran
        changes.patch   what ran beside that commit, if its tree had changes
        runs/<run>.jsonl.gz
"""
import gzip
import json
import os
import re
import shlex
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from records.run import PATCH_NAME
from records.run.sources import hash_sources
from records.tools import markdown
from records.tools.history import NoHistory, sources_at
from records.tools.logs import find_logs, read_bytes, read_log
from records.tools.pool import require_sample, summarize
from records.tools.schema import NUMBER, PACKED, RecordError, Run, check_fields
from records.tools.stats import SIGNIFICANCE

# Where record folders, `runs/` and `index.html` live; the README is one level up.
RECORDS = Path(__file__).parent.parent
RECORD_SCHEMA = 2
FIELDS = {
    "schema": int, "title": str, "date": str, "contributors": list, "parent": str | None, "hardware": list,
    "driver": str | None, "versions": dict, "commit": str, "preset": str, "sources": str,
    "target": NUMBER | None, "seeds": list, "runs": list, "mean_loss": NUMBER,
    "standard_deviation_loss": NUMBER | None, "mean_time_s": NUMBER,
    "standard_deviation_time_s": NUMBER | None, "p_value": NUMBER | None,
}
RUN_FIELDS = {"log": str, "sha256": str, "seed": int, "loss": NUMBER, "time_s": NUMBER}  # of each of "runs"
UNWRITTEN = "_To be written._"


@dataclass
class Record:
    """A record folder that could be loaded."""
    folder: Path
    data: dict  # record.json
    runs: list[Run]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def readme(self) -> str:
        """The text of its README.md, "" where there is none."""
        path = self.folder / "README.md"
        return path.read_text() if path.exists() else ""

    def sources(self) -> dict[str, bytes]:
        """What its runs ran, path -> contents.

        NoHistory where git cannot tell here, RecordError where that is unknown.
        """
        return sources_at(self.folder, self.data["commit"], patch_of(self.folder))


def patch_of(folder: Path) -> bytes:
    """The changes that a run's or a record's folder keeps; b"" where there are none."""
    path = folder / PATCH_NAME
    return path.read_bytes() if path.exists() else b""


def runs_folder(root: Path) -> Path:
    """Where train_gpt.py puts its runs: RUNS_PATH, else `root/runs`."""
    return Path(os.environ.get("RUNS_PATH", root / "runs"))


def folders(root: Path) -> list[Path]:
    """The record folders of `root`, oldest first: those named <date>_<name>."""
    return sorted(p for p in root.glob("????-??-??_*") if p.is_dir())


def load(folder: Path) -> Record:
    """The record in `folder`. RecordError unless its record.json is well-formed and its logs can be read."""
    folder = folder.resolve()  # its name counts, also where it is given as "."
    path = folder / "record.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecordError(f"{folder}: no record.json; `python -m records new` makes a record of finished "
                          "runs") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != RECORD_SCHEMA:
        raise RecordError(f"{path}: these tools read a JSON object with schema {RECORD_SCHEMA}")
    check_fields(data, FIELDS, f"{path}:")
    unknown = sorted(data.keys() - FIELDS.keys())
    if unknown:
        raise RecordError(f"{path}: unknown {', '.join(unknown)}; schema {RECORD_SCHEMA} has no such fields")
    for run in data["runs"]:
        check_fields(run, RUN_FIELDS, f"{path}: a run")
    try:
        date.fromisoformat(data["date"])
    except ValueError:
        raise RecordError(f"{path}: date {data['date']!r} is not of the form 2026-11-21") from None
    runs = [read_log(log) for log in find_logs(folder / "runs")]
    if any(run.foreign for run in runs):
        raise RecordError(f"{folder}: a record holds logs of this project's program, not foreign ones")
    return Record(folder, data, runs)


def load_all(root: Path) -> list[Record]:
    return [load(folder) for folder in folders(root)]


def record_data(runs: list[Run], written: dict) -> dict:
    """record.json for these runs: what is `written` by hand (title, …, commit), and what the logs give."""
    summary, header = summarize(runs), runs[0].header
    loss, time_s = summary["loss"], summary["time_s"]
    return {
        "schema": RECORD_SCHEMA, **{key: written[key] for key in ("title", "date", "contributors", "parent")},
        "hardware": header["devices"], "driver": header["driver"], "versions": header["versions"],
        "commit": written["commit"], "preset": header["preset"], "sources": header["sources"],
        "target": summary["target"], "seeds": summary["seeds"],
        "runs": [{"log": f"runs/{run.label}{PACKED}", "sha256": run.sha256, "seed": run.seed,
                  "loss": run.loss, "time_s": run.time_s} for run in runs],
        "mean_loss": loss["mean"], "standard_deviation_loss": loss["standard_deviation"],
        "mean_time_s": time_s["mean"], "standard_deviation_time_s": time_s["standard_deviation"],
        "p_value": summary["p"],
    }


def result_table(data: dict) -> str:
    """The numbers in a record's README: a row for each run, mean and standard deviation, then the test."""
    rows = [[str(run["seed"]), f"{run['loss']:.4f}", f"{run['time_s']:.3f}"] for run in data["runs"]]
    rows.append(["mean", f"{data['mean_loss']:.4f}", f"{data['mean_time_s']:.3f}"])
    if len(data["runs"]) > 1:
        rows.append(["standard deviation", f"{data['standard_deviation_loss']:.4f}",
                     f"{data['standard_deviation_time_s']:.3f}"])
    return markdown.table(["seed", "loss (nats/token)", "time (s)"], rows) + "\n\n" + significance_line(data)


def is_proven(data: dict) -> bool:
    """Whether the t-test shows the mean loss to be below the target."""
    return data["p_value"] is not None and data["p_value"] < SIGNIFICANCE


def significance_line(data: dict) -> str:
    n, target = len(data["runs"]), data["target"]
    if target is None:
        return f"n = {n}; no target, so nothing to test."
    if n == 1:
        return f"n = 1: one run shows no spread, so nothing is known about significance against {target:g}."
    p = "none, the losses are equal" if data["p_value"] is None else f"p = {data['p_value']:.2g}"
    return f"n = {n}; one-sided t-test of \"the mean is above {target:g}\": {p}."


def pack_log(run: Run, folder: Path) -> None:
    """Put the run's log into `folder`, gzipped; the same log gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{run.label}{PACKED}").write_bytes(gzip.compress(read_bytes(run.path), mtime=0))


def run_again(folder: Path, header: dict, commit: str, patched: bool) -> str:
    """The command that runs what a run with this header ran, from the top of the repository."""
    place = f"../{folder.name}"
    program = shlex.join(map(str, header["command"]))
    ranks = header["world_size"]
    launcher = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python"
    patch = f'git -C {place} apply "$PWD/records/{folder.name}/{PATCH_NAME}" && ' if patched else ""
    return f"git worktree add {place} {commit[:12]} && {patch}cd {place} && {launcher} {program}"


def create(runs: list[Run], root: Path, name: str, written: dict, changed: str = "", why: str = "") -> Path:
    """Make `root/<date>_<name>` of finished runs of one configuration; returns the folder.

    RecordError if it exists.

    `written` has the title and may have date, contributors, parent and the commit (default: the one that the
    logs name).
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name):
        raise RecordError(f"name {name!r}: letters, digits, '-' and '.' only, as it becomes a folder's name")
    if any(run.foreign for run in runs):
        raise RecordError("a record needs logs of this project's program; foreign logs go to stats, compare "
                          "and plot")
    require_sample(runs)
    header = runs[0].header
    written = {"date": header["started"][:10], "contributors": [], "parent": None, "commit": None, **written}
    folder = root / f"{written['date']}_{name}"
    if folder.exists():
        raise RecordError(f"{folder}: exists; choose another --name or remove it")
    if written["parent"] is not None and not (root / written["parent"] / "record.json").exists():
        raise RecordError(f"parent {written['parent']!r}: no record of that name; there are: "
                          f"{', '.join(path.name for path in folders(root)) or 'none'}")
    # A commit that is given stands for itself; what the logs name may need the changes that the run has kept.
    patch = b"" if written["commit"] else patch_of(runs[0].path.parent)
    written["commit"] = written["commit"] or header["commit"]
    require_sources(root, written["commit"], patch, header["sources"])
    for run in runs:
        pack_log(run, folder / "runs")
    if patch:
        (folder / PATCH_NAME).write_bytes(patch)
    data = record_data(runs, written)
    (folder / "record.json").write_text(json.dumps(data, indent=2) + "\n")
    again = run_again(folder, header, data["commit"], bool(patch))
    (folder / "README.md").write_text(
        f"# {written['title']}\n\n"
        f"## What changed\n\n{changed or UNWRITTEN}\n\n"
        f"## Why it works\n\n{why or UNWRITTEN}\n\n"
        f"## Run it again\n\n    {again}\n\n"
        f"## Result\n\n{markdown.marked('result', result_table(data))}\n")
    return folder


def require_sources(root: Path, commit: str | None, patch: bytes, expected: str) -> None:
    """RecordError unless the sources of the commit, patched, have the hash that the logs name."""
    if commit is None:
        raise RecordError("the logs name no commit (no git where they ran); give the one that ran with "
                          "--commit")
    try:
        found = hash_sources(sources_at(root, commit, patch))
    except NoHistory as error:
        raise RecordError(f"a record needs the history of what ran: {error}") from None
    if found != expected:
        raise RecordError("the runs' sources are not those of commit "
                          f"{commit[:12]}{' with their changes' if patch else ''} (hash {found[:12]}…, the "
                          f"logs' {expected[:12]}…); commit what ran, and name it with --commit")
