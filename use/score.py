"""How well a trained model predicts: nats a token and bits a byte of any text, and multiple-choice questions.

    python -m use.score FOLDER notes.md books/           of each: .txt, .md, .jsonl, .parquet, .gz, .zst
    python -m use.score FOLDER main.py --format text     of a file with another name
    python -m use.score FOLDER --shards data/shards/mine the validation text of token shards, as in training
    python -m use.score FOLDER --shards DIR --public_rule   ... and by the public speedrun's rule
    python -m use.score FOLDER --choices questions.jsonl or --hellaswag, which is the same

FOLDER was written by `--save`. A file is one document, or has one in each line or row. The start token of a
document is given and is not scored. Long documents are scored in pieces, as in validation.

A question is a line of JSON with a context ("ctx", "query" or "question"), the texts that may follow it
("endings" or "choices") and the place of the true ending ("label", "gold" or "answer", from 0). The model's
answer is the ending with the lowest loss ("accuracy"), or with the lowest loss per character ("normalised").
The latter is the usual rule for HellaSwag (Zellers et al., arXiv 1905.07830).
"""
import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.errors import DataError, positive, printable, tool_parser
from data.loader import Batch, TextSettings, make_batch, to_device
from data.readers import Documents
from data.scoring import scored_text, validation_stream
from data.shards import document_starts
from data.vocabulary import BytePairs, Bytes
from kernels import loss
from use.model import Saved, choose_device, load, logits, one_line, vocabulary_of

ROWS = 4096     # tokens whose logits are in memory at a time
PUBLIC_CHUNK = 262_144      # tokens that the public speedrun's validation scores at a time
NAMES = ("ctx", "query", "question"), ("endings", "choices"), ("label", "gold", "answer")
Sequence = tuple[np.ndarray, int, int]      # a document's tokens, where in them a sequence starts, its length


def pieces(tokens: np.ndarray, longest: int) -> Iterator[Sequence]:
    """A document's tokens (n,) as sequences whose targets are all of them but the first, each once."""
    for start in range(0, len(tokens) - 1, longest):
        yield tokens, start, min(longest, len(tokens) - 1 - start)


def packed(saved: Saved, sequences: Iterable[Sequence]) -> Iterator[tuple[list[Sequence], Batch]]:
    """Whole sequences in batches of `val_chunk` tokens, on the model's device."""
    config, waiting = saved.model.config, []

    def batch() -> tuple[list[Sequence], Batch]:
        most = len(waiting) + math.ceil(config.val_chunk / config.val_sequence_length)
        made = make_batch(waiting, config.val_chunk, most, config.val_sequence_length, config.document_start)
        return waiting, to_device(made, saved.model.device)

    for sequence in sequences:
        if sum(length for *_, length in waiting) + sequence[2] > config.val_chunk:
            yield batch()
            waiting = []
        waiting.append(sequence)
    if waiting:
        yield batch()


@torch.no_grad()
def score_documents(saved: Saved, documents: Iterable[np.ndarray]) -> tuple[float, int]:
    """The loss of these documents' tokens (n,) together, in nats, and how many tokens were scored."""
    longest, total, count = saved.model.config.val_sequence_length, 0.0, 0
    sequences = (piece for tokens in documents for piece in pieces(tokens, longest))
    for waiting, batch in packed(saved, sequences):
        total += float(saved.model.score(batch, saved.step))
        count += sum(length for *_, length in waiting)
    return total, count


@torch.no_grad()
def score_shards(saved: Saved, folder: Path, tokens: int) -> float:
    """The loss, nats a token, of the first `tokens` of shards' validation text, as a run computes it."""
    config = saved.model.config
    settings = TextSettings.of(replace(config, data_path=str(folder)))
    text = scored_text("val", settings, tokens, config.val_chunk, config.val_sequence_length)
    total = sum(saved.model.score(to_device(batch, saved.model.device), saved.step).double()
                for batch in text.batches)
    return float(total) / text.tokens


@torch.no_grad()
def score_publicly(saved: Saved, folder: Path, tokens: int) -> float:
    """As `score_shards`, by the public speedrun's rule: fixed chunks of the text, which may cut documents.

    `saved` has room for PUBLIC_CHUNK tokens a pass (`val_chunk`) and runs without FP8.
    """
    config, total = saved.model.config, 0.0
    text = validation_stream(str(folder), config.vocab_size, tokens)
    for first in range(0, tokens, PUBLIC_CHUNK):
        part = text[first:min(first + PUBLIC_CHUNK, tokens) + 1]
        starts = np.union1d([0], document_starts(part[:-1], config.document_start)).tolist()
        lengths = np.diff([*starts, len(part) - 1]).tolist()
        sequences = [(part, start, length) for start, length in zip(starts, lengths)]
        batch = make_batch(sequences, len(part) - 1, len(sequences), max(lengths), config.document_start)
        total += float(saved.model.score(to_device(batch, saved.model.device), saved.step).double())
    return total / tokens


def token_losses(x: Tensor, head: Tensor, wanted: loss.Targets, *_, **__) -> Tensor:
    """A stand-in for `Ops.head_loss`: the loss of each token (n,), in nats; 0 for a target of -1."""
    losses = torch.cat([F.cross_entropy(logits(part, head), next_.long(), ignore_index=-1, reduction="none")
                        for part, next_ in zip(x.split(ROWS), wanted.targets.split(ROWS))])
    if wanted.mixture:
        losses = losses - F.softplus(wanted.mixture.log_odds + losses) - wanted.mixture.log_rest
    return losses.masked_fill(wanted.targets < 0, 0)


