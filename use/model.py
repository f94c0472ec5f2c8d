"""A saved model, built by `train_gpt.GPT`, on one device.

Rows of the n-gram table are looked up in the files of the model, which are mapped into memory. So a table of
many billion numbers takes no memory of the device, and only the rows that are read take memory of the host.
"""
import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt
from data.errors import DataError, one_line_errors
from data.vocabulary import BytePairs, Bytes, load_vocabulary
from kernels.loss.cross_entropy import CAP, SHIFT, WIDTH
from kernels.ranks.collectives import Collectives
from records.run.checks import check_config
from records.run.settings import UserError
from records.run.weights import VOCABULARIES, fitting, read_model

# Sampling takes few tokens at a time, for which plain PyTorch in bfloat16 is as fast as the kernels.
PLAIN = {"reference": ("all",), "compile": False, "fp8": ()}


class Saved(NamedTuple):
    """A model that was saved, and what it needs to be used."""
    model: train_gpt.GPT
    step: train_gpt.Step                # how it is validated at the end of its run
    facts: dict                         # of its config.json
    written: "WrittenRows | None"       # of the n-gram table


class WrittenRows:
    """The rows of the n-gram table that a run has written, by number; every other row is zero."""

    def __init__(self, tensors: dict[str, Tensor], like: Tensor):
        count = sum(name.startswith("ngrams.rows.") for name in tensors)
        self.rows = [tensors.pop(f"ngrams.rows.{i}") for i in range(count)]
        numbers = [tensors.pop(f"ngrams.numbers.{i}") for i in range(count)]
        self.numbers = torch.cat([torch.empty(0, dtype=torch.int32), *numbers])
        if (any(x.shape != (len(n), like.shape[1]) for x, n in zip(self.rows, numbers))
                or self.numbers.dtype != torch.int32 or not (self.numbers.diff() > 0).all()):
            raise ValueError("the rows of the n-gram table and their numbers")
        self.ends = torch.tensor([len(rows) for rows in self.rows], dtype=torch.long).cumsum(0)
        self.like = like                # looked-up rows have the width, dtype and device of this

    def __call__(self, numbers: Tensor) -> Tensor:
        """The rows (n, head_dim) with these numbers (n,)."""
        wanted = numbers.cpu().to(self.numbers.dtype)
        found = torch.zeros(len(wanted), self.like.shape[1], dtype=self.like.dtype)
        place = torch.searchsorted(self.numbers, wanted).clamp(max=max(len(self.numbers) - 1, 0))
        here = (self.numbers[place] == wanted).nonzero()[:, 0] if len(self.numbers) else place[:0]
        part = torch.searchsorted(self.ends, place[here], right=True)
        for i, rows in enumerate(self.rows):
            mine = here[part == i]
            found[mine] = rows[place[mine] - (self.ends[i] - len(rows))].to(found.dtype)
        return found.to(self.like.device)


def load(folder: Path, device: torch.device, **changes: object) -> Saved:
    """The model in a folder that `--save` wrote. `changes` are settings that say how it runs, such as PLAIN.

    It takes the fastest attention of this machine, since it may have been trained on another one.
    UserError where the folder does not hold a whole model of this program.
    """
    with fitting(folder), torch.random.fork_rng(devices=[]), torch.no_grad():
        facts, tensors = read_model(folder)
        config = config_of(facts, folder)
        check_config(config, train_gpt.Ops._fields)
        config = replace(config, **{"attention": "auto"} | changes)
        rows, look_up = config.ngram_rows if config.ngrams else 0, None
        short = replace(config, ngram_rows=min(rows, 1))
        # Files are checked against a model without memory, before memory is taken for the real one.
        check_shapes(folder, train_gpt.GPT(short, torch.device("meta"), Collectives(1)), tensors)
        model = train_gpt.GPT(short, device, Collectives(1))
        if rows:
            look_up = WrittenRows(tensors, model.ngrams.table)
            # The model needs only the length of the long table, because n-grams are hashed by it.
            empty = model.ngrams.table.new_empty(rows, config.head_dim, device="meta")
            model.ngrams.table, plain = nn.Parameter(empty), model.ops.lookup

            def lookup(table: Tensor, order, *more) -> Tensor:
                return look_up(order.index) if table.is_meta else plain(table, order, *more)
            model.ops = model.ops._replace(lookup=lookup)
        for name, x in model.state_dict().items():
            if not x.is_meta:
                x.copy_(tensors[name])
        schedule = train_gpt.Schedule(config)
        return Saved(model, schedule.validation(len(schedule)), facts, look_up)


