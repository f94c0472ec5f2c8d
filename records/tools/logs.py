"""Reading logs: `find_logs` says which files are meant, `read_log` makes a `Run` of one."""
import glob
import gzip
import hashlib
import io
import json
import re
import zlib
from array import array
from pathlib import Path

import numpy as np

from data.shards import open_regular
from records.tools.foreign import parse_foreign
from records.tools.schema import (
    LATER,
    LINES,
    LOG_NAME,
    LOG_SCHEMA,
    NUMBER,
    PACKED,
    SCHEDULE,
    RecordError,
    Run,
    check_fields,
    flatten,
)

MOST_BYTES = 1 << 29    # of a log, unpacked: 2 million steps take 380 MB
MOST_RANKS = 1 << 16


def find_logs(place: str | Path) -> list[Path]:
    """The logs that a file, a folder (at any depth) or a pattern such as "records/runs/*-name" means, sorted.

    In a folder every `log.jsonl` and `*.jsonl.gz` counts; only where there is none, every `*.txt` and `*.log`
    (foreign logs) does. Of a record, only the logs behind its numbers count, so not the second full run's.
    """
    paths = [Path(p) for p in sorted(glob.glob(str(place)))] or [Path(place)]
    logs = []
    for path in paths:
        if path.is_dir():
            path = path / "runs" if (path / "record.json").exists() else path
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
    """The log's path without the ending that differs when it is packed: so a packed run keeps its place."""
    return str(log).removesuffix(PACKED).removesuffix(f"/{LOG_NAME}")


def read_logs(places: list[str | Path]) -> list[Run]:
    """The runs of several places, each log once."""
    return [read_log(path) for path in dict.fromkeys(log for place in places for log in find_logs(place))]


def read_log(path: Path) -> Run:
    """A log of ours or a foreign one as a `Run`. One that was cut short gives a partial run and a warning."""
    path = Path(path)
    contents = read_bytes(path)
    if not contents.strip():
        raise RecordError(f"{path}: empty; the run has not written its header yet, or died before it could")
    ours = path.name.endswith((".jsonl", PACKED)) or contents.lstrip().startswith(b"{")
    run = parse(contents, path) if ours else parse_foreign(contents.decode(errors="replace"), path)
    run.sha256 = hashlib.sha256(contents).hexdigest()
    return run


def read_bytes(path: Path) -> bytes:
    """The contents of a log, unpacked if it is gzipped. RecordError if they are too long for a log."""
    try:
        with open_regular(path) as file:
            contents = (gzip.open(file) if path.suffix == ".gz" else file).read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(f"{path}: cannot be unpacked ({error}): the file is damaged; `git checkout` brings "
                          "it back") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    if len(contents) > MOST_BYTES:
        raise RecordError(f"{path}: longer than {MOST_BYTES:,} bytes, which no log is")
    return contents


