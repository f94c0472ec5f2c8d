"""The data tools: what they write, and what they say when something is wrong."""
import base64
import gzip
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, command, succeeded
from hub_server import COMMIT, HubServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import fineweb as fineweb_tool
from data import overlap, peek, readers, text, vocabulary
from data.errors import DataError
from data.readers import Documents
from data.shards import (
    HEADER_BYTES,
    Manifest,
    ShardError,
    document_starts,
    find_shards,
    incoming,
    open_shard,
    shards_in,
    write_shard,
)
from data.vocabulary import load_vocabulary, split_long_space

# It does not compress, and it is the same in every process: test runners that share the work compare names.
NOISE = np.random.default_rng(0).bytes(1000)
VAL, TRAIN1, TRAIN2 = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"


def run(*arguments, stdin: bytes = b"", limit: int | None = None, tries: int | None = None, **environment):
    """`python -m …` in a process of its own; `limit` is the largest file that it may write, in bytes.

    `tries` is for data.fineweb: fewer than its own save the test the seconds between them.
    """
    command = ["-m", *arguments] if not tries else [
        "-c", f"import data.fineweb; data.fineweb.TRIES = {tries}; data.fineweb.main()", *arguments[1:]]
    preexec = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, input=stdin, capture_output=True,
                          env={**os.environ, **environment}, preexec_fn=preexec, timeout=60)
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done


