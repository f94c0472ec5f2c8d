"""Records, the writing half: comparisons, record folders, pictures, the page, watch, ab and sweep."""
import gzip
import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY
from conftest import command as train

from records.run import sources
from records.tools import history, launch, markdown, plots, record, report, schedule, sweep, watch
from records.tools.check import check
from records.tools.compare import compare, compare_text
from records.tools.logs import find_logs, read_logs
from records.tools.record import NEWER_FIELDS, RECORDS, as_json, create, folders, load, load_all
from records.tools.rules import CORPUS_RUN
from records.tools.schema import RecordError, Run
from tests.synthetic import SOURCES, command, commit_sources, foreign_log, git, write_run

WORDS = {"title": "The first <recipe>", "contributors": ["A. Author"], "parent": None}
TRAINER = f"{sys.executable} -m tests.synthetic"


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    """A folder of records in a repository, with five finished runs and a record; the README wants a table."""
    monkeypatch.delenv("RUNS_PATH", raising=False)
    commit = commit_sources(tmp_path)
    root = tmp_path / "records"
    root.mkdir()
    (root / "README.md").write_text(f"# Made up\n\n{markdown.marked(report.MARKER, '')}\n\nThe end.\n")
    for seed in range(5):
        write_run(root / "runs", seed=seed, header={"commit": commit})
    create(read_logs([root / "runs"]), root, "first", WORDS, changed="All.", why="It learns.")
    return root


@pytest.fixture
def first(root: Path) -> Path:
    return root / "2026-11-21_first"


CHANGED = {**SOURCES, "train_gpt.py": SOURCES["train_gpt.py"] + b"# faster\n"}


def add_second(root: Path, **header) -> Path:
    """A faster record with other settings and sources, whose parent is the first."""
    header = {"commit": commit_sources(root.parent, CHANGED), **header}
    return add_record(root, "second", 3, {"title": "Faster", "parent": "2026-11-21_first"},
                      settings={"lr": 0.026}, pace_ms=24.0, sources=CHANGED, header=header,
                      day=datetime(2026, 11, 30, 10))


def add_record(root: Path, name: str, count: int, words: dict, **particulars) -> Path:
    """A record of so many runs, by default of the newest commit."""
    header = {"commit": git(root.parent, "rev-parse", "HEAD")} | particulars.pop("header", {})
    for seed in range(count):
        write_run(root / "runs", name, seed, header=header, **particulars)
    return create(read_logs([root / "runs" / f"*-{name}"]), root, name, WORDS | words, "x", "y")


# The command line

@pytest.mark.parametrize("name", ["check", "stats", "compare", "ab", "plot", "report", "watch", "sweep",
                                  "new"])
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        command(name, "--help")
    assert f"records {name}" in capsys.readouterr().out


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(SystemExit, match="need scipy: pip install -r requirements.txt"):
        runpy.run_path(str(ROOT / "records" / "__main__.py"), run_name="__main__")


# Record folders

def test_a_new_record_is_valid(root, first, capsys):
    assert check(first) == ([], [])
    assert check(add_second(root)) == ([], [])
    assert command("--records", root, "check") == 0
    assert capsys.readouterr().out == "2026-11-21_first: ok\n2026-11-30_second: ok\n"


def test_the_records_of_this_repository_are_valid(capsys):
    """Where the clone is shallow their sources cannot be held against their commits, and a note says so."""
    shallow = not (ROOT / ".git").exists() or git(ROOT, "rev-parse", "--is-shallow-repository") == "true"
    status, printed = command("check"), capsys.readouterr().out
    assert status == 0 and printed.count(": ok\n") == len(folders(RECORDS)) >= 6, printed
    assert shallow or "not checked" not in printed


def test_a_record_is_written_as_it_is_read():
    data = {"title": "[1,\n 2]", "runs": [{"seed": 1}], "few": [-1.5e-7, 1], "seeds": [*range(500)]}
    text = as_json(data)
    assert json.loads(text) == data and '"few": [-1.5e-07, 1]' in text
    assert max(map(len, text.splitlines())) <= 110 and text.count("\n") < 45
    for folder in folders(RECORDS):
        text = (folder / "record.json").read_text()
        assert as_json(json.loads(text)) == text


def change_json(folder: Path, **fields) -> None:
    path = folder / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_log(folder: Path, pattern: str, replacement: str, count: int = 1) -> None:
    log = find_logs(folder)[0]
    text, changed = re.subn(pattern, replacement, gzip.decompress(log.read_bytes()).decode(), count=count)
    assert changed, f"nothing to change: {pattern}"
    log.write_bytes(gzip.compress(text.encode()))


def change_byte(log: Path, at: int) -> None:
    contents = bytearray(log.read_bytes())
    contents[at] ^= 1
    log.write_bytes(contents)


