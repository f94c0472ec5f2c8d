"""Text from a trained model.

    python -m use.sample --prompt "def main("              the newest model that a run saved beside its log
    python -m use.sample FOLDER --prompt "The" --samples 3 a folder of --save
    python -m use.sample FOLDER --temperature 0            always the likeliest token

A sample ends where its document does, or after --tokens. The first one is written as it comes. The same seed
gives the same text on the same kind of device.
"""
import argparse
import codecs
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError, printable, tool_parser, whole
from use.cache import PIECE, Reader
from use.model import PLAIN, Saved, choose_device, latest_model, load, one_line, vocabulary_of

# A model makes rotary tables for all these tokens, and keeps their keys and values.
MOST_TOKENS, MOST_SAMPLES = 1_000_000, 4096
COLDEST = 0.001     # Below, the quotients of logits leave what float32 holds.


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float,
           generator: torch.Generator) -> Tensor:
    """A token (samples,) for each row of logits (samples, vocabulary) float32, on the generator's device.

    `temperature` 0 takes the likeliest token. Otherwise a token is drawn from the `top_k` likeliest (0: all)
    that are also among the fewest likeliest tokens whose probabilities add up to `top_p`.
    """
    if temperature == 0:
        return logits.argmax(1)
    sorted_logits, order = (logits / temperature).sort(1, descending=True)
    probability = sorted_logits.softmax(1)
    out = probability.cumsum(1) - probability >= top_p          # The likeliest one is never out.
    if top_k:
        out[:, top_k:] = True
    out[:, 0] = False
    chosen = torch.multinomial(probability.masked_fill(out, 0), 1, generator=generator)
    return order.gather(1, chosen)[:, 0]


def sample(saved: Saved, prompt: np.ndarray, tokens: int, samples: int, seed: int, temperature: float = 0.8,
           top_k: int = 0, top_p: float = 1.0) -> Iterator[Tensor]:
    """The next token (samples,) of each sample after `prompt` (n,), until all have ended.

    A sample ends when it draws the start token of a document; from then on it repeats this token.
    """
    device, config = saved.model.device, saved.model.config
    reader, generator = Reader(saved), torch.Generator(device).manual_seed(seed)
    size, start = config.vocab_size, config.document_start
    for piece in torch.from_numpy(prompt.astype(np.int64))[None].to(device).split(PIECE, 1):
        after = reader.read(piece)[:, -1:]      # The logits of a long prompt may not fit the device.
    reader.spread(samples)
    after, ended = after.expand(samples, 1, -1), torch.zeros(samples, dtype=torch.bool)
    for left in reversed(range(tokens)):
        chosen = choose(after[:, -1, :size], temperature, top_k, top_p, generator).cpu()
        ended |= chosen == start
        yield chosen.masked_fill_(ended, start)
        if ended.all() or not left:
            return
        after = reader.read(chosen[:, None].to(device))


def arguments() -> argparse.ArgumentParser:
    parser = tool_parser("use.sample", __doc__)
    option = parser.add_argument
    option("folder", nargs="?", type=Path, metavar="FOLDER", help="of --save (default: the newest run's)")
    option("--prompt", default="", help="what the text begins with (default: nothing)")
    option("--tokens", type=whole(1, MOST_TOKENS), default=256, metavar="N",
           help="at most (default: %(default)s)")
    option("--samples", type=whole(1, MOST_SAMPLES), default=1, metavar="N", help="default: %(default)s")
    option("--temperature", type=float, default=0.8, help="default: %(default)s; 0: always the likeliest")
    option("--top-k", type=whole(0, 65_536), default=0, metavar="K",
           help="only the K likeliest tokens (default: all)")
    option("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest, P in all (default: 1)")
    option("--seed", type=whole(0, 2 ** 63 - 1), default=0, help="default: %(default)s")
    return parser


def main() -> None:
    with one_line(arguments()) as options:
        if not (options.temperature == 0 or COLDEST <= options.temperature < math.inf):
            raise DataError(f"--temperature {options.temperature}: it is 0, or at least {COLDEST}")
        if not 0 < options.top_p <= 1:
            raise DataError(f"--top-p {options.top_p}: it is above 0 and at most 1")
        show = printable if sys.stdout.isatty() else str        # No sample steers the terminal.
        folder = options.folder or latest_model()
        # A document begins with its start token, which `encode` puts there.
        text = options.prompt.encode(errors="replace")
        room = 1 + len(text) + options.tokens
        saved = load(folder, choose_device(options.device), **PLAIN, val_chunk=room)
        vocabulary = vocabulary_of(saved.facts, options.vocabulary)
        prompt, text = vocabulary.encode(text), show(text.decode())
        began, told = time.perf_counter(), []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        print(text, end="", flush=True)
        for token in sample(saved, prompt, options.tokens, options.samples, options.seed,
                            options.temperature, options.top_k, options.top_p):
            told.append(token)
            print(show(decoder.decode(vocabulary.decode(token[:1].numpy()))), end="", flush=True)
        print(decoder.decode(b"", final=True))
        for others in torch.stack(told)[:, 1:].unbind(1):
            other = vocabulary.decode(others.numpy()).decode(errors="replace")
            print(f"{'-' * 80}\n{text}{show(other)}")
        seconds, count = time.perf_counter() - began, len(told) * options.samples
        print(printable(f"{folder}: {count} tokens in {seconds:.2f} s, {count / seconds:,.0f} a second, on "
                        f"{saved.model.device}"), file=sys.stderr)


if __name__ == "__main__":
    main()
