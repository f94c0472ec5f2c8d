"""An all-to-all for a table whose columns are spread over ranks: parts of rows become whole rows, and back.

Each rank looks up its columns for the tokens of all ranks. Then every rank sends to each other rank its part
of that rank's rows:

    rank 0 holds columns a, rank 1 columns b       rank 0's tokens need rows 0 and 1, rank 1's rows 2 and 3

    rank 0 looks up    a0 a1 a2 a3                 rank 0 receives   a0 a1, b0 b1   =   rows a0b0, a1b1
    rank 1 looks up    b0 b1 b2 b3                 rank 1 receives   a2 a3, b2 b3   =   rows a2b2, a3b3

Gradients go the opposite way. So traffic grows with the rows that tokens read and not with the table, and
nobody sums gradients over ranks.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.ranks.collectives import Collectives, wait


def in_words(x: Tensor) -> Tensor:
    """View x (n, c) as 16-byte words if its rows are a multiple of 16 bytes.

    The strided copies below then move fewer, larger elements. complex128 is torch's only 16-byte number.
    """
    return x.view(torch.complex128) if x.shape[1] * x.element_size() % 16 == 0 else x


def columns_of(rows: Tensor, ranks: int) -> Tensor:
    """View rows (n, ranks · c) as words (n, ranks, ·): one part of each row for each rank."""
    return in_words(rows.unflatten(1, (ranks, -1)).flatten(0, 1)).unflatten(0, (-1, ranks))


def whole_rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows (n, ranks · c) from every rank's part of them, each (n, c), in rank order."""
    rows = parts[0].new_empty(len(parts[0]), len(parts) * parts[0].shape[1])
    for into, part in zip(columns_of(rows, len(parts)).unbind(1), parts):
        into.copy_(in_words(part))
    return rows


def parts_of_rows(rows: Tensor, into: Sequence[Tensor]) -> None:
    """The inverse of `whole_rows`: write each rank's part of rows (n, ranks · c) to one of `into`, (n, c)."""
    for part, source in zip(into, columns_of(rows, len(into)).unbind(1)):
        in_words(part).copy_(source)


class ColumnExchange:
    """One exchange of rows, with its gradient. It has two halves, so that other work runs while rows travel.

    `send` starts the all-to-all and `receive` waits for it. In the backward pass `receive` starts the
    all-to-all of the gradients and `send` waits for it. With one rank nothing is sent.

    With `PeerCopies` what a rank sends is written where the others read it, and what it sends to itself does
    not move. On two H200s the rows of 98,304 tokens a rank are 126 MB, of which half leave the GPU. In each
    direction this saves a copy of all rows and one of half of them.
    """

    def __init__(self, collectives: Collectives):
        self.collectives, self.sent, self.under_way = collectives, None, ()

    def start(self, arriving: Tensor, parts: Tensor) -> Tensor:
        # What is sent must live until the collective has ended, so it is kept here too.
        self.under_way = self.collectives.all_to_all(arriving, parts), parts
        return arriving

    def finish(self) -> Tensor:
        """Wait for what is under way, and return what this rank has sent."""
        (work, parts), self.under_way = self.under_way, ()
        wait(work)
        return parts

    def send(self, parts: Tensor) -> None:
        """parts (ranks · n, c): this rank's columns of the rows that all ranks' tokens read, rank by rank.

        If they lie in memory from `Collectives.outgoing`, they are sent from there.
        """
        self.sent = SendColumns.apply(parts, self) if self.collectives.size > 1 else parts

    def receive(self) -> Tensor:
        """The whole rows (n, ranks · c) of this rank's tokens."""
        # Drop the reference: its graph refers to this object, and a circle would never be freed in time.
        sent, self.sent = self.sent, None
        return ReceiveColumns.apply(sent, self) if self.collectives.size > 1 else sent

    def by_rank(self, parts: Tensor, own: Tensor) -> list[Tensor]:
        """For each rank its part (n, c): this rank's from `own`, the others' from `parts` (ranks · n, c)."""
        rank, size = self.collectives.rank, self.collectives.size
        return [(own if r == rank else parts).chunk(size)[r] for r in range(size)]


class SendColumns(torch.autograd.Function):
    """What arrives from the other ranks. Without `moves_own` this rank's part of the result is undefined."""
    @staticmethod
    def forward(ctx, parts: Tensor, exchange: ColumnExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(torch.empty_like(parts), parts)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.finish()
        return grad, None


class ReceiveColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arriving: Tensor, exchange: ColumnExchange) -> Tensor:
        ctx.exchange = exchange
        return whole_rows(exchange.by_rank(arriving, own=exchange.finish()))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        exchange, collectives = ctx.exchange, ctx.exchange.collectives
        shape = collectives.size * len(grad), grad.shape[1] // collectives.size
        parts = collectives.outgoing(*shape, dtype=grad.dtype, device=grad.device)
        arriving = torch.empty_like(parts)
        parts_of_rows(grad, exchange.by_rank(parts, own=parts if collectives.moves_own else arriving))
        return exchange.start(arriving, parts), None
