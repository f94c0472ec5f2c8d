"""The model's table of n-grams: which rows a token reads, and how they get to the token's rank.

Each token reads one row for its last 2 tokens, one for its last 3, and so on. Row k is added to the value of
attention head k, times a learned scale for each layer. README.md explains why, and what it costs.
"""
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.gradients import gradient_of
from kernels.ngrams.exchange import ColumnExchange, whole_rows
from kernels.ngrams.row_gradients import RowGradients, no_gradients
from kernels.ngrams.shared_gradient import NGramValues
from kernels.ranks.collectives import Collectives
from kernels.sequence import starts
from kernels.streams import beside, side_stream

PART = 2 ** 20  # rows at a time, for what goes over the whole table


class TableState(NamedTuple):
    """The table, its gradient, and the optimizer's state: the first arguments of `row_adam`."""
    weight: Tensor  # (rows, columns)
    gradients: RowGradients | Tensor  # of the listed rows, or (rows, columns)
    second: Tensor  # (rows, columns / block) float32: mean squares of the gradient
    last: Tensor  # (rows,) float32: the number of the update that last moved a row
    steps: Tensor  # 0-dim float32: how many updates there were
    learns: Tensor  # 0-dim bool: whether the next update moves rows; else it only drops their gradients

    def update(self, row_adam: Callable, rule, beta2: float) -> None:
        """One update by `row_adam` or its reference, with a `Rule` and the decay of the mean squares."""
        row_adam(*self[:5], rule._replace(finite=rule.finite & self.learns), beta2)

    def rows_updated(self) -> int:
        """How many rows updates have moved; rows read since the last update do not count. The host waits."""
        parts = self.last.split(PART)  # A comparison of the whole might not fit beside a long table.
        return sum(int((part > 0).sum()) for part in parts)


class InFlight:
    """The n-gram rows of one micro-batch, on their way from the ranks that hold their columns."""

    def __init__(self, exchange: ColumnExchange, heads: int, scales: Tensor | None, share: Callable):
        self.exchange, self.heads, self.scales, self.share = exchange, heads, scales, share
        self.by_layer: list[NGramValues] | None = None

    def values(self, layer: int) -> NGramValues | None:
        """What this layer adds to its first heads' values; None without a table.

        The first call waits until the rows are here.
        """
        if self.scales is None:
            return None
        if self.by_layer is None:
            rows = self.exchange.receive().unflatten(0, (-1, self.heads))  # (n, heads, head_dim)
            self.by_layer = self.share(rows, self.scales)
        return self.by_layer[layer]


