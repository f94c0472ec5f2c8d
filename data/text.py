"""Any text into token shards.

    python -m data.text INPUT… --out DIR

    python -m data.text books/ notes.md --out data/shards/books-gpt2     GPT-2's vocabulary; a file a document
    python -m data.text corpus.txt --split blank --out data/shards/mine   documents end at blank lines
    python -m data.text dump.jsonl.zst --field body --out data/shards/dump
    cat *.log | python -m data.text - --split line --bytes --out data/shards/logs
    python -m data.text books/ --bytes --out data/shards/books            a token is a byte, as `cpu` wants it
    DATA_PATH=data/shards/books ./run.sh --preset cpu                     train on it

INPUT is a file (.txt, .md, .jsonl, .parquet, each also .gz or .zst), a folder of such files, or - for
standard input. Each document gets its start token and stays in one piece. A document goes into validation if
the hash of its bytes falls into the share that is held out, so it stays there whatever else is added, and
copies of it never stand on both sides. The shards are the same for any number of workers, and appear in DIR
only when all are done. Memory: a shard of each split and a few MB for each worker, however long the input.
"""
import argparse
import functools
import hashlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.errors import DataError, one_line_errors, positive, tool_parser, whole
from data.readers import SEPARATORS, Documents
from data.shards import MOST_TOKENS, Manifest, incoming, publish, write_shard
from data.vocabulary import load_vocabulary

SHARD_TOKENS = 100_000_000  # as the public FineWeb shards: 200 MB
BATCH_BYTES = 1 << 20  # of text, the work that a process gets at a time


