"""Parts of rows from every rank, made whole, and back."""
import pytest
import torch

from kernels.ngrams.exchange import ColumnExchange, parts_of_rows, whole_rows
from kernels.ranks import Collectives


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n, ranks, c", [(5, 4, 8), (5, 2, 3), (7, 4, 48), (3, 1, 16), (1, 8, 2)])
def test_parts_become_whole_rows_and_parts_again(n, ranks, c, dtype):
    parts = torch.randn(ranks * n, c).to(dtype)
    rows = whole_rows(parts.chunk(ranks))
    assert torch.equal(rows, parts.view(ranks, n, c).transpose(0, 1).reshape(n, ranks * c))
    again = torch.empty_like(parts)
    parts_of_rows(rows, again.chunk(ranks))
    assert torch.equal(again, parts)


class Work:
    """A collective under way that says when it is waited for."""

    def __init__(self, said: list):
        self.wait = lambda: said.append("wait")


class Mirror(Collectives):
    """Two ranks of which the other one looks up and sends the same. This one may be told to keep its part."""

    def __init__(self, said: list, rank: int, moves_own: bool):
        super().__init__(2)
        self.said, self.rank, self.moves_own = said, rank, moves_own
        self.buffers: list[torch.Tensor] = []

    def outgoing(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.buffers.append(torch.full(shape, torch.nan, dtype=dtype, device=device))
        return self.buffers[-1]

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        """The other rank sends what this one sends to itself or, of gradients, what this one sends to it."""
        parts, into = sent.chunk(2), received.chunk(2)
        for r in (0, 1) if self.moves_own else (1 - self.rank,):
            into[r].copy_(parts[self.rank] if self.said.count("send") == 0 else parts[r])
        self.said.append("send")
        return Work(self.said)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moves_own", [True, False])
def test_rows_travel_between_send_and_receive_and_gradients_the_other_way(rank, moves_own):
    said, leaf = [], torch.randn(6, 4).requires_grad_()
    exchange = ColumnExchange(Mirror(said, rank, moves_own))
    exchange.send(2 * leaf)
    said.append("other work")
    rows = exchange.receive()
    assert said == ["send", "other work", "wait"] and exchange.sent is None and exchange.under_way == ()
    assert torch.equal(rows, 2 * leaf.chunk(2)[rank].repeat(1, 2))
    grad = torch.randn(3, 8)
    rows.backward(grad)
    assert said[3:] == ["send", "wait"]
    sent = exchange.collectives.buffers[0].chunk(2)
    assert torch.equal(sent[1 - rank], grad.chunk(2, dim=1)[1 - rank])
    assert sent[rank].isnan().all() != moves_own
    torch.testing.assert_close(leaf.grad, 2 * torch.cat(grad.chunk(2, dim=1)))


def test_one_rank_sends_nothing():
    exchange, parts = ColumnExchange(Collectives(1)), torch.randn(3, 4)
    exchange.send(parts)
    assert exchange.receive() is parts
