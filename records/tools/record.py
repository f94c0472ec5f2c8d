"""Record folders: made from finished runs and loaded; `check.py` holds them against their own logs.

    records/2026-11-21_first/
        README.md       what changed, why it works, how to run it again, and a generated table of the runs
        record.json     FIELDS: numbers that follow from the logs, and the commit that all of these runs ran
        runs/<run>.jsonl.gz
        second/<run>.jsonl.gz   one more full run, of another process and seed
"""
import gzip
import json
import os
import re
import shlex
import shutil
import textwrap
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from data.shards import read_regular, whole_file
from records.run.sources import hash_sources
from records.tools import markdown
from records.tools.classes import table_class, table_parameters
from records.tools.history import NoHistory, sources_at
from records.tools.logs import find_logs, read_bytes, read_log
from records.tools.pool import common_texts, require_sample, scores_text, summarize
from records.tools.rules import check_rules, check_target, is_corpus
from records.tools.schema import NUMBER, PACKED, RecordError, Run, check_fields, flatten
from records.tools.stats import SIGNIFICANCE, describe

# Where record folders, `runs/`, `index.html` and the README with the table of records live.
RECORDS = Path(__file__).parent.parent
RECORD_SCHEMA = 3
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"    # of a folder
FIELDS = {
    "schema": int, "title": str, "date": str, "contributors": list, "parent": str | None, "hardware": list,
    "driver": str | None, "versions": dict, "commit": str, "preset": str, "sources": str,
    "target": NUMBER | None, "seeds": list, "runs": list, "mean_loss": NUMBER,
    "standard_deviation_loss": NUMBER | None, "mean_time_s": NUMBER,
    "standard_deviation_time_s": NUMBER | None, "p_value": NUMBER | None,
}
# What came in with schema 3: mean losses on other texts; the class of the n-gram table; the seeds that chose
# a setting or the number of steps; the second full run.
NEWER_FIELDS = {"scores": dict, "class": str, "table_parameters": int, "chosen_with": list,
                "second": dict | None}
RUN_FIELDS = {"log": str, "sha256": str, "seed": int, "loss": NUMBER, "time_s": NUMBER}  # of each of "runs"
UNWRITTEN = "_To be written._"
SECOND = "second"  # the folder of the second full run's log


