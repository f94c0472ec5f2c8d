"""The list of faults, each with the tests that show what becomes of it: survived / tried.

    python -m tests.faults              run all of tests/faults.txt (half an hour on 2 cores), print the table
    python -m tests.faults network      the rows that hold this word
    python -m tests.faults --write      put the table into tests/README.md

A fault is survived if all its tests pass. What could not be tried on this machine is counted apart. A second
table has the times of recovery.
"""
import sys
from collections import Counter
from pathlib import Path

import pytest

from records.tools import markdown

FOLDER = Path(__file__).resolve().parent


class Results:
    """A plugin of pytest that keeps each test's outcome, and the seconds that it recorded, by its id."""
    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.removeprefix("tests/")
            self.outcomes[name] = report.outcome
            self.seconds |= {name: seconds for key, seconds in report.user_properties if key == "seconds"}


class Chosen:
    """A plugin of pytest that leaves only tests whose ids begin as one of these."""
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        self.beginnings = beginnings

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid.removeprefix("tests/").startswith(self.beginnings)]


def recovery(seconds: dict[str, float]) -> str:
    """A table of the seconds from a fault to the end of all ranks, by the ids of tests/ranks.py."""
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for name, taken in seconds.items():
        way, trial = name.partition("[")[2].rstrip("]").split("-", 1)
        place, action, rank = trial.rsplit("-", 2)
        table.setdefault((place, action, rank), {})[way] = f"{taken:.0f}"
    ways = list(dict.fromkeys(way for found in table.values() for way in found))
    rows = [[*trial, *(found.get(way, "–") for way in ways)] for trial, found in table.items()]
    return ("\n\nSeconds from the fault to the end of all ranks, by how they send:\n\n"
            + markdown.table(["where", "what", "rank", *ways], rows, {0, 1})) if rows else ""


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--write"]
    table = FOLDER.joinpath("faults.txt").read_text("utf-8").splitlines()[1:]
    faults = [line.split(" | ") for line in table if all(word in line for word in words)]
    beginnings = tuple(name for *_, tests in faults for name in tests.split())
    results, files = Results(), dict.fromkeys(f"{FOLDER}/{name.split('::')[0]}" for name in beginnings)
    pytest.main(["-q", "-p", "no:cacheprovider", "--tb=line", *files], [results, Chosen(beginnings)])
    rows, total = [], Counter()
    for kind, fault, how, tests in faults:
        found = Counter(outcome for name, outcome in results.outcomes.items()
                        if name.startswith(tuple(tests.split())))
        tried = found["passed"] + found["failed"]
        note = f" ({found['skipped']} not tried here)" if found["skipped"] else ""
        rows.append([kind, fault, how, f"{found['passed']} / {tried}{note}"])
        total += found
    said = f"survived / tried: {total['passed']} / {total['passed'] + total['failed']}"
    text = markdown.table(["kind", "fault", "how", "survived / tried"], rows, {0, 1, 2}) + f"\n\n{said}"
    text += recovery(results.seconds)
    print(text)
    if "--write" in sys.argv:
        readme = FOLDER / "README.md"
        readme.write_text(markdown.replace_between(readme.read_text("utf-8"), "faults", text), "utf-8")
    return int(total["failed"] > 0 or not total["passed"])


if __name__ == "__main__":
    sys.exit(main())
