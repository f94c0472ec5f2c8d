"""Where the same last tokens came before: hashes that equal ends of text share, and the longest match.

A key is a hash of a token's last L tokens. Sums of s_i = Σ h(tokenⱼ) bʲ over j ≤ i give it for any L by one
subtraction: (s_i − s_{i−L}) b⁻ⁱ depends on those tokens and their order alone. All of it is modulo 2⁶⁴, where
an odd b has an inverse.
"""
import torch
from torch import Tensor

LOW = 2 ** 32 - 1
BASE = 6_364_136_223_846_793_005
INVERSE = (pow(BASE, -1, 2 ** 64) + 2 ** 63) % 2 ** 64 - 2 ** 63  # as a signed number
FACTORS = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85
LARGEST_TOKEN = 2 ** 17  # guesses, which count from 1, are below it


def mix(x: Tensor) -> Tensor:
    """x int64 with every bit spread over all others; different numbers stay different."""
    for factor in FACTORS:
        x = (x ^ x >> 32 & LOW) * factor
    return x ^ x >> 32 & LOW


def delayed(x: Tensor, places: int) -> Tensor:
    """x (n,) moved back by so many places, with zeros in front."""
    return torch.cat([x.new_zeros(places), x])[:len(x)]


def suffix_keys(tokens: Tensor, is_start: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Hashes (len(lengths), n) int64 of the last tokens; 0 where the sequence has fewer than that so far.

    tokens (n,) integers, is_start (n,) bool, of which the first is true.
    """
    def powers(base: int) -> Tensor:
        return torch.full((len(tokens),), base, device=tokens.device).cumprod(0)

    sums = (mix(tokens.long() + 1) * powers(BASE)).cumsum(0)
    inverse, sequence, keys = powers(INVERSE), is_start.cumsum(0), []
    for length in lengths:
        key = mix((sums - delayed(sums, length)) * inverse + length)
        keys.append(key.masked_fill(sequence != delayed(sequence, length - 1), 0))
    return torch.stack(keys)


def longest(found: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token the number of the longest match, from 1, and what followed it; 0 where there is none.

    found, places (k, n), shorter matches first: whether there is one, and the place of the token behind it.
    """
    number = (found * torch.arange(1, len(found) + 1, device=found.device)[:, None]).amax(0)
    place = places.gather(0, (number - 1).clamp(min=0)[None])[0]
    return number, place.masked_fill(number == 0, 0)


def near_guesses(tokens: Tensor, is_start: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """What followed the latest earlier place in a token's sequence with the longest equal end.

    keys (k, n) from `suffix_keys`, shorter ends first. Returns the guesses (n,) int64, which count from 1,
    and the numbers (n,) of their lengths; both 0 where there is none.
    """
    # Equal keys of a sequence become neighbours, in the order of the text.
    ordered, order = torch.sort(keys + is_start.cumsum(0) * BASE, dim=1, stable=True)
    following = torch.where(ordered[:, 1:] == ordered[:, :-1], order[:, :-1] + 1, 0)
    place = torch.zeros_like(keys).scatter_(1, order[:, 1:], following)
    number, place = longest((place > 0) & (keys != 0), place)
    return (tokens[place].long() + 1).masked_fill(number == 0, 0), number


def guess_rows(guess: Tensor, number: Tensor, count: int) -> Tensor:
    """Rows (n,) int32, of `count`, for guesses and the numbers of their matches' lengths."""
    return (mix(guess + LARGEST_TOKEN * number) % count).int()
