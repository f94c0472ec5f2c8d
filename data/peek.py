"""A look into token shards: documents, tokens, lengths, first texts, and whether a preset's schedule fits.

    python -m data.peek data/shards/fineweb                     all shards of a folder
    python -m data.peek data/shards/fineweb/fineweb_val_000000.bin --documents 10
    python -m data.peek data/shards/mine --vocabulary gpt2.tiktoken
    python -m data.peek data/shards/fineweb --ids               ids, not text: needs no vocabulary

Every document begins with the vocabulary's last id, so the largest id of a shard is taken for the start
token, and tells the vocabulary: 256 is bytes, 50256 GPT-2's.
"""
import argparse
import itertools
import math
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError, one_line_errors, printable, tool_parser
from data.shards import Manifest, document_starts, find_shards, open_shard
from data.vocabulary import BytePairs, Bytes, load_vocabulary

TEXT_LENGTH = 400  # characters shown of a document
# What the schedules of train_gpt.py want: {tokens a document is cut to: tokens of sequences}, by preset, by
# start token.
SCHEDULES = {
    50256: {"speedrun": {896: 1270 * 131_072 // 3, 2048: 1270 * (262_144 + 393_216) // 3 + 15 * 393_216},
            "medium": {896: 4500 * 262_144 // 3, 2048: 4500 * (393_216 + 524_288) // 3 + 30 * 524_288},
            "corpus": {896: 1320 * 65_536 // 3, 2048: 1320 * (131_072 + 196_608) // 3 + 8 * 196_608},
            "sprint": {896: 1324 * 65_536 // 3, 2048: 1324 * (131_072 + 196_608) // 3 + 8 * 196_608},
            "single": {896: 2540 * 65_536 // 3, 2048: 2540 * (131_072 + 196_608) // 3 + 30 * 196_608}},
    256: {"cpu": {256: 40 * 2048, 512: 40 * 3072 + 50 * 4096}},
}
KEEP_TAILS = {"corpus", "sprint"}   # presets that train on what a cut leaves over, too


class Shard(NamedTuple):
    path: Path
    tokens: np.ndarray  # (n,) uint16
    starts: np.ndarray  # (documents,) int64: positions of start tokens

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document with its start token, (documents,) int64, from the first start on."""
        return np.diff(self.starts, append=len(self.tokens))


def open_all(inputs: list[Path]) -> tuple[list[Shard], int]:
    """The shards that `inputs` (files and folders) name, and their start token.

    DataError if one does not fit the others.
    """
    paths = [path for place in inputs
             for path in (sorted(place.glob("*.bin")) if place.is_dir() else [place])]
    if not paths:
        raise DataError(f"{inputs[0]}: no shards (*.bin) in it; make some with python -m data.text or "
                        "data.fineweb")
    tokens = [open_shard(path) for path in paths]
    largest = [int(shard.max()) for shard in tokens]
    if min(largest) != max(largest):
        odd = paths[largest.index(min(largest))]
        raise DataError(f"{odd}: its largest id is {min(largest)}, that of other shards {max(largest)}; "
                        "either it holds no document start or the shards are of different vocabularies: look "
                        "at them apart")
    bos = largest[0]
    return [Shard(path, shard, document_starts(shard, bos)) for path, shard in zip(paths, tokens)], bos


def table(shards: list[Shard]) -> str:
    """One line a shard: documents, tokens, mean and longest document."""
    width = max(len(shard.path.name) for shard in shards)
    lines = [f"{'shard':{width}} {'documents':>12} {'tokens':>14} {'mean':>8} {'longest':>10}"]
    for shard in shards:
        lines.append(f"{shard.path.name:{width}} {len(shard.starts):12,} {len(shard.tokens):14,} "
                     f"{shard.lengths.mean():8,.0f} {shard.lengths.max():10,}")
    return "\n".join(lines)


def histogram(lengths: np.ndarray) -> str:
    """Bars for the lengths (documents,) in doublings: their share of the documents and of the tokens."""
    space = max(10, min(60, shutil.get_terminal_size().columns - 44))
    doubling = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    documents, tokens = np.bincount(doubling), np.bincount(doubling, weights=lengths)
    lines = [f"{'tokens':>21} {'documents':>10} {'of all':>7} {'tokens':>7}"]
    for power in range(int(doubling.min()), int(doubling.max()) + 1):
        shortest = 2 ** (power - 1) + 1 if power else 1
        bar = "█" * round(space * documents[power] / documents.max())
        lines.append(f"{f'{shortest:,}–{2**power:,}':>21} {documents[power]:10,} "
                     f"{documents[power] / len(lengths):7.1%} {tokens[power] / lengths.sum():7.1%} "
                     f"{bar}".rstrip())
    return "\n".join(lines)


def schedule_fit(lengths: np.ndarray, total: int, bos: int) -> str:
    """For each preset of this vocabulary: the share of tokens that its cuts leave, how long the tokens last.

    A vocabulary that no preset is made for is compared with the small preset.
    """
    lines = []
    for preset, schedule in SCHEDULES.get(bos, SCHEDULES[256]).items():
        left = {cut: 1.0 if preset in KEEP_TAILS else np.minimum(lengths, cut).sum() / total
                for cut in schedule}
        taken = sum(wanted / left[cut] for cut, wanted in schedule.items())
        setting = "" if bos in SCHEDULES else f" --vocab_size {bos + 1}"
        cuts = ", ".join(f"{cut:,} leaves {share:.1%}" for cut, share in left.items())
        more = f"it does not fit in one; --epochs {math.ceil(taken / total)} does."
        lines.append(f"--preset {preset}{setting} takes about {taken:,.0f} tokens of training shards like "
                     f"these (cutting documents at {cuts}); there are {total:,}: {taken / total:.2f} epochs, "
                     + ("it fits." if taken <= total else more))
    return "\n".join(lines)


def first_documents(shards: list[Shard], count: int, vocabulary: Bytes | BytePairs | None) -> str:
    """The first documents, as text, or as ids when there is no vocabulary."""
    documents = itertools.islice(((shard, i) for shard in shards for i in range(len(shard.starts))), count)
    parts = []
    for shard, i in documents:
        length = int(shard.lengths[i])
        # Enough for the text shown.
        tokens = shard.tokens[shard.starts[i]:shard.starts[i] + min(length, TEXT_LENGTH)]
        text = (vocabulary.decode(tokens).decode(errors="replace")[:TEXT_LENGTH] if vocabulary else
                " ".join(map(str, tokens[:64])))
        parts.append(printable(f"── {shard.path.name}, document {i:,}, {length:,} tokens ──\n{text}"))
    return "\n\n".join(parts)


def choose_vocabulary(arguments: argparse.Namespace, bos: int) -> Bytes | BytePairs | None:
    """The vocabulary asked for, or the one that the start token tells; None means ids.

    Prints a line if a vocabulary is missing.
    """
    if arguments.ids:
        return None
    known = {256: "bytes", 50256: "gpt2"}
    choice = "bytes" if arguments.bytes else arguments.vocabulary or known.get(bos)
    if choice is None:
        print(f"No vocabulary is known whose last id is {bos}: ids are shown; give it with --vocabulary "
              "FILE.\n")
        return None
    try:
        vocabulary = load_vocabulary(choice)
    except DataError as error:
        if choice != "gpt2":
            raise
        print(f"Ids are shown, because {error}.\n")
        return None
    if vocabulary.bos != bos:
        raise DataError(f"the vocabulary {vocabulary.name} ends with id {vocabulary.bos}, the shards with "
                        f"{bos}; choose another with --vocabulary FILE or --bytes, or --ids to see ids")
    return vocabulary


def main() -> None:
    parser = tool_parser("data.peek", __doc__)
    parser.add_argument("shards", nargs="+", type=Path, metavar="SHARD", help="shard, or folder of shards")
    parser.add_argument("--documents", type=int, default=3, metavar="N",
                        help="documents to show (default: 3)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--bytes", action="store_true", help="the tokens are bytes")
    which.add_argument("--vocabulary", type=Path, metavar="FILE", help="ranks, as for python -m data.text")
    which.add_argument("--ids", action="store_true", help="show ids, not text")
    with one_line_errors(parser) as arguments:
        shards, bos = open_all(arguments.shards)
        print(printable(table(shards)) + "\n")
        for folder in dict.fromkeys(shard.path.parent for shard in shards):
            if changed := Manifest(folder).changed():
                raise DataError(f"{folder}: {', '.join(changed)} changed since manifest.json was written; "
                                "fetch or make them again, or remove manifest.json if that is meant")
        print(histogram(np.concatenate([shard.lengths for shard in shards])) + "\n")
        if training := [shard for shard in shards if shard.path not in find_shards(shard.path.parent, "val")]:
            lengths = np.concatenate([shard.lengths for shard in training])
            print(schedule_fit(lengths, sum(len(shard.tokens) for shard in training), bos) + "\n")
        if arguments.documents > 0:
            print(first_documents(shards, arguments.documents, choose_vocabulary(arguments, bos)))


if __name__ == "__main__":
    main()
