"""Texts to score a model on, cut into chunks: the validation text, and others by `--score`."""
import math
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data.errors import printable
from data.loader import Batch, TextSettings, make_batch
from data.overlap import fingerprint, marked_tokens
from data.packing import cut_documents
from data.shards import ShardError, document_starts, open_shard, shards_in


class ScoredText(NamedTuple):
    """A text that models are scored on, in chunks."""
    name: str
    batches: list[Batch]
    tokens: int                 # that are scored
    sha256: str = ""            # of its shards, in a log


def validation_stream(folder: str, vocab_size: int, tokens: int) -> np.ndarray:
    """The first tokens + 1 of the validation shards, (tokens + 1,) uint16. ShardError if there are fewer."""
    pieces = (open_shard(path, vocab_size)[:tokens + 1] for path in shards_in(folder, "val"))
    text = np.concatenate([np.zeros(0, np.uint16), *pieces])[:tokens + 1]
    if len(text) <= tokens:
        raise ShardError(f"{folder}: {len(text):,} validation tokens, to score {tokens:,} takes one more "
                         f"than that; add shards, or score at most {len(text) - 1} (--val_tokens of a run, "
                         "--tokens of use.score and use.export)")
    return text


def scored_text(name: str, settings: TextSettings, tokens: int, chunk: int, sequence_length: int,
                multiple: int = 1, scored: np.ndarray | None = None) -> ScoredText:
    """The first `tokens` of the validation stream in chunks; every token after the first is a target once.

    Each document is a sequence, or several of up to `sequence_length` tokens, whatever the chunk. A chunk
    holds whole sequences and is filled up with tokens that are not scored. Empty chunks make the number of
    chunks a multiple of `multiple`. With `scored` (tokens + 1,) bool only targets that it marks are scored.
    """
    if sequence_length > chunk:
        raise ValueError(f"sequences of {sequence_length} tokens in chunks of {chunk}, which would cut them")
    text = validation_stream(settings.folder, settings.vocab_size, tokens)
    starts = np.union1d([0], document_starts(text[:tokens], settings.document_start))
    starts, ends = cut_documents(starts, tokens, sequence_length, keep_tails=True)
    chunks, filled = [], chunk
    for start, length in zip(starts.tolist(), (ends - starts).tolist()):
        if filled + length > chunk:
            chunks.append([])
            filled = 0
        chunks[-1].append((text, start, length))
        filled += length
    # All ranks score equally many chunks, because they look up rows for each other.
    chunks += [[]] * (-len(chunks) % multiple)
    most = max(map(len, chunks)) + math.ceil(chunk / sequence_length)       # with what fills a chunk up
    batches = [make_batch(each, chunk, most, sequence_length, settings.document_start) for each in chunks]
    if scored is not None:
        for batch, sequences in zip(batches, chunks):
            wanted = [scored[start + 1:start + 1 + length] for _, start, length in sequences]
            wanted = torch.from_numpy(np.concatenate([np.zeros(0, bool), *wanted]))
            batch.targets[:len(wanted)].masked_fill_(~wanted, -1)
        tokens = int(scored[1:tokens + 1].sum())
    return ScoredText(name, batches, tokens)


def other_texts(settings: TextSettings, wanted: Seq[str], val_tokens: int, chunk: int, sequence_length: int,
                multiple: int) -> Iterator[ScoredText]:
    """What is scored after a run beside the validation text; `wanted` has the form of `--score`.

    The validation text comes again in two parts, if `python -m data.overlap` has marked its tokens: those
    that lie in a 13-gram of the training text ("val repeated"), and the rest ("val new"), unless empty.
    """
    for name, folder, tokens in map(parse_score, wanted):
        there = str(folder or Path(settings.folder) / name)
        if folder or Path(there).is_dir():
            place = replace(settings, folder=there)
            try:
                text = scored_text(name, place, tokens, chunk, sequence_length, multiple)
                text = text._replace(sha256=fingerprint(there, "val"))
            except ShardError as error:
                # A whole run is not lost because its text was removed meanwhile.
                print(printable(f"WARNING: --score {name} was left out: {error}"), file=sys.stderr)
            else:
                yield text
    if (marks := marked_tokens(settings.folder, val_tokens + 1)) is not None:
        for name, scored in (("val repeated", marks), ("val new", ~marks)):
            if scored[1:].any():
                text = scored_text(name, settings, val_tokens, chunk, sequence_length, multiple, scored)
                yield text._replace(sha256=fingerprint(settings.folder, "val"))


def check_scores(wanted: Seq[str]) -> None:
    """ShardError, before a run, if a folder that is named holds too little to be scored after it."""
    for name, folder, tokens in map(parse_score, wanted):
        size = sum(len(open_shard(path)) for path in shards_in(folder, "val")) if folder else tokens + 1
        if size <= tokens:
            raise ShardError(f"--score {name}: {folder} has {size:,} validation tokens, at most {size - 1:,} "
                             "can be scored")


def parse_score(text: str) -> tuple[str, str, int]:
    """"clean=FOLDER:4194304" -> its name, folder and tokens. Without "=FOLDER" it lies beside the shards."""
    place, _, tokens = text.rpartition(":")
    name, _, folder = place.partition("=")
    if not name or name.startswith("val") or not tokens.isdecimal() or int(tokens) < 1:
        raise ShardError(f"--score {text}: write name=FOLDER:TOKENS, or name:TOKENS for a folder of that "
                         "name beside the shards, which may be missing")
    return name, folder, int(tokens)
