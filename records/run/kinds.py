"""The kinds of values that settings take. The rule of a setting is in the type of its field: `steps: Steps`.

A kind is int, float, bool or str, a tuple of kinds, or any of these with rules, as in
`Annotated[int, Between(1, 6)]`. A rule has a method `holds` and is printed after the name of its kind. Fields
of other types have no rule: any value will do.
"""
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, get_args, get_origin

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
LARGEST = {int: 2 ** 63 - 1, float: sys.float_info.max}     # excludes NaN and infinity


class Misfit(ValueError):
    """A value is not of its kind. Holds what was expected, and the innermost part that is wrong."""


@dataclass(frozen=True)
class Between:
    """Both ends are allowed."""
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class OneOf:
    names: tuple[str, ...]

    def holds(self, value: str) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return f"out of {', '.join(self.names)}"


Count = Annotated[int, Between(0, 10 ** 9)]
Positive = Annotated[int, Between(1, 10 ** 9)]
Few = Annotated[int, Between(1, 64)]
Seed = Annotated[int, Between(0, 2 ** 62)]          # The seeds of many runs then fit 63 bits.
Steps = Annotated[int, Between(0, 1_000_000)]       # Every step of a schedule is looked at before a run.
Size = Annotated[int, Between(1, 65_536)]           # of a vector; and token ids have 16 bits
Tokens = Annotated[int, Between(1, 2 ** 20)]        # of a sequence or a forward pass
Blocks = Annotated[int, Between(1, 16_384)]         # of tokens, in a window; and tokens of a block
Share = Annotated[float, Between(0, 1)]
Beta = Annotated[float, Between(0, 0.999999)]       # of a moving average
Factor = Annotated[float, Between(0, 1e30)]         # The product with a usual number fits a float32.


def parts(kind: type) -> tuple[type, tuple, tuple]:
    """The kind without its rules, the rules, and the kinds of what is in a tuple."""
    base, *rules = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    return base, tuple(rules), get_args(base) if get_origin(base) is tuple else ()


def is_names(kind: type) -> bool:
    """Whether values are lists of names."""
    inside = parts(kind)[2]
    return len(inside) == 2 and inside[1] is ... and parts(inside[0])[0] is str


@lru_cache
def words(kind: type) -> str:
    """What a value of this kind is, for a person."""
    base, rules, inside = parts(kind)
    name = WORDS.get(base, "a value")
    if is_names(kind):
        each = words(inside[0]).removeprefix(WORDS[str])
        name = f"names{each} with commas between them, or none"
    elif inside:
        each = " or ".join(dict.fromkeys(words(one) for one in inside if one is not ...))
        name = f"{'a list' if inside[-1] is ... else f'{len(inside)} values in brackets'}, each {each}"
    return " ".join([name, *map(str, rules)])


def fit(value: object, kind: type) -> object:
    """`value`, if it is of this kind; Misfit if not. A whole number will do for a float and becomes one."""
    base, rules, inside = parts(kind)
    right = base not in WORDS or type(value) is base
    if inside:
        right = type(value) is tuple and (inside[-1] is ... or len(inside) == len(value))
        if right:
            value = tuple(map(fit, value, inside[:1] * len(value) if inside[-1] is ... else inside))
    elif base in LARGEST:
        right = type(value) in (int, base) and abs(value) <= LARGEST[base]
    if not (right and all(rule.holds(value) for rule in rules)):
        raise Misfit(words(kind), value)
    return base(value) if base in LARGEST else value
