"""The statistics: pure functions of numbers. Which runs may be pooled at all is `pool.py`'s to say.

Student's t is that of scipy.special: `stdtr`, its distribution function, and `stdtrit`, the inverse.
scipy.stats has the same under better names, but takes a second to import.
"""
import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from records.tools.schema import RecordError

TARGET = 3.28  # nats/token: the speedrun's validation loss
SIGNIFICANCE = 0.01  # of the task: a record rejects "mean loss >= target" at this level
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Sample:
    """n values; the standard deviation (n - 1) and the standard error are None for n = 1."""
    n: int
    mean: float
    standard_deviation: float | None
    standard_error: float | None


def describe(values: list[float]) -> Sample:
    """RecordError on no values or on one that is not finite: a mean would hide it."""
    values = np.asarray(values, np.float64)
    if not len(values):
        raise RecordError("no values: statistics need at least one finished run")
    if not np.isfinite(values).all():
        raise RecordError(f"value {int(np.flatnonzero(~np.isfinite(values))[0]) + 1} of {len(values)} is not "
                          "finite")
    n = len(values)
    # Equal values give a rounding error of 1e-16 instead of zero, which a t-test would take for a real
    # spread.
    spread = (0.0 if np.ptp(values) == 0 else float(values.std(ddof=1))) if n > 1 else None
    return Sample(n, float(values.mean()), spread, None if spread is None else spread / math.sqrt(n))


def p_below(values: list[float], target: float | None) -> float | None:
    """p of a one-sided t-test: how probable so low a mean is if the true mean is at `target`.

    None where there is no spread (n = 1, equal values) or no target.
    """
    sample = describe(values)
    if target is None or not sample.standard_error:
        return None
    return float(special.stdtr(sample.n - 1, (sample.mean - target) / sample.standard_error))


def more_runs(values: list[float], target: float | None) -> int | None:
    """Runs to add until the t-test decides, assuming that mean and spread stay as they are.

    The true mean may lie on either side of the sample's, so the plan has about an even chance to be enough.
    None where there is no test (see `p_below`) or where MOST_RUNS would not do.
    """
    sample = describe(values)
    if target is None or not sample.standard_deviation:
        return None
    n = np.arange(sample.n, MOST_RUNS)
    p = special.stdtr(n - 1, -abs(sample.mean - target) / sample.standard_deviation * np.sqrt(n))
    enough = np.flatnonzero(p < SIGNIFICANCE)
    return int(enough[0]) if len(enough) else None


def verdict(values: list[float], target: float | None) -> str:
    """One line that says what the runs show about the target, and what would be needed to know more."""
    if target is None:
        return "nothing to test: the logs name no target; give one with --target"
    sample, p = describe(values), p_below(values, target)
    if sample.n == 1:
        return "undecided: one run has no spread, so there is no test; run at least three seeds"
    if p is None:
        return (f"undecided: all {sample.n} losses are equal, no spread to test against; "
                "are these separate runs?")
    if p < SIGNIFICANCE:
        return f"the mean is below {target:g} (p < {SIGNIFICANCE:g})"
    more = more_runs(values, target)
    if more == 0:
        return f"the mean is above {target:g} (the test the other way: p < {SIGNIFICANCE:g})"
    where = "below" if sample.mean < target else "above"
    needed = f"more than {MOST_RUNS:,} runs" if more is None else f"{more} more run{'s' * (more != 1)}"
    return (f"undecided: {needed} would show that it is {where} {target:g} "
            "(if mean and spread stay: an even chance)")


@dataclass(frozen=True)
class Difference:
    """B - A by Welch's test.

    Everything but `difference` is None where a side has one run or neither has a spread.
    """
    difference: float
    low: float | None = None  # 95% interval
    high: float | None = None
    p: float | None = None  # two-sided
    smallest: float | None = None  # the difference that these n would show (p < 0.05) in four of five tries


def welch(a: list[float], b: list[float]) -> Difference:
    sample_a, sample_b = describe(a), describe(b)
    difference = sample_b.mean - sample_a.mean
    if min(sample_a.n, sample_b.n) < 2 or not (sample_a.standard_error or sample_b.standard_error):
        return Difference(difference)
    error = math.hypot(sample_a.standard_error, sample_b.standard_error)
    freedom = error ** 4 / sum(sample.standard_error ** 4 / (sample.n - 1) for sample in (sample_a, sample_b))
    half = float(special.stdtrit(freedom, 0.975)) * error
    # The usual sum of two quantiles, for the test's size and for its power, approximates the noncentral t.
    smallest = half + float(special.stdtrit(freedom, 0.8)) * error
    p = 2 * float(special.stdtr(freedom, -abs(difference) / error))
    return Difference(difference, difference - half, difference + half, p, smallest)
