"""Compiled kernels as one file: there and back, and what strangers' files may not do."""
import io
import json
import sys
import tarfile

import pytest

from records.tools import caches

VARIABLES = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR",
             "flash": "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"}


@pytest.fixture
def move(tmp_path, monkeypatch):
    """Makes this another machine: its caches are in the folder of that name."""
    def to(machine: str):
        for name, variable in VARIABLES.items():
            monkeypatch.setenv(variable, str(tmp_path / machine / name))
        return tmp_path / machine
    return to


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["caches", *map(str, words)])
        try:
            caches.main()
            status = 0
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()
    return run


def fill(folder, **files: bytes) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def archive(path, members: dict[str, bytes], about: object = None, kind: bytes = tarfile.REGTYPE) -> None:
    """A file as a stranger could make it; every member but the first is of that kind."""
    about = json.dumps(caches.about() if about is None else about).encode()
    with tarfile.open(path, "w:gz") as tar:
        for name, content in {caches.ABOUT: about, **members}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name != caches.ABOUT and kind != tarfile.REGTYPE:
                member.type, member.linkname, member.size = kind, "/etc/passwd", 0
            tar.addfile(member, io.BytesIO(content))


def test_there_and_back(tmp_path, move, call):
    here, file = move("here"), tmp_path / "kernels.tar.gz"
    fill(here / "inductor", ab__graph=b"graph" * 1000, triton__0__k=b"\0")
    fill(here / "triton", kernel__k_cubin=b"\x7fELF")
    (here / "triton/kernel/k_cubin").chmod(0o755)
    (here / "triton/link").symlink_to("/etc/passwd")
    assert call("pack", file)[:2] == (0, f"{file}: 3 files of 0.0 MB, 0.0 MB packed\n")
    there = move("there")
    fill(there / "inductor", ab__graph=b"mine")
    assert call("unpack", file)[:2] == (0, f"{file}: 2 files unpacked, 1 were there already\n")
    found = {path.relative_to(there).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777)
             for path in there.rglob("*") if path.is_file()}
    assert found.pop("inductor/ab/graph")[0] == b"mine"
    assert found == {"inductor/triton/0/k": (b"\0", 0o600), "triton/kernel/k_cubin": (b"\x7fELF", 0o700)}
    assert call("unpack", file)[1].endswith(": 0 files unpacked, 3 were there already\n")


def test_nothing_to_pack(tmp_path, move, call):
    """An older file of that name stays."""
    move("here")
    (tmp_path / "old.gz").write_bytes(b"kernels")
    for name in ("new.gz", "old.gz"):
        status, said, error = call("pack", tmp_path / name)
        assert status == 2 and not said and "the caches are empty" in error
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("old.gz", b"kernels")]


def test_kernels_for_another_machine_are_refused(tmp_path, move, call):
    there, file = move("there"), tmp_path / "kernels.tar.gz"
    archive(file, {"triton/k": b"x"}, caches.about() | {"torch": "1.0", "device": "NVIDIA B200"})
    status, said, error = call("unpack", file)
    assert status == 2 and not said and len(error.splitlines()) == 1 and not there.exists()
    assert "torch 1.0, here" in error and "device NVIDIA B200, here" in error and "triton" not in error


@pytest.mark.parametrize("name", ["triton/../../out", "/tmp/out", "../out", "elsewhere/out", "triton",
                                  "triton/a/b"])
def test_a_strangers_file_writes_nothing_outside(name, tmp_path, move, call):
    """Also by a link that lies in the cache already: triton/a leads out of it."""
    there, file = move("there"), tmp_path / "kernels.tar.gz"
    (there / "triton").mkdir(parents=True)
    (tmp_path / "away").mkdir()
    (there / "triton/a").symlink_to(tmp_path / "away")
    archive(file, {"triton/first": b"x", name: b"y"})
    before = {*tmp_path.rglob("*")}
    status, said, error = call("unpack", file)
    assert status == 2 and not said and len(error.splitlines()) == 1 and "cache" in error
    assert {*tmp_path.rglob("*")} - before == {there / "triton/first"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE,
                                  tarfile.FIFOTYPE])
def test_only_files_are_unpacked(kind, tmp_path, move, call):
    there, file = move("there"), tmp_path / "kernels.tar.gz"
    archive(file, {"triton/k": b""}, kind=kind)
    status, _, error = call("unpack", file)
    assert status == 2 and "is no file of a cache" in error and not (there / "triton/k").exists()


@pytest.mark.parametrize("content", ["cut", "bytes", "empty", "no about", "a list", "long"])
def test_what_is_no_such_file_gets_one_line(content, tmp_path, move, call):
    there, file = move("there"), tmp_path / "kernels.tar.gz"
    archive(file, {"triton/k": bytes(range(256)) * 4000}, {"a list": [1], "long": "x" * 20_000}.get(content))
    if content == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    elif content == "bytes":
        file.write_bytes(b"\x1f\x8b" + bytes(range(200)))
    elif content == "empty":
        file.write_bytes(b"")
    elif content == "no about":
        with tarfile.open(file, "w:gz") as tar:
            tar.addfile(tarfile.TarInfo("triton/k"))
    status, said, error = call("unpack", file)
    assert status == 2 and not said and len(error.splitlines()) == 1 and "kernels.tar.gz: no " in error
    assert not [path for path in there.rglob("*") if path.is_file()]
