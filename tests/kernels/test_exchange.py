"""Parts of rows from every rank, made whole, and back."""
import pytest
import torch

from kernels.ngrams.exchange import ColumnExchange, parts_of_rows, whole_rows
from kernels.ranks import Collectives


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n, ranks, c", [(5, 4, 8), (5, 2, 3), (7, 4, 48), (3, 1, 16), (1, 8, 2)])
def test_parts_become_whole_rows_and_parts_again(n, ranks, c, dtype):
    parts = torch.randn(ranks * n, c).to(dtype)
    rows = whole_rows(parts, ranks)
    assert torch.equal(rows, parts.view(ranks, n, c).transpose(0, 1).reshape(n, ranks * c))
    assert torch.equal(parts_of_rows(rows, ranks), parts)


class Work:
    """A collective under way that says when it is waited for."""

    def __init__(self, said: list):
        self.wait = lambda: said.append("wait")


class Mirror(Collectives):
    """Two ranks of which the other one looks up and sends the same."""

    def __init__(self, said: list):
        super().__init__(2)
        self.said = said

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        half = len(sent) // 2
        received[:half], received[half:] = sent[:half], sent[:half]
        self.said.append("send")
        return Work(self.said)


def test_rows_travel_between_send_and_receive_and_gradients_the_other_way():
    said, leaf = [], torch.randn(6, 4).requires_grad_()
    exchange = ColumnExchange(Mirror(said))
    exchange.send(2 * leaf)
    said.append("other work")
    rows = exchange.receive()
    assert said == ["send", "other work", "wait"] and exchange.sent is None and exchange.under_way == ()
    assert torch.equal(rows, 2 * leaf[:3].repeat(1, 2))
    grad = torch.randn(3, 8)
    rows.backward(grad)
    assert said[3:] == ["send", "wait"]
    torch.testing.assert_close(leaf.grad, 2 * grad[:, :4].repeat(2, 1))


def test_one_rank_sends_nothing():
    exchange, parts = ColumnExchange(Collectives(1)), torch.randn(3, 4)
    exchange.send(parts)
    assert exchange.receive() is parts