class NGrams(nn.Module):
    """A hashed table with a row for the last 2, 3, … tokens (kernels/ngrams/README.md).

    Attention needs several layers to see which short phrase a token ends. The table says so by one look-up,
    at almost no time: its cost is memory. Every rank holds some columns of all rows.
    """

    def __init__(self, lengths: tuple[int, ...], rows: int, head_dim: int, layers: int,
                 collectives: Collectives, dtype: torch.dtype, device: torch.device,
                 classes: Tensor | None = None):
        """`classes` (vocabulary,): the class of each token, if n-grams are of classes and not of tokens."""
        super().__init__()
        self.classes = None if classes is None else classes.to(device)
        self.stream = side_stream("n-grams") if device.type == "cuda" else None  # where rows are gathered
        self.lengths, self.collectives = lengths if rows else (), collectives
        self.learns = torch.ones((), dtype=torch.bool, device=device)
        self.table = self.scales = None
        if self.lengths:
            table = torch.empty(rows, head_dim // collectives.size, dtype=dtype, device=device)
            self.table = nn.Parameter(table)  # this rank's columns
            self.scales = nn.Parameter(torch.zeros(layers, len(self.lengths), device=device))
        self.hash_rows: Callable | None = None  # how rows are found; `find_by` sets it
        self.guesses, self.heads = None, len(self.lengths)  # what else rows are read for; how many in all
        self.row_gradients: RowGradients | None = None  # where the table's gradient goes; None: to table.grad

    def find_by(self, hash_rows: Callable, guesses=None) -> None:
        """Rows are found by `hash_rows`, which is `ngram_index` or its reference.

        Tokens also read a row for a guess of the next token, by a `retrieval.Guesses`, if it makes any.
        """
        self.hash_rows, self.guesses = hash_rows, guesses
        if guesses and guesses.near:
            self.heads += 1
            self.scales = nn.Parameter(self.scales.new_zeros(len(self.scales), self.heads))

    @torch.no_grad()
    def initialise(self) -> None:
        """A row that nobody has read yet adds nothing."""
        if self.lengths:
            self.table.zero_()
            self.scales.fill_(0.05)

    def heed(self, batches) -> None:
        """Before a step: the table learns from its batches, unless later steps read one of them again.

        Where one update takes the gradients of several steps, its last step decides for all of them.
        After one reading the row of a rare n-gram knows what follows it. A model that finds the answer there
        when it reads the text again learns to trust such rows, and is worse on all other text.
        """
        self.learns.fill_(not any(batch.read_again for batch in batches))

    @torch.no_grad()
    def find(self, batch) -> Tensor:
        """The rows that the tokens of a `Batch` read, (n · heads,) int32; (0,) without a table.

        With guesses that takes some 60 small kernels, one after the other: 0.4 ms for 65,536 tokens (1×H200).
        """
        if not self.lengths:
            return batch.tokens.new_empty(0, dtype=torch.int32)
        tokens, is_start = batch.tokens, starts(batch.cu_seqlens, len(batch.tokens))
        rows = self.hash_rows(tokens, is_start, self.lengths, len(self.table), self.classes)
        if self.guesses and self.guesses.near:
            guessed = self.guesses.rows(tokens, is_start, len(self.table))
            rows = torch.cat([rows.view(len(tokens), -1), guessed], 1).flatten()
        return rows

    @torch.no_grad()
    def index(self, batch) -> Tensor | None:
        """The rows that all ranks' tokens read, in rank order; None without a table. All ranks must call.

        The rows of this rank's `batch` may have been found before. On a GPU a side stream does the rest, and
        `send` waits for that stream.
        """
        if not self.lengths:
            return None
        with beside(self.stream):
            return self.collectives.all_gathered(batch.rows if len(batch.rows) else self.find(batch))

    def send(self, index: Tensor | None, lookup: Callable, sort: Callable, share: Callable) -> InFlight:
        """Look up this rank's columns of these rows, and start sending them to the ranks that read the rows.

        `lookup`, `sort`: `embedding.lookup` and what sorts for it, or the reference. `share`: `share_values`,
        or its reference if the layers' kernels do not leave their gradients to it.
        """
        exchange = ColumnExchange(self.collectives)
        if index is not None:
            if self.stream:
                torch.cuda.current_stream().wait_stream(self.stream)
            exchange.send(lookup(self.table, sort(index), self.row_gradients, self.collectives.outgoing))
        return InFlight(exchange, self.heads, self.scales, share)

    def optimizer_state(self, block: int, capacity: int | None) -> TableState:
        """State for a row-wise optimizer; `block` neighbouring columns share a mean square.

        From now on gradients go to a list with room for `capacity` rows; with None to a dense `table.grad`.
        """
        (rows, columns), device = self.table.shape, self.table.device
        second, last = torch.zeros(rows, columns // block, device=device), torch.zeros(rows, device=device)
        if capacity is not None:
            self.row_gradients = no_gradients(self.table.data, capacity)
        gradients = gradient_of(self.table).buffer if capacity is None else self.row_gradients
        steps = torch.zeros((), device=device)
        return TableState(self.table.data, gradients, second, last, steps, self.learns)

    @torch.no_grad()
    def written_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows that are not zero: their numbers (k,) int32, ascending, and whole rows (k, head_dim).

        Every rank's host gets them in parts, because neither a GPU nor a host may have room for all. All
        ranks must call.
        """
        for first in range(0, len(self.table) if self.lengths else 0, PART):
            mine = self.table[first:first + PART]
            part = whole_rows(self.collectives.all_gathered(mine).chunk(self.collectives.size))
            numbers = part.any(1).nonzero()[:, 0]
            yield (numbers + first).int().cpu(), part[numbers].cpu()

    def numbers_elsewhere(self) -> int:
        """How many numbers of the table the other ranks hold."""
        return self.table.numel() * (self.collectives.size - 1) if self.lengths else 0