@pytest.mark.parametrize("damage, problem", [
    (lambda f: change_json(f, mean_loss=3.27), "mean_loss is 3.27, but the logs give"),
    (lambda f: change_json(f, p_value=0.001), "p_value is 0.001, but the logs give"),
    (lambda f: change_json(f, seeds=[0, 1, 2, 3, 5]), "seeds is [0, 1, 2, 3, 5], but the logs give [0, 1, 2, "
                                                      "3, 4]"),
    (lambda f: change_json(f, hardware=["NVIDIA B200"]), "hardware is ['NVIDIA B200']"),
    (lambda f: change_json(f, parent="gone"), "parent 'gone': "),
    (lambda f: change_json(f, date="2026-11-20"), "the folder's name does not begin with its date"),
    (lambda f: change_json(f, date="yesterday"), "date 'yesterday' is not of the form"),
    (lambda f: change_json(f, date="2026-12-24"), "date is 2026-12-24, but its first run began on 2026-11-2"),
    (lambda f: [change_log(log, '"steps": 58', '"steps": 1000') for log in find_logs(f)],
     "ask for 1002 steps, and it took 60"),
    (lambda f: change_log(f, '"seed": 0', '"seed": 7'), "its settings say seed 7, its header seed 0"),
    (lambda f: change_log(f, r'("kind": "summary".*"time_s": \d\.\d)\d', r"\g<1>0"),
     "the summary's time_s is"),
    (lambda f: change_json(f, runs=[{}]), "a run needs 'log' as str, found nothing"),
    (lambda f: change_json(f, note="new"), "unknown note"),
    (lambda f: change_json(f, schema=1), "read a JSON object with schema 2 or 3"),
    (lambda f: change_json(f, commit="0" * 40), "commit is 000000000000, but the logs name"),
    (lambda f: change_json(f, commit="0" * 40), "commit 000000000000 is not in this repository, so what ran "
                                                "is unknown"),
    (lambda f: change_json(f, commit="HEAD"), "commit 'HEAD': expected all 40 hexadecimal digits"),
    (lambda f: change_json(f, commit=commit_sources(f.parent.parent, CHANGED)), "has sources with the hash"),
    (lambda f: change_json(f, commit=commit_sources(f.parent.parent)), "but the logs name"),
    (lambda f: (f / "record.json").write_text("{"), "not JSON"),
    (lambda f: (f / "record.json").unlink(), "no record.json"),
    (lambda f: (f / "README.md").unlink(), "no README.md"),
    (lambda f: (f / "README.md").write_text("# Nothing"), '"## Why it works" is missing'),
    (lambda f: (f / "README.md").write_text("# Nothing"), "it does not say how to run commit"),
    (lambda f: change_byte(find_logs(f)[2], 500), "cannot be unpacked"),
    (lambda f: change_log(f, r'("step": 7, "loss": \d\.\d{3})\d', r"\g<1>0"),
     "log has changed since the record was made"),
    (lambda f: find_logs(f)[0].unlink(), "record.json has the runs"),
    (lambda f: find_logs(f)[0].unlink(), "seeds is [0, 1, 2, 3, 4], but the logs give [1, 2, 3, 4]"),
    (lambda f: change_log(f, '"seed": 0', '"seed": 1', 2), "repeat seeds"),
    (lambda f: change_log(f, '"driver": "580.95"', '"driver": "590.1"'),
     "ran in different environments: driver"),
    (lambda f: change_log(f, r'"ms": \d+', '"ms": 999'), "work ran outside the clock"),
    (lambda f: change_log(f, r'"ms": \d+.\d+', '"ms": 0.0'), "a step took no tokens or no time"),
    (lambda f: change_log(f, r'"ms": \d+.\d+', '"ms": NaN'), "a step's ms is not a finite number"),
    (lambda f: change_log(f, r'"lr": \d+.\d+(, "mom)', r'"lr": Infinity\1'), "a step's lr is not a finite"),
    (lambda f: change_log(f, r'"momentum": \d+.\d+', '"momentum": NaN'), "a step's momentum is not"),
    (lambda f: change_log(f, r'("step": 7, "loss": )\d+.\d+', r"\1NaN"), "a step's loss is not"),
    (lambda f: change_log(f, r'"time_s": \d+.\d+', '"time_s": NaN'), "a validation's time_s is not"),
    (lambda f: change_log(f, r'"p50": \d+.\d+', '"p50": NaN'), "the summary's p50 is not"),
    (lambda f: change_log(f, r'"p50": \d+.\d+', f'"p50": {-10 ** 400}'), "the summary's p50 is not"),
    (lambda f: change_log(f, r'"peak_memory_bytes": \d+', '"peak_memory_bytes": -5'),
     "the summary's peak_memory_bytes is not a finite number of at least 0"),
    (lambda f: change_log(f, r'"began": 1\d+.0', '"began": -Infinity'), "the summary's began is not"),
    (lambda f: change_log(f, r'"began": 1\d+.0, ', ""), "does not say began"),
    (lambda f: change_log(f, r'"ended": [\d.]+, "paused_s": 0.0, ', ""), "does not say ended, paused_s"),
    (lambda f: change_log(f, r', "host": "a", "process": \d+', ""), "does not say host, process"),
    (lambda f: change_log(f, r', "data": {.*?}', ""), "does not say data"),
    (lambda f: change_log(f, r'("kind": "summary")', r'\1, "changed_shards": ["x"]'),
     "not those of their manifest"),
    (lambda f: change_log(f, r'.*"kind": "step", "step": 7,.*\n', ""), "do not count 1 to 60"),
    (lambda f: change_log(f, r'("kind": "summary".*"loss": )3\.\d+', r"\g<1>3.1"),
     "the summary's loss is 3.1"),
    (lambda f: change_log(f, r'.*"validation", "step": 60,.*\n', ""), "no validation after the last step"),
    (lambda f: change_log(f, r'.*"summary".*\n', ""), "not finished"),
])
def test_check_finds_damage(first, damage, problem):
    damage(first)
    problems, _ = check(first)
    assert any(problem in found for found in problems), problems


