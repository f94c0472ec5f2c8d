"""Passages that the training text has had before, so that a run can leave them out (`--drop_repeats`).

Web text repeats itself: quotations, agency news, and the lines around an article. What is read again teaches
less, and it teaches that text repeats, which new text does not (Lee et al., arXiv 2107.06499).
"""
import numpy as np

LENGTH = 13             # tokens that are hashed together, as many as `data.overlap` marks
SHORTEST = LENGTH + 3   # tokens of a passage that is found: it has two hashes, as one may be known by chance
EVERY = 2               # One hash in so many is looked at; a power of two.
SPARSE = 32             # bits of memory for each of these hashes, or up to twice as many


def hash_ngrams(tokens: np.ndarray, n: int) -> np.ndarray:
    """Hashes (len - n + 1,) uint64 of the n-gram from each token on: Σ table[token] P^place mod 2^64."""
    table = np.random.default_rng(0).integers(0, 2 ** 64, 2 ** 16, dtype=np.uint64)
    whole, length = np.zeros(0, np.uint64), 0           # of the first `length` tokens from each place
    part, size, factor = table[tokens], 1, 0x9E3779B97F4A7C15       # of 1, 2, 4, … tokens; P^size
    while True:
        if n & size:
            whole = whole[:len(part) - length] * np.uint64(factor) + part[length:] if length else part
            length += size
        if size * 2 > n:
            return whole[:len(tokens) - n + 1]
        part = part[:len(part) - size] * np.uint64(factor) + part[size:]
        size, factor = size * 2, factor * factor % 2 ** 64


class Repeats:
    """Finds passages of about `least` tokens and more that stood in texts which it has seen.

    It remembers every second hash of 13 tokens in a row, by a bit each, in 2 to 4 bytes of memory a token.
    Where neighbouring hashes are known, the tokens from the first to the end of the last are a passage. So a
    few tokens at its ends may not be found, and passages that lie side by side count as one. New text goes as
    well if its hashes have the bits of others: 2 tokens in 1,000 at most. What a text repeats of itself is
    not looked for.
    """

    def __init__(self, tokens: int, least: int) -> None:
        """`tokens`: of all texts, about. ValueError if `least` is below SHORTEST."""
        if least < SHORTEST:
            raise ValueError(f"passages of at least {SHORTEST} tokens can be found, not of {least}")
        self.least, self.bits = least, max(tokens // EVERY * SPARSE, 1 << 16).bit_length()
        self.seen = np.full(1 << self.bits - 3, 0, np.uint8)    # written now, so that no run waits for memory

    def drop(self, tokens: np.ndarray, document_start: int) -> np.ndarray:
        """`tokens` (n,) without passages of earlier calls, and without documents that have nothing (left)."""
        hashes = hash_ngrams(tokens, LENGTH) if len(tokens) >= LENGTH else np.zeros(0, np.uint64)
        # The hash tells whether it is looked at. So in equal passages the same ones are.
        places = np.flatnonzero(hashes & np.uint64(EVERY - 1) == 0)
        bits = hashes[places] >> np.uint64(64 - self.bits)
        byte, bit = bits >> np.uint64(3), np.uint8(1) << (bits & np.uint64(7)).astype(np.uint8)
        before = self.seen[byte]
        change = np.diff((before & bit != 0).astype(np.int8), prepend=0, append=0)
        self.seen[byte] = before | bit
        # Of several bits for one byte that kept the last alone. These are few, and `bitwise_or.at` is slow.
        lost = self.seen[byte] & bit == 0
        np.bitwise_or.at(self.seen, byte[lost], bit[lost])
        begins, ends = places[change[:-1] > 0], places[change[1:] < 0] + LENGTH
        long = ends - begins >= self.least
        depth = np.zeros(len(tokens) + 1, np.int8)
        depth[begins[long]] += 1
        depth[ends[long]] -= 1
        # A document's first token stays, since the passages of two documents may touch.
        kept = tokens[(np.cumsum(depth[:-1], dtype=np.int8) == 0) | (tokens == document_start)]
        start = kept == document_start
        return kept[~(start & np.append(start[1:], True))]
