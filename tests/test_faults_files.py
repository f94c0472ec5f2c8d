"""Disks that are full, shards that change, networks that fail: one line, and nothing half-written."""
import errno
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import write_documents
from hub_server import HubServer
from huggingface_hub import close_session, constants
from synthetic import command as records
from synthetic import commit_sources, write_run
from test_data import TRAIN1, TRAIN2, VAL, gpt2_shard, refused_here

import train_gpt
from data import embedded, fineweb, overlap, peek
from data.errors import DataError
from data.shards import Manifest, ShardError, find_shards, open_shard, publish, shards_in, whole_file
from records.run.log import LogError, RunLog
from records.run.machine import ending_facts
from records.tools import check
from records.tools.logs import read_log


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but locks, by its path, with its contents."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != ".lock"}


# ---- Disks

@pytest.fixture
def project(tmp_path) -> Path:
    """A little repository with a README and the logs of three finished runs."""
    commit = commit_sources(tmp_path)
    (tmp_path / "README.md").write_text("<!-- records -->\nold\n<!-- /records -->\n")
    for seed in range(3):
        write_run(tmp_path / "records/runs", seed=seed, steps=12, header={"commit": commit})
    return tmp_path


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("words", [["report"], ["plot", "{runs}", "--out", "{plots}"],
                                   ["new", "{runs}", "--name", "a", "--title", "A"]], ids=lambda w: w[0])
def test_a_full_disk_leaves_all_as_it_was(project, monkeypatch, capsys, words, code):
    (project / "plots").mkdir()
    before, places = tree(project), {"runs": project / "records/runs", "plots": project / "plots"}

    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as end:
        records("--records", project / "records", *[word.format(**places) for word in words])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and lines[0].startswith("python -m records: ")
    assert str(project) in lines[0] and os.strerror(code) in lines[0] and tree(project) == before


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "link") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    with whole_file(tmp_path / "link") as file:
        file.write(b"whole")
    assert tree(tmp_path) == {"elsewhere": b"mine", "link": b"whole"}


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNS_PATH", str(tmp_path))
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    for _ in range(3):
        RunLog("a").file.close()
    assert [p.name for p in sorted(tmp_path.iterdir())] == [f"20260101-000000-a{n}" for n in ("", "-2", "-3")]
    with pytest.raises(LogError, match="cannot write the run's log"):
        RunLog("../../../elsewhere")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_clock_that_was_set_back_is_found(project):
    run = read_log(next((project / "records/runs").glob("*/log.jsonl")))
    run.summary |= {"began": 2e9, "ended": 2e9 - 3600, "paused_s": 0.0}
    assert any("the system's time -3600" in problem for problem in check.check_clock(run))


# ---- Shards

@pytest.fixture
def recorded(tmp_path) -> Path:
    """Two training shards and one of validation, with their manifest."""
    write_documents(tmp_path / "new", {"train_000000": [50] * 20, "train_000001": [50] * 20,
                                       "val_000000": [50] * 20})
    publish(tmp_path / "new", tmp_path)
    return tmp_path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)


def swap(folder: Path) -> None:
    one, two = find_shards(folder, "train")
    other = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(other)


def test_shards_have_a_manifest_of_what_was_written(recorded):
    facts = json.loads((recorded / "manifest.json").read_text())["shards"]
    assert [facts[p.name]["tokens"] for p in shards_in(str(recorded), "train")] == [1000, 1000]
    assert Manifest(recorded).changed() == [] and not list((recorded / "new").iterdir())


@pytest.mark.parametrize("damage, message", [
    (lambda folder: os.truncate(folder / "train_000001.bin", 2000), "train_000001.bin has 2,000 bytes"),
    (lambda folder: (folder / "train_000000.bin").unlink(), "train_000000.bin is missing"),
    (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "manifest.json is damaged"),
    (lambda folder: (folder / "manifest.json").write_text('{"shards": {"a": {"tokens": "1"}}}'), "damaged"),
])
def test_shards_that_are_not_those_of_the_manifest_are_refused(recorded, damage, message):
    damage(recorded)
    with pytest.raises(ShardError, match=message):
        shards_in(str(recorded), "train")


@pytest.mark.parametrize("damage, names", [
    (lambda folder: flip(folder / "val_000000.bin"), ["val_000000.bin"]),
    (swap, ["train_000000.bin", "train_000001.bin"]),
])
def test_shards_that_changed_are_named_by_peek_and_by_the_log(recorded, damage, names, capsys):
    damage(recorded)
    overlap.fingerprint.cache_clear()
    facts = ending_facts(train_gpt.torch.device("cpu"), str(recorded))
    assert facts["changed_shards"] == names and "changed since manifest.json" in capsys.readouterr().err
    message = refused_here(peek, recorded)
    assert all(name in message for name in names) and "changed since manifest.json" in message


@pytest.mark.parametrize("damage, changed", [
    (lambda folder: [path.unlink() for path in folder.glob("*.bin")], []),
    (lambda folder: shutil.rmtree(folder), []),
    (lambda folder: (folder / "train_000000.bin").write_bytes(b""), ["train_000000.bin"]),
    (lambda folder: (folder / "manifest.json").write_text("{"), None),
])
def test_shards_that_go_during_a_run_do_not_cost_it(recorded, damage, changed, capsys):
    """The summary leaves out what nobody knows, by which a record of it is refused."""
    damage(recorded)
    overlap.fingerprint.cache_clear()
    facts = ending_facts(train_gpt.torch.device("cpu"), str(recorded))
    assert "data" not in facts and facts.get("changed_shards") == changed
    assert "WARNING: the log does not say what text this was: " in capsys.readouterr().err