def held_out(document: bytes, share: float) -> bool:
    """Whether a document belongs to validation: a function of its bytes and the share alone."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") < share * 2**64


def tokenise(vocabulary: str | Path, share: float, documents: list[bytes]) -> list[tuple[bool, np.ndarray]]:
    """For each document, whether it is held out, and its tokens (n,) uint16 with the start token."""
    encode = load_vocabulary(vocabulary).encode
    return [(held_out(document, share), encode(document)) for document in documents]


def batches(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Documents in lists of about BATCH_BYTES (a longer document alone)."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document) + 64  # the 64 bounds the number of tiny documents in a batch
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def in_order(function: Callable, jobs: Iterable, workers: int) -> Iterator:
    """`map(function, jobs)` on `workers` processes, in order, with few results in memory at a time."""
    if workers == 1:
        yield from map(function, jobs)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))

    def submit(job) -> Future:
        # Ctrl-C reaches all processes; only this one is to answer. Those that the pool starts here inherit
        # the mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.submit(function, job)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        waiting: deque[Future] = deque()
        for job in jobs:
            waiting.append(submit(job))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError("a worker process died, perhaps for lack of memory; try fewer: --workers "
                        f"{max(1, workers // 2)}")
    finally:
        pool.shutdown(cancel_futures=True)


class ShardWriter:
    """Writes documents one after another into shards `{split}_000000.bin`, … of at most `size` tokens."""

    def __init__(self, folder: Path, split: str, size: int) -> None:
        self.folder, self.split = folder, split
        self.buffer, self.filled = np.empty(size, np.uint16), 0
        self.shards, self.tokens, self.documents = 0, 0, 0

    def add(self, tokens: np.ndarray) -> None:  # (n,) uint16, one document
        if len(tokens) > len(self.buffer):
            raise DataError(f"a document of {len(tokens):,} tokens does not fit a shard of "
                            f"{len(self.buffer):,}; raise --shard-tokens, or say with --split what separates "
                            "documents")
        if self.filled + len(tokens) > len(self.buffer):
            self.flush()
        self.buffer[self.filled:self.filled + len(tokens)] = tokens
        self.filled += len(tokens)
        self.documents += 1

    def flush(self) -> None:
        """Write what is in the buffer, if anything, as the next shard."""
        if self.filled:
            write_shard(self.folder / f"{self.split}_{self.shards:06d}.bin", self.buffer[:self.filled])
            self.shards, self.tokens, self.filled = self.shards + 1, self.tokens + self.filled, 0


def build(documents: Documents, folder: Path, vocabulary: str | Path = "gpt2", share: float = 0.01,
          shard_tokens: int = SHARD_TOKENS, workers: int = 1) -> list[ShardWriter]:
    """Tokenise `documents` into shards in `folder`, which holds none yet; returns the two finished writers.

    `share` of the documents, by hash, is held out for validation. Either all shards appear in `folder` or
    none.
    """
    load_vocabulary(vocabulary)  # a bad one is reported before any process starts
    with incoming(folder) as staging, tqdm(total=documents.total, unit="B", unit_scale=True,
                                           disable=None) as bar:
        if any(folder.glob("*.bin")):
            raise DataError(f"{folder} already holds shards; choose another folder with --out, or: rm "
                            f"{folder}/*.bin")
        manifest = Manifest(folder)     # A file of that name that is no manifest is somebody's, and refused.
        writers = [ShardWriter(staging, split, shard_tokens) for split in ("train", "val")]
        for results in in_order(functools.partial(tokenise, vocabulary, share), batches(documents), workers):
            for validation, tokens in results:
                writers[validation].add(tokens)
            bar.update(documents.position - bar.n)
        for writer in writers:
            writer.flush()
        check_split(writers, share)
        manifest.path.unlink(missing_ok=True)       # Its shards are gone.
        publish(staging, folder)
    return writers


def check_split(writers: list[ShardWriter], share: float) -> None:
    """DataError if there is no text, or if a split that should have some got none."""
    documents = sum(writer.documents for writer in writers)
    if not documents:
        raise DataError("the input holds no text")
    if 0 < share < 1 and not all(writer.documents for writer in writers):
        empty, full = sorted(writers, key=lambda writer: writer.documents)
        raise DataError(f"none of the {documents:,} documents fell into {empty.split}; change --validation "
                        f"(now {share}; {int(full.split == 'val')} gives {full.split} alone), or say with "
                        "--split what divides documents")


def make_parser() -> argparse.ArgumentParser:
    parser = tool_parser("data.text", __doc__)
    option = parser.add_argument
    option("inputs", nargs="+", metavar="INPUT")
    option("--out", type=Path, required=True, metavar="DIR",
           help="folder for the shards, with none in it yet")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--bytes", action="store_true",
                       help="a token is a byte (256 starts a document); needs no vocabulary")
    which.add_argument("--vocabulary", type=Path, metavar="FILE",
                       help="ranks, a `base64-token rank` a line, instead of GPT-2's, which tiktoken "
                            "fetches once")
    option("--format", choices=["text", "jsonl", "parquet"],
           help="of every file, whatever its name (default: by its name; text for -)")
    option("--split", choices=list(SEPARATORS), default="file",
           help="what ends a document in plain text: the file (default), a line break, blank lines, a NUL "
                "byte")
    option("--field", default="text",
           help="field or column that holds the text in .jsonl and .parquet (default: text)")
    option("--replace-invalid", action="store_true",
           help="put U+FFFD where the input is not UTF-8 (default: stop there)")
    option("--validation", type=share_of_one, default=0.01, metavar="SHARE",
           help="share held out (default: 0.01)")
    option("--shard-tokens", type=whole(1, MOST_TOKENS), default=SHARD_TOKENS, metavar="N",
           help=f"default: {SHARD_TOKENS:,}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    option("--workers", type=positive, default=cores, metavar="N",
           help=f"processes (default: all cores, {cores} here)")
    return parser


def share_of_one(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0 to 1")
    return value


def main() -> None:
    with one_line_errors(make_parser()) as arguments:
        vocabulary = "bytes" if arguments.bytes else arguments.vocabulary or "gpt2"
        utf8 = "replace" if arguments.replace_invalid else "any" if arguments.bytes else "strict"
        documents = Documents(arguments.inputs, arguments.format, arguments.split, arguments.field, utf8)
        start = time.perf_counter()
        writers = build(documents, arguments.out, vocabulary, arguments.validation, arguments.shard_tokens,
                        arguments.workers)
        seconds = time.perf_counter() - start
        parts = "; ".join(f"{w.split}: {w.documents:,} documents, {w.tokens:,} tokens, {w.shards} shards"
                          for w in writers)
        print(f"{arguments.out}: {parts}; {documents.position / 1e6:,.1f} MB read in {seconds:.1f} s "
              f"({documents.position / 1e6 / seconds:.1f} MB/s)", file=sys.stderr)


if __name__ == "__main__":
    main()
