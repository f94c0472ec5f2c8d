"""Rows of a table of which every rank holds some columns: each looks its columns up for all ranks' tokens, an all-to-all makes rows whole."""
import torch
from torch import Tensor

from kernels.ranks.collectives import Collectives, wait


def in_words(x: Tensor) -> Tensor:
    """x (n, c) as numbers of 16 bytes, where rows are of whole ones: the copies below are of words, of few and large ones if they can."""
    return x.view(torch.complex128) if x.shape[1] * x.element_size() % 16 == 0 else x


def whole_rows(parts: Tensor, ranks: int) -> Tensor:
    """Rows (n, ranks c) of their parts (ranks n, c), rank by rank."""
    return in_words(parts).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1).contiguous().view(parts.dtype)


def parts_of_rows(rows: Tensor, ranks: int) -> Tensor:
    """The reverse."""
    parts = rows.unflatten(1, (ranks, -1)).flatten(0, 1)                 # (n ranks, c), where it lies
    return in_words(parts).unflatten(0, (-1, ranks)).transpose(0, 1).flatten(0, 1).contiguous().view(rows.dtype)


class ColumnExchange:
    """Parts of rows to whole rows, and their gradients back: what all ranks' tokens read here, (size * n, width / size) in rank order, becomes
    the rows of this rank's tokens, (n, width).

    In two halves, `send` and `receive`, so that the wire is busy while what stands between them computes; backward likewise.
    """

    def __init__(self, collectives: Collectives):
        self.collectives, self.sent, self.under_way = collectives, None, ()

    def start(self, parts: Tensor) -> Tensor:
        arriving = torch.empty_like(parts)
        self.under_way = self.collectives.all_to_all(arriving, parts), parts     # which must live until then
        return arriving

    def finish(self) -> None:
        wait(self.under_way[0])
        self.under_way = ()

    def send(self, parts: Tensor) -> None:
        self.sent = SendColumns.apply(parts, self) if self.collectives.size > 1 else parts

    def receive(self) -> Tensor:
        sent, self.sent = self.sent, None                                # or its graph, which holds this, would never be freed
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
        return ctx.exchange.start(parts_of_rows(grad, ctx.exchange.collectives.size)), None
