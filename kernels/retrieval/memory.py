"""All that is kept of the training text to be looked up when the model is scored."""
from collections.abc import Iterable

from torch import Tensor

from kernels.loss import Mixture
from kernels.ranks.collectives import Collectives
from kernels.retrieval.counts import TextCounts
from kernels.retrieval.datastore import Datastore


class TextMemory:
    """Counts and states of the training text; both may be off. Training writes them and reads neither."""

    def __init__(self, lengths: tuple[int, ...], kept: int, embedding: Tensor, collectives: Collectives,
                 text: int):
        """`lengths` of contexts that are counted; how many states are kept, of a training on `text` tokens.

        `embedding` (vocabulary, width): a state is as wide, on its device and of its dtype.
        """
        self.counts = TextCounts(lengths, text, embedding.device)
        self.states = Datastore(kept, text, embedding, collectives)
        self.all_gathered = collectives.all_gathered

    def learn(self, batches: Iterable) -> None:
        """Add a step's text to the counts, from this rank's `batches`. All ranks must call.

        States come by `mixed`, in the forward pass.
        """
        self.counts.learn(batches, self.all_gathered)

    def before(self, tokens: int) -> None:
        """To call before each step, of so many `tokens` of all ranks. All ranks must call."""
        self.states.before(tokens)

    def mixed(self, mixture: Mixture | None, x: Tensor, batch, is_start: Tensor) -> Mixture | None:
        """`mixture` (None: the head alone) with the counts and with what followed states similar to x
        (n, width).

        In training, where gradients are enabled, x is stored instead and `mixture` is returned.
        """
        return self.states.mixed(self.counts.mixed(mixture, batch, is_start), x, batch)

    def sort(self) -> None:
        """Make ready for a score of the model."""
        self.counts.sort()
        self.states.sort()

    def rehearse(self) -> None:
        """Sort once, so that the costs of first use are off the clock. Then begin again."""
        self.counts.forget()     # which sorts
        self.states.rehearse()
