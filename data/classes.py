"""What GPT-2's tokens have in common, by their spelling: " The", "the" and "THE" are one word.

    python -m data.classes gpt2.tiktoken        # writes data/gpt2.npz anew from GPT-2's ranks

Each token has three features, and tokens that share one can learn from each other:

- its class: the text without case, accents and spaces around it. The 50,257 tokens fall into 32,993 classes.
  N-grams can be of classes, so that a table has fewer to hold (record 92 of the public speedrun).
- its root: the class of the token that byte-pair encoding began to build it from, as " walk" in " walking"
  (see `roots`); 15,722 roots.
- its form: a space in front or not, capitals, and the suffix, or the last two letters; 3,946 forms. A form
  says much about a word's place in a sentence.

Roots and forms are for `--shared_updates` (kernels/optimizer/shared_updates.py). The suffixes are a plain
list of English ones: "ration" loses "ion", too. The file also has each token's bytes, for canonical.py.
"""
import unicodedata
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path

import numpy as np

from data.errors import one_line_errors, tool_parser
from data.vocabulary import edges, read_ranks

ROOT = 3                # letters at least
GPT2, GPT2_SIZE = Path(__file__).parent / "gpt2.npz", 50257
SUFFIXES = sorted((
    "'s s es ies ed ied edly ing ings er ers est ly y ion ions ation ations ment ments ness nesses al ally "
    "ity ities e ful able ive ic ous ism ist ists ance ence ant ent").split(), key=len, reverse=True)


def normalised(token: bytes) -> str | None:
    """The text of a token without case, accents and spaces around it; None if it has none, or is no text."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return None
    letters = unicodedata.normalize("NFKD", text.strip(" ")).lower()
    return "".join(letter for letter in letters if not unicodedata.combining(letter)) or None


def without_suffix(text: str, least: int) -> tuple[str, str]:
    """The text without its longest suffix that leaves `least` letters, and that suffix; "" for none."""
    endings = (s for s in SUFFIXES if text.endswith(s) and len(text) - len(s) >= least)
    suffix = next(endings, "")
    return text.removesuffix(suffix), suffix


def roots(tokens: list[bytes]) -> list[int]:
    """The root of each of a vocabulary's `tokens`, by rank: the token itself, or one of lower rank.

    The encoder makes a token by joining two parts last. If the left part has at least ROOT letters, its root
    is the token's: " develop" joined "ment", and " development" joined "al".
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found: list[int] = []
    for rank, token in enumerate(tokens):
        left, _ = edges(token, ranks)
        part = left[-2][0] if len(left) > 1 else b""
        found.append(found[ranks[part]] if part in ranks and len(part.strip()) >= ROOT else rank)
    return found


def form(token: bytes, text: str) -> Hashable:
    """How a token with this normalised text is written. Tokens of one form share this, whatever they mean."""
    word, spaced = token.decode().strip(" "), token.startswith(b" ")
    if text.isalpha():
        case = "all" if word.isupper() and len(word) > 1 else "first" if word[:1].isupper() else "none"
        return spaced, case, without_suffix(text, 2)[1] or text[-2:]
    if text.isdigit():
        return spaced, len(text)
    return spaced, text[:1], text[-1:]


def token_features(tokens: list[bytes]) -> np.ndarray:
    """Class, root and form (n, 3) int32 of each token: the first token with the same one, or itself.

    `tokens`: a whole vocabulary by rank.
    """
    firsts: list[dict[Hashable, int]] = [{}, {}, {}]
    features = np.arange(len(tokens), dtype=np.int32)[:, None].repeat(3, 1)
    for i, (token, root) in enumerate(zip(tokens, roots(tokens))):
        if (text := normalised(token)) is not None:
            found = text, normalised(tokens[root]) or text, form(token, text)
            features[i] = [first.setdefault(key, i) for first, key in zip(firsts, found)]
    return features


@lru_cache
def gpt2_features() -> np.ndarray:
    """Class, root and form (50257, 3) int32 of each of GPT-2's tokens. The last one is like no other."""
    with np.load(GPT2, allow_pickle=False) as saved:
        return saved["features"].astype(np.int32)


def gpt2_classes() -> np.ndarray:
    """The class (50257,) int32 of each of GPT-2's tokens."""
    return np.ascontiguousarray(gpt2_features()[:, 0])


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
        # The last row is the token that starts a document.
        features = np.vstack([token_features(tokens), np.full(3, len(tokens), np.int32)])
        text, lengths = np.frombuffer(b"".join(tokens), np.uint8), np.array(list(map(len, tokens)), np.uint8)
        np.savez_compressed(GPT2, features=features.astype(np.uint16), text=text, lengths=lengths)
        counts = ", ".join(f"{len(np.unique(feature)):,}" for feature in features.T)
        print(f"{GPT2}: {len(features):,} tokens; classes, roots, forms: {counts}")


if __name__ == "__main__":
    main()
