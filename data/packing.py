"""Documents into sequences, sequences packed end to end: the arithmetic of batches, in numpy."""
from pathlib import Path
from threading import Lock
from typing import Iterable

import numpy as np

from data.shards import ShardError, document_starts, open_shard


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below n."""
    return n + -n % multiple


def cut_documents(starts: np.ndarray, end: int, cut: int, keep_tails: bool) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the sequences of documents that begin at `starts`, the last of which ends at `end`.

    A sequence has at most `cut` tokens. What a longer document leaves over is dropped, or cut again if
    `keep_tails`.
    """
    ends = np.append(starts[1:], end)
    if not keep_tails:
        return starts, np.minimum(ends, starts + cut)
    pieces = -(-(ends - starts) // cut)
    piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts, ends = np.repeat(starts, pieces) + piece * cut, np.repeat(ends, pieces)
    return starts, np.minimum(ends, starts + cut)


def pack(sequences: Iterable[tuple[np.ndarray, int, int]], n: int, most: int, longest: int,
         document_start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences (text, start, length) as tokens (n,), targets (n,) and cu_seqlens (most + 1,), all int32.

    A target is the token that follows in the text; after a text's last token it is the start of a document.
    The last sequence is cut to fit. Places left over become sequences of at most `longest` tokens with
    targets -1, which are not scored. `cu_seqlens` holds where each sequence starts; its entries after the
    last sequence are n.
    """
    tokens, targets = np.zeros(n, np.int32), np.full(n, -1, np.int32)
    cu_seqlens = [0]
    for text, start, length in sequences:
        here = cu_seqlens[-1]
        end = min(here + length, n)
        tokens[here:end] = text[start:start + end - here]
        following = text[start + 1:start + 1 + end - here]
        targets[here:end] = document_start
        targets[here:here + len(following)] = following
        cu_seqlens.append(end)
    while cu_seqlens[-1] < n:
        cu_seqlens.append(min(cu_seqlens[-1] + longest, n))
    if len(cu_seqlens) > most + 1:
        raise ValueError(f"{len(cu_seqlens) - 1} sequences in a batch that may hold {most}; "
                         "the bound must count every batch")
    return tokens, targets, np.array(cu_seqlens + [n] * (most + 1 - len(cu_seqlens)), np.int32)


class ShardedText:
    """The text of some shards by number: its tokens, and the sequences that its documents are cut into.

    A shard is read when it is first used, once, also if two threads want it.
    """

    def __init__(self, paths: list[Path], vocab_size: int, document_start: int, keep_tails: bool):
        self.paths, self.vocab_size = paths, vocab_size
        self.document_start, self.keep_tails = document_start, keep_tails
        self.locks = [Lock() for _ in paths]
        self.opened: dict[int, tuple[np.ndarray, np.ndarray]] = {}       # tokens, document starts
        self.cuts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def size(self) -> int:
        """Tokens of all shards, by their headers."""
        return sum(len(open_shard(path)) for path in self.paths)

    def open(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n,) uint16, memory-mapped, and document starts (documents,) int64; ShardError if none."""
        with self.locks[shard]:
            if shard in self.opened:
                return self.opened[shard]
            path = self.paths[shard]
            tokens = open_shard(path, self.vocab_size)
            starts = document_starts(tokens, self.document_start)
            if not len(starts):
                raise ShardError(f"{path}: no document starts with token {self.document_start}, its largest "
                                 f"id is {tokens.max()}; train with the preset that fits it or --vocab_size "
                                 f"{int(tokens.max()) + 1}")
            self.opened[shard] = tokens, starts
            return tokens, starts

    def tokens(self, shard: int) -> np.ndarray:
        return self.open(shard)[0]

    def length(self, shard: int, first: int, last: int, cut: int) -> int:
        """Tokens of text from the start of a shard's sequence `first` to that of `last`, or to the end."""
        starts, _ = self.sequences(shard, cut)
        end = starts[last] if last < len(starts) else len(self.tokens(shard))
        return int(end - starts[first])

    def sequences(self, shard: int, cut: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the shard's sequences start, (n,), and the lengths' sum before each and of all, (n + 1,)."""
        if (shard, cut) not in self.cuts:
            tokens, starts = self.open(shard)
            starts, ends = cut_documents(starts, len(tokens), cut, self.keep_tails)
            self.cuts[shard, cut] = starts, np.concatenate([[0], np.cumsum(ends - starts)])
        return self.cuts[shard, cut]
