"""Checkpoints: all that a run needs to go on, written beside training and read by any number of ranks.

    FOLDER/step-0000500/                the newest two are kept; one that is not whole yet is called ….part
        index.json                      the step, the settings, the number of ranks, the files and their sizes
        rank0-00001.safetensors, …      what each rank updates

Tensors are named by parameter, so that another number of ranks finds its parts:

    GROUP/i/weight@a                    numbers a, a + 1, … of parameter i of a group of the optimizer, flat;
                                        also mantissa_bits, momentum, slow, second, average
    GROUP/i/grads of rank r@0           between two steps of one Adam update: what rank r has summed so far
    GROUP/part r of moment i of features    with --shared_updates: rank r's part of the first (0), second (1)
    GROUP/steps                         how many updates there were
    TABLE/rows of rank r/k              numbers of the n-gram table's rows that have been updated; also
                                        weight, second, last of r's columns (see `TableState`)
    retrieval/text                      with `--retrieval`: the text of all steps, to count it again
    TABLE/pending rows of rank r        between two steps of one update: rows with a gradient; also grads

After a step the state is copied on the device, which takes milliseconds. Rows of the n-gram table are copied
straight to the host, because a device may have no room for a second copy; training waits for them. A thread
writes the files. The data need no state, since batches follow from the step's number.

`torch.distributed.checkpoint` is not used. Its index is a pickle, which can execute anything when it is read.
Its shards of a tensor cannot express ours: flat buffers whose padding depends on the number of ranks, and a
table in which only some rows count.
"""
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.ranks.collectives import PATIENCE, with_others
from kernels.streams import side_stream
from records.run.log import LogError, disk_errors
from records.run.settings import UserError, shown
from records.run.terminal import ending_signals
from records.run.weights import (
    TensorFiles,
    check_place,
    fitting,
    plain,
    publish,
    read_json,
    read_tensors,
    write_json,
)

FORMAT, VERSION = "readable-speedrun-checkpoint", 1
KEPT = 2                # checkpoints
IN_THREAD = 0           # the group of ranks that threads speak in
NAME, NAMED = "step-{:07d}", "step-" + 7 * "[0-9]"      # of their folders; what else is there is not ours
PART = 2 ** 21          # rows of the n-gram table that are copied at a time
# Settings that a resumed run may change, because they do not say what a step computes.
FREE = {"preset", "name", "runs", "target", "data_path", "epochs", "val_tokens", "val_every", "val_chunk",
        "val_sequence_length", "val_window", "val_fp8", "canonical", "score", "attention", "fp8", "reference",
        "compile", "capture", "overlap", "peer_copies", "doctor", "check_ranks", "deterministic",
        "write_log", "save", "checkpoint", "checkpoint_every", "checkpoint_on_stop", "resume"}


def check_saving(config) -> None:
    """UserError for settings of `--name`, `--save`, `--checkpoint` and `--resume` that cannot work."""
    if "/" in config.name:
        raise UserError(f"--name {shown(config.name)}: it becomes part of a folder's name; leave out the /")
    check_place(config)
    if config.save and (config.retrieval or config.states):
        kept = "retrieval" if config.retrieval else "states"
        raise UserError(f"--save {shown(config.save)} with --{kept}: a model without its counts or states of"
                        " the training text is not whole; give --save=")
    if config.checkpoint and config.states:
        raise UserError(f"--checkpoint {shown(config.checkpoint)} with --states {config.states}: a checkpoint"
                        " has no states; give --checkpoint= or --states 0")
    wanted = config.checkpoint_every > 0 or config.checkpoint_on_stop
    if config.checkpoint_every < 0 or wanted != bool(config.checkpoint):
        raise UserError(f"--checkpoint {shown(config.checkpoint or 'none')} --checkpoint_every "
                        f"{config.checkpoint_every}: give a folder and a number of steps, or "
                        "--checkpoint_on_stop true")
    if config.runs > 1 and (config.checkpoint or config.resume):
        raise UserError(f"--runs {config.runs} with --checkpoint or --resume: take one run at a time")


