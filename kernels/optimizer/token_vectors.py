"""Tokens that stand among like neighbours share part of their updates, so rare ones learn from common ones.

    u_t = 0.8 adam(g_t) + 0.2 √d v_t polar(M),    M = the mean over steps of Σ_t v_tᵀ g_t

g_t (d,) is the gradient of token t's row in a table of tokens: the embedding, the head or a value embedding.
v_t (k,) is a fixed vector of length 1. Tokens with like neighbours have like vectors, such as " Paris" and
" London". It is as if each row were a sum of its own part and of v_t F, with one matrix F (k, d) for all
tokens, and as if Adam trained the first and Muon the second. But no F is stored: what moves it is added to
the rows. Muon matters here: with Adam for F a run ended 0.12 higher, with Muon 0.04 lower (records/ideas.md).

The vectors come from the first 40 million tokens of the training text, in a fraction of a second when the run
starts, on the clock. For each token it is counted which common tokens stand one and two places before and
behind it. The shares of these neighbours, as square roots, are reduced to k numbers by a singular value
decomposition (Hellinger PCA: Lebret and Collobert, arXiv 1312.5542; by random projections: Halko et al.,
arXiv 0909.4061). A rare token has few neighbours, so those of its class count a little as well.

Ranks share the work by columns of the counts, and later by rows of the tables. In an update they sum M.
"""
import numpy as np
import torch
from torch import Tensor

from kernels.optimizer.adam import Shared
from kernels.optimizer.coefficients import lower_end, polar_express
from kernels.ranks.collectives import wait

COUNTED = 40_000_000        # tokens of text
PLACES = -2, -1, 1, 2       # where a neighbour stands
NEIGHBOURS = 6144           # the commonest tokens, which are counted as neighbours
PRIOR = 50.0                # A token counts as seen so often more, with the neighbours of its class.
SHARE = 0.2                 # of a token's update that comes by its vector
SPARE = 64                  # directions that are found beside the wanted ones
PIECE = 2 ** 24             # tokens that are counted at a time, for memory
TRIPLES = polar_express(4, lower_end("aol", 4))


