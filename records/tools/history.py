"""The sources of past runs, read from git."""
import os
import re
import subprocess
from pathlib import Path

from records.run.sources import ROOT, is_source
from records.tools.schema import RecordError


class NoHistory(RecordError):
    """The history is not here: there is no git, no repository, or the clone lacks old commits."""


def git(repository: Path, *words: str, data: bytes = b"") -> bytes:
    """What `git words` prints in `repository`.

    NoHistory without git; subprocess.CalledProcessError where it fails.
    """
    try:
        return subprocess.run(["git", *words], cwd=repository, input=data, capture_output=True,
                              check=True).stdout
    except FileNotFoundError:
        raise NoHistory("git is not installed") from None


def repository_of(folder: Path) -> Path:
    """The top folder of the repository that `folder` lies in, or of this checkout where it lies in none."""
    for place in (folder, ROOT):
        try:
            return Path(os.fsdecode(git(place, "rev-parse", "--show-toplevel")).rstrip("\n"))
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace").strip().splitlines()
    raise NoHistory(f"git shows no repository here ({reason[0] if reason else 'it does not say why'})")


def sources_at(folder: Path, commit: str) -> dict[str, bytes]:
    """A run's sources, path -> contents: those of a commit of the repository around `folder`.

    NoHistory where this cannot be known here; RecordError where the commit does not exist.
    """
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise RecordError(f"commit {commit!r}: expected all 40 hexadecimal digits; `git rev-parse {commit}` "
                          "tells them")
    repository = repository_of(folder)
    try:
        git(repository, "cat-file", "-e", commit + "^{commit}")
    except subprocess.CalledProcessError:
        if git(repository, "rev-parse", "--is-shallow-repository").strip() == b"true":
            raise NoHistory(f"this clone is shallow and lacks commit {commit[:12]}; `git fetch --unshallow` "
                            "brings it") from None
        raise RecordError(f"commit {commit[:12]} is not in this repository, so what ran is unknown; if it is "
                          "on a branch that was not fetched, `git fetch --all` brings it") from None
    entries = git(repository, "ls-tree", "-r", "-z", commit).decode().split("\0")[:-1]
    blobs = {path: facts.split()[2] for facts, path in (entry.split("\t", 1) for entry in entries)
             if is_source(path)}
    return dict(zip(blobs, read_blobs(repository, list(blobs.values()))))


def read_blobs(repository: Path, names: list[str]) -> list[bytes]:
    """The contents of git's objects of these names."""
    out = git(repository, "cat-file", "--batch", data="".join(f"{name}\n" for name in names).encode())
    contents, at = [], 0
    for _ in names:
        end = out.index(b"\n", at)
        size = int(out[at:end].split()[2])      # the line is: name, type, size
        contents.append(out[end + 1:end + 1 + size])
        at = end + 1 + size + 1
    return contents
