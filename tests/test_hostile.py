"""What strangers send: nothing executes, leaves its folder, steers a terminal, or grows without bound."""
import gzip
import json
import os
import random
import re
import time
from html.parser import HTMLParser

import pytest
from conftest import ROOT
from fuzz import EVIL, KINDS, fuzz
from synthetic import MadeUp, command, commit_sources, made_up_lines, write_run

from data import overlap
from data.errors import DataError, printable
from data.readers import json_field
from data.shards import Manifest, open_shard
from data.vocabulary import read_ranks
from records.run.settings import UserError
from records.run.weights import read_model, read_tensors
from records.tools import logs, markdown, scaling
from records.tools.logs import read_log
from records.tools.record import create, load
from records.tools.schema import RecordError

MARKUP = ("<script>alert(1)</script>\"'><img src=x onerror=alert(1)> "
          "$\\frac{1}{$ \x1b[31m\x07 <!-- /records --> | `<b>`")
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_are_read_or_refused_in_one_line(kind, tmp_path):
    """10,000 of each kind: python -m tests.fuzz."""
    refused, broken = fuzz(kind, tmp_path, range(200))
    assert not broken, {seed: repr(error) for seed, error in broken.items()}
    assert 20 < refused < 200


@pytest.fixture
def hostile(tmp_path):
    """A valid record whose every free text is markup and control characters, in a folder of records."""
    commit = commit_sources(tmp_path)
    header = {"commit": commit, "driver": MARKUP, "devices": [MARKUP] * 4, "preset": MARKUP,
              "attention": MARKUP, "versions": {MARKUP: MARKUP}}
    for seed in range(2):
        write_run(tmp_path / "records/runs", MARKUP.replace("/", ""), seed, steps=12, header=header,
                  settings={MARKUP: MARKUP}, command=["train_gpt.py", MARKUP])
    runs = logs.read_logs([tmp_path / "records/runs"])
    for i, run in enumerate(runs):
        run.path = run.path.parent.rename(run.path.parent.with_name(f"run{i}")) / "log.jsonl"
    words = {"title": MARKUP, "contributors": [MARKUP]}
    create(runs, tmp_path / "records", "evil", words, changed=MARKUP, why=MARKUP)
    (tmp_path / "README.md").write_text("<!-- records -->\n<!-- /records -->\nmine\n")
    return tmp_path


class Page(HTMLParser):
    """Collects tags and attributes."""
    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text.append(data)


def test_pages_tables_and_terminals_show_text_and_nothing_else(hostile, capsys):
    stopped = hostile / "stopped.jsonl"
    stopped.write_text("".join(json.dumps(line) + "\n" for line in [
        *made_up_lines("a", 0, MadeUp(steps=12))[:5], {"kind": "stopped", "step": 4, "reason": MARKUP}]))
    for words in (["check"], ["stats", hostile / "records/runs"], ["watch", stopped, "--once"], ["report"]):
        assert command("--records", hostile / "records", *words) in (0, 1)
    said = capsys.readouterr()
    assert not STEERING.search(said.out + said.err) and "\\x1b[31m" in said.out
    text = (hostile / "records/index.html").read_text("utf-8")
    page = Page(text)
    assert not page.tags & {"script", "img", "iframe", "object", "b"}
    assert not [name for name in page.attributes if name.startswith("on") or name == "src"]
    assert "default-src 'none'" in text and text.index("Content-Security-Policy") < text.index("<title>")
    assert "<script>alert(1)</script>" in "".join(page.text)        # as text
    readme = (hostile / "README.md").read_text("utf-8")
    assert readme.endswith("<!-- /records -->\nmine\n") and readme.count("<!--") == 2
    assert "<script" not in readme and not STEERING.search(readme)


@pytest.mark.parametrize("text, shown", [
    ("a\x1b[2Jb\n", "a\\x1b[2Jb\n"), ("\u202ee\ud800\x9b", "\\u202ee\\ud800\\x9b"), ("é…█", "é…█")])