def refused(done: subprocess.CompletedProcess, *words: str) -> None:
    """The program ended with status 2 and, as its last line, an error that holds `words`."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.rstrip("\n").rsplit("\n", 1)[-1]
    assert last.startswith("python -m data.") and all(word in last for word in words), done.stderr


def refused_here(tool, *arguments) -> str:
    """The one line that `tool.main()` ends with, in this process and with status 2."""
    done = command(*map(str, arguments), program=tool.main)
    refused(done, f"python -m {tool.__name__}: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def shard_bytes(tokens: np.ndarray, magic: int = 20240520, version: int = 1) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + tokens.astype("<u2").tobytes()


def gpt2_shard(seed: int, size: int = 20_000) -> bytes:
    """A shard of random GPT-2 ids in documents of 100 tokens."""
    tokens = np.random.default_rng(seed).integers(0, 50256, size)
    tokens[::100] = 50256
    return shard_bytes(tokens)


# Shards.

def test_shard_comes_back(tmp_path):
    tokens = np.arange(65536, dtype=np.uint16)
    write_shard(tmp_path / "train_000000.bin", tokens)
    assert np.array_equal(open_shard(tmp_path / "train_000000.bin"), tokens)
    assert [p.name for p in tmp_path.iterdir()] == ["train_000000.bin"]


@pytest.mark.parametrize("content, words", [
    (b"", "not a token shard"),
    (b"x" * 2000, "not a token shard"),
    (shard_bytes(np.arange(9), magic=20240521), "found magic 20240521"),
    (shard_bytes(np.arange(9), version=2), "shard version 2, expected 1"),
    (shard_bytes(np.arange(9))[:-2], "truncated or damaged"),
    (shard_bytes(np.arange(9)) + b"xx", "truncated or damaged"),
    (shard_bytes(np.arange(0)), "holds no tokens"),
    (shard_bytes(np.array([1, 257])), "token id 257 is outside the vocabulary of 257"),
])
def test_bad_shard_is_refused(tmp_path, content, words):
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(ShardError, match=words):
        open_shard(tmp_path / "bad.bin", 257)


@pytest.mark.parametrize("tokens", [[65536], [-1]])
def test_ids_that_do_not_fit_are_refused(tmp_path, tokens):
    with pytest.raises(ShardError, match="does not fit the 16 bits"):
        write_shard(tmp_path / "train_000000.bin", np.array(tokens))
    assert not list(tmp_path.iterdir())


def test_incoming_shards_are_not_seen_and_leftovers_go(tmp_path):
    (tmp_path / ".incoming").mkdir()
    (tmp_path / ".incoming" / "train_000007.bin").write_bytes(b"left by a killed process")
    with incoming(tmp_path) as staging:
        assert not list(staging.iterdir())
        write_shard(staging / "train_000000.bin", np.array([256]))
        assert find_shards(tmp_path, "train") == []
    assert not staging.exists()


# FineWeb.

@pytest.fixture
def hub():
    with HubServer({VAL: gpt2_shard(0), TRAIN1: gpt2_shard(1), TRAIN2: gpt2_shard(2)}) as server:
        yield server


def fineweb(hub: HubServer, folder: Path, shards: int = 2, **options) -> subprocess.CompletedProcess:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder.parent / "hf"),
                   "HF_HUB_DISABLE_TELEMETRY": "1"}
    return run("data.fineweb", "--shards", shards, "--out", folder, **environment, **options)


def assert_whole(hub: HubServer, folder: Path) -> None:
    """The folder holds what the hub has, and the manifest says so; nothing else lies about."""
    manifest = json.loads((folder / "manifest.json").read_text())["shards"]
    assert {p.name for p in folder.iterdir()} == {*hub.files, "manifest.json", ".lock"}
    for name, content in hub.files.items():
        assert (folder / name).read_bytes() == content
        assert manifest[name]["tokens"] == (len(content) - HEADER_BYTES) // 2
        assert manifest[name]["documents"] > 0


def test_fineweb_fetches_once(hub, tmp_path):
    folder = tmp_path / "fineweb"
    done = succeeded(fineweb(hub, folder))
    assert "the validation shard and 2 training shards, all checked" in done.stderr
    assert_whole(hub, folder)
    assert json.loads((folder / "manifest.json").read_text())["shards"][VAL]["commit"] == COMMIT
    hub.requests.clear()
    succeeded(fineweb(hub, folder))
    assert hub.requests == []  # what is whole needs no network
    assert_whole(hub, folder)


def test_fineweb_resumes_a_cut_connection(hub, tmp_path):
    hub.files[TRAIN1] = gpt2_shard(3, 13_000_000)  # the client keeps what it got in blocks of 10 MB
    hub.faults[TRAIN1] = ["cut"]
    succeeded(fineweb(hub, tmp_path / "fineweb"))
    ranges = [r for method, name, r in hub.requests if method == "GET" and name == TRAIN1]
    assert len(ranges) == 2 and ranges[0] is None and int(re.match(r"bytes=(\d+)-",
                                                                   ranges[1])[1]) >= 10_000_000
    assert_whole(hub, tmp_path / "fineweb")


def test_fineweb_tries_again(hub, tmp_path):
    hub.faults[TRAIN2] = ["flip"]
    done = succeeded(fineweb(hub, tmp_path / "fineweb"))
    said = f"{TRAIN2}: .*not the one that the hub publishes.*; trying again \\(2 of 4\\)"
    assert re.search(said, done.stderr)
    assert hub.fetched() == [TRAIN1, TRAIN2, TRAIN2, VAL]
    assert_whole(hub, tmp_path / "fineweb")


@pytest.mark.parametrize("variables, words", [
    ({"HF_ENDPOINT": "http://[::1"}, "Invalid IPv6 URL; mend or unset the variables HF_"),
    ({"HF_ENDPOINT": "garbage"}, "HF_ENDPOINT=garbage is no address"),
    ({"HF_HUB_DOWNLOAD_TIMEOUT": "abc"}, "'abc'; mend or unset the variables HF_"),
], ids=str)
def test_fineweb_with_variables_that_are_wrong(tmp_path, variables, words):
    done = run("data.fineweb", "--shards", 1, "--out", tmp_path / "shards", **variables)
    refused(done, words)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("tool, option, value, words", [
    (fineweb_tool, "--shards", 99999999999, "must be at least 1 and at most 103"),
    (fineweb_tool, "--jobs", 99999999999, "must be at least 1 and at most 64"),
    (text, "--shard-tokens", 99999999999999, "must be at least 1 and at most 2,147,483,647"),
    (overlap, "--document_start", 10 ** 30, "must be at least 0 and at most 65,535"),
])
def test_numbers_beyond_all_measure_are_refused(tool, option, value, words):
    done = command(option, str(value), program=tool.main)
    assert done.returncode == 2 and done.stderr.endswith(f"argument {option}: {value}: {words}\n")


def test_fineweb_never_shows_a_shard_that_stays_bad(hub, tmp_path):
    tokens = np.full(20_000, 7)
    tokens[0] = 50256
    hub.files |= {TRAIN1: shard_bytes(tokens, magic=1), TRAIN2: gpt2_shard(2)[:-2],
                  "fineweb_train_000003.bin": shard_bytes(tokens[1:]),
                  "fineweb_train_000004.bin": shard_bytes(np.append(tokens, 50257))}
    done = fineweb(hub, tmp_path / "fineweb", 4, tries=2)
    refused(done, "fineweb_train_00000", "python -m data.fineweb --shards 4")
    for number, words in enumerate(["found magic 1", "truncated or damaged", "no document starts",
                                    "token id 50257"], 1):
        assert re.search(f"_00000{number}.bin: .*{words}.*; trying again \\(2 of 2\\)",
                         done.stderr), done.stderr
    assert [p.name for p in (tmp_path / "fineweb").glob("*.bin")] in ([], [VAL])


def test_fineweb_notices_a_change_since_it_was_checked(hub, tmp_path):
    hub.sha256 = False
    folder = tmp_path / "fineweb"
    assert fineweb(hub, folder).returncode == 0
    content = bytearray(hub.files[TRAIN1])
    content[3000] ^= 1
    (folder / TRAIN1).write_bytes(content)
    (folder / TRAIN2).write_bytes(b"half")
    done = succeeded(fineweb(hub, folder))
    assert f"{TRAIN1}: its SHA-256 is not the one in manifest.json" in done.stderr
    assert f"{TRAIN2}: not a token shard" in done.stderr
    assert_whole(hub, folder)


def test_fineweb_takes_the_cache_but_not_what_is_damaged_in_it(hub, tmp_path):
    fill = ("from huggingface_hub import hf_hub_download as get; import sys; "
            "[get('kjj0/fineweb10B-gpt2', name, repo_type='dataset') for name in sys.argv[1:]]")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    subprocess.run([sys.executable, "-c", fill, VAL, TRAIN1, TRAIN2], env=environment, check=True)
    next((tmp_path / "hf").rglob(TRAIN2)).resolve().write_bytes(hub.files[TRAIN2][:-2])
    hub.requests.clear()
    done = fineweb(hub, tmp_path / "fineweb")
    assert done.returncode == 0 and hub.fetched() == [TRAIN2], done.stderr
    assert_whole(hub, tmp_path / "fineweb")


def test_fineweb_without_network_says_what_to_do(tmp_path):
    done = run("data.fineweb", "--shards", 3, "--out", tmp_path, tries=1,
               HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    refused(done, "ConnectError", "`python -m data.fineweb --shards 3` where there is one", "set DATA_PATH")


def test_fineweb_shard_that_is_not_there(hub, tmp_path):
    refused(fineweb(hub, tmp_path / "fineweb", 3), "fineweb_train_000003.bin", "404")
    assert hub.fetched() == []


def test_fineweb_no_space(hub, tmp_path):
    done = fineweb(hub, tmp_path / "fineweb", limit=30_000)  # a shard is 41 kB
    refused(done, str(tmp_path / "fineweb"), "File too large; free some or choose another folder with --out")
    assert not list((tmp_path / "fineweb").rglob("*.bin"))
    hub.sizes[TRAIN1] = 10**15
    refused(fineweb(hub, tmp_path / "fineweb"), "3 shards need 1000000.0 GB", "free some")


def test_fineweb_two_at_once(hub, tmp_path):
    hub.delay = 0.5
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "data.fineweb", "--shards", "2", "--out", str(tmp_path / "fineweb")]
    both = [subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    messages = "".join(process.communicate(timeout=60)[1].decode() for process in both)
    assert [process.returncode for process in both] == [0, 0], messages
    assert "another process is filling" in messages
    assert hub.fetched() == [TRAIN1, TRAIN2, VAL]
    assert_whole(hub, tmp_path / "fineweb")


@pytest.mark.parametrize("how, status", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_fineweb_ended_and_run_again(hub, tmp_path, how, status):
    """While a server does not answer; Ctrl-C does not wait for it. What was whole is not fetched again."""
    folder = tmp_path / "fineweb"
    hub.faults[TRAIN2] = ["hang"]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    process = subprocess.Popen([sys.executable, "-m", "data.fineweb", "--shards", "2", "--out", str(folder)],
                               cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    def waiting() -> bool:
        return TRAIN2 not in hub.fetched() or len(list(folder.glob("*.bin"))) < 2

    while waiting() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(how)
    assert "Traceback" not in process.communicate(timeout=5)[1].decode() and process.returncode == status
    assert {p.name for p in folder.glob("*.bin")} == {VAL, TRAIN1}
    assert bool(list(folder.glob(".incoming*"))) == (how == signal.SIGKILL)
    assert fineweb(hub, folder).returncode == 0
    assert hub.fetched() == [TRAIN1, TRAIN2, TRAIN2, VAL]
    assert_whole(hub, folder)


def test_fineweb_bad_arguments(tmp_path):
    for damaged in "{", "[]", '{"shards": [1]}', '{"shards": {"a": {}}}':
        (tmp_path / "manifest.json").write_text(damaged)
        assert "manifest.json is damaged; remove it" in refused_here(fineweb_tool, "--out", tmp_path)
    assert "File exists" in refused_here(fineweb_tool, "--out", tmp_path / "manifest.json")
    assert "must be at least 1" in run("data.fineweb", "--shards", 0).stderr


# Text.

@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> Path:
    """A vocabulary file of 256 bytes and a few merges; 263 starts a document."""
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" t", b" the", b"\xc3\xa9", b"  ", b"\n\n"]
    path = tmp_path_factory.mktemp("vocabulary") / "small.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n"
                            for rank, token in enumerate(tokens)))
    return path


def documents_in(folder: Path, split: str, vocabulary: str | Path = "bytes") -> list[bytes]:
    """The documents of a folder of shards, decoded."""
    known, found = load_vocabulary(vocabulary), []
    for path in find_shards(folder, split):
        tokens = open_shard(path, known.size)
        starts = document_starts(tokens, known.bos)
        assert starts[0] == 0  # a shard begins with a document
        found += [known.decode(part) for part in np.split(tokens, starts[1:])]
    return found


@pytest.mark.parametrize("kind", ["bytes", "ranks"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=20))
def test_every_document_comes_back(tmp_path_factory, ranks, kind, documents):
    vocabulary, folder = ranks if kind == "ranks" else "bytes", tmp_path_factory.mktemp("roundtrip")
    (folder / "all.jsonl").write_text("".join(json.dumps({"text": document}) + "\n"
                                              for document in documents))
    text.build(Documents([str(folder / "all.jsonl")]), folder / "out", vocabulary, share=0, shard_tokens=500)
    assert documents_in(folder / "out", "train", vocabulary) == [document.encode() for document in documents]


def test_gpt2_start_token_in_the_text_stays_text(ranks):
    vocabulary = load_vocabulary(ranks)
    tokens = vocabulary.encode(b"a<|endoftext|>b")
    assert np.count_nonzero(tokens == vocabulary.bos) == 1 and vocabulary.decode(tokens) == b"a<|endoftext|>b"


@given(st.text(" \n\tab\u00a0\x1c\u3000", max_size=60))
def test_cuts_in_long_space_change_no_token(ranks, words):
    encode = load_vocabulary(ranks).encoding.encode_ordinary
    parts = split_long_space(words, re.compile(r"(?<![^\S\x1c-\x1f])[^\S\x1c-\x1f]{3,}"))
    assert [token for part in parts for token in encode(part)] == encode(words)


def test_a_million_spaces_are_tokenised(ranks):
    document = b"a" + b" \n" * 1_000_000 + b"b"
    assert load_vocabulary(ranks).decode(load_vocabulary(ranks).encode(document)) == document


STORY = ["Once upon a time", "there was\na café", "the end"]


def write_input(folder: Path, name: str) -> Path:
    """STORY as a file of the format and compression that its name asks for, or with blank lines between."""
    plain = folder / re.sub(r"\.(gz|zst)$", "", name)
    if plain.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3, 4], "text": [*STORY, None]}), plain)
    elif plain.suffix == ".jsonl":
        plain.write_text("".join(json.dumps({"id": 1, "text": part}) + "\n\n" for part in [*STORY, None]))
    else:
        plain.write_text("\n\n".join(STORY) + "\n")
    if name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress(plain.read_bytes()))
    if name.endswith(".zst"):
        (folder / name).write_bytes(pyarrow.compress(plain.read_bytes(), "zstd", asbytes=True))
    return folder / name


def read(*inputs, **options) -> list[str]:
    return [document.decode() for document in Documents([str(name) for name in inputs], **options)]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".md", ".jsonl", ".parquet"])
def test_formats(tmp_path, kind, ending):
    assert read(write_input(tmp_path, f"story{kind}{ending}"), split="blank") == STORY


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("split, content, documents", [
    ("file", b"one\n\ntwo\r\n", ["one\n\ntwo\r\n"]),
    ("line", b"one\ntwo\r\n\n  three\n", ["one", "two", "  three"]),
    ("blank", b"\none\nstill\n\n\n \t\n  two\r\n\r\nthree", ["one\nstill", "  two", "three"]),
    ("nul", b"one\n\0\n two \0\0three", ["one\n", "\n two ", "three"]),
])
def test_split(tmp_path, monkeypatch, split, content, documents, block):
    monkeypatch.setattr(readers, "BLOCK", block)
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt", split=split) == documents


def test_folders_are_read_in_order(tmp_path):
    for name in ["b/2.md", "b/1.TXT", "a.txt", ".hidden/c.txt", "picture.png"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.txt", "b/1.TXT", "b/2.md"]
    assert read(tmp_path / "picture.png", kind="text") == ["picture.png"]
    assert read(tmp_path, kind="text") == ["a.txt", "b/1.TXT", "b/2.md", "picture.png"]


def test_shards_are_the_same_for_any_number_of_workers(tmp_path, ranks):
    lines = b"".join(b"line %d of the text\n" % i for i in range(60_000))
    for workers in 1, 2:
        done = run("data.text", "-", "--split", "line", "--vocabulary", ranks, "--out",
                   tmp_path / str(workers), "--workers", workers, "--shard-tokens", 100_000, stdin=lines)
        assert done.returncode == 0 and "MB read in" in done.stderr, done.stderr
    names = sorted(p.name for p in (tmp_path / "1").glob("*.bin"))
    assert len(names) > 3 and names == sorted(p.name for p in (tmp_path / "2").glob("*.bin"))
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() for name in names)
    train, val = (documents_in(tmp_path / "1", split, ranks) for split in ("train", "val"))
    assert sorted(train + val) == sorted(lines.splitlines()) and 0.007 < len(val) / 60_000 < 0.013


def test_held_out_documents_stay_held_out(tmp_path):
    def held_out(*lines: str) -> set[bytes]:
        folder = tmp_path / str(len(lines))
        (tmp_path / "a.txt").write_text("\n".join(lines))
        text.build(Documents([str(tmp_path / "a.txt")], split="line"), folder, "bytes", share=0.3)
        assert not set(documents_in(folder, "train")) & set(documents_in(folder, "val"))
        return set(documents_in(folder, "val"))
    few, more = [f"document {i}" for i in range(100)], [f"other {i}" for i in range(150)]
    assert held_out(*more, *few, *few) & {line.encode() for line in few} == held_out(*few)


@pytest.mark.parametrize("share, split", [(0, "train"), (1, "val")])
def test_one_split_only(tmp_path, share, split):
    done = run("data.text", "-", "--bytes", "--validation", share, "--out", tmp_path, stdin=b"\xff any bytes")
    assert done.returncode == 0 and [p.name for p in tmp_path.glob("*.bin")] == [f"{split}_000000.bin"]
    assert documents_in(tmp_path, split) == [b"\xff any bytes"]


def test_memory_is_bounded(tmp_path):
    (tmp_path / "a.txt").write_bytes((b"a line of text that is no story\n" * 1000 + b"\n") * 4_000)  # 128 MB
    code = "import data.text; data.text.main(); print(open('/proc/self/status').read())"
    arguments = [tmp_path / "a.txt", "--bytes", "--split", "blank", "--shard-tokens", "1_000_000", "--out",
                 tmp_path / "out"]
    arguments += ["--validation", 0, "--workers", 1]
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True,
                          check=True)
    assert int(re.search(rb"VmHWM:\s+(\d+) kB", done.stdout)[1]) < 150_000


@pytest.mark.parametrize("name, content, arguments, words", [
    ("a.txt", None, [], ["no such file or folder"]),
    ("a.pdf", b"%PDF", [], ["cannot tell the format", "--format text, jsonl or parquet"]),
    ("folder/a.pdf", b"%PDF", [], ["holds no .txt, .md, .jsonl, .parquet"]),
    ("a.txt", b"", [], ["the input holds no text"]),
    ("a.txt", b"one", [], ["none of the 1 documents fell into val", "--validation (now 0.01", "--split"]),
    ("a.txt", b"caf\xe9", [], ["a.txt, document 1: byte 3 is not UTF-8 (0xe9)", "--replace-invalid"]),
    ("a.txt", b"one two three", ["--shard-tokens", "5"],
     ["does not fit a shard of 5", "raise --shard-tokens"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": ', [], ["a.jsonl:2: not JSON"]),
    ("a.jsonl", b'{"id": 1, "body": "a"}', [], ["a.jsonl:1: no field 'text' (found: id, body)", "--field"]),
    ("a.jsonl", b'["text"]', [], ["a.jsonl:1: no field 'text' (found: a list)"]),
    ("a.jsonl", b'{"text": 7}', [], ["a.jsonl:1: field 'text' is a int, not text"]),
    ("a.jsonl", b'{"text": "\\ud800"}', [], ["a.jsonl, document 1: byte 0 is not UTF-8",
                                             "--replace-invalid"]),
    ("a.txt.gz", gzip.compress(NOISE, mtime=0)[:-100], [],
     ["a.txt.gz: cannot be read", "damaged or incomplete"]),
    ("a.txt.gz", b"no gzip", [], ["a.txt.gz: cannot be read", "damaged or incomplete"]),
    ("a.txt.zst", pyarrow.compress(NOISE, "zstd", asbytes=True)[:-9], [],
     ["a.txt.zst: cannot be read"]),
    ("a.parquet", b"no parquet", [], ["a.parquet: not a whole parquet file"]),
    ("a.jsonl", b"{}", ["--vocabulary", "missing.tiktoken"], ["missing.tiktoken: No such file"]),
])
def test_bad_input_is_refused(tmp_path, ranks, name, content, arguments, words):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    place = path.parent if "/" in name else path
    message = refused_here(text, place, "--out", tmp_path / "out", "--workers", 1,
                           *([] if "--vocabulary" in arguments else ["--vocabulary", ranks]), *arguments)
    assert all(word in message for word in words), message
    assert not list((tmp_path / "out").glob("*.bin")) and not list((tmp_path / "out").glob(".incoming*"))


@pytest.mark.parametrize("lines, words", [
    ("IQ== 0\nIg==", ":2: not a base64 token and its rank"),
    ("IQ== 0\nI! 1", ":2: not a base64 token and its rank"),
    ("IQ== 0\nIg== 2", "its ranks are not 0 to 1, each once"),
    ("IQ== 0\nIg== 1", "254 of the 256 single bytes have no rank (the first: 0x00)"),
    ("\n".join(f"{base64.b64encode(i.to_bytes(3, 'big')).decode()} {i}" for i in range(65536)),
     "65,536 tokens and a start token do not fit the 16 bits of a shard's ids (0 to 65,535)"),
])
def test_bad_vocabulary_is_refused(tmp_path, lines, words):
    (tmp_path / "bad.tiktoken").write_text(lines)
    (tmp_path / "a.txt").write_text("text")
    assert words in refused_here(text, tmp_path / "a.txt", "--out", tmp_path / "out", "--vocabulary",
                                 tmp_path / "bad.tiktoken")


def test_gpt2_vocabulary_without_network(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(vocabulary, "FETCH_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection, never answers
        for port, reason in (9, "ConnectionError|ProxyError"), (silent.getsockname()[1], "TimeoutError"):
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
            message = refused_here(text, tmp_path / "a.txt", "--out", tmp_path / "out")
            assert re.search(f"could not fetch GPT-2's vocabulary \\(({reason})\\)", message), message
            assert "`TIKTOKEN_CACHE_DIR=gpt2 python -c " in message and "--vocabulary FILE" in message
    assert not (tmp_path / "out").exists()


def test_replace_invalid(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}')
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    assert read(tmp_path, utf8="replace") == ["a\ufffd\ufffd\ufffdb", "caf\ufffd"]


def test_text_never_mixes_with_other_shards(tmp_path):
    write_shard(tmp_path / "train_000000.bin", np.array([256]))
    message = refused_here(text, write_input(tmp_path, "a.txt"), "--bytes", "--out", tmp_path)
    assert "already holds shards" in message and f"rm {tmp_path}/*.bin" in message
    # That advice works, whatever a manifest says of the shards that are gone.
    Manifest(tmp_path).record(**{"train_000007.bin": {"tokens": 1, "sha256": ""}})
    (tmp_path / "train_000000.bin").unlink()
    text.build(Documents([str(tmp_path / "a.txt")]), tmp_path, "bytes", 0)
    assert shards_in(str(tmp_path), "train") == [tmp_path / "train_000000.bin"]


def test_text_removes_nobodys_manifest(tmp_path):
    """Neither that of another program, nor one of shards where it then writes none."""
    manifest, empty = tmp_path / "manifest.json", tmp_path / "empty.txt"
    empty.touch()
    Manifest(tmp_path).record(**{"train_000007.bin": {"tokens": 1, "sha256": ""}})
    for before, said in ((manifest.read_bytes(), "holds no text"), (b'{"name": "my app"}', "is damaged;")):
        manifest.write_bytes(before)
        assert said in refused_here(text, empty, "--bytes", "--out", tmp_path)
        assert manifest.read_bytes() == before


def test_document_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT", 10)
    with pytest.raises(DataError, match="say with --split what separates"):
        read(write_input(tmp_path, "a.txt"))


def test_text_no_space(tmp_path):
    done = run("data.text", "-", "--bytes", "--validation", 0, "--workers", 1, "--out", tmp_path,
               stdin=b"x" * 200_000, limit=100_000)
    refused(done, str(tmp_path), "File too large; free some or choose another folder with --out")
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_text_interrupted(tmp_path):
    (tmp_path / "long.txt").write_bytes(b"a line\n" * 4_000_000)
    process = subprocess.Popen([sys.executable, "-m", "data.text", tmp_path / "long.txt", "--bytes",
                                "--split", "line", "--workers", "2", "--shard-tokens", "100_000", "--out",
                                tmp_path / "out"], cwd=ROOT,
                               stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("out/.incoming*/*.bin")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    assert process.wait(20) == 130
    assert process.stderr.read() == b"python -m data.text: interrupted; nothing unfinished is left in place\n"
    assert [p.name for p in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_dead_worker_is_reported(monkeypatch):
    with pytest.raises(DataError, match="a worker process died.*--workers 1"):
        list(text.in_order(os._exit, [1, 1], workers=2))


# Peek.

def test_peek(tmp_path, ranks):
    tokens = np.full(10_000, 97)
    tokens[[0, 4000, 7000, 9999]] = 263
    write_shard(tmp_path / "train_000000.bin", tokens)
    write_shard(tmp_path / "val_000000.bin", load_vocabulary(ranks).encode("the café\x1b[31m".encode()))
    done = succeeded(run("data.peek", tmp_path, "--vocabulary", ranks, "--documents", 9))
    assert re.search(r"train_000000.bin +4 +10,000 +2,500 +4,000\n", done.stdout)
    assert re.search(r"2,049–4,096 +3 +60.0% +99.9% █+\n", done.stdout)
    assert re.search(r"--preset cpu --vocab_size 264 takes about [\d,]+ tokens of training shards like these "
                     r"\(cutting documents at 256 leaves 7.7%, 512 leaves 15.4%\); there are 10,000: "
                     r"\d+.\d\d epochs, it does not fit in one; --epochs \d+", done.stdout)
    assert done.stdout.endswith("── val_000000.bin, document 0, 12 tokens ──\nthe café\\x1b[31m\n")


def test_peek_shows_ids_when_there_is_no_vocabulary(tmp_path):
    write_shard(tmp_path / "train_000000.bin", np.array([300, 1, 2]))
    assert re.search("No vocabulary is known whose last id is 300(.|\n)*\n300 1 2\n",
                     run("data.peek", tmp_path).stdout)
    write_shard(tmp_path / "train_000000.bin", np.array([50256, 1, 2]))
    done = run("data.peek", tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY="http://127.0.0.1:9")
    assert re.search("Ids are shown, because tiktoken could not fetch(.|\n)*\n50256 1 2\n", done.stdout)
    assert "\n--preset medium takes about" in done.stdout


def test_peek_a_million_documents(tmp_path):
    tokens = np.tile(np.arange(256, 236, -1, dtype=np.uint16), 1_000_000)
    write_shard(tmp_path / "train_000000.bin", tokens)
    done = command(str(tmp_path), "--documents", "1", program=peek.main)
    assert re.search(r"1,000,000 +20,000,000 +20 +20\n", done.stdout)


@pytest.mark.parametrize("preset", ["speedrun", "single"])
def test_the_default_number_of_shards_follows_from_the_schedule(preset):
    """Of both presets for which run.sh fetches that many."""
    kept = {896: 0.612, 2048: 0.794}  # as said beside SPEEDRUN_SHARDS
    taken = sum(tokens / kept[cut] for cut, tokens in peek.SCHEDULES[50256][preset].items())
    assert -(-taken // 100_000_000) == fineweb_tool.SPEEDRUN_SHARDS


@pytest.mark.parametrize("shards, arguments, words", [
    ({}, [], "no shards (*.bin) in it"),
    ({"a": [256, 1], "b": [257, 1]}, [], "its largest id is 256, that of other shards 257"),
    ({"a": [300, 1]}, ["--bytes"], "the vocabulary bytes ends with id 256, the shards with 300"),
    ({"a": []}, [], "a.bin: holds no tokens; remove it"),
])
def test_peek_refuses(tmp_path, shards, arguments, words):
    for name, tokens in shards.items():
        write_shard(tmp_path / f"{name}.bin", np.array(tokens, dtype=np.uint16))
    assert words in refused_here(peek, tmp_path, *arguments)


@pytest.mark.parametrize("tool", ["fineweb", "text", "peek"])
def test_help_shows_examples(tool):
    done = run(f"data.{tool}", "--help")
    assert done.returncode == 0 and done.stdout.count(f"python -m data.{tool}") >= 4


def test_importing_loads_neither_torch_nor_a_network_client():
    code = ("import sys, data.fineweb, data.text, data.peek; "
            "print({'torch', 'huggingface_hub', 'tiktoken'} & {*sys.modules})")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                          check=True).stdout == b"set()\n"
