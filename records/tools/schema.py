"""What a log holds: the kinds of line and their fields; and `Run`, the form in which the tools see a log."""
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from records.run import LOG_NAME

LOG_SCHEMA = 1
PACKED = ".jsonl.gz"  # how the name of a record's log ends
MOST_DEEP = 8  # settings inside settings
NUMBER = int | float
# Field -> type, for each kind of line in a `log.jsonl`. `header` is the first line; `summary` or `stopped` is
# the last.
LINES = {
    "header": {
        "schema": int, "name": str, "started": str, "preset": str, "config": dict, "seed": int,
        "command": list, "target": NUMBER | None, "world_size": int, "devices": list, "driver": str | None,
        "versions": dict, "commit": str | None, "dirty": bool | None, "sources": str, "attention": str,
        "fp8": bool, "parameters": int,
    },
    "step": {"step": int, "loss": NUMBER, "lr": NUMBER, "tokens": int, "ms": NUMBER},
    "validation": {"step": int, "loss": NUMBER, "time_s": NUMBER, "tokens": int},
    "score": {"text": str, "loss": NUMBER, "tokens": int, "sha256": str},
    "summary": {
        "steps": int, "time_s": NUMBER, "loss": NUMBER, "tokens": int, "tokens_per_s": NUMBER,
        "step_ms": dict, "peak_memory_bytes": int | None, "startup_s": NUMBER, "compile_s": NUMBER,
    },
    "checkpoint": {"step": int, "ms": NUMBER, "bytes": int, "write_s": NUMBER},
    "stopped": {"step": int, "reason": str},
}
# Fields that older logs do not have, by kind of line.
LATER = {
    "header": {"host": str, "process": int, "process_key": str, "doctor": dict}, "summary": {
        "began": NUMBER, "ended": NUMBER, "paused_s": NUMBER, "data": dict, "changed_shards": list,
        "reserved_memory_bytes": int | None},
}
# Fields that the step lines of the first logs lack, with the values that then stand for them. Windows are
# the short and the long one, in blocks.
SCHEDULE = {"momentum": math.nan, "windows": [math.nan, math.nan]}


class RecordError(ValueError):
    """Something that cannot be read, pooled or checked. The message says what, where, and what to do."""


@dataclass
class Run:
    """One log, ours or foreign, whole or not.

    `steps` and `validations` map a field of LINES to its values (n,), in the order of the log. Foreign logs
    have no "loss", "lr" and "tokens" in `steps`, no "tokens" in `validations`, and a header with what could
    be found out.
    """
    path: Path
    header: dict
    steps: dict[str, np.ndarray]
    validations: dict[str, np.ndarray]
    scores: dict[str, float] = field(default_factory=dict)  # nats/token on other texts, after the run
    texts: dict[str, dict] = field(default_factory=dict)  # tokens and sha256 of each of these texts
    summary: dict | None = None  # of a finished run
    stopped: str | None = None  # why a run ended early
    foreign: bool = False
    warnings: list[str] = field(default_factory=list)  # what is incomplete or unknown
    sha256: str = ""  # of the log, unpacked

    @property
    def name(self) -> str:
        return self.header["name"]

    @property
    def label(self) -> str:
        """What messages call this run: its folder's name, or the file's for foreign and packed logs."""
        if self.path.name.startswith(LOG_NAME):
            return self.path.parent.name
        return self.path.name.removesuffix(PACKED)

    @property
    def seed(self) -> int | None:
        return self.header.get("seed")

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def diverged(self) -> bool:
        """Whether the run ended itself because its training loss was no longer a number."""
        return re.search(r"loss is (nan|-?inf)", self.stopped or "") is not None

    @property
    def loss(self) -> float:
        """The last validation loss, nats/token."""
        return float(self.summary["loss"])

    @property
    def time_s(self) -> float:
        """The timed training, seconds."""
        return float(self.summary["time_s"])

    @cached_property
    def step_time_s(self) -> np.ndarray:
        """(steps,) timed seconds at the end of each step, as the steps' own milliseconds add up."""
        return np.cumsum(self.steps["ms"]) / 1000

    @cached_property
    def batch_tokens(self) -> np.ndarray | None:
        """(steps,) tokens of each step; None for a foreign log, which does not say."""
        tokens, before = self.steps.get("tokens"), 0
        if "resumed" in self.header and tokens is not None and len(tokens) > 1:
            before = 2 * tokens[0] - tokens[1]      # as if its first step were like the second
        return None if tokens is None else np.diff(tokens, prepend=before)

    def stages(self) -> list[tuple[str, np.ndarray]]:
        """(name, milliseconds (n,)) of each stretch of equal batch; one stretch if that is unknown."""
        ms, batch = self.steps["ms"], self.batch_tokens
        if batch is None or not len(batch):
            return [("all steps", ms)]
        starts = [0, *np.flatnonzero(np.diff(batch)) + 1]
        return [(f"{batch[start]:,} tokens", ms[start:end])
                for start, end in zip(starts, [*starts[1:], len(ms)])]

    @property
    def planned_steps(self) -> int | None:
        """Steps that the configuration asks for, `steps` + `extra_steps`; None where it does not say."""
        settings = flatten(self.header.get("config") or {})
        named = {last_part(key): value for key, value in settings.items()}
        steps, extra = named.get("steps"), named.get("extra_steps") or 0
        return steps + extra if type(steps) is type(extra) is int else None


def check_fields(data: dict, fields: dict[str, type], what: str) -> None:
    """RecordError unless `data` has every one of `fields` with its type."""
    for name, kinds in fields.items():
        if name not in data or not is_a(data[name], kinds):
            expected = getattr(kinds, "__name__", str(kinds)).replace("NoneType", "null")
            found = repr(data[name])[:40] if name in data else "nothing"
            raise RecordError(f"{what} needs {name!r} as {expected}, found {found}")


def is_a(value: object, kinds: type) -> bool:
    """As `isinstance`, but true and false are no numbers, nor is one with more than 18 digits."""
    if isinstance(value, bool):
        return isinstance(True, kinds) and not isinstance(1, kinds)
    return isinstance(value, kinds) and not (isinstance(value, int) and abs(value) >= 10 ** 18)


def flatten(tree: dict, prefix: str = "", deep: int = 0) -> dict:
    """Nested settings as one level: {"adam": {"lr": 1}} -> {"adam.lr": 1}. RecordError if nested deeply."""
    flat = {}
    if deep > MOST_DEEP:
        raise RecordError(f"settings nested more than {MOST_DEEP} deep: {prefix[:40]}…")
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.", deep + 1)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def last_part(key: str) -> str:
    """The setting's own name: "adam.lr" -> "lr"."""
    return key.rsplit(".", 1)[-1]


def differences(a: dict, b: dict, ignore: frozenset[str] = frozenset()) -> dict[str, tuple]:
    """Dotted key -> (value in a, value in b) where two nested dictionaries differ; None: not there."""
    a, b = flatten(a), flatten(b)
    return {key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys())
            if key not in ignore and a.get(key) != b.get(key)}
