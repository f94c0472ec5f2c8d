"""Batches: which sequences of the shards each step trains on, planned before the run, and the validation text in chunks."""
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import TYPE_CHECKING, Collection, Iterable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.packing import ShardedText, cut_documents, pack, sample_columns
from data.shards import ShardError, document_starts, open_shard, shards_in

if TYPE_CHECKING:
    from train_gpt import Config, Schedule, Step, World

AHEAD = 4           # steps whose batches are made before they are taken
ALIGNED = 32        # numbers: each tensor of a batch starts at a multiple of 128 bytes on a GPU


class Batch(NamedTuple):
    """Sequences packed end to end. `cu_seqlens` has a fixed length; entries past the last sequence repeat `tokens`' length."""
    tokens: Tensor          # (n,) int32
    targets: Tensor         # (n,) int32: the next token; -1 is not scored
    cu_seqlens: Tensor      # (sequences + 1,) int32: where each sequence starts, then n
    columns: Tensor         # (k,) int32, ascending: tokens whose logits are computed, all targets among them; (0,): all tokens
    max_length: int         # no sequence is longer. All before it are tensors


Span = tuple[int, int, int, int]            # a shard, the first and the end of consecutive sequences of it, how much of the first is gone
Sequence = tuple[np.ndarray, int, int]      # a shard's tokens, where in them it starts, its length


