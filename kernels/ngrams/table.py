"""The table of n-grams as a module of the model; README.md explains it."""
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.ngrams.exchange import ColumnExchange, whole_rows
from kernels.ngrams.row_gradients import no_gradients
from kernels.ngrams.shared_gradient import NGramValues
from kernels.ranks.collectives import Collectives, wait
from kernels.sequence import previous

HASH = 998_244_353, 1_000_003, 2_654_435_761, 3_266_489_917, 668_265_263, 374_761_393


def ngram_index(tokens: Tensor, is_start: Tensor, lengths: tuple[int, ...], count: int) -> Tensor:
    """Row numbers of the n-grams that end at each token, (n len(lengths),) int32, token by token."""
    token, index, found = tokens.long() + 1, 0, []
    for factor in HASH[:max(lengths)]:
        found.append(index := token * factor ^ index)
        token = previous(token, is_start)
    return torch.stack([found[length - 1] % count for length in lengths], 1).flatten().int()


def table_row_bytes(head_dim: int, block: int, ranks: int) -> int:
    columns = head_dim // ranks
    return 2 * columns + 4 * (columns // block) + 4 + 4


class NGrams(nn.Module):
    def __init__(self, lengths: tuple[int, ...], rows: int, head_dim: int, layers: int, collectives: Collectives,
                 dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.lengths, self.collectives, self.row_gradients = lengths if rows else (), collectives, None
        columns = head_dim // collectives.size
        self.table = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device)) if self.lengths else None
        self.scales = nn.Parameter(torch.zeros(layers, len(lengths), device=device)) if self.lengths else None

    def initialise(self) -> None:
        if self.lengths:
            self.table.zero_()
            self.scales.fill_(0.05)

    def all_gather(self, x: Tensor) -> Tensor:
        size = self.collectives.size
        whole = x.new_empty(size * len(x), *x.shape[1:]) if size > 1 else x
        wait(Collectives(size).all_gather(whole, x))
        return whole

    def index(self, hash_rows: Callable, tokens: Tensor, is_start: Tensor) -> Tensor | None:
        if not self.lengths:
            return None
        return self.all_gather(hash_rows(tokens, is_start, self.lengths, len(self.table)))

    def send(self, index: Tensor | None, lookup: Callable, sort: Callable, share: Callable) -> "InFlight":
        sent = InFlight(self, share)
        if index is not None:
            sent.exchange.send(lookup(self.table, sort(index), self.row_gradients))
        return sent

    def numbers_elsewhere(self) -> int:
        return self.table.numel() * (self.collectives.size - 1) if self.lengths else 0

    def optimizer_state(self, block: int, capacity: int | None) -> tuple:
        rows, width = self.table.shape
        second = torch.zeros(rows, width // block, device=self.table.device)
        last, steps = torch.zeros(rows, device=self.table.device), torch.zeros((), device=self.table.device)
        if capacity is None:
            self.table.grad = torch.zeros_like(self.table)
        else:
            self.row_gradients = no_gradients(self.table.data, capacity)
        return self.table.data, self.row_gradients or self.table.grad, second, last, steps

    def whole_table(self) -> Tensor:
        columns, part, size = self.table.detach(), 2 ** 20, self.collectives.size
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        table = columns.new_empty(len(columns) * first, columns.shape[1] * size, device="cpu")
        for i in range(0, len(columns), part):
            rows = whole_rows(self.all_gather(columns[i:i + part]), size)
            table[i:i + part].copy_(rows[:len(table)])
        return table


class InFlight:
    def __init__(self, ngrams: NGrams, share: Callable):
        self.ngrams, self.share, self.exchange, self.shared = ngrams, share, ColumnExchange(ngrams.collectives), None

    def values(self, layer: int) -> NGramValues | None:
        if not self.ngrams.lengths:
            return None
        if self.shared is None:
            rows = self.exchange.receive().unflatten(0, (-1, len(self.ngrams.lengths)))
            self.shared = self.share(rows, self.ngrams.scales)
        return self.shared[layer]
