"""States of the training text and what followed them, searched when the model is scored (kNN-LM).

Khandelwal et al. (arXiv 1911.00172) keep a state of every token of the training text. When a text is scored,
what followed similar states has a part of the next token's probability: each state has the weight
e^(γ (cos − 1)) of its angle to the present one. Each state belongs to the nearest of CELLS centres, and a
query sees the states of the PROBES centres that are nearest to it, about 1% of all. This is an inverted file
(Jégou et al., https://doi.org/10.1109/TPAMI.2010.57).

The states are those that training made anyway. A key is what the last layer's MLP reads, in CHANNELS random
directions, with its length divided out, in FP8. So older keys come from other weights than the queries do.
Before a score keys are multiplied by M^(-1/4), where M has their second moments, and their lengths divided
out again. So the directions in which states differ most count less.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backend import EPS
from kernels.fp8.formats import E4M3, has_fp8
from kernels.loss import Mixture
from kernels.ranks.collectives import Collectives, wait
from kernels.retrieval.neighbours import neighbour_sums, neighbour_sums_reference

CHANNELS = 256  # of a key; fewer in a narrower model, and always a power of two
CELLS, PROBES = 1024, 8     # centres; centres whose states a query sees
SHARE = 0.2     # of what followed in the probability, if Σ e^s ≥ 1
RISE = 0.08     # the share's power of a smaller sum
SHARPNESS = 32  # γ
SAMPLE = 2 ** 17    # keys of all ranks that tell how states vary and where centres are
ROUNDS = 5          # of k-means
PART = 2 ** 16      # keys whose cells are found together


class Datastore:
    """This rank's states of the training text and the tokens that followed them.

    `collectives`: of all ranks. Each rank searches its own states for the queries of all ranks.
    """

    def __init__(self, kept: int, text: int, embedding: Tensor, collectives: Collectives):
        """For the last `kept` of the `text` tokens that all ranks read; 0: nothing is kept.

        Each takes 260 bytes where there is FP8. `embedding` (vocabulary, width): a state is as wide.
        """
        width, dtype, device = embedding.shape[1], embedding.dtype, embedding.device
        self.collectives = collectives
        size = min(kept, text) // collectives.size
        self.skipped = text // collectives.size - size      # of the first states
        generator = torch.Generator().manual_seed(1)
        self.channels = min(CHANNELS, 2 ** (width.bit_length() - 1))
        directions = torch.linalg.qr(torch.randn(width, self.channels, generator=generator))[0]
        self.directions = directions.to(device, dtype)      # (width, channels), orthonormal
        self.projection = self.directions.clone()           # of states on keys
        # On the meta device memory is counted: for this machine's GPUs, or for Hopper where there are none.
        old = torch.cuda.is_available() and not has_fp8(torch.device("cuda"))
        self.kind = E4M3 if dtype == torch.bfloat16 and not old else dtype
        self.size, rows = size, size + (size > 0)   # What is not kept goes to the last row.
        self.keys = torch.zeros(rows, self.channels, dtype=self.kind, device=device)
        self.followers = torch.zeros(rows, dtype=torch.int32, device=device)
        self.centres = torch.zeros(CELLS, self.channels, dtype=dtype, device=device)
        # Where each cell's states begin, and those of the last one end.
        self.edges = torch.zeros(CELLS + 1, dtype=torch.int32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # of states seen

    def normed(self, x: Tensor) -> Tensor:
        """States x (n, width) as queries or keys, (n, channels)."""
        return self.key(x @ self.projection)

    def key(self, x: Tensor) -> Tensor:
        """x (n, channels) as keys: with its length divided out, in FP8."""
        return F.rms_norm(x, (self.channels,), eps=EPS).to(self.kind)

    @torch.no_grad()
    def learn(self, x: Tensor, batch) -> None:
        """Keep this rank's states x (n, width) of a training `batch`. Nothing waits for the host."""
        # Warm-up may take more steps than the run.
        place = self.count - self.skipped + torch.arange(len(x), device=x.device)
        places = torch.where((place >= 0) & (place < self.size), place, self.size)
        into, keys = (one.view(torch.int64) for one in (self.keys, self.normed(x)))
        into.index_copy_(0, places, keys)       # eight bytes at a time
        self.followers.index_copy_(0, places, batch.targets)
        self.count += len(x)

    def sort(self) -> None:
        """Even the keys out and put them in the order of their cells. All ranks must call."""
        if not self.size:
            return
        count = min(max(int(self.count) - self.skipped, 0), self.size)
        sample = self.sample(count)
        # With one more key in each direction no moment is 0.
        moments = (sample.T @ sample).double().cpu() + torch.eye(self.channels)
        values, vectors = torch.linalg.eigh(moments)
        # As a symmetric matrix the root is the same on all ranks, whatever signs its vectors have.
        root = ((vectors * (values / values.mean()) ** -0.25) @ vectors.T).to(self.projection)
        self.projection.copy_(self.projection @ root)
        self.divide(self.key(sample.to(root) @ root).to(root))
        cells = torch.empty_like(self.followers[:count])
        for keys, own in zip(self.keys[:count].split(PART), cells.split(PART)):
            keys.copy_(self.key(keys.to(root.dtype) @ root))
            own.copy_(self.products(keys).argmax(1))
        # What has no target comes behind all cells and is never found.
        cells.masked_fill_(self.followers[:count] < 0, CELLS)
        cells, order = cells.sort(stable=True)
        self.followers[:count] = self.followers[:count][order]
        # Eight bytes of each key at a time take little memory. PyTorch gathers 16 much more slowly.
        for column in self.keys[:count].view(torch.int64).unbind(1):
            column.copy_(column[order])
        wanted = torch.arange(CELLS + 1, dtype=torch.int32, device=cells.device)
        self.edges.copy_(torch.searchsorted(cells, wanted))

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
            # A product has no atomic sums, so that all ranks find the same.
            self.centres.copy_(self.key(belongs.to(sample.dtype).T @ sample))

    def products(self, keys: Tensor) -> Tensor:
        """The product of each of `keys` (n, channels) with each centre, (n, CELLS)."""
        return keys.to(self.centres.dtype) @ self.centres.T

    def forget(self) -> None:
        """Begin again, without any state."""
        self.projection.copy_(self.directions)
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
        found = search(q[query].view(self.kind), targets[query], self.edges[cells], self.edges[cells + 1],
                       self.keys, self.followers, SHARPNESS / self.channels)
        sums = torch.empty_like(found)
        sums[order] = found
        sums = sums.view(-1, PROBES, 2).sum(1)
        wait(self.collectives.all_reduce(sums))
        return sums[self.collectives.rank * len(x):][:len(x)]

    def mixed(self, mixture: Mixture | None, x: Tensor, batch) -> Mixture | None:
        """`mixture` (None: the head alone) with what followed similar states.

        Where there are gradients `mixture` stays as it is, and the states are kept.
        """
        if not self.size:
            return mixture
        if torch.is_grad_enabled():
            self.learn(x.detach(), batch)
            return mixture
        matching, every = self.sums(x, batch).unbind(1)
        share = SHARE * every.clamp(max=1) ** RISE
        log_rest = (1 - share).log() + (0 if mixture is None else mixture.log_rest)
        log_odds = (share * matching / every.clamp(min=1e-37)).log() - log_rest
        return Mixture(log_odds if mixture is None else torch.logaddexp(mixture.log_odds, log_odds), log_rest)
