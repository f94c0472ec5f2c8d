"""How much of the validation text the training text holds already: python -m data.overlap FOLDER

For n = 3, 5, 8, 13 and 50: the share of validation tokens that end an n-gram of the training text, and of
those that lie in one. An n-gram never spans two documents. It also writes `overlap.npz` beside the shards,
which marks the tokens that lie in a 13-gram. A run that finds it scores the two parts of the text apart.

Hashes of 64 bits stand for n-grams, so that one in 10^12 may be taken for another. 190 M training tokens take
about a minute and 2 GB.
"""
import hashlib
import sys
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from data.errors import DataError, one_line_errors, positive, printable, tool_parser, whole
from data.repeats import hash_ngrams
from data.shards import open_regular, open_shard, shards_in

LENGTHS = (3, 5, 8, 13, 50)
MARKED = 13             # as in the decontamination of GPT-3 (Brown et al., arXiv 2005.14165, appendix C)
FILE = "overlap.npz"
PIECE = 1 << 23         # training tokens hashed at a time
TABLE_BITS = 28         # of the first, inexact look-up: one byte for each


def starts_of_ngrams(tokens: np.ndarray, n: int, document_start: int) -> np.ndarray:
    """Where (k,) an n-gram starts that lies in one document: its first token alone may begin the document."""
    begins = np.concatenate([[0], np.cumsum(tokens == document_start)])
    count = max(len(tokens) - n + 1, 0)
    return np.flatnonzero(begins[n:n + count] == begins[1:1 + count])


def start_token(shards: list[np.ndarray], given: int | None) -> int:
    """The token that begins a document: `given`, or as in data.peek the largest id. DataError if none is."""
    largest = sorted({int(tokens.max()) for tokens in shards})
    if given is None and len(largest) > 1:
        raise DataError(f"the largest ids of the shards are {', '.join(map(str, largest))}: they are of "
                        "different vocabularies, or some begin no document; name its token with "
                        "--document_start")
    if given is not None and not any((tokens == given).any() for tokens in shards):
        raise DataError(f"--document_start {given}: no shard holds it; leave it out for the largest id, "
                        f"{largest[-1]}")
    return largest[0] if given is None else given


def pieces(paths: list[Path], n: int) -> Iterator[np.ndarray]:
    """The tokens of the shards, a piece at a time; neighbours share n - 1 tokens, so no n-gram is lost."""
    for path in paths:
        tokens = open_shard(path)
        for start in range(0, max(len(tokens) - n + 1, 1), PIECE):
            yield np.asarray(tokens[start:start + PIECE + n - 1])


def found_in_training(validation: np.ndarray, paths: list[Path], n: int, document_start: int) -> np.ndarray:
    """Where (k,) in `validation` (tokens,) an n-gram starts that the training shards hold."""
    places = starts_of_ngrams(validation, n, document_start)
    wanted, inverse = np.unique(hash_ngrams(validation, n)[places], return_inverse=True)
    shift = np.uint64(64 - TABLE_BITS)
    perhaps, found = np.zeros(1 << TABLE_BITS, bool), np.zeros(len(wanted), bool)
    perhaps[wanted >> shift] = True
    for tokens in pieces(paths, n):
        hashes = hash_ngrams(tokens, n)[starts_of_ngrams(tokens, n, document_start)]
        hashes = hashes[perhaps[hashes >> shift]]
        at = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        found[at[wanted[at] == hashes]] = True
    return places[found[inverse]]


def lies_in(starts: np.ndarray, n: int, count: int) -> np.ndarray:
    """Which of `count` tokens lie in one of the n-grams that start at `starts`, (count,) bool."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, np.minimum(starts + n, count), -1)
    return np.cumsum(change[:-1]) > 0


@lru_cache
def fingerprint(folder: str, split: str) -> str:
    """sha256 (hex) over the shards of a split, in order; a file's name does not count."""
    digest = hashlib.sha256()
    for path in shards_in(folder, split):
        digest.update(open_shard(path).data)
    return digest.hexdigest()


def marked_tokens(folder: str, count: int) -> np.ndarray | None:
    """Which of the first `count` validation tokens lie in a 13-gram of the training text, (count,) bool.

    None where `overlap.npz` is not there, is too short, or is of other shards.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as saved:
            same = all(str(saved[split]) == fingerprint(folder, split) for split in ("train", "val"))
            marks = np.unpackbits(saved["marks"]).astype(bool)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        print(printable(f"WARNING: {path} is damaged ({error}) and was left out"), file=sys.stderr)
        return None
    return marks[:count] if same and len(marks) >= count else None


def main() -> None:
    parser = tool_parser("data.overlap", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of token shards")
    parser.add_argument("--tokens", type=positive, default=10_485_760, metavar="N",
                        help="of the validation text (default: %(default)s)")
    parser.add_argument("--document_start", type=whole(0, 65_535), metavar="ID",
                        help="the token that begins a document (default: the largest id of the shards)")
    with one_line_errors(parser, "folder") as options:
        training = shards_in(str(options.folder), "train")
        parts = [open_shard(path) for path in shards_in(str(options.folder), "val")]
        start = start_token([*map(open_shard, training), *parts], options.document_start)
        validation = np.concatenate(parts)[:options.tokens + 1]
        print(f"{'n':>3}  {'end an n-gram':>13}  {'lie in one':>10}")
        for n in LENGTHS:
            starts = found_in_training(validation, training, n, start)
            inside = lies_in(starts, n, len(validation))
            print(f"{n:3}  {len(starts) / len(validation):13.2%}  {inside.mean():10.2%}", flush=True)
            if n == MARKED:
                hashes = {split: fingerprint(str(options.folder), split) for split in ("train", "val")}
                np.savez(options.folder / FILE, marks=np.packbits(inside), **hashes)


if __name__ == "__main__":
    main()
