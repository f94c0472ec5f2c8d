"""Vocabularies: GPT-2's byte-pair encoding, another one like it from a file of ranks, or plain bytes.

A document is bytes (UTF-8 for the pair encodings). Its tokens are the start token, which is the vocabulary's
last id, and what the bytes encode to; decoding gives back exactly those bytes.
"""
import base64
import functools
import re
from multiprocessing import TimeoutError
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from data.errors import DataError
from data.shards import read_regular

MAX_SIZE, MAX_BYTES = 65536, 1 << 26  # tokens, and bytes of their file
NEVER = 1 << 30  # a rank beyond all others
FETCH_SECONDS = 60  # for the 1.5 MB of GPT-2's vocabulary
# tiktoken's regular expression overflows its stack on about a million characters of white space before other
# text. White space as its engine sees it: Python's \s also holds the separators 1c to 1f.
LONG_SPACE = re.compile(r"(?<![^\S\x1c-\x1f])[^\S\x1c-\x1f]{100000,}")


class Bytes:
    """Token = byte; 256 starts a document."""
    name, bos, size = "bytes", 256, 257

    def encode(self, document: bytes) -> np.ndarray:
        """Tokens (1 + bytes,) uint16, the start token first."""
        tokens = np.empty(1 + len(document), np.uint16)
        tokens[0] = self.bos
        tokens[1:] = np.frombuffer(document, np.uint8)
        return tokens

    def decode(self, tokens: np.ndarray) -> bytes:
        """The bytes of `tokens` (n,), start tokens left out."""
        return tokens[tokens != self.bos].astype(np.uint8).tobytes()


class BytePairs:
    """GPT-2's way of splitting text, with the ranks of a `tiktoken.Encoding`."""

    def __init__(self, encoding) -> None:  # tiktoken.Encoding whose last id is the start token
        self.encoding, self.name = encoding, encoding.name
        self.size = encoding.n_vocab
        self.bos = self.size - 1

    def encode(self, document: bytes) -> np.ndarray:
        """Tokens (1 + n,) uint16 of UTF-8 text, the start token first."""
        ids = [self.encoding.encode_to_numpy(part, disallowed_special=())
               for part in split_long_space(document.decode())]
        return np.concatenate([[self.bos], *ids], dtype=np.uint16, casting="unsafe")

    def decode(self, tokens: np.ndarray) -> bytes:
        """The bytes of `tokens` (n,), start tokens left out."""
        return self.encoding.decode_bytes(tokens[tokens != self.bos].tolist())


def edges(token: bytes, ranks: dict[bytes, int]) -> tuple[list, list]:
    """The parts at a token's left edge and at its right edge, while the encoder joins its bytes step by step.

    Both lists have pairs of a part and the rank of the join that takes it up, which is NEVER for the whole
    token.
    """
    parts, left, right = [bytes([byte]) for byte in token], [], []
    while len(parts) > 1:
        joins = [ranks.get(a + b, NEVER) for a, b in zip(parts, parts[1:])]
        rank = min(joins)
        i = joins.index(rank)
        if i == 0:
            left.append((parts[0], rank))
        if i == len(parts) - 2:
            right.append((parts[-1], rank))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return [*left, (token, NEVER)], [*right, (token, NEVER)]


def split_long_space(text: str, long_space: re.Pattern = LONG_SPACE) -> list[str]:
    """`text` in parts with the same tokens, cut before the last character of each long white space.

    The splitting rule ends a piece exactly there, because the last space belongs to the word that follows.
    """
    cuts = [0, *(m.end() - 1 for m in long_space.finditer(text) if m.end() < len(text)), len(text)]
    return [text[start:end] for start, end in zip(cuts, cuts[1:])]


@functools.cache
def load_vocabulary(choice: str | Path) -> Bytes | BytePairs:
    """The vocabulary "bytes", "gpt2" (fetched once by tiktoken) or that of a file of ranks (a Path)."""
    if choice == "bytes":
        return Bytes()
    try:
        import tiktoken
    except ImportError:
        raise DataError("tiktoken is not installed: pip install -r requirements.txt, or use --bytes")
    if choice != "gpt2":
        from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's rule for splitting text into words
        ranks = read_ranks(choice)
        return BytePairs(tiktoken.Encoding(choice.name, pat_str=r50k_pat_str, mergeable_ranks=ranks,
                                           special_tokens={"<|endoftext|>": len(ranks)}))
    try:
        with ThreadPool(1) as pool:  # tiktoken itself would wait for ever for a network that does not answer
            return BytePairs(pool.apply_async(tiktoken.get_encoding, ["gpt2"]).get(FETCH_SECONDS))
    # The errors of requests are OSErrors; a damaged download is a ValueError.
    except (OSError, ValueError, TimeoutError) as error:
        raise DataError(f"tiktoken could not fetch GPT-2's vocabulary ({type(error).__name__}). Where there "
                        "is a network run `TIKTOKEN_CACHE_DIR=gpt2 python -c 'import tiktoken; "
                        "tiktoken.get_encoding(\"gpt2\")'`, copy the folder gpt2 to this machine and set "
                        "TIKTOKEN_CACHE_DIR to it; or give a file of ranks with --vocabulary FILE")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Ranks of a vocabulary file (`base64-of-token rank` in each line): 0 to n-1 once each, all bytes."""
    ranks: dict[bytes, int] = {}
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes, more than a vocabulary has; "
                        "--vocabulary takes a file like gpt2.tiktoken")
    for number, line in enumerate(read_regular(path, MAX_BYTES).splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(f"{path}:{number}: not a base64 token and its rank; "
                            "--vocabulary takes a file like gpt2.tiktoken")
    if len(ranks) >= MAX_SIZE:
        raise DataError(f"{path}: {len(ranks):,} tokens and a start token do not fit the 16 bits of a "
                        f"shard's ids (0 to 65,535); use a vocabulary of at most {MAX_SIZE - 1:,} tokens")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"{path}: its ranks are not 0 to {len(ranks) - 1:,}, each once; the file is "
                        "incomplete or damaged")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path}: {len(missing)} of the 256 single bytes have no rank (the first: "
                        f"{missing[0]:#04x}); some text could not be encoded: the file is incomplete")
    return ranks
