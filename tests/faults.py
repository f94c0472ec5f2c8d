"""The list of faults, each with the tests that show what becomes of it: survived / tried.

    python -m tests.faults              run them all (about half an hour on 2 cores) and print the table
    python -m tests.faults network      the rows that hold this word
    python -m tests.faults --write      put the table into tests/README.md

A fault is survived if all its tests pass. What could not be tried on this machine is counted apart.
"""
import sys
from collections import Counter
from pathlib import Path

import pytest

from records.tools import markdown

FOLDER = Path(__file__).resolve().parent
# Kind | fault | how it is tried | tests, whose names begin so, in tests/
FAULTS = """
processes | a rank that is stopped, killed, or fails alone | real processes | test_watchdog.py
processes | Ctrl-C, SIGTERM, a run killed between checkpoints | real processes | test_run.py::test_interrupt test_checkpoint.py::test_a_killed test_checkpoint.py::test_a_signal
numbers | a loss that is not finite | real run | test_run.py::test_a_non_finite test_optimizer.py::test_a_non_finite test_optimizer.py::test_a_warm_up_that
numbers | a bit that differs between ranks | changed weights | test_optimizer.py::test_check_of_ranks
files | quota or disk used up: page, figures, record | fsync that fails | test_faults_files.py::test_a_full_disk
files | disk full or read-only: page, figures, shards, log, saved model, FineWeb | tmpfs of 64 kB, tmpfs read-only | trials.py::test_a_disk_that trials.py::test_weights_that trials.py::test_fineweb_onto
files | no space while shards are written | RLIMIT_FSIZE | test_data.py::test_text_no_space test_data.py::test_fineweb_no_space
files | a write that is interrupted, a name that is a link | real files | test_faults_files.py::test_a_file_appears
files | a log onto a full disk or into a file | /dev/full | test_run.py::test_a_full_disk
files | runs of one second, a folder that exists, a name with `../` | real folders | test_faults_files.py::test_runs_of_one
files | a run's folder that vanishes | real run | trials.py::test_a_run_folder
files | a clock that was set back | changed log | test_faults_files.py::test_a_clock
files | shards truncated, missing, swapped, changed; manifest damaged | real files | test_faults_files.py::test_shards
files | shards of other formats, empty, folders, broken links | real files | test_data.py::test_bad_shard test_run.py::test_bad_shard test_faults_files.py::test_a_folder_or
files | marks of repeated text that are damaged | real files | test_faults_files.py::test_a_damaged_overlap
files | two processes that fill one folder | real processes | test_data.py::test_fineweb_two_at_once
network | cut at 0, 1, 1024, all but 1 bytes and half; slow; short; one bit flipped; 408, 429 with and without Retry-After, 5xx | local server | test_faults_files.py::test_what_may_pass test_data.py::test_fineweb_resumes test_data.py::test_fineweb_tries
network | 401, 403, 404, 500 for ever, a redirect to itself, data that stay wrong | local server | test_faults_files.py::test_what_stays test_data.py::test_fineweb_never
network | Retry-After of a day | local server | test_faults_files.py::test_a_wish
network | a commit of the hub that is a path | local server | test_faults_files.py::test_a_commit
network | no name server, no server, a server that is silent, a dead proxy | sockets | test_faults_files.py::test_no_name test_data.py::test_gpt2_vocabulary_without test_data.py::test_fineweb_without
network | killed or interrupted while it fetches | real processes | test_data.py::test_fineweb_ended
hostile | 200 mutated logs, foreign logs, records, shards each (10,000: `python -m tests.fuzz`) | fuzzed | test_hostile.py::test_mutated
hostile | markup and control characters in every free text of a record | parsed page | test_hostile.py::test_pages test_hostile.py::test_what_is test_hostile.py::test_a_cell
hostile | a page with markup that nobody escaped | chromium | trials.py::test_the_page_in
hostile | names and commits that are paths, options or commands | changed logs | test_hostile.py::test_headers test_hostile.py::test_a_record_names
hostile | gzip bombs, long lines, deep JSON, long numbers, 10^9 steps | made files | test_hostile.py::test_nothing_grows
hostile | texts that take regular expressions long | made files | test_hostile.py::test_no_foreign
hostile | pickles, eval, exec | search | test_hostile.py::test_data_that
hostile | settings, inputs and vocabularies that are wrong | made files | test_run.py::test_bad_settings test_data.py::test_bad_input test_data.py::test_bad_vocabulary
surroundings | a C locale, 16 commands | real processes | trials.py::test_a_locale
surroundings | PYTHONWARNINGS=error, 16 commands | real processes | trials.py::test_warnings
surroundings | output onto a full disk, 14 commands, with and without a buffer | /dev/full | trials.py::test_output_onto
surroundings | output into `head`, 14 commands | closed pipe | trials.py::test_output_into
surroundings | RANK, WORLD_SIZE, LOCAL_RANK wrong, no MASTER_ADDR | real processes | trials.py::test_variables
surroundings | PYTHON missing or without torch, run.sh through a link | real processes | test_run_sh.py::test_another
surroundings | Ctrl-C while run.sh installs | pseudo-terminal | test_run_sh.py::test_ctrl_c
"""


class Results:
    """A plugin of pytest that keeps each test's outcome by its id."""
    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.removeprefix("tests/")] = report.outcome


class Chosen:
    """A plugin of pytest that leaves only tests whose ids begin as one of these."""
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        self.beginnings = beginnings

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid.removeprefix("tests/").startswith(self.beginnings)]


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--write"]
    faults = [[cell.strip() for cell in line.split("|")] for line in FAULTS.strip().splitlines()
              if all(word in line for word in words)]
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
    print(text)
    if "--write" in sys.argv:
        readme = FOLDER / "README.md"
        readme.write_text(markdown.replace_between(readme.read_text("utf-8"), "faults", text), "utf-8")
    return int(total["failed"] > 0 or not total["passed"])


if __name__ == "__main__":
    sys.exit(main())
