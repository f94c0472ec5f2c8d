"""The list of faults, each with the tests that show what becomes of it: survived / tried.

    python -m tests.faults                          try all of tests/faults.txt (half an hour on 2 cores)
    python -m tests.faults network                  the rows that hold this word
    python -m tests.faults processes -k nccl -n 8   of their tests those that pytest's -k chooses, 8 at once
    python -m tests.faults --write                  put the table into tests/README.md
    python -m tests.faults --write --read FILE      with what `--out FILE` has kept elsewhere; try nothing

A fault is survived on a machine if all its tests pass there. tests/faults.jsonl holds the outcome of each
test on each kind of machine that can try it. `--write` adds to it what was found, and writes all that it
holds. A second table has the times of recovery.
"""
import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from data.errors import tool_parser
from records.tools import markdown

FOLDER = Path(__file__).resolve().parent
KNOWN = FOLDER / "faults.jsonl"
Outcomes = dict[tuple[str, str], dict]      # lines of KNOWN, by their machine and test


def machine() -> str:
    count = torch.cuda.device_count()
    return f"{count} × {torch.cuda.get_device_name()}" if count else "CPU"


def name_of(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This file is a plugin in each of pytest's processes: it leaves the tests of the chosen faults."""
    beginnings = tuple(os.environ["FAULTS"].split())
    items[:] = [item for item in items if name_of(item.nodeid).startswith(beginnings)]


class Recorder:
    """A plugin of pytest, in its first process, that keeps each test's outcome, in a file as well."""
    def __init__(self, out: Path | None) -> None:
        self.found: Outcomes = {}
        self.out, self.machine = out, machine()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when in ("setup", "teardown") and report.outcome == "passed":
            return
        line = {"machine": self.machine, "test": name_of(report.nodeid), "outcome": report.outcome}
        line |= {name: round(value, 1) for name, value in report.user_properties if name == "seconds"}
        line |= {"said": report.longreprtext[-4000:]} if report.outcome == "failed" else {}
        self.found[line["machine"], line["test"]] = line
        if self.out:
            write([line], self.out, "a")


def table() -> list[list[str]]:
    """The rows of faults.txt: kind, fault, how it is tried, and how the names of its tests begin."""
    return [line.split(" | ") for line in FOLDER.joinpath("faults.txt").read_text("utf-8").splitlines()[1:]]


def read(path: Path) -> Outcomes:
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    return {(line["machine"], line["test"]): line for line in lines}


def needed(outcomes: Outcomes) -> Outcomes:
    """In order, without the skips of tests that another machine has tried."""
    tried = {test for (_, test), line in outcomes.items() if line["outcome"] != "skipped"}
    return {key: line for key, line in sorted(outcomes.items())
            if line["outcome"] != "skipped" or key[1] not in tried}


def write(lines: list[dict], path: Path, mode: str = "w") -> None:
    with open(path, mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def attempt(faults: list[list[str]], options: argparse.Namespace) -> Outcomes:
    """Run the tests of these rows of faults.txt."""
    os.environ["FAULTS"] = " ".join(tests for *_, tests in faults)
    files = dict.fromkeys(f"{FOLDER}/{name.split('::')[0]}" for name in os.environ["FAULTS"].split())
    recorder = Recorder(options.out)
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "tests.faults", "--tb=line", "-n", options.n,
                 "--maxschedchunk=1", "-k", options.k, *files], [recorder])
    return recorder.found


def tables(faults: list[list[str]], outcomes: Outcomes) -> str:
    """A row for each fault, a column for each machine, and their sums; then the times of recovery."""
    machines = sorted({machine for machine, _ in outcomes}, key=lambda name: (name != "CPU", name))

    def shares(beginnings: tuple[str, ...]) -> list[str]:
        """For each machine, of the tests that begin so."""
        counts = {name: Counter() for name in machines}
        for (name, test), line in outcomes.items():
            counts[name][line["outcome"]] += test.startswith(beginnings)
        tried = {name: count["passed"] + count["failed"] for name, count in counts.items()}
        return [f"{counts[name]['passed']} / {tried[name]}" if tried[name] else "–" for name in machines]

    rows = [[kind, fault, how, *shares(tuple(tests.split()))] for kind, fault, how, tests in faults]
    total = zip(machines, shares(tuple(name for *_, tests in faults for name in tests.split())))
    tried = {test for (_, test), line in outcomes.items() if line["outcome"] != "skipped"}
    untried = len({test for _, test in outcomes} - tried)
    text = markdown.table(["kind", "fault", "how", *machines], rows, {0, 1, 2})
    text += "\n\nsurvived / tried: " + ", ".join(f"{share} on {name}" for name, share in total)
    return text + f"; without an outcome: {untried}" + recovery(outcomes)


def recovery(outcomes: Outcomes) -> str:
    """A table of the seconds from a fault to the end of all ranks, by the ids of tests/ranks.py."""
    trials: dict[str, dict[str, str]] = {}
    for (_, test), line in outcomes.items():
        if "seconds" in line and line["outcome"] == "passed":
            way, _, trial = test.partition("[")[2].rstrip("]").partition("-")
            trials.setdefault(trial, {})[way] = f"{line['seconds']:.0f}"
    ways = [way for way in ("gloo", "nccl", "copies") if any(way in found for found in trials.values())]
    rows = [[*trial.rsplit("-", 2), *(found.get(way, "–") for way in ways)]
            for trial, found in sorted(trials.items())]
    return ("\n\nSeconds from the fault to the end of all ranks, by how they send:\n\n"
            + markdown.table(["where", "what", "rank", *ways], rows, {0, 1})) if rows else ""


def arguments() -> argparse.Namespace:
    parser = tool_parser("tests.faults", __doc__)
    parser.add_argument("words", nargs="*", help="rows that hold all of these (default: all rows)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="of their tests only some, as in pytest")
    parser.add_argument("-n", default="0", metavar="N", help="tests at once (default: one)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add each outcome to this file at once")
    parser.add_argument("--read", type=Path, metavar="FILE", help="try nothing, but take these outcomes")
    parser.add_argument("--write", action="store_true", help=f"add to {KNOWN.name}, write README.md")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    every = table()
    faults = [row for row in every if all(word in " | ".join(row) for word in options.words)]
    if not faults:
        sys.exit(f"python -m tests.faults: no row of faults.txt holds {' and '.join(options.words)}")
    found = read(options.read) if options.read else attempt(faults, options)
    if options.write:
        known, here = read(KNOWN), machine()
        if not (options.k or options.read):     # Tests that are no more are forgotten.
            beginnings = tuple(name for *_, tests in faults for name in tests.split())
            known = {key: line for key, line in known.items()
                     if not (key[0] == here and key[1].startswith(beginnings))}
        faults, outcomes = every, needed(known | found)
        write(list(outcomes.values()), KNOWN)
    else:
        outcomes = found
    print(text := tables(faults, outcomes))
    if options.write:
        readme = FOLDER / "README.md"
        readme.write_text(markdown.replace_between(readme.read_text("utf-8"), "faults", text), "utf-8")
    results = Counter(line["outcome"] for line in found.values())
    return int(results["failed"] > 0 or not results["passed"])


if __name__ == "__main__":
    sys.exit(main())