def test_a_score_that_is_no_number_ends_the_check_of_its_own_record_alone(root, first, capsys):
    second = add_second(root)
    for log in find_logs(first):
        text = gzip.decompress(log.read_bytes()).decode()
        score = '{"kind": "score", "text": "clean", "loss": NaN, "tokens": 9, "sha256": "x"}\n'
        text = text.replace('{"kind": "summary"', score + '{"kind": "summary"')
        log.write_bytes(gzip.compress(text.encode()))
    assert command("--records", root, "check") == 1
    printed = capsys.readouterr().out
    assert f"{first.name}: NOT VALID\n  problem: value 1 of 5 is not finite" in printed
    assert f"{second.name}: ok" in printed


def test_one_run_says_so(root, capsys):
    folder = add_record(root, "single", 1, {"contributors": []})
    problems, notes = check(folder)
    assert problems == [] and "n = 1: one run shows no spread" in notes[0]
    assert "n = 1" in (folder / "README.md").read_text()
    assert json.loads((folder / "record.json").read_text())["p_value"] is None


def test_a_record_misses_no_target(root, monkeypatch):
    missed = r"mean loss 3\.\d{4} is above the target 3\.28"
    with pytest.raises(RecordError, match=f"^{missed}$"):
        add_record(root, "missed", 1, {}, level=3.3)
    with monkeypatch.context() as changed:      # as somebody could make its files by hand
        changed.setattr(record, "check_target", lambda data: [])
        folder = add_record(root, "missed-too", 1, {}, level=3.3)
    [problem] = check(folder)[0]
    assert re.fullmatch(missed, problem)


def test_notes_of_a_slower_record(root):
    problems, notes = check(add_record(root, "slower", 2, {"parent": "2026-11-21_first"}, pace_ms=40.0))
    assert problems == [] and "not faster than its parent" in notes[-1]


# The sources of a record, in git

def test_a_log_keeps_every_byte(root, first):
    """Packed, and the same each time; what a run wrote comes out again."""
    runs = find_logs(root / "runs")
    packed = find_logs(first)
    assert [log.name for log in packed] == [f"{log.parent.name}.jsonl.gz" for log in runs]
    assert [gzip.decompress(log.read_bytes()) for log in packed] == [log.read_bytes() for log in runs]
    assert all(log.read_bytes()[4:8] == bytes(4) for log in packed)         # gzip's time stamp
    assert [run.label for run in read_logs([first])] == [run.label for run in read_logs([root / "runs"])]


def test_changes_on_top_of_a_commit_are_kept(root, tmp_path):
    """A file that is changed, one that is new and one that is gone, beside a staged one that is no source.

    The patch makes of the commit what ran. A record of it is refused.
    """
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "train_gpt.py").write_bytes(b"print('other')")
    (tmp_path / "kernels/new.py").write_bytes(b"new = '\xff'\r\n")
    (tmp_path / ".gitignore").write_text("new.py\n")
    (tmp_path / "kernels/xxt.py").unlink()
    git(tmp_path, "add", ".gitignore")
    staged, patch = git(tmp_path, "status", "--porcelain"), sources.source_changes(tmp_path)
    assert git(tmp_path, "status", "--porcelain") == staged and b"gitignore" not in patch
    assert b"README" not in patch
    expected = {"train_gpt.py": b"print('other')", "kernels/new.py": b"new = '\xff'\r\n"}
    assert sources.project_sources(tmp_path) == expected
    log = write_run(root / "runs", "changed", sources=expected, header={"commit": commit, "dirty": True})
    git(tmp_path, "reset", "--quiet", "--hard")
    (tmp_path / "kernels/new.py").unlink()
    assert sources.source_changes(tmp_path) == b""
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, check=True)
    assert sources.project_sources(tmp_path) == expected
    with pytest.raises(RecordError, match="its runs had changes or new files that are not in their commit"):
        create(read_logs([log]), root, "changed", WORDS)


def test_an_old_record_may_name_another_commit_than_its_logs(root, first):
    """The tree had changes, but a later commit holds what ran. That was allowed before schema 3."""
    for log in find_logs(first):
        text = gzip.decompress(log.read_bytes()).decode().replace('"dirty": false', '"dirty": true')
        log.write_bytes(gzip.compress(text.encode()))
    data = json.loads((first / "record.json").read_text())
    old = {key: value for key, value in data.items() if key not in NEWER_FIELDS} | {"schema": 2}
    old["runs"] = [run | {"sha256": read_logs([first / run["log"]])[0].sha256} for run in old["runs"]]
    (first / "record.json").write_text(json.dumps(old))
    problems, notes = check(first)
    assert problems == [] and "by the rules of its time" in notes[-1] and "uncommitted changes" in notes[0]
    for log in find_logs(first):
        text = gzip.decompress(log.read_bytes()).decode().replace("2026-11-21T", "2026-11-23T")
        log.write_bytes(gzip.compress(text.encode()))
    assert "schema 2 is for runs before 2026-11-23" in check(first)[0]


# The rules for new records