@dataclass
class Record:
    """A record folder that could be loaded."""
    folder: Path
    data: dict  # record.json
    runs: list[Run]
    second: Run | None = None  # one more full run

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def readme(self) -> str:
        """The text of its README.md, "" where there is none that can be read."""
        try:
            return read_regular(self.folder / "README.md", mode="r", encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def sources(self) -> dict[str, bytes]:
        """The sources that the record's runs ran, path -> contents.

        NoHistory where this clone or machine lacks the history; RecordError where the commit is unknown.
        """
        return sources_at(self.folder, self.data["commit"])


def runs_folder(root: Path) -> Path:
    """Where train_gpt.py puts its runs: RUNS_PATH, else `root/runs`."""
    return Path(os.environ.get("RUNS_PATH", root / "runs"))


def folders(root: Path) -> list[Path]:
    """The record folders of `root`, oldest first: those named <date>_<name>."""
    return sorted(p for p in root.glob("????-??-??_*") if p.is_dir())


def load(folder: Path) -> Record:
    """The record in `folder`. RecordError unless its record.json is well-formed and its logs can be read."""
    folder = folder.resolve()  # its name counts, also where it is given as "."
    if not re.fullmatch(NAME, folder.name):     # The page makes anchors of it.
        raise RecordError(f"{folder}: a record's name has only letters, digits, '-', '_' and '.'")
    path = folder / "record.json"
    try:
        data = json.loads(read_regular(path))
    except FileNotFoundError:
        raise RecordError(f"{folder}: no record.json; `python -m records new` makes a record of finished "
                          "runs") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") not in (2, RECORD_SCHEMA):
        raise RecordError(f"{path}: these tools read a JSON object with schema 2 or {RECORD_SCHEMA}")
    fields = FIELDS | (NEWER_FIELDS if data["schema"] == RECORD_SCHEMA else {})
    check_fields(data, fields, f"{path}:")
    unknown = sorted(data.keys() - fields.keys())
    if unknown:
        raise RecordError(f"{path}: unknown {', '.join(unknown)}; schema {data['schema']} has no such fields")
    for run in [*data["runs"], *filter(None, [data.get("second")])]:
        check_fields(run if isinstance(run, dict) else {}, RUN_FIELDS, f"{path}: a run")
    for name, kind in {"contributors": str, "hardware": str, "seeds": int, "chosen_with": int}.items():
        if not all(type(item) is kind for item in data.get(name, [])):
            raise RecordError(f"{path}: {name} holds more than {kind.__name__}")
    flatten(data["versions"])
    if data["parent"] is not None and not re.fullmatch(NAME, data["parent"]):
        raise RecordError(f"{path}: parent {data['parent'][:40]!r} is no record's name")
    try:
        date.fromisoformat(data["date"])
    except ValueError:
        raise RecordError(f"{path}: date {data['date']!r} is not of the form 2026-11-21") from None
    runs = [read_log(log) for log in find_logs(folder / "runs")]
    second = [read_log(log) for log in find_logs(folder / SECOND)] if (folder / SECOND).exists() else []
    if any(run.foreign for run in [*runs, *second]):
        raise RecordError(f"{folder}: a record holds logs of this project's program, not foreign ones")
    if len(second) > 1:
        raise RecordError(f"{folder / SECOND}: {len(second)} logs, expected one")
    return Record(folder, data, runs, next(iter(second), None))


def load_all(root: Path) -> list[Record]:
    return [load(folder) for folder in folders(root)]


def run_data(run: Run, folder: str) -> dict:
    """What record.json says of a run whose log lies in this folder of the record."""
    return {"log": f"{folder}/{run.label}{PACKED}", "sha256": run.sha256, "seed": run.seed,
            "loss": run.loss, "time_s": run.time_s}


def record_data(runs: list[Run], written: dict, second: Run | None = None) -> dict:
    """record.json for these runs: what is `written` by hand (title, …, commit), and what the logs give."""
    summary, header = summarize(runs), runs[0].header
    if second:
        require_sample([second], "the second full run")
    loss, time_s = summary["loss"], summary["time_s"]
    schema = written.get("schema", RECORD_SCHEMA)
    newer = {"scores": summary["scores"], "class": table_class(header),
             "table_parameters": table_parameters(header), "chosen_with": written.get("chosen_with") or [],
             "second": run_data(second, SECOND) if second else None} if schema == RECORD_SCHEMA else {}
    return {
        "schema": schema, **{key: written[key] for key in ("title", "date", "contributors", "parent")},
        "hardware": header["devices"], "driver": header["driver"], "versions": header["versions"],
        "commit": written["commit"], "preset": header["preset"], "sources": header["sources"],
        "target": summary["target"], "seeds": summary["seeds"],
        "runs": [run_data(run, "runs") for run in runs],
        "mean_loss": loss["mean"], "standard_deviation_loss": loss["standard_deviation"],
        "mean_time_s": time_s["mean"], "standard_deviation_time_s": time_s["standard_deviation"],
        "p_value": summary["p"], **newer,
    }


def result_table(data: dict, runs: list[Run], second: Run | None) -> str:
    """The numbers in a record's README: a row for each run, mean and standard deviation, then the test.

    `data` is its record.json, in whose order the `runs` stand.
    """
    texts = common_texts(runs) if "scores" in data else []
    rows = [[str(said["seed"]), f"{said['loss']:.4f}", *(f"{run.scores[text]:.4f}" for text in texts),
             f"{said['time_s']:.3f}"] for said, run in zip(data["runs"], runs)]
    each = [describe([run.scores[text] for run in runs]) for text in texts]
    rows.append(["mean", f"{data['mean_loss']:.4f}", *(f"{x.mean:.4f}" for x in each),
                 f"{data['mean_time_s']:.3f}"])
    if len(data["runs"]) > 1:
        rows.append(["standard deviation", f"{data['standard_deviation_loss']:.4f}",
                     *(f"{x.standard_deviation:.4f}" for x in each),
                     f"{data['standard_deviation_time_s']:.3f}"])
    lines = [markdown.table(["seed", "loss (nats/token)", *texts, "time (s)"], rows), "",
             significance_line(data)]
    if second:
        losses = f"{second.loss:.4f}" + (f", {scores_text(second.scores)}" if second.scores else "")
        lines.append(f"A second full run, seed {second.seed}: {losses} in {second.time_s:.3f} s.")
    return "\n".join(lines)


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
    with whole_file(folder / f"{run.label}{PACKED}") as file:
        file.write(gzip.compress(read_bytes(run.path), mtime=0))


def run_again(folder: Path, header: dict) -> str:
    """The command that repeats the run of this header, given at the top of the repository."""
    place = f"../{folder.name}"
    program = shlex.join(map(str, header["command"]))
    ranks = header["world_size"]
    launcher = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python"
    return f"git worktree add {place} {header['commit'][:12]} && cd {place} && {launcher} {program}"


def as_json(data: dict) -> str:
    """JSON with a field a line. Lists of numbers, such as seeds, fill lines of 90 characters."""
    def filled(found: re.Match) -> str:
        return f"[{textwrap.fill(' '.join(found[1].split()), 90, subsequent_indent='    ')}]"
    return re.sub(r"\[([-\s\d.,e]+)\]", filled, json.dumps(data, indent=2)) + "\n"


def create(runs: list[Run], root: Path, name: str, written: dict, changed: str = "", why: str = "",
           second: Run | None = None) -> Path:
    """Make `root/<date>_<name>` of finished runs of one configuration; returns the folder.

    RecordError if it exists, or if the runs break a rule of records.

    `written` has the title and may have date, contributors, parent and chosen_with.
    """
    if not re.fullmatch(NAME, name):
        raise RecordError(f"name {name!r}: letters, digits, '-' and '.' only, as it becomes a folder's name")
    if any(run.foreign for run in [*runs, *filter(None, [second])]):
        raise RecordError("a record needs logs of this project's program; foreign logs go to stats, compare "
                          "and plot")
    if len(labels := [run.label for run in runs]) > len({*labels}):
        raise RecordError(f"two runs are called {max(labels, key=labels.count)}, of two machines perhaps; "
                          "rename the folder of one, for a record keeps each log by that name")
    runs = sorted(runs, key=lambda run: run.label)      # as `load` will find them in the folder
    require_sample(runs)
    header = runs[0].header
    written = {"date": header["started"][:10], "contributors": [], "parent": None,
               "commit": header["commit"], **written}
    folder = root / f"{written['date']}_{name}"
    if folder.exists():
        raise RecordError(f"{folder}: exists; choose another --name or remove it")
    if written["parent"] is not None and not (root / written["parent"] / "record.json").exists():
        raise RecordError(f"parent {written['parent']!r}: no record of that name; there are: "
                          f"{', '.join(path.name for path in folders(root)) or 'none'}")
    data = record_data(runs, written, second)
    broken = check_rules(data, runs, second) + check_target(data)
    if written.get("chosen_with") is None and is_corpus(runs[0]):
        broken.append("--chosen-with is missing: say which seeds chose a setting or the number of steps, and "
                      "give it no seed if none did")
    if broken:
        raise RecordError("; ".join(broken))
    require_sources(root, header)
    require_new(root, data)
    try:
        for place, logs in (("runs", runs), (SECOND, [second] if second else [])):
            for run in logs:
                pack_log(run, folder / place)
        write_text(folder / "record.json", as_json(data))
        write_text(folder / "README.md",
                   f"# {written['title']}\n\n"
                   f"## What changed\n\n{changed or UNWRITTEN}\n\n"
                   f"## Why it works\n\n{why or UNWRITTEN}\n\n"
                   f"## Run it again\n\n    {run_again(folder, header)}\n\n"
                   f"## Result\n\n{markdown.marked('result', result_table(data, runs, second))}\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def require_new(root: Path, data: dict) -> None:
    """RecordError if a log of this record.json is in a record of `root`."""
    for path in root.glob("????-??-??_*/record.json"):
        text = path.read_text(errors="replace")
        if used := [run["log"] for run in [*data["runs"], *filter(None, [data.get("second")])]
                    if run["sha256"] in text]:
            raise RecordError(f"{', '.join(used)}: already in the record {path.parent.name}")


def write_text(path: Path, text: str) -> None:
    """Write the file whole or not at all. A lone surrogate, which UTF-8 cannot hold, becomes "?"."""
    with whole_file(path) as file:
        file.write(text.encode(errors="replace"))


def require_sources(root: Path, header: dict) -> None:
    """RecordError unless the commit in a log's header has the sources that, by this header, ran."""
    commit, expected = header["commit"], header["sources"]
    if commit is None:
        raise RecordError("the logs name no commit: there was no git where they ran")
    try:
        found = hash_sources(sources_at(root, commit))
    except NoHistory as error:
        raise RecordError(f"a record needs the history of what ran: {error}") from None
    if found != expected:
        raise RecordError(f"the runs' sources are not those of commit {commit[:12]} (hash {found[:12]}…, the "
                          f"logs' {expected[:12]}…)")