def test_a_folder_or_a_broken_link_is_no_shard(tmp_path):
    (tmp_path / "train_000000.bin").mkdir()
    (tmp_path / "train_000001.bin").symlink_to("gone")
    for path in find_shards(tmp_path, "train"):
        with pytest.raises(ShardError, match="cannot be read"):
            open_shard(path)


def test_a_damaged_overlap_file_is_left_out(recorded, capsys):
    for contents in (b"", b"PK\x03\x04 no zip", b"\x93NUMPY"):
        (recorded / overlap.FILE).write_bytes(contents)
        assert overlap.marked_tokens(str(recorded), 10) is None
        assert "is damaged" in capsys.readouterr().err


def test_the_embedded_corpus_has_a_manifest_too(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "source_files", lambda: sorted(Path(__file__).parent.glob("test_*.py")))
    assert Manifest(embedded.build(tmp_path)).shards.keys() == {"train_000000.bin", "val_000000.bin"}
    assert Manifest(tmp_path).changed() == []


# ---- The network of data.fineweb

@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The stand-in for the hub, for a client in this process that waits a hundredth as long."""
    with HubServer({name: gpt2_shard(i, 2000) for i, name in enumerate((VAL, TRAIN1, TRAIN2))}) as server:
        point_at(server.url, tmp_path, monkeypatch)
        yield server


def point_at(url: str, folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(fineweb, "FIRST_WAIT_S", 0.01)
    no_sleep = SimpleNamespace(**vars(time) | {"sleep": lambda _: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", no_sleep)   # the client's own waits


def fetched(hub: HubServer, folder: Path) -> bool:
    """Whether the folder holds what the hub has, and nothing else."""
    return {p.name: p.read_bytes() for p in folder.glob("*.bin")} == hub.files


@pytest.mark.parametrize("faults, said", [
    *(([fault], "") for fault in (("cut", 0), ("cut", 1), ("cut", 1024), ("cut", 5023), "slow", 408, 429,
                                  (429, {"Retry-After": "1"}), (503, {"Retry-After": "soon"}))),
    (["cut", "cut", "cut"], ""), (["short"], "Consistency check failed"),
    (["flip"], "not the one that the hub publishes"), ([500], "500 Internal Server Error"),
    ([502, 503], "503 Service Unavailable"),
], ids=str)
def test_what_may_pass_is_tried_again(hub, tmp_path, capsys, faults, said):
    hub.faults[TRAIN1], hub.head_faults[TRAIN1] = faults, [f for f in faults if isinstance(f, int)]
    assert fineweb.fetch(tmp_path / "shards", 2, 4).changed() == []
    assert fetched(hub, tmp_path / "shards")
    assert not said or re.search(f"{TRAIN1}: .*{said}.*; trying again", capsys.readouterr().err)


@pytest.mark.parametrize("faults, words", [
    ([401] * 4, "401"), ([403] * 4, "403"), ([404] * 4, "404"), ([500] * 9, "500"), (["loop"], "edirect"),
    (["flip"] * 4, "not the one that the hub publishes"), (["short"] * 9, "onsistency|rotocol|length"),
], ids=str)
def test_what_stays_is_one_line_and_leaves_no_shard(hub, tmp_path, faults, words):
    hub.faults[TRAIN1] = faults
    with pytest.raises(DataError, match=words) as error:
        fineweb.fetch(tmp_path / "shards", 2, 1)
    assert "\n" not in str(error.value) and not (tmp_path / "shards" / TRAIN1).exists()
    hub.faults.clear()
    fineweb.fetch(tmp_path / "shards", 2, 4)
    assert fetched(hub, tmp_path / "shards")


def test_a_wish_to_wait_is_honoured_within_bounds(hub, tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(fineweb, "Event", lambda: type("E", (), {
        "wait": lambda _, s: waited.append(s), "is_set": lambda _: False, "set": lambda _: None})())
    hub.head_faults[VAL] = [(429, {"Retry-After": "7"}), (429, {"Retry-After": "86400"}), 429]
    fineweb.fetch(tmp_path / "shards", 1, 1)
    assert waited == [7, fineweb.LONGEST_WAIT_S, 0.04]


@pytest.mark.parametrize("commit", ["../../../evil", "/etc", "main/../.."])
def test_a_commit_that_is_a_path_is_refused(hub, tmp_path, commit):
    hub.commit = commit
    with pytest.raises(DataError, match="is no commit"):
        fineweb.fetch(tmp_path / "shards", 1, 1)
    assert not list(tmp_path.rglob("*.bin")) and not (tmp_path / "evil").exists()


@pytest.fixture
def closed() -> Iterator[str]:
    """An address where nobody answers. The client reads the proxy's when its connections begin."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    close_session()
    yield f"http://127.0.0.1:{port}"
    close_session()


@pytest.mark.parametrize("where", ["no name server", "no server", "a dead proxy"])
def test_no_name_server_no_server_and_a_dead_proxy(hub, closed, tmp_path, monkeypatch, where):
    """The hub itself is there: past the proxy the shards would come."""
    url = {"no name server": "http://no-such-host.invalid", "no server": closed}.get(where, hub.url)
    point_at(url, tmp_path, monkeypatch)
    monkeypatch.setattr(fineweb, "TRIES", 2)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
        if where == "a dead proxy" and name.startswith("HTTP"):
            monkeypatch.setenv(name, closed)
    with pytest.raises(DataError, match="cannot be had from .*If there is no network here"):
        fineweb.fetch(tmp_path / "shards", 1, 1)
    assert not find_shards(tmp_path / "shards", "train") and not hub.requests
