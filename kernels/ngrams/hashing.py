"""hash_L = t₀ f₀ ^ t₁ f₁ ^ … ^ t_(L−1) f_(L−1) modulo 2⁶⁴, of a token t₀ and the L − 1 tokens before it.

Token ids count from 1, and places before the start of a sequence count as 0. So the hash depends on the L
tokens, on their order and on where the sequence starts, and on nothing else. The factors f are odd: a product
with an odd number loses none of 64 bits.

- `ngram_index`: the hash with the factors HASH, modulo the table's number of rows, is the row that a token
  reads.
- `suffix_keys`: the hash with the powers of BASE, nearly all of which fill 64 bits, is a key. Two places
  have equal keys if their last L tokens are equal.

One launch walks back from all tokens at once. It reads a token as often as the longest end has tokens, but
from memory only once, and writes each result once. One H200, 49,152 tokens: 4.8 µs for four rows and 2.1 for
four keys; compiled PyTorch 8.9 and 8.4.
"""
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.backend import check, tl, triton
from kernels.example import Example
from kernels.sequence import previous

# The factors of a token and of those before it.
HASH = 998_244_353, 1_000_003, 2_654_435_761, 3_266_489_917, 668_265_263, 374_761_393
BASE = 6_364_136_223_846_793_005
# (tokens a program, warps). The first is used.
CONFIGS = [(256, 4), (128, 4), (512, 4), (512, 8)]


def powers(count: int) -> tuple[int, ...]:
    """The powers of BASE, from the 0th on, modulo 2⁶⁴ as signed numbers."""
    return tuple((pow(BASE, power, 2 ** 64) + 2 ** 63) % 2 ** 64 - 2 ** 63 for power in range(count))


def hashes_reference(tokens: Tensor, is_start: Tensor, factors: tuple[int, ...]) -> list[Tensor]:
    """Hashes (n,) int64 of the last token, of the last two, and so on: one for each factor."""
    token, hashed, found = tokens.long() + 1, 0, []
    for factor in factors:
        hashed = token * factor ^ hashed  # of one more token
        found.append(hashed)
        token = previous(token, is_start)
    return found


def ngram_index_reference(tokens: Tensor, is_start: Tensor, lengths: tuple[int, ...], count: int,
                          classes: Tensor | None = None) -> Tensor:
    """Plain PyTorch form of `ngram_index`."""
    of = tokens if classes is None else classes[tokens.long()]
    found = hashes_reference(of, is_start, HASH[:max(lengths)])
    return torch.stack([found[length - 1] % count for length in lengths], 1).flatten().int()