def own_parts(shard, rank: int, ranks: int) -> Iterator[tuple[int, int, slice]]:
    """For each parameter that a rank updates: its index, the start of the rank's part, the part's slice.

    `shard` is one of the optimizer's shards; the slices are of the rank's own buffers.
    """
    number = 0
    for (params, _, _), (_, own) in zip(shard.group.rounds(ranks), shard.places, strict=True):
        size = own.stop - own.start
        if shard.own_weights.ndim > 1:     # matrices, one a rank; the last ones may be padding
            if rank < len(params):
                yield number + rank, 0, own
        else:
            first = rank * size
            valid = min(max(params[0].numel() - first, 0), size)
            yield number, first, slice(own.start, own.start + valid)
        number += len(params)


def buffers(shard, averages) -> dict[str, Tensor]:
    """The buffers of a group that one rank alone holds, by name, without gradients."""
    found = {"weight": shard.own_weights, "mantissa_bits": shard.mantissa_bits, "momentum": shard.momentum,
             "slow": shard.slow, "second": shard.second,
             "average": averages.of(shard.own_weights)}
    return {name: x for name, x in found.items() if x is not None}


def feature_moments(shard) -> list[Tensor]:
    """This rank's part of both moments of features; [] unless the tokens of this group share updates."""
    shared = getattr(shard, "shared", None)
    return shared.moments if shared else []


class Copy(NamedTuple):
    """The state of a rank after a step, which training does not change any more."""
    step: int                       # how many steps are done
    tensors: dict[str, Tensor]      # on the device or on the host
    finite: Tensor                  # 0-dim bool: whether all losses were


@torch.no_grad()
def copy_state(trainer, steps_done: int) -> Copy:
    """Copy what this rank updates, and its gradients if an update is under way."""
    optimizer, world, tensors = trainer.optimizer, trainer.world, {}
    pending = steps_done % trainer.config.adam_every > 0
    for name, shard in optimizer.shards.items():
        if hasattr(shard, "table"):
            tensors |= copy_table(f"{name}/{{}} of rank {world.rank}", shard.table, pending)
            if world.rank == 0:
                tensors[f"{name}/steps"] = shard.table.steps.clone()
            continue
        replicated = shard.group.replicated
        if world.rank == 0 or not replicated:
            parts = list(own_parts(shard, 0 if replicated else world.rank, 1 if replicated else world.size))
            for field, x in buffers(shard, optimizer.averages).items():
                x = x.clone()
                tensors |= {f"{name}/{i}/{field}@{first}": x[own].flatten() for i, first, own in parts}
        if world.rank == 0:
            tensors[f"{name}/steps"] = shard.steps.clone()
        for i, moment in enumerate(feature_moments(shard)):
            tensors[f"{name}/part {world.rank} of moment {i} of features"] = moment.clone()
        if pending and shard.own_weights.ndim == 1:
            for i, p in enumerate(shard.group.params):
                tensors[f"{name}/{i}/grads of rank {world.rank}@0"] = p.grad.flatten().clone()
    if world.rank == 0 and trainer.config.retrieval:
        tensors["retrieval/text"] = trainer.model.memory.counts.written()
    return Copy(steps_done, tensors, optimizer.finite.clone())


def copied_bytes(model, optimizer, config) -> int:
    """The most bytes of the device that `copy_state` takes, and holds until the files are written."""
    if not config.checkpoint:
        return 0
    pending = config.checkpoint_on_stop or config.checkpoint_every % config.adam_every > 0
    copied = [model.memory.counts.text]
    for shard in optimizer.shards.values():
        if not hasattr(shard, "table"):
            copied += [*buffers(shard, optimizer.averages).values()]
            copied += feature_moments(shard)
            copied += [shard.all_grads] * (pending and shard.own_weights.ndim == 1)
    return sum(x.nbytes for x in copied)


