"""The embedded corpus: a byte-level one, built in seconds from text that every machine with Python has.

    python -m data.embedded [--out data/shards/bytes]

Takes the standard library's own sources, splits them by file into training and validation text (one file in
sixteen, by the hash of its name, so that the split is stable) and writes them as token shards. A document is
a file's head or one of its functions, classes or methods; its tokens are its bytes after the start token 256.
Documents stand in the order of their hashes: neighbours of one file in one batch would teach the model that
file.
"""
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.errors import one_line_errors, tool_parser
from data.shards import ShardError, find_shards, incoming, publish, write_shard

BOS = 256
VOCAB_SIZE = 257
FOLDER = Path(__file__).parent / "shards" / "bytes"
SKIP = {"site-packages", "dist-packages", "__pycache__", "idle_test", "lib2to3"}


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def source_files() -> list[Path]:
    """The standard library's Python files."""
    root = Path(sysconfig.get_path("stdlib"))
    return [p for p in root.rglob("*.py") if not SKIP.intersection(p.relative_to(root).parts)]


def split_source(text: bytes) -> list[bytes]:
    """The head of a Python file, then each function, head of a class and method, with their decorators."""
    starts = [m.start() for m in re.finditer(rb"(?m)^( {4}|)(@.*\n\1)*(async )?(def|class) ", text)]
    return [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)])]


def build(folder: Path = FOLDER) -> Path:
    """Write `train_000000.bin` and `val_000000.bin` into `folder` unless both are there; returns it."""
    if find_shards(folder, "train") and find_shards(folder, "val"):
        return folder
    # A text that stands in two files counts once.
    splits: dict[str, set[bytes]] = {"train": set(), "val": set()}
    for path in source_files():
        split = "val" if sha256(path.name.encode())[0] % 16 == 0 else "train"
        splits[split].update(filter(None, split_source(path.read_bytes())))
    splits["train"] -= splits["val"]
    if not splits["train"] or not splits["val"]:
        raise ShardError(f"{sysconfig.get_path('stdlib')} holds no Python sources to build the embedded "
                         "corpus from; set DATA_PATH to a folder of token shards")
    with incoming(folder) as staging:
        for split, documents in splits.items():
            tokens = [np.frombuffer(b"\0" + text, np.uint8).astype(np.uint16)
                      for text in sorted(documents, key=sha256)]
            for document in tokens:
                document[0] = BOS
            write_shard(staging / f"{split}_000000.bin", np.concatenate(tokens))
        publish(staging, folder)
    return folder


def provide(folder: str, rank: int, barrier: Callable[[], None]) -> None:
    """Build the corpus if `folder` is FOLDER: rank 0 builds it, and the others wait at the barrier."""
    if folder == str(FOLDER) and rank == 0:
        build()
    barrier()


def main() -> None:
    parser = tool_parser("data.embedded", __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    with one_line_errors(parser) as arguments:
        folder = build(arguments.out)
        sizes = ", ".join(f"{p.name} {p.stat().st_size / 1e6:.1f} MB" for p in sorted(folder.glob("*.bin")))
        print(f"{folder}: {sizes}", file=sys.stderr)


if __name__ == "__main__":
    main()
