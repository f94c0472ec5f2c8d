"""Which tokens a sampled softmax computes logits for, beside the targets, and how much each counts.

The tokens of a part of a micro-batch share a sample. For each of them, a row of logits, the sum of e^logit
over the vocabulary is estimated from candidates. A token that is drawn with probability π counts 1/π times,
so the estimate is right in the mean. Its variance is Σ (1/π − 1) p² times the sum's square, where p are the
row's probabilities. It is least where π is proportional to √(Σ p²), summed over the rows of the part.

A token that a row makes probable, and that is no target of the row's part, often is a token that commonly
follows the row's own: "ieties" after " Soc", "blown" after "full-". So Σ p² is estimated from how often
tokens follow one another. For 8,192 tokens of unseen text, 3,072 draws and the states after a quarter of a
run, the variance is 0.024 in the mean over rows. By the tokens' frequencies alone it is 0.030, and 0.0014 by
the model's own Σ p², which a run does not know beforehand (records/ideas.md).
"""
import numpy as np
import torch

from data.shards import ShardError

COUNTED = 4_000_000     # tokens at the beginning of the text, in which tokens and pairs are counted
TOGETHER = 2 ** 17      # tokens that are counted together
UNSEEN = 4.0            # added to each count, which bounds the weight of a token that was not counted
LEAST_SHARE = 0.05      # of what follows a token; rarer followers are left to their frequency
COMMON = 1 / 4000       # From this frequency on a token is a target of most parts, whatever it follows.
# Σ p² over n rows is estimated as n times the frequency times this, plus the squared shares of followers.
# 0.01 and 0.03 are as good.
OF_FREQUENCY = 0.015
# The probability of a candidate that is certain. It is a bit less than 1, so that rounding never makes one
# pass two integers.
SURE = 1 - 1e-9


def sample_parts(n: int, share: int) -> int:
    """Into how many equal parts n tokens are split, so that about `share` have one sample of candidates.

    0: all n. A part has a multiple of 16 tokens on every device, because FP8 wants that on GPUs.
    """
    most = n // share if share else 1
    return next((parts for parts in range(most, 1, -1) if n % (16 * parts) == 0), 1)


class Importance:
    """How likely each token is to be a candidate, against others, by what follows what in some text."""

    def __init__(self, text: np.ndarray, vocabulary: int):
        """`text` (n,) uint16, of token ids below `vocabulary`."""
        # The clock runs, and new memory takes longer than counting. Small pieces use the same memory again.
        # Each piece has the first token of the next one too, so that no pair is lost.
        pieces = [text[i:i + TOGETHER + 1] for i in range(0, max(len(text), 1), TOGETHER)]
        counts = sum(np.bincount(piece[:TOGETHER], minlength=vocabulary) for piece in pieces) + UNSEEN
        self.frequency = counts / counts.sum()
        # Pairs that cannot be kept are left out before the sort. The second token of a pair must not be
        # common. It must occur often enough in the whole text to be LEAST_SHARE of what follows the first.
        most = np.where(self.frequency < COMMON, counts, 0).astype(np.float32)
        least = (LEAST_SHARE * counts).astype(np.float32)
        pairs = []
        for piece in pieces:
            able = np.flatnonzero(most.take(piece[1:]) >= least.take(piece[:-1]))
            pairs.append(piece.take(able).astype(np.uint32) << 16 | piece.take(able + 1))
        pairs = np.concatenate(pairs)
        pairs.sort()
        is_new = np.ones(len(pairs), bool)
        is_new[1:] = pairs[1:] != pairs[:-1]
        new = np.flatnonzero(is_new)
        first, second = (pairs[new] >> 16).astype(np.intp), (pairs[new] & 0xFFFF).astype(np.intp)
        share = np.diff(new, append=len(pairs)) / counts[first]
        kept = share >= LEAST_SHARE
        self.first, self.second, self.squares = first[kept], second[kept], share[kept] ** 2

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Each token's importance (vocabulary,), above 0, for a part of a batch with these tokens (n,)."""
        times = np.bincount(tokens, minlength=len(self.frequency))
        met = np.flatnonzero((times > 0).take(self.first))      # pairs whose first token the part has
        estimate = OF_FREQUENCY * len(tokens) * self.frequency
        np.add.at(estimate, self.second[met], self.squares[met] * times[self.first[met]])
        return np.sqrt(estimate, out=estimate)


def shares_of_sample(importance: np.ndarray, count: int) -> np.ndarray:
    """The probability of each (n,) to be among `count`: in proportion to its importance, but at most SURE."""
    if count >= np.count_nonzero(importance > 0):
        return (importance > 0).astype(float)
    total, sure = importance.sum(), 0
    scale = count / total
    while (found := np.count_nonzero(over := importance >= 1 / scale)) > sure:
        sure, scale = found, (count - found) / (total - importance[over].sum())
    return np.minimum(importance * scale, SURE)


def sample_candidates(targets: np.ndarray, count: int, importance: np.ndarray,
                      generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` tokens, ascending, int32, and their weights, float32: the targets (n,) and some of the rest.

    A target of -1 is none. A token of the rest is drawn with a probability in proportion to its importance,
    (vocabulary,) above 0. Its weight is one over that probability; a target's is 1. So a sum over candidates,
    by weights, is in the mean the sum over the vocabulary. Systematic sampling (Madow, Ann. Math. Stat. 20,
    1949) draws a fixed number of tokens with these probabilities: those where the sum of probabilities,
    shifted by one random number, passes an integer. ShardError if there are more than `count` targets.
    """
    rest = importance.copy()
    rest[targets[targets >= 0]] = 0
    drawn = rest == 0
    missing = count - np.count_nonzero(drawn)
    if missing < 0:
        raise ShardError(f"{count - missing} different targets in a part with {count} candidates; "
                         "raise --softmax_samples or --extra_samples")
    shares = rest       # of the targets: 0
    if missing:
        shares = shares_of_sample(rest, missing)
        # NumPy would take three times as long. The last sum is `missing`, but for rounding.
        sums = torch.from_numpy(shares).cumsum(0).numpy()
        passed = np.zeros(len(sums) + 1, np.int32)
        passed[1:] = sums * (missing / sums[-1]) + generator.uniform(1e-6, 1 - 1e-6)
        drawn |= passed[1:] > passed[:-1]
    candidates = np.flatnonzero(drawn)
    shares = shares[candidates]
    return candidates.astype(np.int32), (1 / np.where(shares > 0, shares, 1)).astype(np.float32)
