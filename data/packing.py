"""Documents into sequences, sequences packed end to end: the arithmetic of batches, in numpy."""
from pathlib import Path
from threading import Lock
from typing import Iterable

import numpy as np

from data.repeats import Repeats
from data.shards import ShardError, check_ids, document_starts, open_shard

PART = 1 << 18      # tokens of a shard that are read at a time
PATIENCE = 0.001    # seconds of waiting for the lock before a thread looks again; a part takes ten times that
LOOKED = 1 << 14    # tokens among which a document's start is looked for


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below n."""
    return n + -n % multiple


def cut_documents(starts: np.ndarray, end: int, cut: int, keep_tails: bool) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the sequences of documents that begin at `starts`, the last of which ends at `end`.

    A sequence has at most `cut` tokens. What a longer document leaves over is dropped, or cut again if
    `keep_tails`.
    """
    ends = np.append(starts[1:], end)[:len(starts)]     # There may be no document.
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
    """The text of some shards in parts of whole documents: tokens, and the sequences that these are cut into.

    A part has the documents that begin in PART tokens of a shard. It is read when it is first used, once,
    also if two threads want it. With `drop_repeats` a part leaves out passages of about so many tokens and
    more that earlier parts have. Then parts are read in order, and what is left of them stays in memory.
    """

    def __init__(self, paths: list[Path], vocab_size: int, document_start: int, keep_tails: bool,
                 drop_repeats: int = 0, read: int = 0):
        """`read`: with `drop_repeats`, about how many tokens of the text will be read."""
        self.paths, self.vocab_size = paths, vocab_size
        self.document_start, self.keep_tails = document_start, keep_tails
        # One memory map a shard: each holds a file open.
        self.shards = [open_shard(path) for path in paths]
        self.parts = [(shard, first) for shard, tokens in enumerate(self.shards)
                      for first in range(0, len(tokens), PART)]
        self.repeats = Repeats(read, drop_repeats) if drop_repeats else None
        self.reading = Lock()
        self.opened: dict[int, tuple[np.ndarray, np.ndarray]] = {}       # tokens, document starts
        self.cuts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.found = (-1, 0, 0)     # a shard, a place in it, and where the next document from there begins

    def __len__(self) -> int:
        return len(self.parts)

    def size(self) -> int:
        """Tokens of all shards."""
        return sum(map(len, self.shards))

    def open(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (n,) uint16 and document starts (documents,) int64.

        ShardError if a token is no id of the vocabulary, or if in the whole shard no document starts.
        """
        while part not in self.opened:
            # Locks are not fair: the thread that reads ahead would take this one again and again. So another
            # thread that waits for it looks now and then whether its part has been read meanwhile.
            if self.reading.acquire(timeout=PATIENCE):
                try:
                    for each in range(len(self.opened) if self.repeats else part, part + 1):
                        if each not in self.opened:
                            self.opened[each] = self.read(*self.parts[each])
                finally:
                    self.reading.release()
        return self.opened[part]

    def read(self, shard: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        """As `open`, for the part that begins at or behind token `first` of a shard."""
        path, text = self.paths[shard], self.shards[shard]
        begin, end = self.document_from(shard, first), self.document_from(shard, first + PART)
        check_ids(path, text[first:end], self.vocab_size)
        if begin == len(text) and not first:
            raise ShardError(f"{path}: no document starts with token {self.document_start}, its largest "
                             f"id is {text.max()}; train with the preset that fits it or --vocab_size "
                             f"{int(text.max()) + 1}")
        # An array, because slices of a memory map cost more.
        tokens = np.asarray(text[begin:end])
        if self.repeats:
            tokens = self.repeats.drop(tokens, self.document_start)
        return tokens, document_starts(tokens, self.document_start)

    def document_from(self, shard: int, place: int) -> int:
        """Where in a shard the first document begins at `place` or behind it; its length if none does."""
        text, (known, low, start) = self.shards[shard], self.found
        # So a document that is longer than many parts is gone through once.
        if known != shard or not low <= place <= start:
            found = (np.flatnonzero(text[i:i + LOOKED] == self.document_start) + i
                     for i in range(place, len(text), LOOKED))
            start = next((int(each[0]) for each in found if len(each)), len(text))
            self.found = shard, place, start
        return start

    def length(self, part: int, first: int, last: int, cut: int) -> int:
        """Tokens of text from the start of a part's sequence `first` to that of `last`, or to the end."""
        starts, _ = self.sequences(part, cut)
        end = starts[last] if last < len(starts) else len(self.open(part)[0])
        return int(end - starts[first])

    def sequences(self, part: int, cut: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the part's sequences start, (n,), and the lengths' sum before each and of all, (n + 1,)."""
        if (part, cut) not in self.cuts:
            tokens, starts = self.open(part)
            starts, ends = cut_documents(starts, len(tokens), cut, self.keep_tails)
            self.cuts[part, cut] = starts, np.concatenate([[0], np.cumsum(ends - starts)])
        return self.cuts[part, cut]