def copy_table(name: str, table, pending: bool) -> dict[str, Tensor]:
    """The rows of the n-gram table that were updated, and those that have a gradient, on the host."""
    tensors = {}
    for first in range(0, len(table.last), PART):
        rows = (table.last[first:first + PART] > 0).nonzero()[:, 0] + first
        if not len(rows):
            continue
        of_part = {"rows": rows.int(), "weight": table.weight[rows], "second": table.second[rows],
                   "last": table.last[rows]}
        tensors |= {f"{name.format(field)}/{first}": x.cpu() for field, x in of_part.items()}
    if pending:
        rows, grads = pending_rows(table.gradients)
        tensors |= {name.format("pending rows"): rows.int().cpu(), name.format("pending grads"): grads.cpu()}
    return tensors


def pending_rows(gradients) -> tuple[Tensor, Tensor]:
    """Numbers (k,) and gradients (k, columns) of the rows that have one; `gradients` as in `TableState`."""
    if isinstance(gradients, Tensor):
        rows = gradients.any(1).nonzero()[:, 0]
        return rows, gradients[rows]
    count = min(int(gradients.count), len(gradients.rows) - 1)
    return gradients.rows[1:1 + count], gradients.grads[1:1 + count]


class Keeper:
    """A context around the steps of a run that writes its checkpoints; without `--checkpoint`, none.

    All ranks must make a keeper, and call `after` after the same steps. All ranks must see the folder.
    """

    def __init__(self, trainer, log):
        config, self.world = trainer.config, trainer.world
        self.trainer, self.log, self.config = trainer, log, config
        self.stopped, self.pending, self.handlers = False, None, {}
        if not config.checkpoint:
            return
        self.folder, self.thread = log.begun_in / config.checkpoint, ThreadPoolExecutor(1)
        # The stream is made here, on this rank's device: a new thread begins on the first device.
        self.stream = side_stream("checkpoints") if self.world.device.type == "cuda" else None
        # The thread has the group IN_THREAD; in the other one ranks agree while the thread writes.
        self.groups = ([dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2)]
                       if self.world.size > 1 else [])
        if self.world.rank == 0:
            with disk_errors(f"checkpoints to {self.folder}"):
                self.folder.mkdir(parents=True, exist_ok=True)
                for left_over in self.folder.glob(f"{NAMED}.part"):
                    shutil.rmtree(left_over)
        self.world.barrier()

    def __enter__(self) -> "Keeper":
        if self.config.checkpoint_on_stop:
            def stop(*_) -> None:
                self.stopped = True
            self.handlers = {n: signal.signal(n, stop) for n in ending_signals()}
        return self

    def __exit__(self, kind, *_) -> None:
        """Wait until the last checkpoint is written."""
        try:
            self.collect()
        except LogError:
            if kind is None or self.stopped:    # Otherwise what ended the run says more.
                raise
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def agreed(self, value: bool, group: int) -> bool:
        """Whether `value` is true on any rank."""
        found = torch.tensor(int(value))
        if self.groups:
            with with_others(counted=group != IN_THREAD):
                dist.all_reduce(found, dist.ReduceOp.MAX, self.groups[group])
        return bool(found)

    def after(self, steps_done: int) -> None:
        """Begin a checkpoint after this step if one is due; KeyboardInterrupt behind it if a signal came."""
        every = self.config.checkpoint_every
        if not self.config.checkpoint or steps_done == len(self.trainer.schedule):
            return
        stop = self.config.checkpoint_on_stop and self.agreed(self.stopped, 1)
        if stop or every and steps_done % every == 0:
            begin = time.perf_counter()
            self.collect()
            copy = copy_state(self.trainer, steps_done)
            copied = torch.cuda.current_stream().record_event() if self.stream else None
            waited = time.perf_counter() - begin
            self.pending = waited, self.thread.submit(self.write, copy, copied)
        if stop:
            raise KeyboardInterrupt(f"stopped by a signal after step {steps_done}; go on with --resume "
                                    f"{self.config.checkpoint}")

    def collect(self) -> None:
        """Wait for the checkpoint that is being written, if any, and log it. LogError if it failed."""
        if self.pending is not None:
            (waited, job), self.pending = self.pending, None
            step, size, seconds = job.result()
            self.log.write("checkpoint", step=step, ms=round(waited * 1e3, 3), bytes=size,
                           write_s=round(seconds, 3))

    def write(self, copy: Copy, copied: torch.cuda.Event | None) -> tuple[int, int, float]:
        """In the thread: write this rank's files; then rank 0 gives the whole its name.

        Returns the step, the bytes that this rank wrote and the seconds that took.
        """
        begin, name = time.perf_counter(), NAME.format(copy.step)
        part, error = self.folder / f"{name}.part", None
        with torch.cuda.stream(self.stream):            # with None nothing changes
            if copied:
                copied.wait()
            files = TensorFiles(part, f"rank{self.world.rank}")
            try:
                part.mkdir(exist_ok=True)
                finite = bool(copy.finite)
                for key, x in copy.tensors.items():
                    finite &= bool(x.isfinite().all())      # The last update has no loss yet.
                    files.add(key, x)
                files.flush()
            except OSError as caught:
                error = caught
            failed = self.agreed(error is not None or not finite, IN_THREAD)
        with disk_errors(f"the checkpoint {part}"):
            if error:
                raise error
            if failed:
                raise LogError(f"the checkpoint {part} is not whole: another rank could not write it, or a "
                               "loss or a weight is not finite")
            if self.world.rank == 0:
                sizes = {path.name: path.stat().st_size for path in sorted(part.glob("*.safetensors"))}
                write_json(part / "index.json", {
                    "format": FORMAT, "version": VERSION, "step": copy.step, "ranks": self.world.size,
                    "config": plain(self.config), "files": sizes})
                publish(part, self.folder / name)
                for old in checkpoints(self.folder)[:-KEPT]:
                    shutil.rmtree(old)
        return copy.step, files.size, time.perf_counter() - begin


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{NAMED}/index.json"))