def corpus_runs(root: Path, name: str, seeds: range, clean: float = 3.568,
                texts: tuple = ("clean", "fineweb"), facts: dict = CORPUS_RUN, preset: str = "corpus",
                **particulars) -> list:
    """Finished runs on the corpus, scored on other texts, each half a minute after the one before."""
    settings = {"ngram_rows": 2 ** 21, "head_dim": 128, "val_tokens": facts["val_tokens"], "runs": len(seeds)}
    header = {"preset": preset, "commit": git(root.parent, "rev-parse", "HEAD"), "process": seeds[0],
              "target": facts["target"]}
    for seed in seeds:
        log = write_run(root / "runs", name, seed, header=header, settings=settings, **particulars)
        *lines, summary = [json.loads(line) for line in log.read_text().splitlines()]
        lines += [{"kind": "score", "text": text, "loss": clean} | facts["texts"][text] for text in texts]
        began = 1e9 + 30 * seed
        summary |= {"began": began, "ended": began + summary["time_s"] + 2.0, "paused_s": 2.0,
                    "data": facts["data"]}
        log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, summary]))
    return read_logs([root / "runs" / f"*-{name}"])


def with_second(root: Path, count: int = 5, **particulars) -> tuple[list, Run]:
    """Runs on the corpus, and a second full run of the same particulars."""
    runs, [second] = (corpus_runs(root, name, seeds, **particulars) for name, seeds in
                      (("corpus", range(5, 5 + count)), ("again", range(20, 21))))
    return runs, second


def test_a_record_on_the_corpus_holds_three_texts_and_a_second_run(root):
    runs, second = with_second(root)
    folder = create(runs, root, "corpus", WORDS | {"chosen_with": [0]}, "x", "y", second)
    table = (folder / "README.md").read_text()
    assert re.search(r"\| seed +\| loss \(nats/token\) \| +clean \| fineweb \| time", table)
    assert all(f" {run.scores['clean']:.4f} |" in table for run in runs)
    assert f"A second full run, seed 20: {second.loss:.4f}, clean {second.scores['clean']:.4f}," in table
    assert [run.seed for run in read_logs([folder])] == [5, 6, 7, 8, 9]     # as its numbers are
    assert check(folder) == ([], [])
    data = json.loads((folder / "record.json").read_text())
    assert data["class"] == "at most 0.3 G" and data["table_parameters"] == 2 ** 28
    assert data["scores"] == pytest.approx({"clean": 3.568, "fineweb": 3.568})
    readme = (folder / "README.md").read_text()
    assert "clean 3.5680, fineweb 3.5680" in readme and "A second full run, seed 20" in readme
    change_json(folder, scores={"clean": 3.5, "fineweb": 3.5}, chosen_with=[5, 20], **{"class": "open"})
    problems = " ".join(check(folder)[0])
    assert all(word in problems for word in ("scores is", "class is 'open'", "seeds [5, 20] chose"))


def test_logs_can_be_given_in_any_order(root):
    runs, second = with_second(root)
    folder = create(runs[::-1], root, "corpus", WORDS | {"chosen_with": [0]}, "x", "y", second)
    assert check(folder) == ([], [])


def test_a_log_belongs_to_one_record(root, first):
    """The second full run's log too."""
    with pytest.raises(RecordError, match=f"jsonl.gz: already in the record {first.name}$"):
        create(read_logs([root / "runs"]), root, "again", WORDS)
    runs, second = with_second(root)
    words = WORDS | {"chosen_with": [0]}
    folder = create(runs, root, "corpus", words, second=second)
    others = corpus_runs(root, "others", range(30, 35))
    with pytest.raises(RecordError, match=rf"^second/\S+: already in the record {folder.name}$"):
        create(others, root, "others", words, second=second)


@pytest.mark.parametrize("particulars, second, problem", [
    ({"clean": 3.571}, {}, "mean loss on clean is 3.5710, above 3.570"),
    ({"texts": ("clean",)}, {"texts": ("clean",)}, "not scored on fineweb"),
    ({"level": 3.2795}, {"level": 3.2795}, "not shown to be below 3.28"),
    ({}, None, "no second full run"),
    ({}, {"pace_ms": 31.2}, "takes 3.42 s, more than 3%"),
    ({}, {"level": 3.285}, "more than 3 standard deviations"),
    ({}, {"steps": 63}, "the second full run differs in steps"),
    ({}, {"facts": CORPUS_RUN | {"data": {"train": "x", "val": "x"}}}, "the second full run differs in data"),
])
def test_a_record_on_the_corpus_is_refused(root, particulars, second, problem):
    runs = corpus_runs(root, "corpus", range(5, 10), **particulars)
    other = corpus_runs(root, "again", range(20, 21), **second)[0] if second is not None else None
    with pytest.raises(RecordError, match=re.escape(problem)):
        create(runs, root, "corpus", WORDS, second=other)


def test_a_second_run_of_a_changed_program_is_refused(root):
    runs, second = with_second(root)
    second.header["dirty"] = True
    with pytest.raises(RecordError, match="its runs had changes or new files that are not in their commit"):
        create(runs, root, "corpus", WORDS | {"chosen_with": []}, second=second)


OTHER_TEXT = {"tokens": 1000, "sha256": "x"}


