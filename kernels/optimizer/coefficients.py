"""p_k(x) = a_k x + b_k x³ + c_k x⁵, whose composition brings every singular value in [lower, 1] close to 1.

Newton–Schulz applies these polynomials to the singular values of a matrix, using only matmuls. *Polar
Express* (Amsel, Persson, Musco, Gower, arXiv 2505.16932) shows that the best composition is greedy: each p_k
is the odd quintic nearest to 1 on the interval in which the earlier steps left the singular values. Two
guards make it usable in bfloat16: a *cushion* (no step looks at an interval wider than cushion·u … u, so that
the middle of the spectrum is not sacrificed to its smallest values) and a *safety* factor (every polynomial
but the last is that of x / safety, so that rounding cannot push a singular value past the end of the next
interval, where a quintic diverges).

Everything here is float64 on a CPU and takes milliseconds; results are cached. kernels/README.md has the
distance to the polar factor that each normalisation and number of steps leaves.
"""
from functools import lru_cache
from math import sqrt

import numpy as np

Triple = tuple[float, float, float]  # (a, b, c)

# Where the interval begins, by normalisation and number of steps. `fit` found these for the singular values
# of 30 momentum matrices of a training run of `corpus`, at steps 1, 10, 100 and 500 (kernels.lab.polar_error
# --real, one H200, 21 November 2026). For five steps after the plain normalisation it found the published
# 1e-3, which serves any other number of steps as well.
LOWER = {"frobenius": {5: 1e-3}, "aol": {4: 3.9e-3, 5: 1.2e-3, 6: 4.1e-4}}


def nearest_quintic(lower: float, upper: float) -> Triple:
    """The odd quintic p that minimises max |1 - p(x)| over [lower, upper], 0 < lower <= upper (Remez)."""
    if lower > upper * (1 - 5e-6):  # The interval is a point: p(u) = 1 with p'(u) = p''(u) = 0.
        return 15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5
    # p equals 1 ± error, alternating, at both ends and at its two stationary points q < r in between.
    x = np.array([lower, (3 * lower + upper) / 4, (lower + 3 * upper) / 4, upper])
    error, previous = np.inf, 0.0
    while abs(error - previous) > 1e-15:
        previous = error
        a, b, c, error = np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], 1), np.ones(4))
        root = sqrt(9 * b * b - 20 * a * c)
        x[1:3] = np.sqrt([(-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)])
    return float(a), float(b), float(c)


@lru_cache
def polar_express(
    steps: int,
    lower: float = 1e-3,  # the smallest singular value that shall reach 1; the largest is 1
    cushion: float = 0.02,
    safety: float = 1.02,
) -> tuple[Triple, ...]:
    """The triples (a, b, c) of `steps` steps for singular values in [lower, 1]."""
    if steps < 1 or not 0 < lower <= 1 or not 0 <= cushion <= 1 or safety < 1:
        raise ValueError(f"need steps >= 1, 0 < lower <= 1, 0 <= cushion <= 1 and safety >= 1, not "
                         f"steps={steps}, lower={lower}, cushion={cushion}, safety={safety}")
    upper, triples = 1.0, []
    for step in range(steps):
        a, b, c = nearest_quintic(max(lower, cushion * upper), upper)
        image = [a * x + b * x**3 + c * x**5 for x in (lower, upper)]
        scale = 2 / sum(image)  # The cushion left p off centre on [lower, upper]: centre it around 1.
        shrink = safety if step < steps - 1 else 1.0
        a, b, c = a * scale / shrink, b * scale / shrink**3, c * scale / shrink**5
        triples.append((a, b, c))
        lower = a * lower + b * lower**3 + c * lower**5
        upper = 2 - lower
    return tuple(triples)


def lower_end(normalisation: str, steps: int) -> float:
    """The `lower` of `polar_express` that suits training, for the nearest number of steps that was fitted.

    Raises ValueError for an unknown normalisation.
    """
    if normalisation not in LOWER:
        raise ValueError(f"normalisation must be one of {', '.join(LOWER)}; found {normalisation!r}")
    fitted = LOWER[normalisation]
    return fitted[min(fitted, key=lambda known: abs(known - steps))]


def apply(triples: tuple[Triple, ...], singular_values: np.ndarray) -> np.ndarray:
    """The singular values after the Newton–Schulz steps."""
    x = np.asarray(singular_values, dtype=np.float64)
    for a, b, c in triples:
        x = x * (a + b * x**2 + c * x**4)
    return x


def polar_error(triples: tuple[Triple, ...], singular_values: np.ndarray) -> float:
    """Relative Frobenius distance to the polar factor: the root mean square of p(σ) - 1."""
    return float(np.sqrt(np.mean((apply(triples, singular_values) - 1) ** 2)))


def fit(
    spectra: list[np.ndarray],  # singular values in (0, 1] after the normalisation in use, one array a matrix
    steps: int,
) -> tuple[float, float]:
    """The `lower` whose Polar Express triples suit `spectra` best, and their mean polar error.

    Only the interval is searched (a grid, 5% apart), not the triples themselves. Every candidate then stays
    bounded on all of [0, 1], whatever the matrix.
    """
    errors = {lower: float(np.mean([polar_error(polar_express(steps, lower), sigma) for sigma in spectra]))
              for lower in np.geomspace(1e-4, 0.5, 175).tolist()}
    return min(errors.items(), key=lambda item: item[1])