@torch.no_grad()
def score_endings(saved: Saved, texts: Iterable[tuple[np.ndarray, int]]) -> Iterator[float]:
    """For each text (tokens (n,), of which the last k are the ending) the loss of its ending, in nats.

    An ending has no more tokens than a sequence, `val_sequence_length`.
    """
    model, longest, ops = saved.model, saved.model.config.val_sequence_length, saved.model.ops
    sequences, lengths = [], []
    for tokens, ending in texts:
        tokens = np.concatenate([tokens[:1], tokens[1:][-longest:]])    # A long context loses its beginning.
        sequences.append((tokens, 0, len(tokens) - 1))
        lengths.append(ending)
    model.ops, lengths = ops._replace(head_loss=token_losses), iter(lengths)
    try:
        for waiting, batch in packed(saved, sequences):
            losses, end = model(batch, saved.step).double().cpu(), 0
            for *_, length in waiting:
                end += length
                yield float(losses[end - next(lengths):end].sum())
    finally:
        model.ops = ops


def read_questions(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """Context, endings and the place of the true one of each line; DataError names a line that has none."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                question = json.loads(line)
                context, endings, label = [next(question[name] for name in names if name in question)
                                           for names in NAMES]
                if not (isinstance(context, str) and isinstance(endings, list)
                        and all(isinstance(x, str) for x in endings)
                        and str(label).isdecimal() and int(label) < len(endings)):
                    raise ValueError
                "".join([context, *endings]).encode()       # ValueError where half a character stands alone
            except (ValueError, TypeError, StopIteration, OverflowError, RecursionError):
                wanted = ", ".join(names[0] for names in NAMES)
                raise DataError(f"{path}:{number}: no question with {wanted} (python -m use.score --help "
                                "says what they are)") from None
            yield context, endings, int(label)


def score_questions(saved: Saved, questions: Iterable[tuple[str, list[str], int]],
                    encode: Callable[[bytes], np.ndarray]) -> tuple[int, int, int]:
    """How many questions there are, how many are right, and how many by the endings' loss a character."""
    questions, longest = list(questions), saved.model.config.val_sequence_length
    texts = []
    for number, (context, endings, _) in enumerate(questions, 1):
        for ending in endings:
            begin, end = encode(context.rstrip().encode()), encode(f" {ending.strip()}".encode())[1:]
            if len(end) > longest:      # The loss of a part of it would make it the likeliest.
                raise DataError(f"question {number}: an ending of {len(end):,} tokens, the model is scored "
                                f"on at most {longest:,} at a time; remove the question")
            texts.append((np.concatenate([begin, end]), len(end)))
    losses, right, normalised = score_endings(saved, texts), 0, 0
    for _, endings, label in questions:
        found = np.array([next(losses) for _ in endings])
        right += int(found.argmin() == label)
        normalised += int((found / [max(len(ending.strip()), 1) for ending in endings]).argmin() == label)
    return len(questions), right, normalised


def arguments() -> argparse.ArgumentParser:
    parser = tool_parser("use.score", __doc__)
    option = parser.add_argument
    option("folder", type=Path, metavar="FOLDER", help="of --save")
    option("files", nargs="*", metavar="FILE", help="text, or a folder of it")
    option("--format", choices=["text", "jsonl", "parquet"], help="of every FILE (default: by its name)")
    option("--field", default="text", help="field or column with the text in .jsonl and .parquet")
    option("--shards", type=Path, metavar="DIR", help="token shards, whose validation text is scored")
    option("--tokens", type=positive, metavar="N", help="of that text (default: as many as training scored)")
    option("--public_rule", action="store_true",
           help=f"also in chunks of {PUBLIC_CHUNK:,} tokens and without FP8; takes that much more memory")
    option("--choices", "--hellaswag", type=Path, action="append", default=[], metavar="FILE",
           help="questions, one JSON object a line")
    return parser


def score_file(saved: Saved, vocabulary: Bytes | BytePairs, name: str, **reading: str | None) -> str:
    """The line to print about a file. `reading`: keywords of `Documents`, which reads the file."""
    size, encoded, utf8 = 0, [], "any" if isinstance(vocabulary, Bytes) else "replace"
    for document in Documents([name], utf8=utf8, **reading):
        size += len(document)
        encoded.append(vocabulary.encode(document))
    if not size:
        raise DataError(f"{name}: holds no text")
    total, count = score_documents(saved, encoded)
    return (f"{name}: {total / count:.4f} nats a token, {total / math.log(2) / size:.4f} bits a byte "
            f"({count:,} tokens, {size:,} bytes)")


def main() -> None:
    with one_line(arguments()) as options:
        if not (options.files or options.shards or options.choices):
            raise DataError("nothing to score: give a FILE, --shards or --choices")
        saved = load(options.folder, choose_device(options.device))
        if options.shards:
            tokens = options.tokens or saved.model.config.val_tokens
            loss = score_shards(saved, options.shards, tokens)
            print(printable(f"{options.shards}: {loss!r} nats a token ({tokens:,} tokens)"))
            if options.public_rule:
                wide = load(options.folder, saved.model.device, val_chunk=PUBLIC_CHUNK, fp8=())
                public = score_publicly(wide, options.shards, tokens)
                print(printable(f"{options.shards}: {public!r} by the public rule, {public - loss:+.5f}"))
        if options.files or options.choices:
            vocabulary = vocabulary_of(saved.facts, options.vocabulary)
        for name in options.files:
            told = score_file(saved, vocabulary, name, kind=options.format, field=options.field)
            print(printable(told), flush=True)
        for path in options.choices:
            count, right, normalised = score_questions(saved, read_questions(path), vocabulary.encode)
            if not count:
                raise DataError(f"{path}: holds no questions")
            told = f"{path}: accuracy {right / count:.4f}, normalised {normalised / count:.4f}"
            print(printable(f"{told} ({count:,} questions)"), flush=True)


if __name__ == "__main__":
    main()