@pytest.mark.parametrize("facts, where", [
    ({"target": 4.0}, "target (3.28 / 4.0)"),
    ({"val_tokens": 1000}, "val_tokens (10485760 / 1000)"),
    ({"data": CORPUS_RUN["data"] | {"train": "x"}}, "data.train ("),
    ({"data": CORPUS_RUN["data"] | {"val": "x"}}, "data.val ("),
    ({"texts": CORPUS_RUN["texts"] | {"clean": OTHER_TEXT}}, "texts.clean.sha256 ("),
    ({"texts": CORPUS_RUN["texts"] | {"fineweb": OTHER_TEXT}}, "texts.fineweb.tokens (561000 / 1000)"),
])
def test_a_record_on_the_corpus_is_held_against_its_texts(root, facts, where):
    """Every run is, the second full run too."""
    runs, second = with_second(root, facts=CORPUS_RUN | facts)
    with pytest.raises(RecordError) as refusal:
        create(runs, root, "corpus", WORDS, second=second)
    rules = [text for text in str(refusal.value).split("; ") if "the rules of the corpus" in text]
    assert len(rules) == 6 and all(where in text for text in rules)


def test_the_corpus_is_known_by_its_text_whatever_the_preset(root):
    runs, second = with_second(root, clean=3.58, preset="mine")
    with pytest.raises(RecordError, match="mean loss on clean is 3.5800, above"):
        create(runs, root, "corpus", WORDS, second=second)


@pytest.mark.parametrize("count, left, problem", [
    (6, slice(1, None), r"its process made 6 runs, and here are those of seeds \[6, 7, 8, 9, 10\]"),
    (6, slice(0, 6, 5), r"and here are those of seeds \[5, 10\]"),
    (4, slice(None), "4 runs; a record on the corpus has at least 5"),
])
def test_runs_on_the_corpus_are_all_of_a_process_and_at_least_five(root, count, left, problem):
    runs, second = with_second(root, count)
    with pytest.raises(RecordError, match=problem):
        create(runs[left], root, "corpus", WORDS, second=second)


def test_a_record_on_the_corpus_says_which_seeds_chose(root, capsys):
    with_second(root)
    [second] = find_logs(root / "runs" / "*-again")
    words = ["--records", root, "new", root / "runs" / "*-corpus", "--name", "a", "--title", "A", "--second",
             second]
    assert command(*words) == 2 and "--chosen-with is missing" in capsys.readouterr().err
    assert command(*words, "--chosen-with") == 0
    assert load(root / "2026-11-21_a").data["chosen_with"] == []


def test_the_second_run_is_another_process_and_seed(root):
    *runs, last = corpus_runs(root, "corpus", range(5, 10))
    for second in (last, *corpus_runs(root, "again", range(6, 7))):
        with pytest.raises(RecordError, match="needs a process and a seed of its own"):
            create(runs, root, "corpus", WORDS, second=second)


@pytest.mark.parametrize("fault, problem", [
    (lambda summary: summary.update(ended=summary["ended"] + 2.0), "the clock gave"),
    (lambda summary: summary.update(began=summary["began"] - 31, ended=summary["ended"] - 31),
     "began before"),
])
def test_a_clock_that_other_stamps_contradict(root, fault, problem):
    runs, second = with_second(root)
    folder = create(runs, root, "corpus", WORDS | {"chosen_with": []}, "x", "y", second)
    log = find_logs(folder / "runs")[3]
    *lines, summary = [json.loads(line) for line in gzip.decompress(log.read_bytes()).splitlines()]
    fault(summary)
    log.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in [*lines, summary]).encode()))
    assert len([found for found in check(folder)[0] if problem in found]) == 1      # not of the other runs


def test_a_shallow_clone_says_what_it_cannot_check(root, first, tmp_path):
    git(tmp_path, "add", "records")
    commit_sources(tmp_path, CHANGED)
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{tmp_path}", str(tmp_path / "clone"))
    problems, notes = check(tmp_path / "clone/records" / first.name)
    assert problems == [] and "not checked: this clone is shallow and lacks commit" in notes[0]
    assert "`git fetch --unshallow` brings it" in notes[0]
    git(tmp_path / "clone", "fetch", "--quiet", "--unshallow")
    assert check(tmp_path / "clone/records" / first.name) == ([], [])


def test_without_git_a_record_is_not_checked_against_its_commit(first, monkeypatch):
    monkeypatch.setenv("PATH", "")
    problems, notes = check(first)
    assert problems == [] and notes == ["its sources were not checked: git is not installed"]
    assert sources.source_changes(ROOT) == b""
    change_log(first, '"sources": "', '"sources": "0')
    assert check(first)[0]                                  # all that needs no history is still checked


def test_a_folder_outside_any_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "ROOT", tmp_path)
    with pytest.raises(history.NoHistory, match="git shows no repository here .*not a git repository"):
        history.sources_at(tmp_path, "0" * 40)


def test_create_refuses(root):
    runs = read_logs([root / "runs"])
    with pytest.raises(RecordError, match="exists"):
        create(runs, root, "first", WORDS)
    with pytest.raises(RecordError, match="letters, digits"):
        create(runs, root, "a/b", WORDS)
    with pytest.raises(RecordError, match="parent 'gone': no record of that name; there are: "
                                          "2026-11-21_first"):
        create(runs, root, "other", {**WORDS, "parent": "gone"})
    changed = commit_sources(root.parent, CHANGED)
    for commit, message in ((changed, "sources are not those of commit"), (None, "the logs name no commit")):
        for run in runs:
            run.header["commit"] = commit
        with pytest.raises(RecordError, match=message):
            create(runs, root, "other", WORDS)


