"""An all-to-all for a table whose columns are spread over ranks: parts of rows become whole rows, and back.

Each rank looks up its columns for the tokens of all ranks. Then every rank sends to each other rank its part
of that rank's rows:

    rank 0 holds columns a, rank 1 columns b       rank 0's tokens need rows 0 and 1, rank 1's rows 2 and 3

    rank 0 looks up    a0 a1 a2 a3                 rank 0 receives   a0 a1, b0 b1   =   rows a0b0, a1b1
    rank 1 looks up    b0 b1 b2 b3                 rank 1 receives   a2 a3, b2 b3   =   rows a2b2, a3b3

Gradients go the opposite way. So traffic grows with the rows that tokens read and not with the table, and
nobody sums gradients over ranks.
"""
import torch
from torch import Tensor

from kernels.ranks.collectives import Collectives, wait


def in_words(x: Tensor) -> Tensor:
    """View x (n, c) as 16-byte words if its rows are a multiple of 16 bytes.

    The transposing copies below then move fewer, larger elements. complex128 is torch's only 16-byte number.
    """
    return x.view(torch.complex128) if x.shape[1] * x.element_size() % 16 == 0 else x


def whole_rows(parts: Tensor, ranks: int) -> Tensor:
    """Rows (n, ranks · c) from their parts (ranks · n, c), which come rank by rank."""
    return in_words(parts).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1).contiguous().view(parts.dtype)


def parts_of_rows(rows: Tensor, ranks: int) -> Tensor:
    """The inverse of `whole_rows`: parts (ranks · n, c) of rows (n, ranks · c)."""
    parts = rows.unflatten(1, (ranks, -1)).flatten(0, 1)  # (n · ranks, c), without moving anything
    parts = in_words(parts).unflatten(0, (-1, ranks)).transpose(0, 1).flatten(0, 1)
    return parts.contiguous().view(rows.dtype)


class ColumnExchange:
    """One exchange of rows, with its gradient. It has two halves, so that other work runs while rows travel.

    `send` starts the all-to-all and `receive` waits for it. In the backward pass `receive` starts the
    all-to-all of the gradients and `send` waits for it. With one rank nothing is sent.
    """

    def __init__(self, collectives: Collectives):
        self.collectives, self.sent, self.under_way = collectives, None, ()

    def start(self, parts: Tensor) -> Tensor:
        arriving = torch.empty_like(parts)
        # What is sent must live until the collective has ended, so it is kept here too.
        self.under_way = self.collectives.all_to_all(arriving, parts), parts
        return arriving

    def finish(self) -> None:
        wait(self.under_way[0])
        self.under_way = ()

    def send(self, parts: Tensor) -> None:
        """parts (ranks · n, c): this rank's columns of the rows that all ranks' tokens read, rank by rank."""
        self.sent = SendColumns.apply(parts, self) if self.collectives.size > 1 else parts

    def receive(self) -> Tensor:
        """The whole rows (n, ranks · c) of this rank's tokens."""
        # Drop the reference: its graph refers to this object, and a circle would never be freed in time.
        sent, self.sent = self.sent, None
        return ReceiveColumns.apply(sent, self) if self.collectives.size > 1 else sent


class SendColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts: Tensor, exchange: ColumnExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(parts)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.finish()
        return grad, None


class ReceiveColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arriving: Tensor, exchange: ColumnExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return whole_rows(arriving, exchange.collectives.size)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        return exchange.start(parts_of_rows(grad, exchange.collectives.size)), None
