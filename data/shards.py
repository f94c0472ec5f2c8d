"""Token shards: the one file format that everything here reads and writes.

A shard is 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then the tokens as
uint16. Each document begins with the vocabulary's last token (GPT-2: 50256, `<|endoftext|>`; bytes: 256).
This is the format of the public pre-tokenised FineWeb shards.
"""
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from data.errors import DataError

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
HEADER_BYTES = 4 * HEADER_INTS
MOST_TOKENS = 2 ** 31 - 1     # that a header can tell
MOST_BYTES = 10_000_000     # of a file that is read whole


class ShardError(DataError):
    """A shard that cannot be used. The message says which, what was found and what to do."""


def open_regular(path: Path, mode: str = "rb", **how: str) -> IO:
    """As `open`, but an OSError for what is no regular file: a pipe may never answer, a device never end."""
    file = open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK), **how)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return file


def read_regular(path: Path, most: int = MOST_BYTES, mode: str = "rb", **how: str) -> bytes | str:
    """All of a regular file. OSError if it is none, or longer than `most`."""
    with open_regular(path, mode, **how) as file:
        contents = file.read(most + 1)
    if len(contents) > most:
        raise OSError(errno.EINVAL, f"longer than {most:,} bytes", str(path))
    return contents


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the name `path` at the end of the block.

    If the block or the disk fails, all is as it was, and an OSError names `path`. A link of that name is
    replaced, not followed.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write `tokens` (n,), ids 0..65535, as a shard. It is named once whole, so no partial one exists."""
    path = Path(path)
    if len(tokens) and (int(tokens.max()) > 65535 or int(tokens.min()) < 0):
        raise ShardError(f"{path}: token id {int(tokens.max())} does not fit the 16 bits of a shard; "
                         "use a vocabulary of at most 65,536 tokens")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with whole_file(path) as f:
        f.write(header.tobytes())
        f.write(np.ascontiguousarray(tokens, dtype="<u2").data)


def open_shard(path: Path, vocab_size: int | None = None) -> np.ndarray:
    """Memory-map the tokens of a shard: (n,) uint16, read-only.

    ShardError if it is not a whole shard of this format.

    With `vocab_size`, ids are checked against it too, which reads the whole file.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = np.fromfile(file, dtype="<i4", count=HEADER_INTS)
    except OSError as error:
        raise ShardError(f"{path}: cannot be read ({error.strerror}); mend or remove it") from None
    if len(header) < HEADER_INTS or header[0] != MAGIC:
        found = f"magic {header[0]}" if len(header) else "an empty file"
        raise ShardError(f"{path}: not a token shard (expected magic {MAGIC}, found {found}); remove it or "
                         "fetch it again")
    if header[1] != VERSION:
        raise ShardError(f"{path}: shard version {header[1]}, expected {VERSION}; "
                         "convert it again with this program's data tools")
    expected = HEADER_BYTES + 2 * int(header[2])
    if size != expected:
        raise ShardError(f"{path}: {size:,} bytes, but its header promises {header[2]:,} tokens = "
                         f"{expected:,} bytes; it is truncated or damaged: fetch it again")
    if header[2] <= 0:
        raise ShardError(f"{path}: holds no tokens; remove it")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES)
    if vocab_size is not None:
        check_ids(path, tokens, vocab_size)
    return tokens


