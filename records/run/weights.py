"""The folder of a trained model, which `use/` reads: its weights, its settings, and a card for readers.

    model.safetensors       or model-00001-of-00003.safetensors, … with model.safetensors.index.json
    config.json             every setting, the steps taken, the losses, the name of the vocabulary
    README.md               the model card

Rows of the n-gram table that no step has written are zero and are left out. The others are the tensors
`ngrams.rows.0`, `ngrams.rows.1`, … (k, head_dim), and their numbers, which ascend, are `ngrams.numbers.0`, …
(k,) int32. Reading executes nothing: safetensors holds numbers alone.
"""
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.errors import printable
from data.shards import open_regular, read_regular
from records.run.explain import parameter_count
from records.run.log import disk_errors, place_of
from records.run.settings import UserError, shown

FORMAT, VERSION = "readable-speedrun-model", 1
LOG = "log"                             # `--save log`: into the folder of the run's log
FILE_BYTES = 2_000_000_000              # of a file at most, and so of host memory; hubs ask for at most 5 GB
VOCABULARIES = {257: "bytes", 50257: "gpt2"}        # by size; other ones come from a file
CARD = """\
---
library_name: readable-speedrun
---
# {name}

A small language model, trained with the readable speedrun.

| | |
| --- | --- |
| preset, seed | {preset}, {seed} |
| data | {data} |
| steps, tokens | {steps:,}, {tokens:,} |
| timed training | {time_s:.1f} s{since} |
| validation loss, nats a token | {loss:.4f} |
{scores}| parameters | {parameters:,}, without the n-gram table {dense:,} |
| n-gram rows written | {written:,} of {rows:,} |
| vocabulary | {vocabulary} |

    python -m use.sample FOLDER --prompt "…"
    python -m use.score FOLDER FILE…
    python -m use.export FOLDER --out OTHER

It was trained on so little text that it is no source of facts, and nothing was done to make it polite.
"""


class TensorFiles:
    """Tensors on their way into the safetensors files STEM-00001, STEM-00002, … of a folder."""

    def __init__(self, folder: Path, stem: str):
        self.folder, self.stem = folder, stem
        self.waiting: dict[str, Tensor] = {}
        self.files: dict[Path, list[str]] = {}      # written, with the names of their tensors
        self.size = 0

    def add(self, name: str, x: Tensor) -> None:
        """Take a tensor, from any device. It must not change before `flush`."""
        if sum(waiting.nbytes for waiting in self.waiting.values()) + x.nbytes > FILE_BYTES:
            self.flush()
        self.waiting[name] = x.detach().cpu().contiguous()
        self.size += x.nbytes

    def flush(self) -> None:
        """Write what was taken. OSError if the disk does not take it."""
        if not self.waiting:
            return
        path = self.folder / f"{self.stem}-{len(self.files) + 1:05d}.safetensors"
        try:
            save_file(self.waiting, path, {"format": "pt"})     # by which transformers knows torch
        except SafetensorError as error:
            code = re.search(r"os error (\d+)", str(error))
            raise OSError(int(code[1]) if code else errno.EIO, str(error)) from None
        path.chmod(0o644)
        sync(path)
        self.files[path] = list(self.waiting)
        self.waiting = {}


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
    sync(path)


