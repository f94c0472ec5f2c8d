"""Passages that the training text has had before, so that a run can leave them out (`--drop_repeats`).

Web text repeats itself: quotations, agency news, and the lines around an article. What is read again teaches
less, and it teaches that text repeats, which new text does not (Lee et al., arXiv 2107.06499).
"""
import numpy as np

from data.overlap import MARKED, hash_ngrams

SHORTEST = MARKED + 3   # tokens of a passage, which then has two hashes: one may be that of other tokens
EVERY = 2               # One hash in so many is looked at.
SPARSE = 32             # bits of memory for each of these hashes


class Repeats:
    """Finds passages of at least `least` tokens that stood in texts which it has seen.

    It remembers every second hash of 13 tokens in a row, by a bit each, in 2 to 4 bytes of memory a token.
    Where neighbouring hashes are known, the tokens from the first to the last one's end are such a passage.
    So one or two tokens at its ends may not be found. What a text repeats of itself is not looked for.
    """

    def __init__(self, tokens: int, least: int) -> None:
        """`tokens`: of all texts, about. ValueError if `least` is below SHORTEST."""
        if least < SHORTEST:
            raise ValueError(f"passages of at least {SHORTEST} tokens can be found, not of {least}")
        self.least, self.bits = least, max(tokens // EVERY * SPARSE, 1 << 16).bit_length()
        self.seen = np.full(1 << self.bits - 3, 0, np.uint8)    # written now, so that no run waits for memory

    def drop(self, tokens: np.ndarray, document_start: int) -> np.ndarray:
        """`tokens` (n,) without passages of earlier calls, and without documents of which nothing is left."""
        hashes = hash_ngrams(tokens, MARKED) if len(tokens) >= MARKED else np.zeros(0, np.uint64)
        # The hash tells whether it is looked at. So in equal passages the same ones are.
        places = np.flatnonzero(hashes % np.uint64(EVERY) == 0)
        bits = hashes[places] >> np.uint64(64 - self.bits)
        byte, bit = bits >> np.uint64(3), np.uint8(1) << (bits & np.uint64(7)).astype(np.uint8)
        change = np.diff((self.seen[byte] & bit != 0).astype(np.int8), prepend=0, append=0)
        np.bitwise_or.at(self.seen, byte, bit)
        begins, ends = places[change[:-1] > 0], places[change[1:] < 0] + MARKED
        long = ends - begins >= self.least
        # A document's first token stays, since the passages of two documents may touch.
        depth = np.zeros(len(tokens) + 1, np.int8)
        np.add.at(depth, begins[long], 1)
        np.add.at(depth, ends[long], -1)
        kept = tokens[(np.cumsum(depth[:-1], dtype=np.int8) == 0) | (tokens == document_start)]
        start = kept == document_start
        return kept[~(start & np.append(start[1:], False))]