def test_create_refuses_logs_that_would_be_lost(root, tmp_path):
    """Runs of two machines that began in one second; a second full run that was cut off, or is foreign."""
    runs = read_logs([root / "runs"])
    other = write_run(tmp_path / "elsewhere", "first", 20, header={"commit": runs[0].header["commit"]})
    with pytest.raises(RecordError, match="two runs are called 20261121-100000-first"):
        create([*runs, *read_logs([other])], root, "other", WORDS)
    other.write_text("".join(other.read_text().splitlines(keepends=True)[:-1]))
    for second, message in ((other, "not finished"), (foreign_log(tmp_path, "a"), "foreign logs go to")):
        with pytest.raises(RecordError, match=message):
            create(runs, root, "other", WORDS, second=read_logs([second])[0])


def test_a_second_run_that_is_cut_off_ends_the_check_of_its_own_record_alone(root, first, capsys):
    shutil.copytree(first / "runs", first / "second")
    for log in find_logs(first / "second")[1:]:
        log.unlink()
    [log] = find_logs(first / "second")
    log.write_bytes(gzip.compress(b"\n".join(gzip.decompress(log.read_bytes()).splitlines()[:-1]) + b"\n"))
    second = add_second(root)
    assert command("--records", root, "check") == 1
    printed = capsys.readouterr().out
    assert f"{first.name}: NOT VALID\n  problem: {log.name.split('.')[0]}: not finished" in printed
    assert f"{second.name}: ok" in printed


def test_records_of_one_name_are_checked_both(root, first, tmp_path, capsys):
    good = shutil.copytree(first, root / "again" / first.name)
    change_json(first, mean_loss=3.0)
    assert command("--records", root, "check", first, good) == 1
    printed = capsys.readouterr().out
    assert f"{first}: NOT VALID" in printed and f"{good}: " in printed


def test_hosts_and_numbers_of_processes_may_repeat(root):
    """Then a key tells the processes apart; older logs have none."""
    runs, second = with_second(root)
    for run in (*runs, second):
        run.header["process"] = 7
    with pytest.raises(RecordError, match="needs a process and a seed of its own"):
        create(runs, root, "corpus", WORDS | {"chosen_with": []}, second=second)
    for run in (*runs, second):
        run.header["process_key"] = run.name
    create(runs, root, "corpus", WORDS | {"chosen_with": []}, second=second)


# Comparisons

def test_compare(root):
    add_second(root, driver="590.1")
    a, b = load_all(root)
    result = compare(a.runs, b.runs)
    assert result["time_s"]["difference"] == pytest.approx(b.data["mean_time_s"] - a.data["mean_time_s"])
    assert result["time_s"]["low"] < result["time_s"]["difference"] < result["time_s"]["high"] < 0
    assert len(result["stages"]) == 3 and result["stages"][0]["b_ms"] == pytest.approx(24, rel=0.1)
    assert set(result["configuration"]) == {"lr", "sources"}
    text = compare_text(result)
    assert "lr (0.023 / 0.026)" in text and "WARNING: machine, driver or versions differ" in text
    assert "the smallest that these n show" in text
    with pytest.raises(RecordError, match="20261121-100000-first: on both sides"):
        compare(a.runs, a.runs[:1])


def test_differences_are_shown_where_they_begin(root):
    layers = [{"attention": True, "skip_from": None}] * 5
    add_second(root, devices=["NVIDIA H200"] * 8)
    a, b = load_all(root)
    a.runs[0].header["config"]["layers"] = layers
    b.runs[0].header["config"]["layers"] = [*layers[1:], {"attention": False}]
    text = compare_text(compare(a.runs[:1], b.runs[:1]))
    assert "machine (4 × NVIDIA H200 / 8 × NVIDIA H200)" in text
    assert re.search(r"layers \(….*True.* / ….*False", text)


def test_the_doctors_figures_are_compared(root):
    """Those of both logs, if they are numbers more than 5% apart; of a log without them nothing is said."""
    add_second(root)
    a, b = (record.runs[:1] for record in load_all(root))
    assert "doctor" not in compare_text(compare(a, b))
    same = {"copies, GB/s": 100, "wrong": "x"}
    a[0].header["doctor"] = {"figures": same | {"matmul, TFLOP/s": 700.0}, "findings": ["slow: x"]}
    b[0].header["doctor"] = {"figures": same | {"matmul, TFLOP/s": 650.0, "copies, GB/s": 96, "wrong": 1}}
    text = compare_text(compare(a, b))
    assert text.splitlines()[-1] == ("figures of --doctor true that differ by more than 5%: "
                                     "matmul, TFLOP/s (700.0 / 650.0)")


