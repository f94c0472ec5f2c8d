"""Batches: which sequences each step trains on, planned a little ahead. scoring.py makes what is scored."""
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.candidates import COUNTED, Importance, sample_candidates, sample_parts
from data.packing import ShardedText, pack, round_up
from data.shards import ShardError, open_shard, shards_in

AHEAD = 4           # steps whose batches are made before they are asked for
MEASURED = 64       # steps of validation text that the bounds of a batch are taken from
SWITCH = 0.0002     # seconds after which Python asks a thread for its lock if another one waits for it
ALIGNED = 32        # numbers: each tensor of a batch starts at a multiple of 128 bytes on a GPU
# Before the run only the validation text tells how much text the cuts drop. If by that a schedule reads more
# text than there is, by more than this share, the run is refused. If by less, the text may still end before
# the run does. How much `drop_repeats` leaves out is not known before. `Loader.read_again` takes it to be at
# most this share.
LACKING = 0.05


@dataclass(frozen=True)
class TextSettings:
    """What the loader needs to know beside the shapes of the steps; all of it are settings of a run."""
    folder: str                 # of token shards (--data_path)
    vocab_size: int             # ids in a shard are below it
    padded_vocab: int           # rows of the head: candidates of a sampled softmax are below it
    document_start: int         # the id that begins every document
    epochs: int                 # how often a token may be seen
    keep_tails: bool            # train on what a cut document leaves over, as sequences of their own
    drop_repeats: int           # leave passages of so many tokens out that the text had before; 0: keep all
    micro_batches: int          # in how many parts the batch of a step is packed, on any number of ranks
    seed: int                   # of the sample of a sampled softmax; nothing else here depends on it
    softmax_tokens: int = 0     # about so many tokens of a micro-batch share a sample; 0: all

    @classmethod
    def of(cls, config) -> "TextSettings":
        """The text settings of a run with the configuration `config`."""
        return cls(config.data_path, *(getattr(config, field.name) for field in fields(cls)[1:]))


class StepShape(NamedTuple):
    """What the loader needs to know of a step."""
    tokens: int                 # of the whole step, over all ranks
    sequence_length: int        # at which documents are cut
    samples: int                # tokens that its sampled softmax draws beside the targets; 0: all logits