class Found(NamedTuple):
    """A checkpoint to go on from."""
    folder: Path
    index: dict                     # what its index.json says

    @property
    def step(self) -> int:
        return self.index["step"]

    def facts(self) -> dict[str, object]:
        """For the log's header."""
        return {"resumed": {"checkpoint": self.folder.name, "step": self.step, "ranks": self.index["ranks"]}}


def find(config) -> Found | None:
    """The checkpoint to go on from; None where the run begins.

    UserError where the folder holds no checkpoint, where the checkpoint is not whole or has another value of
    a setting that is not FREE, or where the folder of `--checkpoint` holds one of a later step: by its number
    that one would outlive the checkpoints of this run.
    """
    found, folder = newest(config), Path(config.checkpoint)
    others = checkpoints(folder) if config.checkpoint else []
    if others and others[-1].name > NAME.format(found.step if found else 0):
        raise UserError(f"--checkpoint {shown(folder)}: holds {others[-1].name}, which is further; go on "
                        f"from it with --resume {shown(folder)}, or choose another folder")
    return found


def newest(config) -> Found | None:
    """The checkpoint that `--resume` means; None without it.

    Also None if `--checkpoint` names the same folder and it holds no checkpoint yet. So one command begins a
    run and, when it is given again, resumes the run.
    """
    if not config.resume:
        return None
    folder = Path(config.resume)
    if not (folder / "index.json").exists():
        if not (inside := checkpoints(folder)):
            if config.checkpoint and folder == Path(config.checkpoint):
                return None
            raise UserError(f"--resume {folder}: holds no checkpoint; --checkpoint {folder} with "
                            "--checkpoint_every writes them, and with --checkpoint_on_stop one where a "
                            "signal stops a run that has taken a step")
        folder = inside[-1]
    index = read_json(folder / "index.json", FORMAT, VERSION)
    with fitting(folder):
        step, ranks, last = index["step"], index["ranks"], config.steps + config.extra_steps - 1
        if not (type(step) is type(ranks) is int and 1 <= step <= last and 1 <= ranks < 10_000):
            raise ValueError(f"step {step}, {ranks} ranks")
        for name, size in index["files"].items():
            path = folder / Path(name).name
            if not path.exists() or path.stat().st_size != size:
                raise UserError(f"{path}: truncated or missing; resume from another one in {folder.parent}")
        mine = plain(config)
        # A setting that the checkpoint does not name is newer than it; the run had the default.
        for name, theirs in {**plain(type(config)()), **index["config"]}.items():
            if name in mine and name not in FREE and theirs != mine[name]:
                what = f"--{name} was {shown(theirs)}, here it is {shown(mine[name])}"
                what = f"{name} were others" if name in ("layers", "stages") else what
                raise UserError(f"--resume {folder}: its {what}; give the same settings")
    return Found(folder, index)


