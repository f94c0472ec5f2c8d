"""Distance to the polar factor after Newton–Schulz in float64, for several choices of its coefficients.

    python -m kernels.lab.triples           # some seconds on a CPU

"AOL 4, first dropped" is the public proposal: the last four of the five plain triples. Spectra without tiny
values pay for intervals that were fitted to those of training.
"""
import numpy as np

from kernels.optimizer.coefficients import apply, fit, lower_end, polar_express

SAFETY = 1.02  # as in kernels/optimizer/orthogonalize.py


def sample_matrices(m: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Matrices of m rows with spectra like those of gradients, from harmless to nearly singular."""
    random = np.random.default_rng(seed).standard_normal

    def with_spectrum(sigma: np.ndarray, n: int) -> np.ndarray:
        return np.linalg.qr(random((m, m)))[0] * sigma @ np.linalg.qr(random((n, m)))[0].T

    k, low = np.arange(1, m + 1), m // 12
    return {
        f"Gaussian {m}×{m}": random((m, m)),
        f"Gaussian {m}×{4 * m}": random((m, 4 * m)),
        f"rank {low} + 10% noise {m}×{4 * m}": random((m, low)) @ random((low, 4 * m)) / low**0.5
        + 0.1 * random((m, 4 * m)),
        f"σ = k^-½ {m}×{4 * m}": with_spectrum(k**-0.5, 4 * m),
        f"σ = 1/k {m}×{m}": with_spectrum(1 / k, m),
        f"σ from 1 to 1e-4 {m}×{m}": with_spectrum(np.geomspace(1, 1e-4, m), m),
    }


def main(m: int = 384) -> None:
    fitted = {steps: polar_express(steps, lower_end("aol", steps)) for steps in (4, 5)}
    methods = {  # whether AOL's scaling comes first, and the triples
        "plain 5": (False, polar_express(5)), "AOL 4": (True, fitted[4]),
        "AOL 4, lower 7e-3": (True, polar_express(4, 7e-3)),
        "AOL 4, first dropped": (True, polar_express(5)[1:]), "AOL 5": (True, fitted[5]),
        "AOL 5, lower 7e-3": (True, polar_express(5, 7e-3)),
    }
    print(f"| matrix | σ after AOL | {' | '.join(methods)} |\n{'| --- ' * (2 + len(methods))}|")
    spectra = []
    for name, x in sample_matrices(m).items():
        u, _, v = np.linalg.svd(x, full_matrices=False)
        scales = {True: np.sqrt(np.abs(x @ x.T).sum(1, keepdims=True)), False: SAFETY * np.linalg.norm(x)}
        decomposed = {aol: np.linalg.svd(x / scale, full_matrices=False) for aol, scale in scales.items()}
        spectra.append(decomposed[True][1])
        errors = []
        for aol, triples in methods.values():
            left, sigma, right = decomposed[aol]
            errors.append(np.linalg.norm(left * apply(triples, sigma) @ right - u @ v) / m**0.5)
        shown = [f"{spectra[-1].min():.0e} … {spectra[-1].max():.2f}", *(f"{error:.3f}" for error in errors)]
        print(f"| {' | '.join([name, *shown])} |")
    for steps in (4, 5):
        lower, error = fit(spectra, steps)
        print(f"{steps} steps after AOL: best lower over all of these {lower:.1e}, mean error {error:.3f}")


if __name__ == "__main__":
    main()