def suffix_keys_reference(tokens: Tensor, is_start: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Plain PyTorch form of `suffix_keys`."""
    found = hashes_reference(tokens, is_start, powers(max(lengths)))
    return torch.stack([found[length - 1] for length in lengths])


@triton.jit
def hash_kernel(tokens_ptr, is_start_ptr, classes_ptr, out_ptr, n, count, LENGTHS: tl.constexpr,
                FACTORS: tl.constexpr, TOKENS: tl.constexpr):
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside, hashed = i < n, tl.zeros((TOKENS,), tl.int64)  # whether token i - back is of the same sequence
    for back in tl.static_range(len(FACTORS)):
        token = tl.load(tokens_ptr + i - back, mask=inside, other=-1)
        if classes_ptr is not None:
            token = tl.load(classes_ptr + token, mask=inside, other=-1)
        hashed ^= (token.to(tl.int64) + 1) * FACTORS[back]
        for k in tl.static_range(len(LENGTHS)):
            if LENGTHS[k] == back + 1:
                if count is None:
                    tl.store(out_ptr + k * n + i, hashed, mask=i < n)
                else:  # The remainder has the sign of what is divided, as in C.
                    row = hashed % count
                    row = tl.where(row < 0, row + count, row).to(tl.int32)
                    tl.store(out_ptr + i * len(LENGTHS) + k, row, mask=i < n)
        goes_on = tl.load(is_start_ptr + i - back, mask=inside, other=1) == 0
        inside = inside & goes_on & (i > back)


def hash_ends(out: Tensor, tokens: Tensor, is_start: Tensor, lengths: tuple[int, ...],
              factors: tuple[int, ...], classes: Tensor | None, count: int | None,
              tuned: tuple[int, int]) -> Tensor:
    """Fills `out`: with whole hashes length by length if `count` is None, or with rows token by token."""
    integers = torch.int32, torch.int64
    check(tokens.ndim == 1 and tokens.is_contiguous() and tokens.dtype in integers, "tokens", tokens,
          "contiguous int32 or int64 (n,)")
    check(is_start.shape == tokens.shape and is_start.is_contiguous() and is_start.dtype == torch.bool,
          "is_start", is_start, f"contiguous bool ({len(tokens)},)")
    check(classes is None or classes.ndim == 1 and classes.is_contiguous() and classes.dtype in integers,
          "classes", classes, "contiguous int32 or int64 (vocabulary,)")
    n, (block, warps) = len(tokens), tuned
    if n:
        hash_kernel[triton.cdiv(n, block),](
            tokens, is_start, classes, out, n, count, LENGTHS=lengths, FACTORS=factors, TOKENS=block,
            num_warps=warps)
    return out


def ngram_index(
    tokens: Tensor,  # (n,) int32 or int64, contiguous
    is_start: Tensor,  # (n,) bool, contiguous; the first token has no predecessor in any case
    lengths: tuple[int, ...],  # of the n-grams, in tokens
    count: int,  # rows of the table, at most 2³¹ − 1
    classes: Tensor | None = None,  # (vocabulary,) int32 or int64: each token's class, hashed in its place
    tuned: tuple[int, int] = CONFIGS[0],
) -> Tensor:
    """Row numbers of the n-grams that end at each token, token by token: (n · len(lengths),) int32."""
    out = torch.empty(len(tokens) * len(lengths), dtype=torch.int32, device=tokens.device)
    return hash_ends(out, tokens, is_start, lengths, HASH[:max(lengths)], classes, count, tuned)


def suffix_keys(tokens: Tensor, is_start: Tensor, lengths: tuple[int, ...],
                tuned: tuple[int, int] = CONFIGS[0]) -> Tensor:
    """Keys (len(lengths), n) int64 of the last tokens; `tokens` and `is_start` as for `ngram_index`.

    Where a sequence has fewer tokens so far, the missing ones count as 0. So no other token of that sequence
    has the same key, except by chance.
    """
    out = torch.empty(len(lengths), len(tokens), dtype=torch.int64, device=tokens.device)
    return hash_ends(out, tokens, is_start, lengths, powers(max(lengths)), None, None, tuned)


def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    """Rows of n-grams of classes, and keys; sequences of one token and of four in odd sizes."""
    def inputs(n: int) -> tuple[Tensor, ...]:
        token = torch.arange(n, device=device)
        is_start = token % 2048 == 0 if size == "real" else token % 5 < 2
        return torch.randint(50257, (n,), device=device).int(), is_start

    def with_classes(n: int) -> tuple:
        return *inputs(n), (2, 3, 4, 5), 2 ** 28, torch.randint(32993, (50257,), device=device).int()

    for n in (49152, 196608) if size == "real" else (1, 700):
        yield Example("rows of n-grams", f"{n:,} × 4", partial(with_classes, n), ngram_index,
                      ngram_index_reference, bytes=n * (4 + 1 + 4 * 4), configs=tuple(CONFIGS))
        yield Example("keys of ends of text", f"{n:,} × 4", lambda n=n: (*inputs(n), (1, 2, 4, 8)),
                      suffix_keys, suffix_keys_reference, bytes=n * (4 + 1 + 4 * 8), configs=tuple(CONFIGS))