def test_what_is_printable(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize("field, value", [
    ("started", "../../../x"), ("commit", "--output=/tmp/x"), ("commit", "`touch x`"),
    ("world_size", 10 ** 9), ("devices", [{}]), ("command", [["rm"]]), ("schema", True), ("seed", 10 ** 30),
    ("config", {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}}}),
])
def test_headers_that_would_lead_the_tools_astray(tmp_path, field, value):
    lines = made_up_lines("a", 0, MadeUp(steps=12))
    lines[0][field] = value
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RecordError, match="log.jsonl:1:|settings nested|schema"):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.parametrize("text", ["a;touch PWNED;b=1", "$(touch PWNED)=1", "a b=1", "--a=1", "a\n=1", "é=1"])
def test_names_of_settings_are_no_commands(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    assert command("--records", tmp_path, "sweep", "--seeds", 1, f"--set={text}", "--", "false") == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "is no setting's name" in said and not list(tmp_path.iterdir())


def test_batches_of_a_measurement_are_no_commands(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert scaling.main(["--ranks", "1", "--batch_tokens", "1;touch PWNED;"]) == 2
    assert "the command above failed" in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_a_record_names_no_other_folder(hostile):
    [folder] = (hostile / "records").glob("2026-*_evil")
    data = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(data | {"parent": "../../etc"}))
    with pytest.raises(RecordError, match="is no record's name"):
        load(folder)
    with pytest.raises(RecordError, match="only letters"):
        load(folder.rename(folder.with_name('2026-11-21_" onload="x')))


def test_nothing_grows_without_bound(tmp_path, monkeypatch):
    """A log that unpacks to much more, deep nesting, long numbers, a header that promises 10^9 steps."""
    monkeypatch.setattr(logs, "MOST_BYTES", 1 << 20)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b" " * (2 << 20)))
    (tmp_path / "long.jsonl").write_bytes(b" " * (2 << 20))
    for name, text in (("deep", "[" * 200_000), ("digits", '{"a": ' + "9" * 9000 + "}")):
        (tmp_path / f"{name}.jsonl").write_text(text + "\n")
        with pytest.raises(DataError, match="not JSON"):
            json_field(text.encode(), "text", "a.jsonl:1")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(RecordError, match="longer than 1,048,576 bytes|not JSON"):
            read_log(path)
    lines = made_up_lines("a", 0, MadeUp(steps=12, settings={"steps": 10 ** 9}))[:5]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command("watch", tmp_path / "a.jsonl", "--once") == 0
    (tmp_path / "vocabulary").touch()
    monkeypatch.setattr("data.vocabulary.MAX_BYTES", -1)
    with pytest.raises(DataError, match="more than a vocabulary has"):
        read_ranks(tmp_path / "vocabulary")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"),
                                  lambda path: path.touch() or os.truncate(path, 1 << 40)],
                         ids=["a pipe", "a device", "a terabyte"])
def test_pipes_devices_and_terabytes_are_refused_at_once(hostile, capsys, make):
    """A pipe never answers, a device never ends, and a file of holes takes no room on the disk."""
    [folder] = (hostile / "records").glob("2026-*_evil")
    (folder / "README.md").unlink()
    make(folder / "README.md")
    assert command("--records", hostile / "records", "report") == 0
    assert "README.md: not refreshed" in capsys.readouterr().out
    readers = {"record.json": lambda _: load(folder), "log.jsonl": read_log, "train_0.bin": open_shard,
               "config.json": lambda path: read_model(path.parent), "model.safetensors": read_tensors,
               "manifest.json": lambda path: Manifest(path.parent), "ranks": read_ranks}
    for name, read in readers.items():
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        said = "no regular file|longer than|not a token shard|more than a vocabulary has|truncated or"
        with pytest.raises((RecordError, DataError, UserError, OSError), match=said):
            read(folder / name)
    make(folder / overlap.FILE)
    assert overlap.marked_tokens(str(folder), 10) is None and "is damaged" in capsys.readouterr().err


def test_no_foreign_log_takes_long_to_search(tmp_path):
    rule = "=" * 100 + "\n"
    for part in ("|   0  NVIDIA" + " " * 100_000, "step:" + "1" * 100_000, rule * 2000 + "\n" * 100_000,
                 "| " * 100_000, "step:1/3 val_loss:" + "x" * 100_000):
        (tmp_path / "a.txt").write_text(f"import torch\n{rule}{part}\n{rule}{part}\n")
        begin = time.monotonic()
        with pytest.raises(RecordError, match="neither a log.jsonl"):
            read_log(tmp_path / "a.txt")
        assert time.monotonic() - begin < 2


def test_a_cell_cannot_leave_its_table():
    rng = random.Random(0)
    rows = [[str(rng.choice(EVIL)) for _ in range(3)] for _ in range(50)]
    lines = markdown.table(["a", "b", "c"], rows).splitlines()
    assert len(lines) == 52 and {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {4}
    assert not STEERING.search("".join(lines)) and "<!--" not in "".join(lines)


def test_data_that_is_unpickled_is_nowhere():
    """No file of the project loads pickles: `weights_only=False`, `allow_pickle=True` and pickle itself."""
    for path in [ROOT / "train_gpt.py", *(p for room in ("data", "records", "kernels") for p in
                                          (ROOT / room).rglob("*.py"))]:
        text = path.read_text("utf-8")
        unsafe = r"weights_only=False|allow_pickle=True|import pickle|\b(eval|exec)\("
        assert not re.search(unsafe, text), path