class Loader:
    """Training batches as a function of the step's number alone: the same on any number of ranks and for any timing.

    Sequences begin where documents do, are cut to the step's length and packed end to end into micro-batches of fixed size,
    in the order of the shards; the last one of a micro-batch is cut to fit, and what it leaves over is dropped or, with
    `keep_tails`, begins the next one, so that no token is lost. The whole plan, which sequences go where, is made
    before the run: so too little data is an error then, the number of sequences in a batch has an exact bound, and the
    position in the data needs no saving. Only which tokens a sampled softmax draws (`columns`) depends on the seed as well.
    """

    def __init__(self, config: "Config", schedule: "Schedule", world: "World"):
        self.config, self.schedule, self.world = config, schedule, world
        self.text = ShardedText(shards_in(config.data_path, "train"), config.vocab_size, config.document_start, config.keep_tails)
        self.plan = [list(step) for step in self.make_plan()]
        self.most: dict[int, int] = {}                                   # sequences in a micro-batch, by batch size
        for step, micro_batches in zip(schedule, self.plan):
            counts = (sum(last - first for _, first, last, _ in spans) for spans in micro_batches)
            self.most[step.batch_tokens] = max(self.most.get(step.batch_tokens, 0), *counts)
        self.columns = self.count_columns()                              # of a micro-batch, by batch size

    def sequences(self, spans: list[Span], step: "Step") -> Iterator[Sequence]:
        for shard, first, last, gone in spans:
            starts, before = self.text.sequences(shard, step.sequence_length)
            tokens = np.asarray(self.text.tokens(shard))                 # slices of a memory map cost more
            for start, length in zip(starts[first:last].tolist(), np.diff(before[first:last + 1]).tolist()):
                yield tokens, start + gone, length - gone
                gone = 0

    def count_columns(self) -> dict[int, int]:
        """How many columns hold every micro-batch's targets and the sample, by batch size.

        So a stage's shapes are fixed. What is cut off the last sequence counts as well. 190 M tokens take about half a second.
        """
        columns: dict[int, int] = {}
        for step, micro_batches in zip(self.schedule, self.plan):
            for spans in micro_batches if step.sampled else ():
                different = np.zeros(self.config.padded_vocab, bool)
                different[self.config.document_start] = True             # the target of a shard's last token
                following = [text[start + 1:start + 1 + length] for text, start, length in self.sequences(spans, step)]
                different[np.concatenate(following, dtype=np.intp)] = True
                wanted = int(np.count_nonzero(different)) + self.config.softmax_samples
                wanted = min(wanted + -wanted % 256, self.config.padded_vocab)
                columns[step.batch_tokens] = max(columns.get(step.batch_tokens, 0), wanted)
        return columns

    def columns_of(self, step: "Step") -> int | None:
        """How many tokens' logits this step computes; None: all."""
        return self.columns.get(step.batch_tokens) if step.sampled else None

    def make_plan(self) -> Iterator[list[list[Span]]]:
        shard, position, epoch, keep = 0, 0, 0, self.config.keep_tails
        for step in self.schedule:
            micro_batches = []
            for _ in range(self.config.micro_batches):
                spans, missing = [], step.batch_tokens // self.config.micro_batches
                while missing > 0:
                    starts, before = self.text.sequences(shard, step.sequence_length)
                    first = int(np.searchsorted(starts, position))
                    # In the middle of a sequence: of the one that the last micro-batch cut, or a stage with another length did.
                    if keep and first and position < starts[first - 1] + before[first] - before[first - 1]:
                        first -= 1
                    if first == len(starts):
                        shard, position = (shard + 1) % len(self.text), 0
                        epoch += shard == 0
                        if epoch == self.config.epochs:
                            raise ShardError(self.too_few(step))
                        continue
                    gone = max(position - int(starts[first]), 0)
                    last = min(int(np.searchsorted(before, before[first] + gone + missing)), len(starts))
                    over = max(int(before[last] - before[first]) - gone - missing, 0)
                    missing -= int(before[last] - before[first]) - gone - over
                    position = int(starts[last]) if last < len(starts) else len(self.text.tokens(shard))
                    position -= over if keep else 0
                    spans.append((shard, first, last, gone))
                micro_batches.append(spans)
            yield micro_batches
        self.epochs = epoch + (shard + position / len(self.text.tokens(shard))) / len(self.text)    # that the plan takes

    def too_few(self, step: "Step") -> str:
        total, wanted = sum(len(self.text.tokens(i)) for i in range(len(self.text))), [s.batch_tokens for s in self.schedule]
        lasted, steps = sum(wanted[:step.index]) or total * self.config.epochs, self.config.steps
        fewer = int(steps * (lasted - sum(wanted[steps:])) / sum(wanted[:steps]))
        return (f"{self.config.data_path}: {len(self.text)} training shards with {total:,} tokens last for {step.index} of "
                f"{len(wanted)} steps; add shards (FineWeb's: python -m data.fineweb), or set --epochs "
                f"{math.ceil(self.config.epochs * sum(wanted) / lasted)} or about --steps {max(fewer, len(self.config.batch_tokens))}")

    def batches(self, index: int) -> list[Batch]:
        """This rank's micro-batches of a step, on the host."""
        step, share = self.schedule.at(index), self.config.micro_batches // self.world.size
        n = step.batch_tokens // self.config.micro_batches
        batches = []
        for i in range(self.world.rank * share, (self.world.rank + 1) * share):
            sequences = self.sequences(self.plan[index][i], step)
            batch = make_batch(sequences, n, self.most[step.batch_tokens], step.sequence_length, self.config)
            if count := self.columns_of(step):
                generator = np.random.default_rng([self.config.seed % 2**32, index, i])
                columns = sample_columns(batch.targets.numpy(), count, self.config.padded_vocab, generator)
                batch = batch._replace(columns=torch.from_numpy(columns))
            batches.append(batch)
        return batches

    def prefetch(self, indices: Collection[int]) -> Iterator[list[Batch]]:
        """The batches of these steps, made a few ahead by a thread that also brings them to a GPU.

        What a batch lies in is written over a few steps later, behind all that was launched before the next one was asked for.
        """
        device, rooms = self.world.device, []
        if device.type == "cuda":
            batch, share = max(self.config.batch_tokens), self.config.micro_batches // self.world.size
            largest = 2 * batch // self.world.size + share * (max(self.most.values()) + 1 + self.config.padded_vocab + 4 * ALIGNED)
            rooms, stream = [Room(largest, device) for _ in range(AHEAD + 2)], torch.cuda.Stream(device)

        def make(index: int, room: Room | None) -> list[Batch]:
            batches = self.batches(index)
            return room.bring(batches, stream) if room else batches

        def taken() -> Iterator[list[Batch]]:
            rest, in_turn, ahead = iter(indices), cycle(rooms or [None]), deque()
            with ThreadPoolExecutor(1) as thread:
                while True:
                    wanted = islice(rest, AHEAD + 1 - len(ahead))
                    ahead.extend((thread.submit(make, index, room), room) for index, room in zip(wanted, in_turn))
                    if not ahead:
                        return
                    made, room = ahead.popleft()
                    batches = made.result()
                    if room:
                        room.ready.wait()
                    yield batches
                    if room:
                        room.left.record()
        return taken()


