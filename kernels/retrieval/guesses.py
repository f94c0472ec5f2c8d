"""The index of the text that was trained on, and the guesses that tokens read rows for."""
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kernels.retrieval.matching import LOW, guess_rows, longest, near_guesses
from kernels.sequence import starts


class TextIndex:
    """The text of earlier steps, and for the ends of its tokens the latest place where each stood.

    An end of text has a key (`suffix_keys`). It chooses one of the slots, whose 64 bits hold the place of the
    token that followed and 32 other bits of the key; these tell a place from that of another end of text
    with the same slot. Newer places are larger numbers, so the maximum keeps the newest, in whatever order
    a GPU writes them. Nothing here waits for the host or changes its shape: a captured step can be replayed.
    """

    def __init__(self, capacity: int, slots: int, keys: Callable[[Tensor, Tensor], Tensor],
                 device: torch.device):
        """Room for a text of `capacity` tokens; `keys` (tokens, is_start): from `suffix_keys`."""
        self.keys = keys
        # Tokens count from 1, and are negative where a sequence starts; 0: not written yet.
        self.text = torch.zeros(capacity + 2, dtype=torch.int32, device=device)
        self.slots = torch.zeros(slots, dtype=torch.int64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # of tokens written

    def add(self, text: Tensor) -> None:
        """Append text (n,) int32 of whole sequences, in the form of `self.text`."""
        # Warm-up may take more steps than the run; it then begins again.
        places = (self.count + torch.arange(len(text), device=text.device)) % (len(self.text) - 2)
        self.text.scatter_(0, places, text)
        keys = self.keys(text.abs() - 1, text < 0)
        followed = torch.cat([text[1:] > 0, text.new_zeros(1, dtype=torch.bool)])
        entries = (places + 1 << 32 | keys >> 32 & LOW).masked_fill(~followed | (keys == 0), 0)
        self.slots.scatter_reduce_(0, (keys % len(self.slots)).flatten(), entries.flatten(), "amax")
        self.count += len(text)

    def look_up(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both tokens that followed (n,) each, and the numbers of the matches' lengths; 0 for none.

        keys (k, n), shorter ends first.
        """
        entries = self.slots[keys % len(self.slots)]
        number, place = longest((entries > 0) & (keys != 0) & (entries & LOW == keys >> 32 & LOW),
                                entries >> 32)
        place = place.masked_fill(number == 0, len(self.text) - 2)  # which is never written
        first, second = (self.text[place + i].long().clamp(min=0) for i in range(2))
        return first, second, number

    def written(self) -> Tensor:
        """A copy of the text so far, from which `add` makes this index again."""
        return self.text[:int(self.count)].clone()


class Guesses:
    """Up to three guesses a token: one from its own sequence, two from the text of earlier steps."""

    def __init__(self, near: tuple[int, ...], stream: tuple[int, ...], slots: int, capacity: int,
                 suffix_keys: Callable, device: torch.device):
        """`near`, `stream`: lengths of matches, () for none. `capacity`: tokens of the whole run, which also
        bounds the `slots`. `suffix_keys` may be its compiled form.
        """
        self.near, self.stream, self.suffix_keys = (*sorted(near),), (*sorted(stream),), suffix_keys
        self.kinds = bool(near) + 2 * bool(stream)
        slots = min(slots, 4 * capacity * len(stream))
        self.index = TextIndex(capacity, slots, self.keys, device) if stream else None

    def keys(self, tokens: Tensor, is_start: Tensor) -> Tensor:
        return self.suffix_keys(tokens, is_start, self.stream)

    def rows(self, tokens: Tensor, is_start: Tensor, count: int) -> Tensor:
        """Rows (n, kinds) int32 of a table of `count` rows, for each token."""
        found = []
        if self.near:
            keys = self.suffix_keys(tokens, is_start, self.near)
            found.append(near_guesses(tokens, is_start, keys))
        if self.index:
            first, second, number = self.index.look_up(self.keys(tokens, is_start))
            found += [(first, number), (second, number)]
        rows = [guess_rows(*guess, kind, self.kinds, count) for kind, guess in enumerate(found)]
        return torch.stack(rows, 1)

    @torch.no_grad()
    def learn(self, batches: Iterable, all_gathered: Callable[[Tensor], Tensor]) -> None:
        """Add a step's text: this rank's `batches`, and those of the other ranks. All ranks must call.

        What fills a batch up, which has no targets, becomes sequences of one token and so matches nothing.
        """
        if self.index:
            text = [((batch.tokens + 1) * (1 - 2 * starts(batch.cu_seqlens, len(batch.tokens)).int())
                     ).masked_fill(batch.targets < 0, -1) for batch in batches]
            self.index.add(all_gathered(torch.cat(text)))

    def forget(self) -> None:
        """Empty the index."""
        for x in (self.index.text, self.index.slots, self.index.count) if self.index else ():
            x.zero_()