def test_ab_takes_turns_and_compares(root, capfd):
    commands = [f"{TRAINER} {root / 'runs'} --name {name} --lr {lr}"
                for name, lr in [("slow", 0.02), ("fast", 0.023)]]
    assert command("--records", root, "ab", *commands, "-n", 2, "--json") == 0
    printed = capfd.readouterr()
    assert [line.split("--name ")[1] for line in printed.err.splitlines() if line.startswith("$")] == [
        "slow --lr 0.02 --seed 0", "fast --lr 0.023 --seed 0", "fast --lr 0.023 --seed 1",
        "slow --lr 0.02 --seed 1"]
    result = json.loads(printed.out)
    assert result["loss"]["a"]["n"] == result["loss"]["b"]["n"] == 2
    assert set(result["configuration"]) == {"lr"}


def test_launch_refuses(tmp_path):
    with pytest.raises(RecordError, match="failed with exit code 3"):
        launch.launch("exit 3", tmp_path)
    with pytest.raises(RecordError, match="should add one run .* found none"):
        launch.launch("true", tmp_path)
    with pytest.raises(RecordError, match="sets --seed"):
        launch.with_settings("./run.sh --seed=1", {"seed": "0"})


# Sweeps

def test_sweep_resumes(root, capfd):
    def run(seeds: int, *more: object) -> int:
        words = ["--set", "lr=0.02,0.023", "--seeds", seeds, "--name", "rate", "--", *TRAINER.split(),
                 root / "runs", *more]
        return command("--records", root, "sweep", *words)

    assert run(1) == 0 and len(find_logs(root / "runs" / "*-rate-*")) == 2
    assert "| -" in (printed := capfd.readouterr().out) and re.search(r"\| lr=0.023 +\| +1 \| 3\.\d{4}\* ",
                                                                      printed)
    assert run(2) == 0
    assert capfd.readouterr().err.count("not repeated") == 2
    assert len(find_logs(root / "runs" / "*-rate-*")) == 4
    assert run(1, "--steps", 30) == 0  # another command is another sweep, of the same name or not
    assert "not repeated" not in capfd.readouterr().err and len(find_logs(root / "runs" / "*-rate-*")) == 6
    log = next(log for log in find_logs(root / "runs" / "*-rate-*") if '"steps": 18' in log.read_text())
    log.write_text(log.read_text().replace('"extra_steps": 2', '"extra_steps": 3'))
    assert run(2) == 2
    assert "differ in more than the swept settings: extra_steps (3 / 2)" in capfd.readouterr().err


def test_sweep_goes_on_after_a_divergence(root, capfd):
    words = ["--set", "lr=9,0.023", "--seeds", 2, "--", *TRAINER.split(), root / "runs"]
    for done_before in (0, 3):
        assert command("--records", root, "sweep", *words) == 0
        printed = capfd.readouterr()
        assert re.search(r"\| lr=9 +\| +- \| diverged ",
                         printed.out) and "step 4: the training loss is nan" in printed.out
        assert printed.err.count("not repeated") == done_before
    words[1] = "lr=9"
    assert command("--records", root, "sweep", *words) == 2
    assert "every combination diverged" in capfd.readouterr().err


def test_sweep_settings():
    assert sweep.parse_settings(["lr=1,2", "windows=[1,3],[3,7]"]) == {"lr": ["1", "2"],
                                                                       "windows": ["[1,3]", "[3,7]"]}
    for wrong in (["lr"], ["lr=1", "lr=2"], ["seed=1"], ["lr=1,,2"]):
        with pytest.raises(RecordError, match="--set"):
            sweep.parse_settings(wrong)


# Pictures and the page

def test_plots_have_axes_units_and_legends(root):
    add_second(root)
    drawn = plots.figures({record.data["title"]: record.runs for record in load_all(root)})
    assert set(drawn) == {"loss-time", "loss-tokens", "final-loss", "step-time", "schedule"}
    for name, figure in drawn.items():
        for axes in figure.axes:
            assert axes.get_ylabel() and axes.get_legend(), name
        assert figure.axes[-1].get_xlabel(), name
    files = plots.save(drawn, root.parent / "plots")
    assert len(files) == 10 and all(path.stat().st_size > 4000 for path in files)


def test_a_panel_for_each_text_that_was_scored(first):
    runs = [replace(run, scores={"clean": run.loss + 0.3}) for run in load(first).runs]
    figure = plots.figures({"scored": runs, "not scored": load(first).runs})["final-loss"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["last validation loss (nats/token)",
                                                           "loss on clean (nats/token)"]
    assert [len(axes.get_xticks()) for axes in figure.axes] == [2, 2]
    assert figure.axes[1].get_xticklabels()[1].get_text().endswith("n = 0")


def test_plot_of_a_growing_log(root, capsys):
    log = find_logs(root / "runs")[0]
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:25]))
    assert command("plot", log, "--out", root / "plots") == 0
    printed = capsys.readouterr()
    assert "not finished" in printed.err and "loss-time.png" in printed.out
    log.write_text(log.read_text().splitlines()[0])
    assert command("plot", log, "--out", root / "plots") == 2
    assert "nothing to plot" in capsys.readouterr().err


def test_a_plot_line_is_one_configuration(root, capsys):
    add_second(root)
    assert command("plot", root / "runs", "--out", root / "plots") == 2
    assert "mix configurations" in capsys.readouterr().err