class Pieces:
    """The tensors of a checkpoint, of all ranks, put together by parameter."""

    def __init__(self, found: Found):
        self.folder = found.folder
        self.tensors = {name: x for file in found.index["files"]
                        for name, x in read_tensors(found.folder / Path(file).name).items()}
        self.places: dict[str, list[tuple[int, Tensor]]] = {}       # sorted by the first number
        for name, x in self.tensors.items():
            whole, at, first = name.rpartition("@")
            if at:
                self.places.setdefault(whole, []).append((int(first), x))
        for parts in self.places.values():
            parts.sort(key=lambda part: part[0])

    def tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise UserError(f"{self.folder}: {name!r} is missing; the checkpoint is of another program")
        return self.tensors[name]

    def numbers(self, name: str, first: int, like: Tensor) -> Tensor:
        """Numbers of a parameter from `first` on, as many as `like` has and in the shape of `like`."""
        end, found = first + like.numel(), []
        for start, x in self.places.get(name, []):
            found.append(x[max(first - start, 0):max(end - start, 0)])
        whole = torch.cat(found) if found else torch.empty(0)
        if whole.numel() != like.numel() or whole.dtype != like.dtype:
            raise UserError(f"{self.folder}: {name!r} has {whole.numel()} numbers of {whole.dtype}, not "
                            f"{like.numel()} of {like.dtype}; it is of another kind of machine or program")
        return whole.view(like.shape)


def restore(trainer, found: Found) -> int:
    """Put a new trainer into the state of the checkpoint; returns how many steps are done."""
    with torch.no_grad(), fitting(found.folder):
        restore_state(trainer, found)
    return found.step


def restore_state(trainer, found: Found) -> None:
    optimizer, world, pieces = trainer.optimizer, trainer.world, Pieces(found)
    pending = found.step % trainer.config.adam_every > 0
    for name, shard in optimizer.shards.items():
        if hasattr(shard, "table"):
            shard.table.steps.copy_(pieces.tensor(f"{name}/steps"))
            restore_table(name, shard, pieces, found.index["ranks"], world, pending)
            continue
        shard.steps.copy_(pieces.tensor(f"{name}/steps"))
        own = (0, 1) if shard.group.replicated else (world.rank, world.size)
        for i, first, place in own_parts(shard, *own):
            for field, x in buffers(shard, optimizer.averages).items():
                x[place].copy_(pieces.numbers(f"{name}/{i}/{field}", first, x[place]))
        if feature_moments(shard):
            parts = [[pieces.tensor(f"{name}/part {rank} of moment {i} of features")
                      for rank in range(found.index["ranks"])] for i in (0, 1)]
            shard.shared.load([torch.cat(part) for part in parts])
        for i, p in enumerate(shard.group.params):
            p.copy_(pieces.numbers(f"{name}/{i}/weight", 0, p))
            if pending and shard.own_weights.ndim == 1:
                p.grad.copy_(own_gradient(f"{name}/{i}/grads", p, pieces, found.index["ranks"], world))
    if trainer.config.retrieval:
        steps = [step.batch_tokens for step in islice(trainer.schedule, found.step)]
        for text in pieces.tensor("retrieval/text").split(steps):
            trainer.model.memory.counts.add(text.to(world.device))


