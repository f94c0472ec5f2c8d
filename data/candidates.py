"""Which tokens a sampled softmax computes logits for, beside the targets, and how much each counts.

A sum over the vocabulary is estimated from candidates. A token j that is drawn with probability π counts 1/π
times, so the estimate is right in the mean. For one row of logits its variance is Σ (1/π − 1) p², if p are
the row's probabilities and the sum is 1. It is least where π goes by √(Σ p²), summed over the rows of a part.

What a row makes probable and no target of its part is, is mostly a token that often follows the row's own
ones: "ieties" after " Soc", "blown" after "full-". So Σ p² is estimated from how often tokens follow one
another and follow pairs. The table has the variance that this leaves, as the mean over rows, for 8,192 tokens
of unseen text, 4,096 draws and the states after a quarter of a run. The model's own Σ p², which a run does
not know beforehand, would leave 0.0014 already with 3,072 draws (records/ideas.md).

    by how often tokens follow one in 4 M tokens    0.0162
    ... in 39 M                                     0.0135
    ... and follow two                              0.0113
    ... and follow three (left out)                 0.0103

Counting the 39 M tokens of a shard takes 4 to 8 seconds (two cores), with three tokens twice as long. So a
run begins with what 4 M say, and later steps know more. Which step knows what depends on its number alone. On
eight GPUs step 500 comes sooner than the count and would wait for it. No GPU has run this yet.
"""
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from data.shards import ShardError

# Tokens at the beginning of the first shard that are counted, or as many as it has.
FIRST, REFINED = 4_000_000, 40_000_000
REFINED_FROM = 500      # the step from which on candidates are drawn by REFINED tokens
UNSEEN = 4.0            # added to each count, which bounds the weight of a token that was not counted
# For contexts of so many tokens: followers are kept from this share on, and if they were seen so often.
# Others are left to their frequency.
KEPT = {1: (0.02, 1), 2: (0.1, 2)}
COMMON = 1 / 4000       # From this frequency on a token is a target of most parts, whatever it follows.
# For n rows Σ p² is taken for n times the frequency times this, and the squared shares of followers. 0.007
# and 0.03 are as good.
OF_FREQUENCY = 0.015
SLOTS = 22              # bits of a context's hash


def sample_parts(n: int, share: int) -> int:
    """Into how many equal parts n tokens are split, so that about `share` have one sample of candidates.

    0: all n. On GPUs a part has a multiple of 16 tokens, as FP8 wants it, and so it has here.
    """
    most = n // share if share else 1
    return next((parts for parts in range(most, 1, -1) if n % (16 * parts) == 0), 1)


def keys_of(text: np.ndarray, length: int) -> np.ndarray:
    """The last `length` tokens, at most four, at each place of text (n,) as one number.

    (n + 1 - length,) uint64. The newest token is in the lowest bits.
    """
    wide, end = text.astype(np.uint64), len(text)
    keys = wide[length - 1:].copy()
    for back in range(1, length):
        keys |= wide[length - 1 - back:end - back] << np.uint64(16 * back)
    return keys


def slots_of(keys: np.ndarray) -> np.ndarray:
    """A number below 2 ** SLOTS for each of keys (n,) uint64."""
    return (keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - SLOTS)