def check_shapes(folder: Path, model: train_gpt.GPT, tensors: dict[str, Tensor]) -> None:
    """UserError if the tensors are not those of the model and rows of the n-gram table."""
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items() if name != "ngrams.table"}
    found = {name: tuple(x.shape) for name, x in tensors.items()
             if not re.fullmatch(r"ngrams\.(rows|numbers)\.\d+", name)}
    for name in wanted.keys() ^ found.keys():
        raise UserError(f"{folder}: {name} is {'missing' if name in wanted else 'unknown'}; the model is not "
                        "whole, or of another version of this program")
    for name, shape in wanted.items():
        if shape != found[name]:
            raise UserError(f"{folder}: {name} is {found[name]}, by its config.json {shape}; the files are "
                            "of two models")


def config_of(facts: dict, folder: Path) -> train_gpt.Config:
    """The settings that config.json holds. UserError for those that this program does not know."""
    tables = {"layers": train_gpt.Layer, "stages": train_gpt.Stage}
    try:
        values = {name: tuple(tables[name](**as_tuples(row)) for row in x) if name in tables else x
                  for name, x in facts["config"].items()}
        return train_gpt.Config(**as_tuples(values))
    except (KeyError, TypeError) as error:
        known = [f.name for f in fields(train_gpt.Config)]
        unknown = ", ".join(sorted(facts.get("config", {}).keys() - set(known))) or error
        raise UserError(f"{folder}/config.json: settings that this program does not know ({unknown}); use "
                        "the version of the program that saved it") from None


def as_tuples(x: object) -> object:
    """JSON's lists as the tuples that settings are."""
    if isinstance(x, dict):
        return {name: as_tuples(value) for name, value in x.items()}
    return tuple(map(as_tuples, x)) if isinstance(x, (list, tuple)) else x


def vocabulary_of(facts: dict, given: Path | None) -> Bytes | BytePairs:
    """The vocabulary of a model with these `facts`: the one that they name, or `given`, a file of ranks.

    UserError if there is neither, or if the vocabulary has another size than the model's.
    """
    if given is None and facts.get("vocabulary") not in VOCABULARIES.values():
        raise UserError("the model's vocabulary has no name; give its file of ranks with --vocabulary")
    vocabulary, size = load_vocabulary(given or facts["vocabulary"]), facts["config"]["vocab_size"]
    if vocabulary.size != size:
        raise UserError(f"--vocabulary {given}: {vocabulary.size:,} tokens, the model has {size:,}")
    return vocabulary


def logits(x: Tensor, head: Tensor) -> Tensor:
    """The softcapped logits (n, padded vocabulary) float32 of x (n, width), the input of the head."""
    return CAP * torch.sigmoid((F.linear(x, head).float() + SHIFT) / WIDTH)


def choose_device(wanted: str) -> torch.device:
    """"cpu", "cuda", "cuda:1", or with "auto" the first GPU if there is one."""
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:     # torch built without CUDA asserts
        raise UserError(f"--device {wanted}: {str(error).splitlines()[0]}; use auto or cpu") from None


def latest_model() -> Path:
    """The model of the newest run that saved one beside its log; UserError if there is none."""
    runs = Path(os.environ.get("RUNS_PATH", train_gpt.ROOT / "records/runs"))
    models = sorted(runs.glob("2*/model/config.json"), key=lambda path: path.stat().st_mtime)
    if not models:
        raise UserError(f"no run in {runs} has saved a model; ./run.sh --preset cpu trains one, and --save "
                        "log saves one of any run")
    return models[-1].parent


@contextmanager
def one_line(parser: argparse.ArgumentParser) -> Iterator[argparse.Namespace]:
    """Run a command: gives its arguments, and ends expected failures in one line."""
    parser.add_argument("--vocabulary", type=Path, metavar="FILE", help="ranks, if the model's has no name")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:1 (default: a GPU if any)")
    with one_line_errors(parser, "folder") as options:
        try:
            yield options
        except UserError as error:
            raise DataError(str(error)) from None