def own_gradient(name: str, p: Tensor, pieces: Pieces, ranks: int, world) -> Tensor:
    """The gradient that this rank had summed. If another number of ranks wrote, rank 0 gets the whole sum."""
    if ranks == world.size:
        return pieces.numbers(f"{name} of rank {world.rank}", 0, p)
    if world.rank:
        return torch.zeros_like(p)
    return sum(pieces.numbers(f"{name} of rank {rank}", 0, p).float() for rank in range(ranks))


def restore_table(name: str, shard, pieces: Pieces, ranks: int, world, pending: bool) -> None:
    """Restore this rank's columns of the n-gram table from the columns of the `ranks` ranks that wrote."""
    table, beta2 = shard.table, shard.group.betas[1]
    columns = table.weight.shape[1]
    width, block = columns * world.size // ranks, columns // table.second.shape[1]      # of a writing rank

    def overlap(rank: int) -> tuple[slice, slice]:
        """The columns that both ranks have, as a slice of ours and one of `rank`'s; may be empty."""
        begin = max(world.rank * columns, rank * width)
        end = max(min((world.rank + 1) * columns, (rank + 1) * width), begin)
        return tuple(slice(begin - start, end - start) for start in (world.rank * columns, rank * width))

    def parts(rank: int) -> Iterator[tuple[Tensor, str]]:
        """Numbers of rows, and the key of their other tensors."""
        prefix = f"{name}/rows of rank {rank}/"
        for key, rows in pieces.tensors.items():
            if key.startswith(prefix):
                yield rows.long(), f"{name}/{{}} of rank {rank}/{key.removeprefix(prefix)}"

    mine = [rank for rank in range(ranks) if overlap(rank)[0].stop > overlap(rank)[0].start]
    device = table.weight.device
    # A rank notes in `last` when it last moved a row. These notes may differ, since the row's gradient may be
    # zero in one rank's columns alone. Where columns of several ranks become those of one, the latest note
    # counts, and mean squares of an earlier note decay up to it.
    for rows, key in (part for rank in mine for part in parts(rank)):
        rows, last = rows.to(device), pieces.tensor(key.format("last")).to(device)
        table.last[rows] = torch.maximum(table.last[rows], last)
    for rank in mine:
        here, there = overlap(rank)
        blocks_here, blocks_there = (slice(x.start // block, x.stop // block) for x in (here, there))
        for rows, key in parts(rank):
            last, rows = pieces.tensor(key.format("last")).to(device), rows.to(device)
            second = pieces.tensor(key.format("second"))[:, blocks_there].to(device)
            table.weight[:, here][rows] = pieces.tensor(key.format("weight"))[:, there].to(device)
            table.second[:, blocks_here][rows] = second * (beta2 ** (table.last[rows] - last))[:, None]
    if pending:
        restore_pending(name, table, pieces, [(rank, *overlap(rank)) for rank in mine])


def restore_pending(name: str, table, pieces: Pieces, overlaps: list[tuple[int, slice, slice]]) -> None:
    """The gradients of rows that wait for the next update."""
    listed = {rank: pieces.tensor(f"{name}/pending rows of rank {rank}").long() for rank, *_ in overlaps}
    rows = torch.cat([*listed.values()]).unique()
    grads = torch.zeros(len(rows), table.weight.shape[1], dtype=table.weight.dtype)
    for rank, here, there in overlaps:
        places = torch.searchsorted(rows, listed[rank])
        grads[:, here][places] = pieces.tensor(f"{name}/pending grads of rank {rank}")[:, there]
    rows, grads = rows.to(table.weight.device), grads.to(table.weight.device)
    if isinstance(table.gradients, Tensor):
        table.gradients[rows] = grads
        return
    gradients, k = table.gradients, torch.arange(1, len(rows) + 1, device=rows.device)
    gradients.grads[1:1 + len(rows)], gradients.rows[1:1 + len(rows)] = grads, rows.int()
    gradients.place[rows] = k.int()
    gradients.count.fill_(len(rows))