def check_ids(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """ShardError if one of these tokens (n,) of a shard is no id of a vocabulary of this size."""
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise ShardError(f"{path}: token id {int(tokens.max())} is outside the vocabulary of {vocab_size}; "
                         "if it is not damaged, train with the preset that fits it or --vocab_size "
                         f"{int(tokens.max()) + 1}")


def document_starts(tokens: np.ndarray, bos: int) -> np.ndarray:
    """Positions (documents,) int64 of the tokens that begin a document, in bounded memory."""
    chunk = 1 << 20     # What is compared stays in a processor's cache; of 1 << 24 tokens it does not.
    return np.concatenate([np.zeros(0, np.int64), *(np.flatnonzero(tokens[i:i + chunk] == bos) + i
                                                    for i in range(0, len(tokens), chunk))])


def find_shards(folder: Path, split: str) -> list[Path]:
    """The shards of a split ("train" or "val") in a folder, in order: `fineweb_train_000001.bin`, …"""
    return sorted(p for p in Path(folder).glob("*.bin") if f"_{split}_" in f"_{p.name}")


def shards_in(folder: str, split: str) -> list[Path]:
    """As `find_shards`. ShardError if there are none, if the folder's name is empty, or if the shards have
    not the number and the sizes that the folder's manifest says.
    """
    try:
        paths = find_shards(Path(folder), split) if folder else []
    except OSError:     # The name is too long.
        paths = []
    if not paths:
        raise ShardError(f"no {split} shards (*{split}_*.bin) in {folder or 'an unset DATA_PATH'}; set "
                         "DATA_PATH to a folder that python -m data.fineweb or data.text has filled, or "
                         "train on the embedded corpus with --preset cpu"
                         + " and DATA_PATH unset" * bool(folder))
    Manifest(Path(folder)).check_sizes(split)
    return paths


class Manifest:
    """manifest.json in a folder of shards: number of tokens, SHA-256 and origin of each shard that a data
    tool has checked or made. A shard brought by other means has no entry, and a folder may have no manifest.
    """

    def __init__(self, folder: Path) -> None:
        """DataError if there is a manifest.json that cannot be read."""
        self.folder, self.path = folder, folder / "manifest.json"
        try:
            known = json.loads(read_regular(self.path)) if self.path.exists() else {"shards": {}}
            self.shards: dict[str, dict] = known["shards"]
            for name, facts in self.shards.items():
                plain = re.fullmatch(r"[\w.-]{1,200}", name)       # no path
                if not (plain and type(facts["tokens"]) is int and type(facts["sha256"]) is str):
                    raise TypeError
        except OSError as error:
            raise ShardError(f"{self.path}: cannot be read ({error.strerror}); mend or remove it") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ShardError(f"{self.path} is damaged; remove it and run again: the shards are then checked "
                             "without it") from None

    def record(self, **facts: dict) -> None:
        """Add facts about shards, by name: `tokens`, `sha256`, and what else is known."""
        self.shards |= facts
        with whole_file(self.path) as f:
            f.write(json.dumps({"shards": dict(sorted(self.shards.items()))}, indent=1).encode() + b"\n")

    def check_sizes(self, split: str) -> None:
        """ShardError if a shard of this split is missing, or has another size than when it was recorded."""
        for name, facts in self.shards.items():
            path, expected = self.folder / name, HEADER_BYTES + 2 * facts["tokens"]
            if f"_{split}_" in f"_{name}" and (not path.is_file() or path.stat().st_size != expected):
                found = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is missing"
                raise ShardError(f"{path} {found}, but manifest.json says {expected:,} bytes; fetch or make "
                                 "it again, or remove manifest.json if that is meant")

    def changed(self) -> list[str]:
        """The names of recorded shards that are there with another SHA-256. Reads all of them."""
        return [name for name, facts in self.shards.items()
                if (self.folder / name).is_file() and sha256_of(self.folder / name) != facts["sha256"]]


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def incoming(folder: Path) -> Iterator[Path]:
    """An empty sub-folder of `folder` for shards that are not ready yet, removed at the end.

    Only one process at a time has the sub-folder; the next one waits. What a killed process left there is
    removed, too. `find_shards` does not see the sub-folder. Its name is new each time, since a thread that
    still writes may keep an old sub-folder alive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is filling {folder}: waiting for it to finish", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in folder.glob(".incoming*"):
            shutil.rmtree(left_over, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=".incoming-", dir=folder))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, folder: Path) -> None:
    """Record the shards of `staging` in the manifest of `folder`, then move them: none is unrecorded."""
    shards = sorted(staging.glob("*.bin"))
    Manifest(folder).record(**{path.name: {"tokens": len(open_shard(path)), "sha256": sha256_of(path)}
                               for path in shards})
    for path in shards:
        os.replace(path, folder / path.name)
