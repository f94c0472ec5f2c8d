"""Is a record true? Its numbers, sources and words held against the logs that it keeps."""
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from records.run.sources import hash_sources
from records.tools import markdown
from records.tools.history import NoHistory
from records.tools.pool import environment_differences, list_clashes, require_sample
from records.tools.record import (
    RECORD_SCHEMA,
    UNWRITTEN,
    Record,
    is_proven,
    load,
    record_data,
    result_table,
    significance_line,
)
from records.tools.rules import STAMPS, check_rules, check_target, origin
from records.tools.schema import NUMBER, RecordError, Run

RULES_BEGAN = "2026-11-23"      # from then on a record had to show three texts, and more (rules.py)
# A share of the time between validations: logs round times, and a step's end is measured on the device.
CLOCK_TOLERANCE = 0.01
LAST_TOLERANCE = 0.01   # seconds: the clock is read again when the run has ended
STAMPS_TOLERANCE = 0.1  # seconds: validations begin and end between two readings of the system's time


def check(folder: Path, read: Callable[[Path], Record] = load) -> tuple[list[str], list[str]]:
    """(problems, notes) of a record folder. Problems make it invalid; notes are what a reader should know.

    `read` may remember what it has loaded, since the record that this one builds on is read as well.
    """
    try:
        record = read(folder)
        require_sample(record.runs)
        true = record_data(record.runs, record.data, record.second)
    except RecordError as error:
        return [str(error)], []
    first = record.runs[0]
    began = min(run.header["started"][:10] for run in record.runs)
    problems = check_logs(record.data["runs"], true["runs"])
    if true["schema"] == RECORD_SCHEMA:
        problems += check_rules(true, record.runs, record.second)
    problems += [f"{key} is {record.data[key]!r}, but the logs give {value!r}"
                 for key, value in true.items() if key != "runs" and not same(record.data[key], value)]
    problems += check_words(record, result_table(true, record.runs, record.second))
    source_problems, notes = check_sources(record)
    problems += source_problems
    problems += check_succession(record.runs)
    for run in [*record.runs, *filter(None, [record.second])]:
        problems += [f"{run.label}: {problem}" for problem in check_clock(run)]
        clashes = environment_differences(first, run)
        if clashes:
            problems.append(f"{first.label} and {run.label} ran in different environments: "
                            f"{list_clashes(clashes)}")
    if true["date"] != began:
        problems.append(f"its date is {true['date']}, but its first run began on {began}")
    if true["schema"] < RECORD_SCHEMA and began >= RULES_BEGAN:
        problems.append(f"schema {true['schema']} is for runs before {RULES_BEGAN}")
    if true["schema"] < RECORD_SCHEMA:
        notes.append("scored on the validation text alone, by the rules of its time")
    problems += check_target(true)
    if not is_proven(true):
        notes.insert(0, f"not shown to be below its target: {significance_line(true)}")
    if true["parent"] is not None:
        try:
            notes += check_pace(true, read(folder.parent / true["parent"]).data)
        except RecordError as error:
            problems.append(f"parent {true['parent']!r}: {error}")
    return problems, notes


def check_logs(recorded: list[dict], true: list[dict]) -> list[str]:
    """Where record.json lists other runs than there are logs, or says of a run what its log does not."""
    by_log, problems = {run["log"]: run for run in recorded}, []
    if [run["log"] for run in recorded] != [run["log"] for run in true]:
        problems.append(f"record.json has the runs {[run['log'] for run in recorded]}, but the logs here are "
                        f"{[run['log'] for run in true]}")
    for run in true:
        said = by_log.get(run["log"], run)
        problems += [f"{run['log']}: {key} is {said[key]!r} in record.json, but the log gives {run[key]!r}"
                     for key in ("seed", "loss", "time_s") if not same(said[key], run[key])]
        if said["sha256"] != run["sha256"]:
            problems.append(f"{run['log']}: the log has changed since the record was made: its SHA-256 is "
                            f"{run['sha256'][:12]}…, in record.json {said['sha256'][:12]}…")
    return problems


def check_sources(record: Record) -> tuple[list[str], list[str]]:
    """(problems, notes): whether the sources of the record's commit are the sources that ran, by its logs."""
    commit, hashed = record.data["commit"], record.runs[0].header["sources"]
    headers = [run.header for run in (*record.runs, *filter(None, [record.second]))]
    named = {header["commit"] for header in headers}
    dirty = any(header["dirty"] is not False for header in headers)
    problems, notes = [], []
    if not dirty and named != {commit}:
        problems.append(f"commit is {commit[:12]}, but the logs name "
                        f"{', '.join(str(name)[:12] for name in named)}")
    try:
        files = record.sources()
    except NoHistory as error:
        return problems, [f"its sources were not checked: {error}"]
    except RecordError as error:
        return [*problems, str(error)], []
    if hash_sources(files) != hashed:
        found = hash_sources(files)[:12]
        problems.append(f"commit {commit[:12]} has sources with the hash {found}…, but the logs say that "
                        f"{hashed[:12]}… ran")
    elif dirty:
        others = ", ".join(sorted(str(name)[:12] for name in named))
        notes.append(f"the logs name commit {others} with uncommitted changes; the sources that ran are "
                     f"those of commit {commit[:12]}")
    return problems, notes


