"""Settings that follow from the GPUs' memory, where the person has not given them.

More micro-batches need less memory each and take longer. They also pack documents into other batches, which
changes the loss as another seed does. A shorter n-gram table ends at a higher loss. The number of tokens that
a validation scores at a time changes no result.
"""
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np
import torch

from data import canonical, embedded
from data.candidates import sample_parts
from data.packing import round_up
from data.shards import open_shard, shards_in
from kernels.ranks.copies import can_copy, ranks_here
from records.run.ahead import Launch, compiling, hash_triton, no_launch
from records.run.checks import check_machine
from records.run.memory import Need, count
from records.run.notes import Notes
from records.run.settings import UserError

LIMIT = "GPU_MEMORY_LIMIT_GB"           # environment: use no more than this of each GPU, in 10^9 bytes
# Bytes that torch's allocator does not see: those of kernels not loaded yet, of graphs and of NCCL's
# buffers. CUDA's context is not among them, because it is there already. This number was not measured.
OUTSIDE = 1_500_000_000
LOOKED_AT = 2 ** 18                     # tokens of the validation text that samples are counted in
SHORTEST = 2 ** 20                      # rows of an n-gram table; a shorter one is hardly worth its time
# Settings that often differ from start to start and change no size. They are no part of a note's question.
SIZELESS = ("seed", "name", "runs", "target", "muon_lr", "muon_decay", "adam_lr", "adam_decay", "value_lr",
            "ngram_lr", "cooldown", "final_lr")
COSTS = {"micro_batches": "which packs other batches; more are slower",
         "ngram_rows": "a shorter table, whose loss is higher", "val_chunk": "which changes no result"}


