"""Reading logs: `find_logs` says which files are meant, `read_log` makes a `Run` of one."""
import glob
import gzip
import hashlib
import json
import zlib
from pathlib import Path

import numpy as np

from records.tools.foreign import parse_foreign
from records.tools.schema import (
    LINES,
    LOG_NAME,
    LOG_SCHEMA,
    NUMBER,
    PACKED,
    SCHEDULE,
    RecordError,
    Run,
    check_fields,
)


def find_logs(place: str | Path) -> list[Path]:
    """The logs that a file, a folder (at any depth) or a pattern such as "records/runs/*-name" means, sorted.

    In a folder every `log.jsonl` and `*.jsonl.gz` counts; only where there is none, every `*.txt` and `*.log`
    (foreign logs) does.
    """
    paths = [Path(p) for p in sorted(glob.glob(str(place)))] or [Path(place)]
    logs = []
    for path in paths:
        if path.is_dir():
            ours = sorted([*path.rglob(LOG_NAME), *path.rglob(f"*{PACKED}")], key=run_of)
            logs += ours or sorted([*path.rglob("*.txt"), *path.rglob("*.log")])
        elif path.exists():
            logs.append(path)
        else:
            raise RecordError(f"{path}: no such file or folder; `ls records/runs` lists the runs of this "
                              "checkout")
    if not logs:
        raise RecordError(f"{place}: holds no {LOG_NAME} and no plain-text log; give a run's folder or a log "
                          "file")
    return logs


def run_of(log: Path) -> str:
    """The path without what says how the log is kept, so that a run keeps its place in a record's order."""
    return str(log).removesuffix(PACKED).removesuffix(f"/{LOG_NAME}")


def read_logs(places: list[str | Path]) -> list[Run]:
    """The runs of several places, each log once."""
    return [read_log(path) for path in dict.fromkeys(log for place in places for log in find_logs(place))]


def read_log(path: Path) -> Run:
    """A log of ours or a foreign one as a `Run`. One that was cut short gives a partial run and says so."""
    path = Path(path)
    contents = read_bytes(path)
    text = contents.decode(errors="replace")
    if not text.strip():
        raise RecordError(f"{path}: empty; the run has not written its header yet, or died before it could")
    ours = path.name.endswith((".jsonl", PACKED)) or text.lstrip().startswith("{")
    run = parse(text, path) if ours else parse_foreign(text, path)
    run.sha256 = hashlib.sha256(contents).hexdigest()
    return run


def read_bytes(path: Path) -> bytes:
    """The contents of a log, unpacked if it is gzipped."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"{path}: cannot be unpacked ({error}): the file is damaged; `git checkout` brings "
                          "it back") from None


def parse(text: str, path: Path) -> Run:
    """The text of a `log.jsonl` as a `Run`."""
    lines: dict[str, list[dict]] = {kind: [] for kind in LINES}
    warnings = []
    rows = text.splitlines()
    for number, row in enumerate(rows, 1):
        last = number == len(rows)
        try:
            line = json.loads(row)
        except json.JSONDecodeError as error:
            if last and number > 1 and not text.endswith("\n"):
                warnings.append(f"line {number} is incomplete: the log is still being written or was cut off")
                break
            raise RecordError(f"{path}:{number}: not JSON ({error.msg}): {row[:60]!r}; the log is damaged "
                              "here") from None
        check_line(line, f"{path}:{number}", first=number == 1)
        if lines["summary"] or lines["stopped"]:
            raise RecordError(f"{path}:{number}: a line after the run's last one; two runs wrote into one "
                              "log")
        lines[line["kind"]].append(line)
    run = Run(path, lines["header"][0], columns(lines["step"], "step"),
              columns(lines["validation"], "validation"),
              scores={line["text"]: line["loss"] for line in lines["score"]},
              summary=next(iter(lines["summary"]), None), warnings=warnings)
    if lines["stopped"]:
        run.stopped = lines["stopped"][0]["reason"]
        run.warnings.append(f"stopped at step {lines['stopped'][0]['step']}: {run.stopped}")
    elif not run.finished:
        run.warnings.append(f"not finished: no summary after step {len(run.steps['step'])} of "
                            f"{run.planned_steps or '?'}")
    return run


def check_line(line: dict, where: str, first: bool) -> None:
    """RecordError unless `line` is of a known kind, in its place, with every field of the right type."""
    kind = line.get("kind") if isinstance(line, dict) else None
    if kind not in LINES:
        raise RecordError(f"{where}: kind {kind!r}; a line of a {LOG_NAME} is one of {', '.join(LINES)}")
    if first != (kind == "header"):
        raise RecordError(f"{where}: {kind!r}, but a log begins with its one header line; "
                          + ("its beginning is missing" if first else "two runs wrote into one log"))
    if first and line.get("schema") != LOG_SCHEMA:
        raise RecordError(f"{where}: log schema {line.get('schema')!r}; these tools read schema {LOG_SCHEMA}")
    check_fields(line, LINES[kind], f"{where}: {kind} line")
    if kind == "step":
        check_fields(SCHEDULE | line, {"momentum": NUMBER, "windows": list}, f"{where}: step line")
        if len(line.get("windows", SCHEDULE["windows"])) != 2:
            raise RecordError(f"{where}: step line needs 'windows' as [short, long], found {line['windows']}")


def columns(lines: list[dict], kind: str) -> dict[str, np.ndarray]:
    """Field -> values (n,): int64 for counts, float64 for the rest; a step's windows are (n, 2)."""
    found = {name: np.array([line[name] for line in lines], np.int64 if kinds is int else np.float64)
             for name, kinds in LINES[kind].items()}
    if kind == "step":
        found |= {name: np.array([line.get(name, missing) for line in lines], np.float64)
                  for name, missing in SCHEDULE.items()}
    return found