class Batch(NamedTuple):
    """Sequences packed end to end. Tensors are of one type, because one kernel copies them all."""
    tokens: Tensor          # (n,) int32
    targets: Tensor         # (n,) int32: the next token; -1 is not scored
    cu_seqlens: Tensor      # (most sequences + 1,) int32: where each sequence starts, then n to the end
    # (parts, k) int32, ascending: tokens whose logits each equal part of the n tokens computes; (0,): all
    candidates: Tensor
    weights: Tensor         # like `candidates`: the bits, int32, of each one's float32 weight in sums
    rows: Tensor            # (n · rows a token,) int32: what tokens read of the n-gram table; (0,): not known
    max_length: int         # no sequence is longer
    read_again: bool = False    # Later steps may read some of this text again.

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All fields from `tokens` to `rows`."""
        return self[:-2]

    @property
    def sample(self) -> tuple[Tensor, Tensor]:
        """The candidates and their weights, both (parts, k), int32 and float32."""
        return self.candidates, self.weights.view(torch.float32)


# Consecutive sequences of a part of the text: the part's number, the first sequence, the end, and how many
# tokens of the first sequence are gone already.
Span = tuple[int, int, int, int]
Sequence = tuple[np.ndarray, int, int]      # a part's tokens, where in them the sequence starts, its length


class Bounds(NamedTuple):
    """Sizes of a micro-batch that hold for a whole stage, so that a captured step fits all of its steps."""
    sequences: int              # A micro-batch with more of them ends early.
    targets: int                # different ones that share a sample, and a document's start; 0: not counted
    read: float = 1.0           # tokens of text used for a trained token, with those that cuts drop


class Plan:
    """Which sequences each step trains on: a function of the step's number, made as far as it is asked for.

    Sequences begin where documents do, are cut to the step's length and packed end to end into micro-batches
    of fixed size, in the order of the shards. The last sequence of a micro-batch is cut to fit. The rest of
    this sequence is dropped or, with `keep_tails`, begins the next micro-batch, so that no token is lost.
    """

    def __init__(self, settings: TextSettings, shapes: Seq[StepShape], split: str,
                 bounds: dict[int, Bounds] | None = None):
        self.settings, self.shapes, self.bounds = settings, shapes, bounds or {}
        self.text = ShardedText(shards_in(settings.folder, split), settings.vocab_size,
                                settings.document_start, settings.keep_tails,
                                settings.drop_repeats if split == "train" else 0,
                                sum(shape.tokens for shape in shapes))
        self.steps: list[list[list[Span]]] = []         # of each step, of each micro-batch
        self.part = 0                                   # of the text, in which the last planned step ends
        self.planner = self.make()

    def of(self, index: int) -> list[list[Span]]:
        """The spans of each micro-batch of the step `index`."""
        # Steps are planned well before they are needed, so that too little text is noticed early. But the
        # step that is needed does not wait for text that only later ones use.
        while len(self.steps) <= min(2 * index + AHEAD, len(self.shapes) - 1):
            if len(self.steps) > index and (self.part + 1) % len(self.text) not in self.text.opened:
                break
            self.steps.append(next(self.planner))
        return self.steps[index]

    def sequences(self, spans: list[Span], cut: int) -> Iterator[Sequence]:
        """The sequences of a micro-batch, whose documents are cut at `cut` tokens."""
        for part, first, last, gone in spans:
            starts, before = self.text.sequences(part, cut)
            tokens = self.text.open(part)[0]
            for start, length in zip(starts[first:last].tolist(), np.diff(before[first:last + 1]).tolist()):
                yield tokens, start + gone, length - gone
                gone = 0

    def make(self) -> Iterator[list[list[Span]]]:
        """The spans of each micro-batch of each step, in order. ShardError if the text ends too soon."""
        part, position, epoch, keep = 0, 0, 0, self.settings.keep_tails
        for index, shape in enumerate(self.shapes):
            micro_batches = []
            for _ in range(self.settings.micro_batches):
                spans, missing = [], shape.tokens // self.settings.micro_batches
                room = self.bounds[shape.tokens].sequences if self.bounds else missing
                while missing > 0 and room > 0:
                    starts, before = self.text.sequences(part, shape.sequence_length)
                    first = int(np.searchsorted(starts, position))
                    # The position may lie inside a sequence: of one that the last micro-batch cut, or of one
                    # that another stage cut at another length.
                    if keep and first and position < starts[first - 1] + before[first] - before[first - 1]:
                        first -= 1
                    if first == len(starts):
                        part, position = (part + 1) % len(self.text), 0
                        self.part = part
                        epoch += part == 0
                        if epoch == self.settings.epochs:
                            repeats = " without the passages that repeat" if self.text.repeats else ""
                            raise ShardError(self.too_few(index, repeats))
                        continue
                    gone = max(position - int(starts[first]), 0)
                    last = int(np.searchsorted(before, before[first] + gone + missing))
                    last = min(last, len(starts), first + room)
                    over = max(int(before[last] - before[first]) - gone - missing, 0)
                    missing -= int(before[last] - before[first]) - gone - over
                    room -= last - first
                    position = int(starts[last]) if last < len(starts) else len(self.text.open(part)[0])
                    position -= over if keep else 0
                    spans.append((part, first, last, gone))
                micro_batches.append(spans)
            yield micro_batches

    def too_few(self, index: int, how: str = "") -> str:
        """The message if the text ends in the step `index`; `how` says how that is known."""
        wanted, folder = [shape.tokens for shape in self.shapes], self.settings.folder
        total = self.text.size()
        lasted = sum(wanted[:index]) or total * self.settings.epochs
        return (f"{folder}: {len(self.text.paths)} training shards with {total:,} tokens last for {index} of "
                f"{len(wanted)} steps{how}; add shards (FineWeb's: python -m data.fineweb), or set "
                f"--epochs {math.ceil(self.settings.epochs * sum(wanted) / lasted)} or lower --steps to "
                f"about {min(lasted / sum(wanted), 1):.0%} of what it is")


def parts_of(settings: TextSettings, shape: StepShape) -> int:
    """Into how many parts a micro-batch of this step is split, each with its own sample of candidates."""
    return sample_parts(shape.tokens // settings.micro_batches, settings.softmax_tokens)


def measure_bounds(settings: TextSettings, shapes: Seq[StepShape]) -> dict[int, Bounds]:
    """The bounds of a micro-batch, by tokens of the step, from the validation text.

    A captured step needs the bounds before the run, but the training text is first read on the clock. So they
    come from a text of the same kind. The bounds hold for any text: a micro-batch with more sequences ends
    early, and one with more different targets draws fewer others as candidates.
    """
    bounds = {}
    # It matters whether a step draws samples, not how many: without samples no targets are counted.
    for shape in dict.fromkeys(shape._replace(samples=min(shape.samples, 1)) for shape in shapes):
        plan = Plan(replace(settings, epochs=-1), [shape] * MEASURED, "val")
        sequences, targets, read = 0, 0, 0
        for spans in (spans for step in plan.make() for spans in step):
            read += sum(plan.text.length(part, first, last, shape.sequence_length)
                        for part, first, last, _ in spans)
            sequences = max(sequences, sum(last - first for _, first, last, _ in spans))
            if shape.samples:
                pieces = [text[start + 1:start + 1 + length] for text, start, length
                          in plan.sequences(spans, shape.sequence_length)]
                parts = np.array_split(np.concatenate(pieces), parts_of(settings, shape))
                targets = max(targets, *(int(np.count_nonzero(np.bincount(part))) + 1 for part in parts))
        old = bounds.get(shape.tokens, Bounds(0, 0))
        bounds[shape.tokens] = Bounds(max(old.sequences, sequences + sequences // 4 + 8),
                                      max(old.targets, targets),
                                      1.0 if settings.keep_tails else read / (shape.tokens * MEASURED))
    return bounds


class Loader:
    """Training batches as a function of the step's number alone, on any number of ranks and for any timing.

    Only the sample of a sampled softmax depends on the seed as well. So the position in the data needs no
    saving. No training text is read before the first batch is asked for.
    """

    def __init__(self, settings: TextSettings, shapes: Seq[StepShape], rank: int, ranks: int,
                 device: torch.device, split: str = "train", bounds: dict[int, Bounds] | None = None):
        """`shapes`: of every step of the run. `bounds` are measured if they are not given.

        Raises ShardError where the shards are bad or hold fewer tokens than the steps take.
        """
        self.settings, self.shapes, self.rank, self.ranks, self.device = settings, shapes, rank, ranks, device
        self.bounds = bounds or measure_bounds(settings, shapes)
        self.plan = Plan(settings, shapes, split, self.bounds)
        taken = np.array([shape.tokens for shape in shapes])
        read = taken * [self.bounds[shape.tokens].read for shape in shapes]
        total = self.plan.text.size()
        self.epochs = float(read.sum() / total)     # if training documents are as long as the scored ones
        for each, text, how in ((taken, total, ""),
                                (read, total * (1 + LACKING), " if documents are as long as in validation")):
            lasting = int(np.searchsorted(each.cumsum(), text * settings.epochs, "right"))
            if lasting < len(shapes) and settings.epochs > 0:
                raise ShardError(self.plan.too_few(lasting, how))
        # Whether each step's text is read again: if the run reads on for one whole reading, at the least.
        again = np.cumsum(read) - read + total * (1 - LACKING) < read.sum()
        self.read_again = (again & (settings.epochs > 1)).tolist()

    def rehearsal(self, shapes: Seq[StepShape]) -> "Loader":
        """Batches of the same form from the validation text, again and again if it is short."""
        settings = replace(self.settings, epochs=-1)
        return Loader(settings, shapes, self.rank, self.ranks, self.device, "val", self.bounds)

    @property
    def candidates(self) -> dict[tuple[int, int], int]:
        """Candidates of a part of a micro-batch, by tokens and samples of the step; {}: no step draws any."""
        return {(shape.tokens, shape.samples): self.candidates_of(shape)
                for shape in dict.fromkeys(self.shapes) if shape.samples}

    def candidates_of(self, shape: StepShape) -> int | None:
        """For how many tokens a part of a micro-batch of this step computes logits; None: for all."""
        wanted = round_up(self.bounds[shape.tokens].targets + shape.samples, 256)
        return min(wanted, self.settings.padded_vocab) if shape.samples else None

    @cached_property
    def importance(self) -> Importance:
        """By how much a token is likelier than others to be a candidate, from the text's beginning."""
        # Not by `self.plan.text`, whose parts another thread reads meanwhile.
        text = open_shard(self.plan.text.paths[0])
        return Importance(np.asarray(text[:COUNTED]), self.settings.padded_vocab)

    def most(self, shape: StepShape) -> int:
        """Sequences that a micro-batch can hold: those of the text, and what fills up one that ends early."""
        tokens = shape.tokens // self.settings.micro_batches
        return self.bounds[shape.tokens].sequences + math.ceil(tokens / shape.sequence_length)

    def batches(self, index: int) -> list[Batch]:
        """This rank's micro-batches of a step, on the host."""
        shape, settings = self.shapes[index], self.settings
        n, on_each = shape.tokens // settings.micro_batches, settings.micro_batches // self.ranks
        batches, count = [], self.candidates_of(shape)
        # Pairs are counted before the plan asks for the first part, which another thread reads meanwhile.
        importance = self.importance if count else None
        for i in range(self.rank * on_each, (self.rank + 1) * on_each):
            sequences = self.plan.sequences(self.plan.of(index)[i], shape.sequence_length)
            batch = make_batch(sequences, n, self.most(shape), shape.sequence_length, settings.document_start)
            batch = batch._replace(read_again=self.read_again[index])
            if importance:
                generator = np.random.default_rng([settings.seed % 2**32, index, i])
                parts = (x.numpy().reshape(parts_of(settings, shape), -1) for x in batch[:2])
                drawn = zip(*(sample_candidates(targets, count, importance.of(tokens), generator)
                              for tokens, targets in zip(*parts)))
                candidates, weights = (torch.from_numpy(np.stack(each)) for each in drawn)
                batch = batch._replace(candidates=candidates, weights=weights.view(torch.int32))
            batches.append(batch)
        return batches

    def read_ahead(self, part: int) -> None:
        """Read a part of the text, unless all steps are planned without it."""
        if len(self.plan.steps) < len(self.shapes):
            self.plan.text.open(part)

    def prefetch(self, indices: Collection[int],
                 prepare: Callable[[Batch], Batch] = lambda batch: batch) -> Iterator[list[Batch]]:
        """The batches of these steps, made a few ahead by a thread that also brings them to a GPU.

        On a GPU that thread also calls `prepare` for each batch, on the stream of the copies. So the work
        that `prepare` launches runs beside earlier steps. On a CPU `prepare` is not called.
        The memory of a batch is written over a few steps later, after all work that was launched before the
        next batch was asked for.
        """
        device, rooms = self.device, []
        if device.type == "cuda":
            # All of a step's tokens and targets, and what each micro-batch of this rank has beside them.
            tokens, on_each = max(self.bounds), self.settings.micro_batches // self.ranks
            drawn = max(parts_of(self.settings, shape) * (self.candidates_of(shape) or 0)
                        for shape in dict.fromkeys(self.shapes))
            others = max(map(self.most, self.shapes)) + 1 + 2 * drawn + 5 * ALIGNED
            largest = 2 * tokens // self.ranks + on_each * others
            rooms, stream = [Room(largest, device) for _ in range(AHEAD + 2)], copy_stream(device)

        def make(index: int, room: Room | None) -> list[Batch]:
            batches = self.batches(index)
            return room.bring(batches, stream, prepare) if room else batches

        def deliver() -> Iterator[list[Batch]]:
            rest, in_turn, ahead = iter(indices), cycle(rooms or [None]), deque()
            with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as opener, ExitStack() as end:
                # By default Python lets a thread wait 5 ms for its lock, a third of a short step. The setting
                # stays: several loaders may be at work, and none knows when the last one ends.
                sys.setswitchinterval(SWITCH)
                # Parts that no step has come to are not worth waiting for.
                end.callback(opener.shutdown, wait=False, cancel_futures=True)
                # Another thread reads ahead, since a part may take longer than a step.
                opener.map(self.read_ahead, range(len(self.plan.text)))
                while True:
                    wanted = islice(rest, AHEAD + 1 - len(ahead))
                    ahead.extend((thread.submit(make, index, room), room)
                                 for index, room in zip(wanted, in_turn))
                    if not ahead:
                        return
                    made, room = ahead.popleft()
                    batches = made.result()
                    if room:
                        room.ready.wait()
                        # Rows may have been allocated on the stream of the copies. Their memory must not be
                        # used again while a step still reads them.
                        for batch in batches:
                            batch.rows.record_stream(torch.cuda.current_stream())
                    yield batches
                    if room:
                        room.left.record()
        return deliver()


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The process's stream for batches on their way.

    torch hands out 32 streams in turn. If each loader took a new one, some loader would in time get the
    stream on which a step is being recorded as a graph, and the recording would fail.
    """
    return torch.cuda.Stream(device)


class Room:
    """Memory for the batches of one step, as one tensor in pinned memory and one on a GPU."""

    def __init__(self, size: int, device: torch.device):
        self.here = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.there = torch.empty(size, dtype=torch.int32, device=device)
        # Events: for `ready`, the batches are on the GPU and prepared; for `left`, their last reader has
        # ended. The first reader is whoever had this memory before, such as a step of an earlier loader that
        # still runs.
        self.ready, self.left = torch.cuda.Event(), torch.cuda.Event()
        self.left.record()

    def bring(self, batches: list[Batch], stream: torch.cuda.Stream,
              prepare: Callable[[Batch], Batch]) -> list[Batch]:
        """Copy the batches to the GPU in one piece and prepare them, on `stream`. `ready` marks the end."""
        tensors = [x for batch in batches for x in batch.tensors]
        sizes = [round_up(x.numel(), ALIGNED) for x in tensors]
        total = sum(sizes)
        # The copy of what this memory held before has ended.
        self.ready.synchronize()
        for piece, x in zip(self.here[:total].split(sizes), tensors):
            piece[:x.numel()].copy_(x.flatten())
        with torch.cuda.stream(stream):
            stream.wait_event(self.left)
            self.there[:total].copy_(self.here[:total], non_blocking=True)
            arrived = iter(piece[:x.numel()].view(x.shape)
                           for piece, x in zip(self.there[:total].split(sizes), tensors))
            batches = [prepare(Batch(*(next(arrived) for _ in batch.tensors), *batch[-2:]))
                       for batch in batches]
            self.ready.record()
        return batches


def make_batch(sequences: Iterable[Sequence], n: int, most: int, longest: int, document_start: int) -> Batch:
    """A batch of n tokens without candidates and rows; see `pack`."""
    arrays = pack(sequences, n, most, longest, document_start)
    none = torch.empty(0, dtype=torch.int32)
    return Batch(*map(torch.from_numpy, arrays), none, none, none, longest)


def to_device(batch: Batch, device: torch.device, copy: bool = False) -> Batch:
    """The batch on `device`. With `copy`, tensors that are there already are copied as well."""
    return Batch(*(x.to(device, non_blocking=True, copy=copy) for x in batch.tensors), *batch[-2:])