class Fitting:
    """Finds the first of the choices that fits, for ranks that each have `room` bytes on a GPU.

    The `notes` have what earlier starts counted; that is not counted again.
    """

    def __init__(self, config, world, room: int, program, launch: Launch = no_launch,
                 notes: Notes | None = None):
        self.config, self.world, self.room, self.program = config, world, room, program
        self.launch, self.notes = launch, notes
        self.copies = config.peer_copies and ranks_here() == world.size and can_copy(world.device)
        self.counted: dict[int, dict[int, Need]] = {}   # by micro-batches and val_chunk

    def need(self, choice) -> Need:
        """The most that `choice` holds. Only another number of micro-batches takes a new count."""
        if choice.micro_batches not in self.counted:
            self.counted[choice.micro_batches] = self.count(choice)
        need = self.counted[choice.micro_batches][choice.val_chunk]
        return need._replace(table=need.table * choice.ngram_rows // max(self.config.ngram_rows, 1))

    def count(self, choice) -> dict[int, Need]:
        """What the choice's number of micro-batches needs, for each size of a validation's chunks."""
        config, ranks = replace(self.config, micro_batches=choice.micro_batches), self.world.size
        chunks = halvings(config.val_chunk, config.val_sequence_length)
        sampled = candidates(choice, self.program.Schedule(choice))
        alike = replace(config, **dict.fromkeys(SIZELESS))
        program = Path(self.program.__file__).read_bytes()  # It may be another one than ours.
        question = "memory", program, alike, ranks, self.copies, sampled, chunks
        if answer := self.notes.find(question) if self.notes else None:
            return {chunk: Need(*need) for chunk, *need in answer}
        counted = count(self.program, config, ranks, self.world.device, self.copies, sampled, chunks,
                        self.launch)
        if self.notes:
            self.notes.add(question, [[chunk, *need] for chunk, need in counted.items()])
        return counted

    def first(self, given: Collection[str]) -> tuple:
        """The first choice that fits and its need; None and the least need if there is none."""
        needs = []
        for choice in choices(self.config, given, self.world.size):
            needs.append(self.need(choice))
            if needs[-1].total(self.config.capture) <= self.room:
                # Counted by its own settings a choice needs a little less: its rotary tables may be shorter.
                exact = Fitting(choice, self.world, self.room, self.program, notes=self.notes)
                return choice, (self if choice == self.config else exact).need(choice)
        return None, min(needs, key=lambda need: need.total(self.config.capture))


def fit(config, given: Collection[str], world, trainer: type):
    """`config` with such `micro_batches`, `ngram_rows` and `val_chunk` as fit each GPU of the `world`.

    Where `micro_batches` was not given, each rank has at least one, if so many divide the batches. Settings
    that were `given` stay as they are; if they do not fit, a UserError names some that do. Prints the memory
    that the run needs and the settings that it changes. Leaves the memory, and with `config.doctor` the
    machine's figures, in `world.found` for the log. On a CPU nothing has to fit. Another process begins to
    work out the canonical mask. During the count the kernels that the run will launch are compiled, unless an
    earlier start has left both the kernels and the count in Triton's cache.
    """
    if config.canonical:
        canonical.begin(config.padded_vocab)    # The first score that counts waits for it.
    if config.doctor:
        from records.tools import doctor  # a program of its own, which few runs need
        world.found["doctor"] = doctor.figures(world)
        for finding in world.found["doctor"]["findings"] if world.rank == 0 else ():
            print(f"doctor: {finding}")
    if world.device.type != "cuda":
        return config
    hash_triton()
    wanted = config
    if "micro_batches" not in given and can_split(config, world.size):
        wanted = replace(config, micro_batches=max(config.micro_batches, world.size))   # one for each rank
    embedded.provide(config.data_path, world.rank, world.barrier)      # Candidates are counted in its text.
    check_machine(wanted, world.size, world.device)
    notes = Notes(world.device)
    with compiling() as launch:
        fitting = Fitting(wanted, world, room_of(world), sys.modules[trainer.__module__], launch, notes)
        choice, need = fitting.first(given)
        advice = fitting.first(())[0] if choice is None else None
    notes.keep()        # Behind the kernels: a start that finds the count compiles none ahead of its launch.
    total, room = need.total(config.capture), fitting.room
    if choice is None:
        advice = f"use {' '.join(changes(config, advice))}" if advice else "none of its settings would"
        raise UserError(f"this takes {total / 1e9:.2f} GB of each GPU, where {room / 1e9:.2f} GB can be "
                        f"used; {advice}")
    world.found["memory"] = {"room_bytes": room, "needed_bytes": total, "allocated_bytes": need.allocated,
                             **need._asdict()}
    if world.rank == 0:
        changed = ", ".join(f"{flag} ({why})" for flag, why in changes(config, choice).items())
        print(f"memory: {total / 1e9:.1f} of the {room / 1e9:.1f} GB of each GPU"
              + (f", with {changed}" if changed else ""))
    return choice


def fitted(argv: list[str], world, program) -> list[str]:
    """The command line `argv`, then the settings that `fit` chooses, for tools that train by themselves."""
    config, options = program.parse(argv)
    choice = fit(config, options["given"], world, program.Trainer)
    return [*argv, *" ".join(changes(config, choice)).split()]


def changes(config, choice) -> dict[str, str]:
    """The flags that make `config` into `choice`, and what each of them costs."""
    return {f"--{name} {getattr(choice, name)}": why for name, why in COSTS.items()
            if getattr(choice, name) != getattr(config, name)}


def choices(config, given: Collection[str], ranks: int) -> Iterator:
    """Settings that need less and less memory: first those of `config`, then more and more halvings of these.

    A halving halves the tokens of a micro-batch or the rows of the table. Among settings with equally many
    halvings the longest table comes first. Before each further halving smaller chunks of a validation are
    tried, since they cost nothing.
    """
    micro_batches, rows = [config.micro_batches], [config.ngram_rows]
    while "micro_batches" not in given and can_split(config, 2 * micro_batches[-1]):
        micro_batches.append(2 * micro_batches[-1])
    if "ngram_rows" not in given and config.ngram_rows:
        rows = halvings(config.ngram_rows, SHORTEST)
    chunks = [config.val_chunk]
    if "val_chunk" not in given:
        chunks = halvings(config.val_chunk, config.val_sequence_length)
    for halved in range(len(micro_batches) + len(rows) - 1):
        for of_rows in range(len(rows)):
            if 0 <= halved - of_rows < len(micro_batches):
                for chunk in chunks:
                    yield replace(config, micro_batches=micro_batches[halved - of_rows],
                                  ngram_rows=rows[of_rows], val_chunk=chunk)


def halvings(value: int, least: int) -> list[int]:
    """value, value / 2, … down to `least`, and at least `value` itself."""
    values = [value]
    while values[-1] // 2 >= least:
        values.append(values[-1] // 2)
    return values


def can_split(config, micro_batches: int) -> bool:
    """Whether every stage's batch divides into `micro_batches` of at least two long sequences."""
    return all(stage.batch_tokens % (16 * micro_batches) == 0
               and stage.batch_tokens // micro_batches >= 2 * stage.sequence_length
               for stage in config.stages)


def candidates(config, steps: Iterable) -> dict[tuple[int, int], int]:
    """About how many candidates a part of a micro-batch has, by tokens and samples of its step.

    The loader measures this number over many steps. The first parts of the validation text give nearly the
    same number, at once.
    """
    text = open_shard(shards_in(config.data_path, "val")[0], config.vocab_size)
    found = {}
    for tokens, samples in {(step.batch_tokens, step.samples) for step in steps}:
        share = tokens // config.micro_batches
        part = share // sample_parts(share, config.softmax_tokens)
        parts = (text[start:start + part] for start in range(0, max(LOOKED_AT, share), part))
        seen = max(len(np.unique(part)) for part in parts)
        wanted = min(round_up(int(1.1 * seen) + samples, 256), config.padded_vocab)
        found[tokens, samples] = wanted if samples else 0
    return found


def room_of(world) -> int:
    """Bytes that a run may use of each GPU: what the GPU with the least room has, but at most the limit.

    The limit is the environment's GPU_MEMORY_LIMIT_GB. torch's allocator keeps to it from now on.
    """
    free, total = torch.cuda.mem_get_info(world.device)
    room = free - OUTSIDE
    if text := os.environ.get(LIMIT):
        try:
            limit = int(Decimal(text) * 10 ** 9)
        except (InvalidOperation, ValueError, OverflowError):
            raise UserError(f"{LIMIT}={text}: expected a number of GB") from None
        torch.cuda.set_per_process_memory_fraction(max(min(limit / total, 1.0), 0.0), world.device)
        room = min(room, limit)
    return world.least(room)
