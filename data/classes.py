"""Classes of tokens, for n-grams that ignore case, accents and spaces: " The", "the" and "THE" are one.

    python -m data.classes gpt2.tiktoken        # writes data/gpt2.npz anew from GPT-2's ranks

The 50,257 tokens of GPT-2 fall into 32,993 classes. A table of n-grams then has fewer n-grams to hold. The
idea is from the public speedrun's record 92. The file also has the bytes of each token, for canonical.py.
"""
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np

from data.errors import one_line_errors, tool_parser
from data.vocabulary import read_ranks

GPT2, GPT2_SIZE = Path(__file__).parent / "gpt2.npz", 50257


def normalised(token: bytes) -> str | None:
    """The text of a token without case, accents and spaces around it; None if it has none, or is no text."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return None
    letters = unicodedata.normalize("NFKD", text.strip(" ")).lower()
    return "".join(letter for letter in letters if not unicodedata.combining(letter)) or None


def token_classes(tokens: list[bytes]) -> np.ndarray:
    """The class (n,) int32 of each token: the first token of the same normalised text, or itself."""
    first: dict[str, int] = {}
    texts = map(normalised, tokens)
    classes = [i if text is None else first.setdefault(text, i) for i, text in enumerate(texts)]
    return np.array(classes, np.int32)


@lru_cache
def gpt2_classes() -> np.ndarray:
    """The class (50257,) int32 of each of GPT-2's tokens. The last one, which starts a document, is alone."""
    with np.load(GPT2, allow_pickle=False) as saved:
        return saved["classes"].astype(np.int32)


@lru_cache
def gpt2_tokens() -> list[bytes]:
    """The bytes of each of GPT-2's 50,256 tokens of text, by rank."""
    with np.load(GPT2, allow_pickle=False) as saved:
        text, ends = saved["text"].tobytes(), np.cumsum(saved["lengths"], dtype=np.int64).tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends)]


def main() -> None:
    parser = tool_parser("data.classes", __doc__)
    parser.add_argument("ranks", type=Path, metavar="FILE",
                        help="of ranks, as for python -m data.text --vocabulary")
    with one_line_errors(parser, "ranks") as options:
        ranks = read_ranks(options.ranks)
        tokens = sorted(ranks, key=ranks.get)
        classes = np.append(token_classes(tokens), np.int32(len(tokens)))       # the start of a document
        text, lengths = np.frombuffer(b"".join(tokens), np.uint8), np.array(list(map(len, tokens)), np.uint8)
        np.savez_compressed(GPT2, classes=classes.astype(np.uint16), text=text, lengths=lengths)
        print(f"{GPT2}: {len(classes):,} tokens, {len(np.unique(classes)):,} classes")


if __name__ == "__main__":
    main()
