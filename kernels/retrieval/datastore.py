"""States of the training text and what followed them, searched when the model is scored (kNN-LM).

Khandelwal et al. (arXiv 1911.00172) keep a state of every token of the training text. When a text is scored,
what followed similar states has a part of the next token's probability: each state has the weight
e^(γ (cos − 1)) of its angle to the present one. Each state belongs to the nearest of CELLS centres, and a
query sees the states of the PROBES centres that are nearest to it, about 1.6% of all. This is an inverted
file (Jégou et al., https://doi.org/10.1109/TPAMI.2010.57).

The states are those that training made anyway: what the last layer's MLP reads. A key is the state in
CHANNELS directions, scaled to the norm √CHANNELS and rounded to FP8. The directions are those in which states
vary most just before the first one is kept: 0.005 better than random ones. Before a score keys are multiplied
by M^POWER, where M are their second moments, and scaled again. So the directions in which keys vary most
count less. A further score first undoes what the last one did.

Keys come from the weights of their step, and queries from the final ones. So the older a key is, the less
even a right one is like the query. Therefore its weight is multiplied by e^(DRIFT a), where a is the share of
the training that came after it. That and a larger γ are worth 0.004. The states of the first steps are not
kept, since they gain nothing. Below, s = γ (cos − 1) + DRIFT a is the logarithm of a state's weight.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EPS
from kernels.fp8.formats import E4M3, has_fp8
from kernels.loss import Mixture
from kernels.ranks.collectives import Collectives, wait
from kernels.retrieval.cells import settle, settle_reference
from kernels.retrieval.neighbours import neighbour_sums, neighbour_sums_reference

CHANNELS = 256  # of a key; fewer in a narrower model, and always a power of two
POWER = -1 / 4  # of the keys' second moments M
CELLS, PROBES = 1024, 16    # centres; centres whose states a query sees
SHARE = 0.27    # of what followed similar states in the probability, where Σ e^s ≥ 1
RISE = 0.1      # below that the share is SHARE (Σ e^s)^RISE
SHARPNESS = 40  # γ
DRIFT = 5.5     # how much larger s is for a state from the run's start than for one from its end
FIRST = 1 / 8   # the share of the training whose states are never kept
SAMPLE = 2 ** 17    # keys, over all ranks, from which M and the centres are made
NEWEST = 2 ** 13    # states, over all ranks, from which directions are chosen
ROUNDS = 5          # of k-means


class Datastore:
    """This rank's states of the training text and the tokens that followed them.

    `collectives`: of all ranks. Each rank searches its own states for the queries of all ranks.
    """

    def __init__(self, kept: int, tokens: int, embedding: Tensor, collectives: Collectives):
        """For the last `kept` of the `tokens` that all ranks read, but at most 1 − FIRST of them; 0: none.

        A state takes 268 bytes where there is FP8, and 16 more while states are sorted. `embedding`
        (vocabulary, width): a state is as wide.
        """
        width, dtype, device = embedding.shape[1], embedding.dtype, embedding.device
        self.collectives = collectives
        size = min(kept, tokens - round(FIRST * tokens)) // collectives.size
        self.drift = DRIFT * collectives.size / tokens      # of each row
        self.skipped = tokens // collectives.size - size    # this rank's first states, which are not kept
        generator = torch.Generator().manual_seed(1)
        self.channels = min(CHANNELS, 2 ** (width.bit_length() - 1))
        directions = torch.linalg.qr(torch.randn(width, self.channels, generator=generator))[0]
        self.directions = directions.to(device, dtype)      # (width, channels): random, orthonormal
        self.projection = self.directions.clone()           # of states on keys
        # On the meta device memory is counted: for this machine's GPUs, or for Hopper where there are none.
        old = torch.cuda.is_available() and not has_fp8(torch.device("cuda"))
        self.kind = E4M3 if dtype == torch.bfloat16 and not old else dtype
        self.size, rows = size, size + (size > 0)   # What is not kept goes to the last row.
        self.keys = torch.zeros(rows, self.channels, dtype=self.kind, device=device)
        self.followers = torch.zeros(rows, dtype=torch.int32, device=device)
        self.centres = torch.zeros(CELLS, self.channels, dtype=self.kind, device=device)
        # After `sort`, columns edges[c] to edges[c + 1] of this list have the rows of cell c's keys, and the
        # followers of these.
        self.listed = torch.zeros(2, size, dtype=torch.int32, device=device)
        self.edges = torch.zeros(CELLS + 1, dtype=torch.int32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # of states seen, kept or not
        self.passed = 0     # what `count` is before a step, known to the host
        self.undo: Tensor | None = None     # the inverse of M^POWER at the last sort; None: not sorted yet
        some = NEWEST // collectives.size * (size > 0)
        self.newest = torch.zeros(some, width, dtype=dtype, device=device)      # of the last states

    def normed(self, x: Tensor) -> Tensor:
        """States x (n, width) as queries or keys, (n, channels)."""
        return self.key(x @ self.projection)

    def key(self, x: Tensor) -> Tensor:
        """x (n, channels) as keys: with its length divided out, in FP8."""
        return F.rms_norm(x, (self.channels,), eps=EPS).to(self.kind)

    @torch.no_grad()
    def learn(self, x: Tensor, batch) -> None:
        """Keep this rank's states x (n, width) of a training `batch`. Nothing waits for the host."""
        # States that are not kept go to the last row, as do those beyond the run: warm-up may be longer.
        place = self.count - self.skipped + torch.arange(len(x), device=x.device)
        places = torch.where((place >= 0) & (place < self.size), place, self.size)
        into, keys = (one.view(torch.int64) for one in (self.keys, self.normed(x)))
        into.index_copy_(0, places, keys)       # eight bytes at a time
        self.followers.index_copy_(0, places, batch.targets)
        self.count += len(x)
        rows = len(self.newest)
        some = x[::max(len(x) // rows, 1)][:rows]
        self.newest[:len(some)] = some

    def before(self, tokens: int) -> None:
        """To call before each step, of so many `tokens` of all ranks. All ranks must call."""
        own = tokens // self.collectives.size
        # The step makes the first state that is kept.
        if self.size and self.passed <= self.skipped < self.passed + own:
            self.choose()
        self.passed += own

    @torch.no_grad()
    def choose(self) -> None:
        """Project on the directions in which the newest states vary most, by subspace iteration."""
        states = self.collectives.all_gathered(self.newest).float()
        states = F.rms_norm(states, states.shape[1:], eps=EPS)
        moments, found = states.T @ states / len(states), self.directions.float()
        for _ in range(2):
            found = torch.linalg.qr(moments @ (moments @ found)).Q
        self.projection.copy_(self.of_rank_0(found.to(self.projection)))

    def sort(self) -> None:
        """Even the keys out and list them in the order of their cells. All ranks must call."""
        count = min(max(int(self.count) - self.skipped, 0), self.size)
        if not count:
            return
        sample = self.sample(count)
        plain = sample if self.undo is None else F.rms_norm(sample @ self.undo.float(), sample.shape[1:])
        # The identity keeps moments above 0. It is little beside them, for they sum up to SAMPLE · channels.
        values, vectors = torch.linalg.eigh((plain.T @ plain).double().cpu() + torch.eye(self.channels))
        factors = (values / values.mean()) ** POWER
        both = torch.cat([(vectors * each) @ vectors.T for each in (factors, 1 / factors)])
        root, undo = self.of_rank_0(both.to(self.projection)).split(self.channels)
        change = root if self.undo is None else self.undo @ root
        self.undo = undo
        self.projection.copy_(self.projection @ change)
        self.divide(self.key(sample.to(change) @ change).to(change))
        place = settle_reference if self.keys.device.type == "cpu" else settle
        cells = place(self.keys[:count], change, self.centres)
        # States without a target get a cell behind all others, which is never searched.
        cells.masked_fill_(self.followers[:count] < 0, CELLS)
        cells, order = cells.sort(stable=True)
        self.listed[0, :count] = order
        torch.index_select(self.followers, 0, order, out=self.listed[1, :count])
        wanted = torch.arange(CELLS + 1, dtype=torch.int32, device=cells.device)
        self.edges.copy_(torch.searchsorted(cells, wanted))

    def of_rank_0(self, x: Tensor) -> Tensor:
        """That rank's x, which has one shape on all ranks."""
        return self.collectives.all_gathered(x.contiguous())[:len(x)]

    def sample(self, count: int) -> Tensor:
        """SAMPLE of the first `count` keys of all ranks, (SAMPLE, channels) float32."""
        places = torch.arange(SAMPLE // self.collectives.size, device=self.keys.device)
        own = self.keys.view(torch.uint8)[places * count // len(places)]
        return self.collectives.all_gathered(own).view(self.kind).float()

    def divide(self, sample: Tensor) -> None:
        """Put the centres where the keys are, by spherical k-means of a `sample` (n, channels)."""
        self.centres.copy_(sample[::len(sample) // CELLS][:CELLS])
        number = torch.arange(CELLS, device=sample.device)
        for _ in range(ROUNDS):
            belongs = self.products(sample).argmax(1, keepdim=True) == number
            self.centres.copy_(self.key(belongs.to(sample.dtype).T @ sample))
        self.centres.copy_(self.of_rank_0(self.centres.view(torch.uint8)).view(self.kind))

    def products(self, keys: Tensor) -> Tensor:
        """The product of each of `keys` (n, channels) with each centre, (n, CELLS)."""
        dtype = self.projection.dtype
        return keys.to(dtype) @ self.centres.to(dtype).T

    def rehearse(self) -> None:
        """Choose directions and sort some rows, so that first uses are off the clock. Then begin again."""
        if self.size:
            self.choose()
        self.count.fill_(self.skipped + min(self.size, SAMPLE))
        self.sort()
        self.forget()

    def forget(self) -> None:
        """Begin again, without any state."""
        self.projection.copy_(self.directions)
        self.passed, self.undo = 0, None
        self.count.zero_()
        self.edges.zero_()

    @torch.no_grad()
    def sums(self, x: Tensor, batch) -> Tensor:
        """For each token of `batch` Σ e^s of states whose follower is its target, and of all, (n, 2).

        `x` (n, width): its states. All ranks must call.
        """
        own = self.normed(x)
        q, cells, targets = map(self.collectives.all_gathered, (
            own.view(torch.uint8), self.products(own).topk(PROBES).indices, batch.targets))
        cells, order = cells.flatten().sort()
        query = order // PROBES
        search = neighbour_sums_reference if x.device.type == "cpu" else neighbour_sums
        found = search(q[query].view(self.kind), targets[query], self.edges[torch.stack([cells, cells + 1])],
                       self.keys, self.listed, SHARPNESS / self.channels, self.drift)
        sums = torch.empty_like(found)
        sums[order] = found * (self.drift * (self.count - self.skipped).clamp(max=self.size)).exp()
        sums = sums.view(-1, PROBES, 2).sum(1)
        wait(self.collectives.all_reduce(sums))
        return sums[self.collectives.rank * len(x):][:len(x)]

    def mixed(self, mixture: Mixture | None, x: Tensor, batch) -> Mixture | None:
        """`mixture` (None: the head alone) with what followed similar states.

        In training, where gradients are enabled, x is stored instead and `mixture` is returned.
        """
        if not self.size:
            return mixture
        if torch.is_grad_enabled():
            self.learn(x.detach(), batch)
            return mixture
        matching, every = self.sums(x, batch).unbind(1)
        share = SHARE * every.clamp(max=1) ** RISE
        # A sum is below that only if all states that x sees point away from it, and then its share is tiny.
        return Mixture.after(mixture, share * matching / every.clamp(min=1e-37), 1 - share)