def test_a_resumed_run_is_drawn_where_its_steps_are(root, monkeypatch):
    """Its log begins behind the checkpoint."""
    logs = find_logs(root / "runs")[:2]
    text = re.sub(r'.*"kind": "(step|validation)", "step": ([1-9]|[12]\d|30),.*\n', "", logs[0].read_text())
    logs[0].write_text(text.replace('"kind": "header"', '"kind": "header", "resumed": {}'))
    drawn = []
    monkeypatch.setattr(plots.plt.Axes, "plot", lambda axes, x, y, *_, **__: drawn.append((x, y)))
    plots.draw(plots.plt.subplots()[1], 0, [(run.steps["step"], run.steps["step"], run.steps["loss"])
                                            for run in read_logs(logs)], "")
    [(x, y)] = drawn
    assert list(x) == list(range(1, 61)) and np.isfinite(y).all()
    picture = watch.picture(read_logs(logs)[0], None)
    assert "step 60 of 60" in picture


def test_schedule_panels(first):
    run = load(first).runs[0]
    drawn, note = schedule.panels(run)
    assert not note
    assert [title for title, _ in drawn] == ["learning rate (×)", "batch (tokens)", "window (blocks)",
                                             "momentum"]
    assert dict(drawn)["window (blocks)"]["long attention window"][-1] == 11
    change_log(first, r'"momentum": 0.95, "windows": .*?], ', "", count=0)  # as the first logs were
    drawn, note = schedule.panels(load(first).runs[0])
    assert len(drawn) == 2 and "not logged" in note


def test_report(root):
    add_second(root, driver="590.1")
    page, notes = report.write(root)
    html = page.read_text()
    assert notes == [] and html.count("<section") == 2 and html.count("<svg") == 11
    assert "The first &lt;recipe&gt;" in html and "train_gpt.py +1 -0" in html
    assert "lr (0.023 / 0.026)" in html
    assert "driver (580.95 / 590.1)" in html
    assert not re.search(r'<script|(?:src|href)="(?!#|data:|2026-)', html), "the page must need no server"
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert set(re.findall(r'url\(#([^)]+)\)', html)) <= set(identifiers)
    readme = (root / "README.md").read_text()
    assert readme.endswith("The end.\n") and "[Faster](2026-11-30_second)" in readme
    assert markdown.between(readme, report.MARKER) == report.readme_table(load_all(root))
    assert report.write(root)[0].read_text() == html and (root / "README.md").read_text() == readme


def test_report_without_records_or_markers(tmp_path):
    (tmp_path / "records").mkdir()
    page, notes = report.write(tmp_path / "records")
    assert "No records yet" in page.read_text() and "not refreshed" in notes[0]


def test_the_readme_of_this_repository_is_not_stale():
    shown = markdown.between((RECORDS / "README.md").read_text(), report.MARKER)
    assert shown == report.readme_table(load_all(RECORDS)), "run `python -m records report`"


# Watching

def test_watch(root, capsys):
    log = write_run(root / "runs", "now", pace_ms=27.0, day=datetime(2026, 11, 22))
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:50]))
    # The newest run, against the fastest record of its preset and class.
    assert command("--records", root, "watch", "--once") == 0
    printed = capsys.readouterr().out
    assert re.search(r"-now \(n-gram table: [^)]+\): step 42 of 60\n", printed)
    assert "tokens/s" in printed and re.search(r"\d s left", printed)
    assert "from the target 3.28" in printed and re.search(r"2026-11-21_first had 3\.\d{4} at this time",
                                                           printed)
    assert "ahead" in printed


def test_watch_ends_with_the_run_and_begins_before_its_first_step(root, capsys):
    log = find_logs(root / "runs")[0]
    watch.watch(log, root, None, every_s=60)
    assert "finished" in capsys.readouterr().out
    log.write_text(log.read_text().splitlines()[0] + "\n")
    assert "no step yet" in watch.picture(read_logs([log])[0], None)


# The real program

def test_a_run_of_the_cpu_preset(tmp_path):
    """The program's own log, hash of sources and schedule are what check, stats, plot and report expect."""
    settings = ("--preset cpu --target 10 --micro_batches 2 --batch_tokens 128,256,256 --runs 2 --steps 4 "
                "--extra_steps 0 --val_every 0")
    assert train(*TINY, *settings.split(), RUNS_PATH=str(tmp_path / "runs")).returncode == 0
    assert command("stats", tmp_path / "runs", "--target", 9) == 0
    assert command("plot", tmp_path / "runs", "--out", tmp_path / "plots") == 0
    assert {"loss-time.png", "step-time.svg", "schedule.svg"} <= {path.name
                                                                  for path in (tmp_path / "plots").iterdir()}
    (tmp_path / "records").mkdir()
    for log in find_logs(tmp_path / "runs"):            # Whoever tests may have changes of their own.
        text, header = log.read_text(), json.loads(log.open().readline())
        if header["dirty"]:
            committed = sources.hash_sources(history.sources_at(ROOT, header["commit"]))
            text = text.replace('"dirty": true', '"dirty": false').replace(header["sources"], committed)
        log.write_text(text)
    runs = read_logs([tmp_path / "runs"])
    folder = create(runs, tmp_path / "records", "cpu", WORDS, changed="Nothing.", why="It does not.")
    assert command("--records", tmp_path / "records", "check") == 0
    assert len(schedule.panels(load(folder).runs[0])[0]) == 4
    assert command("--records", tmp_path / "records", "report") == 0
    assert "<svg" in (tmp_path / "records" / "index.html").read_text()
