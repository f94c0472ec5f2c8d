"""The longest match: where in its sequence a token's last tokens came before, found by equal keys."""
import torch
from torch import Tensor

LOW = 2 ** 32 - 1
FACTORS = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85
LARGEST_TOKEN = 2 ** 17  # guesses, which count from 1, are below it


def mix(x: Tensor) -> Tensor:
    """x int64 with every bit spread over all others; different numbers stay different."""
    for factor in FACTORS:
        x = (x ^ x >> 32 & LOW) * factor
    return x ^ x >> 32 & LOW


def longest(found: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, the number of its longest match, from 1, and the place behind that match; 0 if none.

    found, places (k, n), shorter matches first: whether there is one, and the place of the token behind it.
    """
    number = (found * torch.arange(1, len(found) + 1, device=found.device)[:, None]).amax(0)
    place = places.gather(0, (number - 1).clamp(min=0)[None])[0]
    return number, place.masked_fill(number == 0, 0)


def near_guesses(tokens: Tensor, is_start: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """For each token: what followed the latest of its longest matches earlier in its sequence.

    keys (k, n) from `suffix_keys`, shorter ends first. Returns the guesses (n,) int64, which count from 1,
    and the numbers (n,) of their lengths; both 0 where there is none.
    """
    # Equal keys of a sequence become neighbours, those of each length in the order of the text. All lengths
    # are one row, because torch sorts the rows of a matrix as one list, and then once more by their rows. 32
    # bits take half the passes that 64 take. By chance about one token of 98,304 for each length then gets
    # the guess of other tokens.
    (k, n), lengths = keys.shape, torch.arange(len(keys), device=keys.device)[:, None]
    short = (keys + is_start.cumsum(0) * FACTORS[0]) * FACTORS[1] >> 32
    ordered, order = torch.sort(short.int().flatten(), stable=True)
    behind = torch.where(ordered[1:] == ordered[:-1], order[:-1] + 1, 0)
    # A neighbour of another length, equal by chance, stands in a row before, and its place is not above 0.
    place = torch.zeros_like(order).scatter_(0, order[1:], behind).view(k, n) - lengths * n
    number, place = longest(place > 0, place)
    return (tokens[place].long() + 1).masked_fill(number == 0, 0), number


def guess_rows(guess: Tensor, number: Tensor, count: int) -> Tensor:
    """Rows (n,) int32, of `count`, for guesses and the numbers of their matches' lengths."""
    return (mix(guess + LARGEST_TOKEN * number) % count).int()