def publish(part: Path, folder: Path) -> None:
    """Give a finished folder its name, so that it is there whole or not at all. An older `folder` is removed.

    The older one is first moved to a new name, since a FOLDER.old may be the user's.
    """
    sync(part)
    own = Path(tempfile.mkdtemp(prefix=".replaced-", dir=folder.parent))
    old = own / folder.name
    try:
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
        sync(folder.parent)
    except BaseException:                   # Ctrl-C, too
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        raise
    finally:
        if folder.exists() or not old.exists():
            shutil.rmtree(own, ignore_errors=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which is then published as `folder`; an error removes it.

    Until then it lies beside `folder` under a new name, since any other name may be the user's.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder.parent))
    try:
        part = own / folder.name        # Only its owner may read `own`; this one is a folder like any other.
        part.mkdir()
        yield part
        publish(part, folder)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def plain(config) -> dict:
    """The settings as JSON has them, without paths of this machine; `data_path` is a folder's name alone."""
    places = {"data_path": Path(config.data_path).name, "save": "", "checkpoint": "", "resume": "",
              "score": ()}
    return json.loads(json.dumps(asdict(config) | places))


def check_place(config) -> None:
    """UserError if `--save` names what is no model's folder, or one folder for several runs."""
    folder = Path(config.save)
    if not config.save or config.save == LOG:
        return
    if config.runs > 1:
        raise UserError(f"--save {shown(folder)} with --runs {config.runs}: each would replace the last; "
                        f"--save {LOG} gives each run its own")
    try:
        other = folder.exists() and not (folder / "config.json").exists()
    except OSError as error:                # as for a name that is too long
        raise UserError(f"--save {shown(folder)}: {error.strerror}; choose another name") from None
    if other:
        raise UserError(f"--save {shown(folder)}: it exists and is no model's folder; choose another name")


def prepare(model, schedule) -> list[str]:
    """What saving will take, for the first lines of a run; [] if nothing is saved.

    The folder's place is made now, since after the run it is too late to find that there is none.
    """
    config, table = model.config, model.ngrams.table
    if not config.save or config.save == LOG and not config.write_log:
        return []
    place = "the folder of the log"
    if config.save != LOG:
        place = config.save
        with disk_errors(f"the model to {place}"):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
    dense = sum(p.nbytes for p in model.parameters() if p is not table)
    read = model.ngrams.heads * sum(step.batch_tokens for step in schedule)
    rows = 0 if table is None else min(len(table), read)
    most = dense + rows * (config.head_dim * model.dtype.itemsize + 4)
    return [f"save: to {printable(place)}, at most {most / 1e9:.2f} GB ({rows:,} n-gram rows or fewer), by "
            f"way of {2 * min(most, FILE_BYTES) / 1e9:.2f} GB of host memory"]


def table_parts(model) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers (k,) int32 and rows (k, head_dim) that were written, on the host; all ranks must call."""
    waiting: list[tuple[Tensor, Tensor]] = []
    for part in model.ngrams.written_rows():
        waiting.append(part)
        if sum(x.nbytes for pair in waiting for x in pair) > FILE_BYTES // 2:
            yield tuple(map(torch.cat, zip(*waiting)))
            waiting = []
    if waiting:
        yield tuple(map(torch.cat, zip(*waiting)))


def save_model(model, report, log) -> list[str]:
    """Write the folder of a trained model, whose weights are whole. All ranks must call.

    Returns a line for a person, from the first rank.
    """
    config, table = model.config, model.ngrams.table
    if config.save == LOG and not config.write_log:
        return []
    first = report.rank == 0
    if first:
        folder = log.path.parent / "model" if config.save == LOG else log.begun_in / config.save
    with (disk_errors(f"the model to {folder}" if first else "the model"),
          new_folder(folder) if first else nullcontext() as part):
        if first:
            files = TensorFiles(part, "model")
            for name, x in model.state_dict().items():
                if name != "ngrams.table":
                    files.add(name, x)
        written = 0
        for i, (numbers, rows) in enumerate(table_parts(model)):
            if first:
                written += len(numbers)
                files.add(f"ngrams.numbers.{i}", numbers)
                files.add(f"ngrams.rows.{i}", rows)
        if not first:
            return []
        files.flush()
        name_files(files)
        dense = sum(p.numel() for p in model.parameters() if p is not table)
        facts = {"name": config.name or config.preset, "preset": config.preset, "seed": config.seed,
                 "data": Path(config.data_path).name, "steps": len(report.losses), "tokens": report.tokens,
                 "time_s": round(report.clock.seconds, 3), "resumed_after": log.first,
                 "loss": report.validation_loss,
                 "parameters": parameter_count(model), "dense": dense, "written": written,
                 "rows": 0 if table is None else len(table),
                 "vocabulary": VOCABULARIES.get(config.vocab_size)}
        scores = "".join(f"| {name}, nats a token | {loss:.4f} |\n" for name, loss in report.scores.items())
        since = f" since step {log.first}, where it went on from a checkpoint" if log.first else ""
        (part / "README.md").write_text(CARD.format(**facts, scores=scores, since=since), "utf-8", "replace")
        write_json(part / "config.json", {"format": FORMAT, "version": VERSION, **facts,
                                          "scores": report.scores, "config": plain(config)})
    return [f"model {place_of(folder)}: {files.size / 1e6:,.1f} MB"]


def name_files(files: TensorFiles) -> None:
    """Name the files of a model as hubs know them, with an index if there are several."""
    count, places = len(files.files), {}
    for i, (path, names) in enumerate(files.files.items(), 1):
        to = f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        os.replace(path, files.folder / to)
        places |= dict.fromkeys(names, to)
    if count > 1:
        write_json(files.folder / "model.safetensors.index.json",
                   {"metadata": {"total_size": files.size}, "weight_map": places})


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Raise UserError where the contents of a folder do not fit together: a stranger may have made them."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError, MemoryError,
            RuntimeError) as error:
        if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):     # not the folder's fault
            raise
        reason = shown(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        raise UserError(f"{folder}: damaged, or of another program ({reason}); fetch or save it "
                        "again") from error


def read_json(path: Path, form: str, version: int) -> dict:
    """The JSON object in a file, of this `form` and of a version that is known; UserError if it is not."""
    try:
        data = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise UserError(f"{path}: {reason}; this is no folder of a {form}") from None
    if not isinstance(data, dict) or data.get("format") != form:
        raise UserError(f"{path}: not of a {form}; another program wrote it")
    if not isinstance(data.get("version"), int) or data["version"] > version:
        raise UserError(f"{path}: version {shown(data.get('version'))} of {form}, this program reads up to "
                        f"{version}; use the program that wrote it")
    return data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory; UserError if it is damaged."""
    try:
        open_regular(path).close()      # A pipe would block `load_file`.
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: truncated or damaged ({shown(error)}); fetch or save it again") from None


def read_model(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """What config.json says, and all tensors by name, of the folder of a saved model."""
    facts = read_json(folder / "config.json", FORMAT, VERSION)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return facts, read_tensors(folder / "model.safetensors")
    try:
        names = sorted(set(json.loads(read_regular(index))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: damaged; fetch or save the model again") from None
    return facts, {name: x for file in names for name, x in read_tensors(folder / Path(file).name).items()}