class Room:
    """For the batches of one step, as one tensor each in pinned memory and on a GPU."""

    def __init__(self, size: int, device: torch.device):
        self.here = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.there = torch.empty(size, dtype=torch.int32, device=device)
        self.ready, self.left = torch.cuda.Event(), torch.cuda.Event()   # the copy has arrived; nobody reads it any more

    def bring(self, batches: list[Batch], stream: torch.cuda.Stream) -> list[Batch]:
        """Copy them to the GPU, in one piece, on `stream`; they are there once `ready` is."""
        tensors = [x for batch in batches for x in batch[:-1]]
        sizes = [x.numel() + -x.numel() % ALIGNED for x in tensors]
        total = sum(sizes)
        self.ready.synchronize()                                         # what was here before has left
        for piece, x in zip(self.here[:total].split(sizes), tensors):
            piece[:x.numel()].copy_(x)
        with torch.cuda.stream(stream):
            stream.wait_event(self.left)
            self.there[:total].copy_(self.here[:total], non_blocking=True)
            self.ready.record()
        arrived = iter(piece[:x.numel()] for piece, x in zip(self.there[:total].split(sizes), tensors))
        return [Batch(*(next(arrived) for _ in batch[:-1]), batch.max_length) for batch in batches]


def make_batch(sequences: Iterable[Sequence], n: int, most: int, longest: int, config: "Config") -> Batch:
    arrays = pack(sequences, n, most, longest, config.document_start)
    return Batch(*map(torch.from_numpy, arrays), torch.empty(0, dtype=torch.int32), longest)


def to_device(batch: Batch, device: torch.device, copy: bool = False) -> Batch:
    """`copy`: also of what is there already."""
    return Batch(*(x.to(device, non_blocking=True, copy=copy) for x in batch[:-1]), batch.max_length)


def validation_batches(config: "Config", multiple: int = 1) -> list[Batch]:
    """The scored stream in chunks: every token after the first is a target once.

    Its sequences are the documents, in pieces of `val_sequence_length` if longer, whatever the chunk; a chunk holds whole
    sequences and is filled up with tokens that are not scored. Empty chunks make their number a `multiple`.
    """
    paths, total = shards_in(config.data_path, "val"), config.val_tokens
    text = np.concatenate([np.zeros(0, np.uint16), *(open_shard(p, config.vocab_size)[:total + 1] for p in paths)])[:total + 1]
    if len(text) <= total:
        raise ShardError(f"{config.data_path}: {len(text):,} validation tokens, --val_tokens {total} needs one more than it scores; "
                        f"add shards or set --val_tokens {len(text) - 1}")
    starts = np.union1d([0], document_starts(text[:total], config.document_start))
    starts, ends = cut_documents(starts, total, config.val_sequence_length, keep_tails=True)
    chunks, filled = [], config.val_chunk
    for start, length in zip(starts.tolist(), (ends - starts).tolist()):
        if filled + length > config.val_chunk:
            chunks.append([])
            filled = 0
        chunks[-1].append((text, start, length))
        filled += length
    chunks += [[]] * (-len(chunks) % multiple)                           # ranks score in step: they read each other's tables
    most = max(map(len, chunks)) + -(-config.val_chunk // config.val_sequence_length)      # with what fills a chunk up
    return [make_batch(chunk, config.val_chunk, most, config.val_sequence_length, config) for chunk in chunks]