def check_pace(data: dict, parent: dict) -> list[str]:
    """A note if a record is not faster than its parent, of the same machine, class and rules."""
    alike = all(parent.get(name) == data.get(name) for name in ("hardware", "class", "schema"))
    if not alike or parent["mean_time_s"] > data["mean_time_s"]:
        return []
    return [f"not faster than its parent: {data['mean_time_s']:.3f} s, {parent['mean_time_s']:.3f} s before"]


def check_words(record: Record, table: str) -> list[str]:
    """Problems of the folder's name and of its README, which must hold `table`."""
    problems = []
    if not record.name.startswith(record.data["date"] + "_"):
        problems.append(f"the folder's name does not begin with its date {record.data['date']}_")
    if not record.readme:
        return [*problems, "no README.md: say what changed and why it works"]
    if record.data["commit"][:7] not in record.readme:
        problems.append(f"README.md: it does not say how to run commit {record.data['commit'][:12]} again")
    for title in markdown.WRITTEN_SECTIONS:
        if markdown.titled(record.readme, title) in (None, "", UNWRITTEN):
            problems.append(f"README.md: the section \"## {title}\" is missing or not written yet")
    if markdown.between(record.readme, "result") != table:
        problems.append("README.md: its result table is stale; `python -m records report` writes it anew")
    return problems


def check_clock(run: Run) -> list[str]:
    """Broken clock rules: the clock covers every step, and the totals are those of the last step."""
    if "resumed" in run.header:
        return ["it went on from a checkpoint, so its clock has counted only the rest"]
    if problems := check_numbers(run):
        return problems
    steps, validations, summary = run.steps, run.validations, run.summary
    count = len(steps["step"])
    if list(steps["step"]) != list(range(1, count + 1)) or count != summary["steps"]:
        problems.append(f"{count} step lines do not count 1 to {summary['steps']}, the summary's steps")
    if run.planned_steps not in (None, summary["steps"]):
        problems.append(f"its settings ask for {run.planned_steps} steps, and it took {summary['steps']}")
    if run.header["config"].get("seed", run.seed) != run.seed:
        problems.append(f"its settings say seed {run.header['config']['seed']}, its header seed {run.seed}")
    if not count or (run.batch_tokens <= 0).any() or (steps["ms"] <= 0).any():
        problems.append("a step took no tokens or no time")
    if not len(validations["step"]) or validations["step"][-1] != summary["steps"]:
        return [*problems, "no validation after the last step"]
    before_step = before_time = 0
    for step, time_s in zip(validations["step"], validations["time_s"]):
        inside = (steps["step"] > before_step) & (steps["step"] <= step)
        needed = steps["ms"][inside].sum() / 1000
        if time_s - before_time < needed * (1 - CLOCK_TOLERANCE):
            problems.append(f"the clock gave {time_s - before_time:.3f} s to steps {before_step + 1} to "
                            f"{step}, whose own times add up to {needed:.3f} s: work ran outside the clock")
        before_step, before_time = step, time_s
    last = {"loss": (validations["loss"][-1], 1e-6), "tokens": (steps["tokens"][-1] if count else 0, 0),
            "time_s": (validations["time_s"][-1], LAST_TOLERANCE)}
    problems += [f"the summary's {key} is {summary[key]}, that of the last step {value}"
                 for key, (value, tolerance) in last.items() if abs(summary[key] - value) > tolerance]
    if not same(summary["tokens_per_s"] * summary["time_s"], summary["tokens"], CLOCK_TOLERANCE):
        problems.append(f"tokens_per_s is {summary['tokens_per_s']}, not {summary['tokens']} tokens / "
                        f"{summary['time_s']} s")
    if changed := summary.get("changed_shards"):
        problems.append(f"shards were not those of their manifest: {changed}")
    return problems + check_stamps(run)


def check_numbers(run: Run) -> list[str]:
    """Numbers of a log that are not finite or below zero. NaN would pass every comparison of other checks."""
    kinds = {"a step's": run.steps, "a validation's": run.validations, "the score on": run.scores,
             "the summary's": run.summary | run.summary["step_ms"]}
    return [f"{kind} {name} is not a finite number of at least 0" for kind, values in kinds.items()
            for name, value in values.items() if isinstance(value, NUMBER | np.ndarray)
            and not np.all((value >= 0) & (value < math.inf))]


def check_stamps(run: Run) -> list[str]:
    """Whether the clock agrees with the system's time at its start and its end, if the log tells it."""
    summary = run.summary
    if not summary.keys() >= {*STAMPS}:
        return []
    wall = summary["ended"] - summary["began"] - summary["paused_s"]
    if abs(wall - summary["time_s"]) <= CLOCK_TOLERANCE * wall + STAMPS_TOLERANCE:
        return []
    return [f"the clock gave {summary['time_s']:.3f} s, the system's time {wall:.3f} s"]


def check_succession(runs: list[Run]) -> list[str]:
    """Whether runs of one process follow one another in the system's time."""
    stamped = sorted((run for run in runs if run.summary.keys() >= {*STAMPS}),
                     key=lambda run: run.summary["began"])
    return [f"{after.label} began before {before.label} of the same process had ended"
            for before, after in zip(stamped, stamped[1:])
            if origin(before) == origin(after) and after.summary["began"] < before.summary["ended"]]


def same(a: object, b: object, tolerance: float = 1e-9) -> bool:
    """Equal, numbers to a relative `tolerance`, also inside lists and dictionaries."""
    if isinstance(a, NUMBER) and isinstance(b, NUMBER):
        return math.isclose(a, b, rel_tol=tolerance)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in a)
    return a == b
