"""Which tokens never follow which, because byte-pair encoding would have written other tokens.

The encoder splits a text into words. In each word it joins two neighbouring parts for as long as any two make
a token, first those that make the token of lowest rank. So "th" is never followed by "e": there the encoder
would have written "the". A model cannot know that for every pair, and gives impossible tokens some
probability. With `--canonical true` a model that is scored gives this probability to the possible ones:

    p(b | ..., a) = [b can follow a] p_head(b) / (the sum of p_head over all tokens that can follow a)

Training does not change, and takes no longer. This is the canonical mask of the public speedrun's record
91. Its authors report a loss that is 0.0017 lower for the same weights.

A pair is ruled out only if the border between its tokens lies inside one word in every context. This rules
out 2.8% of the pairs of GPT-2's tokens. None of these occurs in the 205 million pairs of the corpus of
records/README.md.
"""
import subprocess
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.classes import GPT2_SIZE, gpt2_tokens
from data.vocabulary import edges

# The encoder cuts these off whatever letters follow, so the next letter may begin another word.
CONTRACTIONS = {b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"}


def kind(token: bytes, last: bool) -> str:
    """What a token's first or last character is: a "letter", a "number", "other", or only "part" of one.

    "blank" is the space that the encoder puts before a word, "space" is any other. A first character is
    "unknown" if the token has only its beginning: it may be of the same word as the character before or not.
    """
    for size in range(1, 5):
        try:
            character = (token[-size:] if last else token[:size]).decode()
        except UnicodeDecodeError:
            continue
        if character.isspace():
            return "blank" if character == " " else "space"
        return {"L": "letter", "N": "number"}.get(unicodedata.category(character)[0], "other")
    return "part" if last or token[0] < 0xC0 else "unknown"     # A byte below 0xC0 continues a character.


# By the kind of a token's last character: the kinds of a next character that can be in the same word.
SAME_WORD = {"letter": ("letter",), "number": ("number",), "other": ("other",), "part": ("part",),
             "blank": ("letter", "number", "other"), "space": ()}


def impossible_pairs(tokens: list[bytes], columns: int) -> np.ndarray:
    """Bit b of row a is 1 where token b never follows token a: (n + 1, columns / 8) uint8, lowest bits first.

    The n `tokens` stand by rank. Token n starts a document: every token may follow it, and it may follow
    every token. Columns beyond n are no tokens and follow none.

    A part s at the end of a and a part p at the start of b meet at the border. They are joined if s + p is a
    token of lower rank than the joins that would take up s within a and p within b. Of equal joins the
    leftmost is first. If s and p are joined, the text has another token there, and b never follows a.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lefts, rights = zip(*(edges(token, ranks) for token in tokens))
    begin, end = (np.array([kind(token, last) for token in tokens]) for last in (False, True))
    # By the part p: the tokens that have it at their left edge, first those that keep it longest.
    with_part = defaultdict(list)
    for b, left in enumerate(lefts):
        for part, rank in left:
            with_part[part].append((-rank, b))
    with_part = {part: np.array(sorted(found)).T for part, found in with_part.items()}
    # By the part s: the ranks of its joins with a part p, and the tokens that have p at their left edge.
    joins = defaultdict(list)
    for joined, rank in ranks.items():
        for size in range(1, len(joined)):
            s, p = joined[:size], joined[size:]
            if s in ranks and p in with_part:
                joins[s].append((rank, p))
    followers = {}
    for s, found in joins.items():
        found.sort()
        kept = [with_part[p][1][:np.searchsorted(with_part[p][0], -rank, "right")] for rank, p in found]
        followers[s] = np.repeat([rank for rank, _ in found], list(map(len, kept))), np.concatenate(kept)
    inside = {last: np.isin(begin, first) for last, first in SAME_WORD.items()}
    absent = np.arange(columns) > len(tokens)
    bits = np.tile(np.packbits(absent, bitorder="little"), (len(tokens) + 1, 1))
    for a, right in enumerate(rights):
        never = absent.copy()
        for part, rank in right if tokens[a] not in CONTRACTIONS else ():
            if part in followers:
                of_rank, b = followers[part]
                never[b[:np.searchsorted(of_rank, rank)]] = True
        never[:len(tokens)] &= inside[end[a]]
        bits[a] = np.packbits(never, bitorder="little")
    return bits


@lru_cache
def begin(columns: int) -> subprocess.Popen:
    """Let another process work out the impossible pairs of GPT-2's tokens: 4 s, or 8 beside a start."""
    return subprocess.Popen(
        [sys.executable, "-m", "data.canonical", str(columns)], cwd=Path(__file__).resolve().parent.parent,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)


@lru_cache
def gpt2_pairs(columns: int) -> np.ndarray:
    """The impossible pairs of GPT-2's tokens, by that process, or by this one if it failed."""
    pairs = np.empty((GPT2_SIZE, columns // 8), np.uint8)
    with begin(columns) as process:
        size = process.stdout.readinto(pairs.data.cast("B"))
    whole = size == pairs.nbytes and not process.returncode
    return pairs if whole else impossible_pairs(gpt2_tokens(), columns)


class Never:
    """The impossible pairs of GPT-2's tokens on a device. On the meta device only their size is right."""

    waits = True            # but not while `without_waiting` scores what is thrown away

    def __init__(self, columns: int, device: torch.device):
        self.bits = torch.zeros(GPT2_SIZE, columns // 8, dtype=torch.uint8, device=device)
        self.known = device.type == "meta"

    def behind(self, tokens: Tensor) -> Tensor:
        """The rows (n, columns / 8) uint8 of tokens (n,). The first call that counts waits for the pairs."""
        if self.waits and not self.known:
            self.bits.copy_(torch.from_numpy(gpt2_pairs(8 * self.bits.shape[1])))
            self.known = True
        return self.bits[tokens]


@contextmanager
def without_waiting() -> Iterator[None]:
    """Inside, scores do not wait for the pairs. Until the pairs are known, any token may follow there.

    Such scores are wrong, but a warm-up needs no right ones: waiting took 3.7 s of a start (1×H200).
    """
    Never.waits = False
    try:
        yield
    finally:
        Never.waits = True


def main() -> None:
    """Write the bits of so many columns to standard output, for `begin`."""
    sys.stdout.buffer.write(impossible_pairs(gpt2_tokens(), int(sys.argv[1])).data)


if __name__ == "__main__":
    main()