def count_pairs(tokens: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    """How often each (token, column) occurs, int32 of this shape. A column beyond it is not counted."""
    rows, width = shape[0], shape[1] + 1
    counts = torch.zeros(rows * width, dtype=torch.int32, device=tokens.device)
    for token, column in zip(tokens.split(PIECE), columns.split(PIECE)):
        pairs = token.long() * width + column
        counts.index_add_(0, pairs, counts.new_ones(()).expand(len(pairs)))
    return counts.view(rows, width)[:, :-1]


def profiles(counts: Tensor, seen: Tensor, classes: Tensor | None) -> Tensor:
    """√p(neighbour | token) − √p(neighbour), (tokens, neighbours) float32.

    `counts` is like it, `seen` (tokens,) float32 says how often each token occurred, and `classes` (tokens,)
    int64 which one it is like.
    """
    everywhere = counts.sum(0) / seen.sum()
    expected = everywhere
    if classes is not None:
        of_class = torch.zeros_like(counts, dtype=torch.float32).index_add_(0, classes, counts.float())
        class_seen = torch.zeros_like(seen).index_add_(0, classes, seen)
        expected = ((of_class + PRIOR * everywhere) / (class_seen + PRIOR)[:, None])[classes]
    shares = (counts + PRIOR * expected) / (seen + PRIOR)[:, None]
    return shares.sqrt_() - everywhere.sqrt()


def neighbour_vectors(text: Tensor, vocabulary: int, entries: int, classes: Tensor | None, world) -> Tensor:
    """A vector of length 1 for each token, (vocabulary, entries) float32.

    A token without neighbours has one near 0: it is shorter than 0.01 before it would get its length.
    `text` (n,) int32 is the same on every rank; so is the result, and nearly so on other numbers of ranks.
    `classes`: as in `profiles`. `world`: the program's ranks.
    """
    ranks, device = world.size, text.device
    seen = text.bincount(minlength=vocabulary).float()
    neighbours = min(NEIGHBOURS, vocabulary)
    mine = seen.argsort(descending=True, stable=True)[:neighbours][world.rank::ranks]
    column = torch.full((vocabulary,), len(mine), dtype=torch.int32, device=device)
    column[mine] = torch.arange(len(mine), dtype=torch.int32, device=device)
    weight = (seen / seen.sum()).clamp_min(1e-7).pow(0.25)[:, None]     # Common tokens count more.
    x = torch.empty(vocabulary, len(PLACES) * len(mine), device=device)
    for place, part in zip(PLACES, x.chunk(len(PLACES), 1)):
        tokens, others = (text[:-place], text[place:]) if place > 0 else (text[-place:], text[:place])
        counts = count_pairs(tokens, column[others], part.shape)
        torch.mul(profiles(counts, seen, classes), weight, out=part)

    def product(b: Tensor) -> Tensor:
        return world.collectives.summed(x @ b)

    generator = torch.Generator(device).manual_seed(0)
    most = min(entries + SPARE, vocabulary)
    start = torch.randn(len(PLACES), neighbours, most, device=device, generator=generator)
    found = product(start[:, world.rank::ranks].flatten(0, 1))
    for _ in range(2):
        found = product(x.mT @ torch.linalg.qr(found)[0])
    basis = torch.linalg.qr(found)[0]
    inner = x.mT @ basis
    squares, turn = torch.linalg.eigh(world.collectives.summed(inner.mT @ inner))
    # With σ the singular values, √σ weighs the directions. They are mixed, because AOL wants rows alike.
    vectors = basis @ (turn * squares.clamp_min(0).pow(0.25))[:, -entries:] / weight
    mixed = vectors @ torch.linalg.qr(torch.randn(entries, entries, device=device, generator=generator))[0]
    return torch.nn.functional.normalize(mixed, dim=1, eps=0.01)        # 0.01: see the docstring.


class TokenVectors:
    """The vectors, as `rows` of a table of tokens (padded vocabulary, entries). They are 0 until `find`."""

    def __init__(self, entries: int, vocabulary: int, rows: int, classes: Tensor | None,
                 dtype: torch.dtype, device: torch.device):
        self.vocabulary, self.classes = vocabulary, None if classes is None else classes.to(device).long()
        self.rows = torch.zeros(rows, entries, dtype=dtype, device=device)

    @classmethod
    def of(cls, config, classes: Tensor | None, dtype: torch.dtype, device: torch.device):
        """Those of a run with the program's settings `config`; None if it has none."""
        sizes = config.token_vectors, config.vocab_size, config.padded_vocab
        return cls(*sizes, classes, dtype, device) if config.token_vectors else None

    @torch.no_grad()
    def find(self, text: np.ndarray, world) -> None:
        """From the text's tokens (n,) uint16."""
        tokens = torch.from_numpy(text.view(np.int16).copy()).to(self.rows.device).int() & 0xFFFF
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")      # TF32
        try:
            self.rows[:self.vocabulary] = neighbour_vectors(
                tokens, self.vocabulary, self.rows.shape[1], self.classes, world)
        finally:
            torch.set_float32_matmul_precision(before)

    def working_bytes(self, ranks: int) -> int:
        """About what `find` holds at most on each of so many GPUs."""
        numbers = self.vocabulary * min(NEIGHBOURS, self.vocabulary) // ranks
        return 4 * (5 + len(PLACES)) * numbers + 40 * PIECE


class VectorUpdates:
    """The part of a group's updates that comes by the tokens' vectors."""

    def __init__(self, group, world):
        """For the tables (rows, width) of tokens of one of the program's groups. `world`: its ranks."""
        self.collectives, self.beta, tables = world.collectives, group.betas[0], group.params
        self.rows = group.vectors.rows.chunk(world.size)[world.rank]    # of tokens that this rank updates
        shape = len(tables), self.rows.shape[1], tables[0].shape[1]
        self.momentum = torch.zeros(shape, device=tables[0].device)     # the same on all ranks

    def update(self, newton_schulz, grad: Tensor, finite: Tensor) -> Shared:
        """For this rank's rows of the tables, of which `grad` (numbers,) is the summed gradient.

        `newton_schulz`: the program's. `finite`: as in Adam.
        """
        tables, _, width = self.momentum.shape
        grads = grad.view(tables, -1, width)
        sums = self.rows.mT @ grads
        wait(self.collectives.all_reduce(sums))
        self.momentum.lerp_(torch.where(finite, sums, 0).float(), 1 - self.beta)
        direction = newton_schulz(self.momentum.to(grad.dtype), TRIPLES, "aol")
        return Shared(1 - SHARE, (self.rows @ direction * (SHARE * width ** 0.5)).flatten())
