"""Many changes in few runs: each run makes half of them, so that every run counts for every change.

If each change were tried alone against an unchanged run, a run would count for one change. Here a change's
effect is the mean of the runs that make it minus the mean of those that do not. All other changes are made as
often on either side, so they cancel. With 12 runs of standard deviation 0.003 the standard error of each of
eight effects is 0.0017. Eight pairs of runs would be 16, and the standard error of each difference 0.0042.

The designs are those of Plackett and Burman (Biometrika 33, 1946). They assume that effects add up: where two
changes help or harm each other, that shows in the effects of other changes. A second pass repeats the runs;
each then makes the changes that it did not make before (a fold-over: Box and Wilson, 1951). In both passes
together such pairs move no effect. Runs of their own must still confirm what a screening finds: four effects
that added up to 0.0087 came to 0.0002 (records/measuring.md).
"""
import numpy as np
from scipy import special

from records.run.settings import UserError

SIZES = 8, 12, 20, 24   # runs; each is a prime that leaves 3 divided by 4, plus one
SPARE = 3               # fewest runs beyond one for the mean and one for each effect; they show the spread
SURE = 0.95


def design(changes: int, passes: int = 1) -> np.ndarray:
    """Which run makes which change: (runs, changes) bool. The last run of a pass makes none, or all."""
    runs = next((size for size in SIZES if size >= 1 + changes + SPARE), None)
    if runs is None or not changes:
        raise UserError(f"--screen takes 1 to {SIZES[-1] - 1 - SPARE} changes to --try, not {changes}")
    prime = runs - 1
    made = np.isin(np.arange(prime), np.arange(prime) ** 2 % prime)
    first = np.vstack([[np.roll(made, i) for i in range(prime)], np.zeros(prime, bool)])[:, :changes]
    return np.vstack([~first if i % 2 else first for i in range(passes)])


def effects(made: np.ndarray, results: np.ndarray) -> tuple[np.ndarray, float]:
    """The effect of each change (changes,) on `results` (runs,), and half the width of its 95% interval.

    `made`: a whole `design`.
    """
    signs = np.where(made, 1.0, -1.0)
    found = signs.T @ results / (len(results) / 2)
    rest = results - results.mean() - signs @ found / 2
    freedom = len(results) - 1 - made.shape[1]
    error = 2 * np.sqrt(rest @ rest / freedom / len(results))
    return found, float(special.stdtrit(freedom, (1 + SURE) / 2) * error)
