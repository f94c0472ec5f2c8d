"""How often each token followed the last few ones in the text that was trained on."""
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kernels.loss import Mixture
from kernels.sequence import previous, starts

LONGEST = 3             # tokens of context: with the one that follows they fill 64 bits
SHARE = 0.005           # of the counts of each length in the probability
BITS = 16               # of a token
NOTHING = -2 ** 63      # the key of no token
LARGEST_VOCABULARY = 2 ** BITS - 2
PART = 2 ** 24          # tokens that are sorted together; each takes some 48 bytes meanwhile


def pack(newest: Tensor, *earlier: Tensor) -> Tensor:
    """An n-gram of up to four tokens as one number (n,) int64, which sorts by its newest token first.

    Tokens count from 1, and 0 is no token.
    """
    # No token at all gives the smallest number of int64, so that all of its 64 bits are used.
    key = (newest.long() - 2 ** (BITS - 1)) * 2 ** (3 * BITS)
    for i, token in enumerate(earlier):
        key += token.long() * 2 ** (BITS * (2 - i))
    return key


def last_tokens(tokens: Tensor, is_start: Tensor) -> list[Tensor]:
    """Each token (n,) and the three before it in its sequence; 0 where there is none."""
    found = [tokens]
    for _ in range(LONGEST):
        found.append(previous(found[-1], is_start))
    return found


class TextCounts:
    """The n-grams of the text that was trained on, of up to four tokens, and how often each occurs.

    N-grams are stored as numbers in sorted order. The occurrences of an n-gram, and of all longer n-grams
    that end with it, are neighbours. So two searches in each part count any n-gram. The text is gathered step
    by step, and sorted when a model is to be scored. Nothing that a step does waits for the host.
    """

    def __init__(self, lengths: tuple[int, ...], capacity: int, device: torch.device):
        """`lengths` of contexts, from 1 to `LONGEST`, () for none. 12 bytes for each of `capacity` tokens."""
        self.lengths = (*sorted({*lengths}),)
        # Tokens count from 1, and are negative where a sequence starts; 0: no token.
        self.text = torch.zeros(capacity if lengths else 0, dtype=torch.int32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)      # of tokens written
        self.parts = [torch.full_like(part, NOTHING, dtype=torch.int64)
                      for part in self.text.split(PART) if len(part)]

    @torch.no_grad()
    def learn(self, batches: Iterable, all_gathered: Callable[[Tensor], Tensor]) -> None:
        """Add a step's text: this rank's `batches`, and those of the other ranks. All ranks must call.

        What fills a batch up, which has no targets, is no text.
        """
        if self.lengths:
            text = [((batch.tokens + 1) * (1 - 2 * starts(batch.cu_seqlens, len(batch.tokens)).int())
                     ).masked_fill(batch.targets < 0, 0) for batch in batches]
            self.add(all_gathered(torch.cat(text)))

    def add(self, text: Tensor) -> None:
        """Append text (n,) int32 of whole sequences, in the form of `self.text`."""
        # Warm-up may take more steps than the run. Writing then starts at the front again.
        places = (self.count + torch.arange(len(text), device=text.device)) % len(self.text)
        self.text.scatter_(0, places, text)
        self.count += len(text)

    def written(self) -> Tensor:
        """A copy of the text so far, from which `add` and `sort` make these counts again."""
        return self.text[:int(self.count)].clone()

    def sort(self) -> None:
        """Make the counts those of the text so far. Each part begins as a sequence does."""
        for part, text in zip(self.parts, self.text.split(PART)):
            is_start = text < 0
            is_start[:1] = True
            part.copy_(pack(*last_tokens(text.abs(), is_start)).sort().values)

    def forget(self) -> None:
        """Begin again, without any text."""
        self.text.zero_()
        self.count.zero_()
        self.sort()

    def occurrences(self, keys: Tensor, length: int) -> Tensor:
        """How often the newest `length` tokens of each of keys (n,) occur, (n,) int64."""
        size = 2 ** (BITS * (LONGEST + 1 - length))
        low = keys & -size      # Without its older tokens a key is the smallest with these newest ones.
        return sum(torch.searchsorted(part, low + size) - torch.searchsorted(part, low)
                   for part in self.parts)

    def mixed(self, mixture: Mixture | None, batch, is_start: Tensor) -> Mixture | None:
        """`mixture` (None: the head alone) with counts: for each length in turn p becomes (1 − s) p + s k/c.

        c is how often a target's context of that length occurs, k how often the target follows it, and s is
        `SHARE`, but 0 where c is 0. Where there are gradients `mixture` stays as it is.
        """
        if not self.lengths or torch.is_grad_enabled():
            return mixture
        context = last_tokens(batch.tokens + 1, is_start)
        seen, followed = pack(*context), pack(batch.targets + 1, *context[:LONGEST])
        rest = torch.ones(len(seen), device=seen.device)
        counted = torch.zeros_like(rest)
        for length in self.lengths:
            times = self.occurrences(seen, length)
            share = SHARE * (times > 0)
            ratio = self.occurrences(followed, length + 1) / times.clamp(min=1)
            rest, counted = (1 - share) * rest, (1 - share) * counted + share * ratio
        return Mixture.after(mixture, counted, rest)