class Followers(NamedTuple):
    """What often follows contexts of some length, context by context."""
    length: int             # of the contexts, in tokens
    slots: np.ndarray       # (2 ** SLOTS,) int32: by a context's hash, where among all contexts it stands
    contexts: np.ndarray    # (k,) uint64: their keys
    ends: np.ndarray        # (k + 1,) intp: 0, and where the followers of each one end
    tokens: np.ndarray      # (m,) uint16: the followers
    squares: np.ndarray     # (m,) float64: the squared share of each among what follows its context

    @classmethod
    def counted(cls, text: np.ndarray, length: int, frequency: np.ndarray) -> "Followers":
        """Those in text (n,) uint16 that KEPT names, but no token that is COMMON.

        Meanwhile some 25 bytes a token of the text are held.
        """
        least, often = KEPT[length]
        keys = keys_of(text, length + 1)
        keys.sort()         # This takes a third of the time. np.unique takes twice as long.
        new = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[:len(keys)])
        counts, contexts = np.diff(new, append=len(keys)), keys[new] >> np.uint64(16)
        tokens = (keys[new] & np.uint64(0xFFFF)).astype(np.uint16)
        first = np.flatnonzero(np.append(True, contexts[1:] != contexts[:-1])[:len(contexts)])
        times = np.repeat(np.add.reduceat(counts, first), np.diff(first, append=len(contexts)))
        shares = counts / (times + 1)
        kept = (shares >= least) & (counts >= often) & (frequency[tokens] < COMMON)
        contexts, begins = np.unique(contexts[kept], return_index=True)
        slots = np.zeros(2 ** SLOTS, np.int32)
        # Of those that share a slot the last one stays. Of 400,000 contexts 1 in 20 is lost.
        slots[slots_of(contexts)] = np.arange(len(contexts))
        ends = np.append(begins, kept.sum())
        return cls(length, slots, contexts, ends, tokens[kept], shares[kept] ** 2)

    def sums(self, text: np.ndarray, vocabulary: int) -> np.ndarray:
        """Of each token (vocabulary,) its squared shares among what follows contexts in text (n,), summed."""
        if not len(self.contexts):
            return np.zeros(vocabulary)
        keys = keys_of(text, self.length)
        places = self.slots[slots_of(keys)]     # A search would take five times as long.
        places = places[self.contexts[places] == keys]
        begins, counts = self.ends[places], self.ends[places + 1] - self.ends[places]
        each = np.repeat(begins - counts.cumsum() + counts, counts) + np.arange(counts.sum())
        return np.bincount(self.tokens[each], self.squares[each], vocabulary)


class Importance(NamedTuple):
    """How likely each token is to be a candidate, against others, by what follows what in some text."""
    frequency: np.ndarray           # (vocabulary,) float64, above 0
    followers: list[Followers]

    @classmethod
    def by_tokens(cls, text: np.ndarray, vocabulary: int) -> "Importance":
        """By what follows single tokens in `text` (n,) uint16, of token ids below `vocabulary`."""
        counts = np.bincount(text, minlength=vocabulary) + UNSEEN
        frequency = counts / counts.sum()
        return cls(frequency, [Followers.counted(text, 1, frequency)])

    def refined(self, text: np.ndarray) -> "Importance":
        """By what follows contexts of all lengths in more text; frequencies stay what they are."""
        with ThreadPoolExecutor() as threads:
            count = partial(Followers.counted, text, frequency=self.frequency)
            return self._replace(followers=list(threads.map(count, KEPT)))

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Each token's importance (vocabulary,), above 0, for a part of a batch with these tokens (n,)."""
        squares = OF_FREQUENCY * len(tokens) * self.frequency
        return np.sqrt(sum((each.sums(tokens, len(squares)) for each in self.followers), squares))


def shares_of_sample(importance: np.ndarray, count: int) -> np.ndarray:
    """The probability of each (n,) to be among `count`: in proportion to its importance, but at most 1."""
    if count >= len(importance):
        return np.ones(len(importance))
    total, sure = importance.sum(), 0
    scale = count / total
    while (found := np.count_nonzero(over := importance * scale >= 1)) > sure:
        sure, scale = found, (count - found) / (total - importance[over].sum())
    return np.minimum(importance * scale, 1.0)


def sample_candidates(targets: np.ndarray, count: int, importance: np.ndarray,
                      generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` tokens, ascending, int32, and their weights, float32: the targets (n,) and some of the rest.

    A target of -1 is none. A token of the rest is drawn with a probability in proportion to its importance,
    (vocabulary,) above 0. Its weight is one over that probability; a target's is 1. So a sum over candidates,
    by weights, is in the mean the sum over the vocabulary. Fixed sizes and these probabilities, within 0.1%:
    Pareto sampling (Rosén, J. Stat. Plan. Inference 62, 1997).
    """
    weights = np.zeros(len(importance), np.float32)
    weights[targets[targets >= 0]] = 1.0
    others = np.flatnonzero(weights == 0)
    missing = count - (len(weights) - len(others))
    if missing < 0:
        raise ShardError(f"{count - missing} different targets in a part with {count} candidates; "
                         "raise --softmax_samples or --extra_samples")
    if missing:
        shares, chance = shares_of_sample(importance[others], missing), generator.random(len(others))
        drawn = np.argpartition(chance / (1 - chance) * (1 - shares) / shares, missing - 1)[:missing]
        weights[others[drawn]] = 1 / shares[drawn]
    candidates = np.flatnonzero(weights)
    return candidates.astype(np.int32), weights[candidates]