def parse(contents: bytes, path: Path) -> Run:
    """The contents of a `log.jsonl` as a `Run`."""
    lines: dict[str, list[dict]] = {kind: [] for kind in LINES}
    numbers, warnings = {kind: Columns(kind, path) for kind in ("step", "validation")}, []
    for number, row in enumerate(io.BytesIO(contents), 1):
        try:
            line = json.loads(row.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            if number > 1 and not row.endswith(b"\n"):
                warnings.append(f"line {number} is incomplete: the log is still being written or was cut off")
                break
            raise RecordError(f"{path}:{number}: not JSON ({error}): {row[:60].decode(errors='replace')!r}; "
                              "the log is damaged here") from None
        check_line(line, f"{path}:{number}", first=number == 1)
        if lines["summary"] or lines["stopped"]:
            raise RecordError(f"{path}:{number}: a line after the run's last one; two runs wrote into one "
                              "log")
        numbers.get(line["kind"], lines[line["kind"]]).append(line)
    run = Run(path, lines["header"][0], numbers["step"].arrays(), numbers["validation"].arrays(),
              scores={line["text"]: line["loss"] for line in lines["score"]},
              texts={line["text"]: {key: line[key] for key in ("tokens", "sha256")}
                     for line in lines["score"]},
              summary=next(iter(lines["summary"]), None), warnings=warnings)
    if lines["stopped"]:
        run.stopped = lines["stopped"][0]["reason"]
        run.warnings.append(f"stopped at step {lines['stopped'][0]['step']}: {run.stopped}")
    elif not run.finished:
        run.warnings.append(f"not finished: no summary after step {len(run.steps['step'])} of "
                            f"{run.planned_steps or '?'}")
    return run


class Columns:
    """The numbers of a kind of line, field by field: a run may have millions of steps."""

    def __init__(self, kind: str, path: Path):
        self.kind, self.path = kind, path
        self.values = {name: array("q" if kinds is int else "d") for name, kinds in LINES[kind].items()}
        self.pairs = {"windows"} if kind == "step" else set()       # which have two numbers a line
        self.missing = SCHEDULE if kind == "step" else {}
        self.values |= {name: array("d") for name in self.missing}

    def append(self, line: dict) -> None:
        try:
            for name, values in self.values.items():
                value = line[name] if name in line else self.missing[name]
                values.extend(value) if name in self.pairs else values.append(value)
        except (TypeError, OverflowError) as error:
            raise RecordError(f"{self.path}: a {self.kind} line holds no plain number ({error})") from None

    def arrays(self) -> dict[str, np.ndarray]:
        """Field -> values (n,): int64 for counts, float64 for the rest; a step's windows are (n, 2)."""
        found = {name: np.array(values) for name, values in self.values.items()}
        return {name: x.reshape(-1, 2) if name in self.pairs else x for name, x in found.items()}


def check_line(line: dict, where: str, first: bool) -> None:
    """RecordError unless `line` is of a known kind, in its place, with every field of the right type."""
    kind = line.get("kind") if isinstance(line, dict) else None
    if not isinstance(kind, str) or kind not in LINES:
        raise RecordError(f"{where}: kind {kind!r}; a line of a {LOG_NAME} is one of {', '.join(LINES)}")
    if first != (kind == "header"):
        raise RecordError(f"{where}: {kind!r}, but a log begins with its one header line; "
                          + ("its beginning is missing" if first else "two runs wrote into one log"))
    if first and line.get("schema") != LOG_SCHEMA:
        raise RecordError(f"{where}: log schema {line.get('schema')!r}; these tools read schema {LOG_SCHEMA}")
    later = {name: kinds for name, kinds in LATER.get(kind, {}).items() if name in line}
    check_fields(line, LINES[kind] | later, f"{where}: {kind} line")
    if kind == "header":
        check_header(line, where)
    if kind == "summary":
        flatten(line.get("data", {}))
    if kind == "step":
        check_fields(SCHEDULE | line, {"momentum": NUMBER, "windows": list}, f"{where}: step line")
        if len(line.get("windows", SCHEDULE["windows"])) != 2:
            raise RecordError(f"{where}: step line needs 'windows' as [short, long], found {line['windows']}")


def check_header(header: dict, where: str) -> None:
    """RecordError if what a header says would lead the tools astray: into git, a shell, or other folders."""
    if header["commit"] is not None and not re.fullmatch("[0-9a-f]{7,64}", header["commit"]):
        raise RecordError(f"{where}: {header['commit'][:40]!r} is no commit")
    if not re.match(r"\d{4}-\d\d-\d\dT", header["started"]):
        raise RecordError(f"{where}: {header['started'][:40]!r} is no time")
    for name in ("devices", "command"):
        if not all(isinstance(item, str) for item in header[name]):
            raise RecordError(f"{where}: {name!r} holds more than texts")
    for name in ("config", "versions"):
        flatten(header[name])
    if not 1 <= header["world_size"] <= MOST_RANKS or len(header["devices"]) > MOST_RANKS:
        raise RecordError(f"{where}: {header['world_size']} ranks, {len(header['devices'])} devices")
