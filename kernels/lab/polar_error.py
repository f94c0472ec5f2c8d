"""‖Q − UVᵀ‖ / ‖UVᵀ‖ and the singular values of Q = newton_schulz(X), for matrices harmless, hostile and real.

    python -m kernels.lab.polar_error [--real momentum.pt] [--size 768] [--out polar_error.json]

On a GPU this runs the kernel in bfloat16, elsewhere the plain form in float32. The truth is the SVD of the
very same matrix in float64; if the matrix does not have full rank, it is the partial isometry whose null
space is X's own. --real takes what kernels.lab.record_momentum saved. The interval of Polar Express that
suits the spectra of these matrices best is then fitted and compared with the one in use.

The tables of kernels/README.md are made of kernels/lab/polar_error.json (`python -m kernels.bench --write`).
"""
import argparse
import json
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.optimizer.coefficients import Triple, fit, lower_end, polar_error, polar_express
from kernels.optimizer.orthogonalize import SAFETY, newton_schulz, newton_schulz_reference

RESULT = Path(__file__).parent / "polar_error.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMALISATIONS = {"plain": "frobenius", "AOL": "aol"}
STEPS = range(2, 8)  # of the means
Method = tuple[tuple[Triple, ...], str]


def method(name: str, steps: int, lower: float | None = None) -> Method:
    """As the optimizer does it, unless another `lower` is given."""
    return polar_express(steps, lower or lower_end(NORMALISATIONS[name], steps)), NORMALISATIONS[name]


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


def synthetic(m: int) -> dict[str, Tensor]:
    """The matrices above, and some that a kernel may stumble over."""
    matrices = {name: torch.from_numpy(x) for name, x in sample_matrices(m).items()}
    wide = matrices[f"Gaussian {m}×{4 * m}"]
    matrices |= {"Gaussian × 1e-8": wide * 1e-8, "Gaussian × 1e8": wide * 1e8,
                 "rows × 1e-8 … 1e8": wide * torch.logspace(-8, 8, m, dtype=torch.float64)[:, None],
                 "every row twice": wide[torch.arange(m) // 2], "zero": torch.zeros_like(wide)}
    return matrices


def real(path: str) -> dict[str, Tensor]:
    """From a file of kernels.lab.record_momentum: "step 100, Q 3" -> matrix."""
    matrices = torch.load(path, weights_only=True)["matrices"]
    return {f"step {step}, {name}": x for name, steps in matrices.items() for step, x in steps.items()}


def singular_values(x: Tensor) -> np.ndarray:
    """Of a float64 matrix, from its smaller Gram matrix: fast, and exact to 1e-8 of the largest."""
    gram = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().cpu().numpy()


def normalised(x: Tensor, name: str) -> Tensor:
    """The matrix that Newton–Schulz starts from, in float64."""
    if name == "plain":
        return x / (SAFETY * x.norm()).clamp(min=1e-300)
    wide = x.mT if x.shape[0] > x.shape[1] else x
    sums = (wide @ wide.mT).abs().sum(-1, keepdim=True)
    scaled = wide * torch.where(sums > 0, sums.rsqrt(), 0)
    return scaled.mT if x.shape[0] > x.shape[1] else scaled


def polar_factor(x: Tensor) -> Tensor:
    """U Vᵀ over the non-zero singular values of a float64 matrix."""
    driver = "gesvd" if x.is_cuda else None  # Jacobi's method leaves small singular values inexact.
    u, sigma, v = torch.linalg.svd(x, full_matrices=False, driver=driver)
    kept = sigma > sigma.max() * max(x.shape) * torch.finfo(x.dtype).eps
    return u[:, kept] @ v[kept]


def distance(x: Tensor, exact: Tensor, triples: tuple[Triple, ...],
             normalisation: str) -> tuple[float, Tensor]:
    """The polar error of one orthogonalisation (of a zero matrix, its norm), and the result in float64."""
    orthogonalise = newton_schulz if DEVICE == "cuda" else newton_schulz_reference
    out = orthogonalise(x[None], triples, normalisation)[0].double()
    return ((out - exact).norm() / exact.norm().clamp(min=1e-300 if exact.any() else 1)).item(), out


def measure(name: str, x: Tensor, methods: dict[str, Method], spectra: dict[str, list[np.ndarray]]) -> dict:
    """One row: the range of singular values at the start, each method's error and range, and errors by steps.

    The singular values themselves are added to `spectra` where the matrix is one of training and not zero.
    """
    x = x.to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    exact = polar_factor(x.double())
    row = {"matrix": name, "shape": list(x.shape), "rank": round(exact.square().sum().item()),
           "start": {}, "results": {}, "curves": {}}
    for kind in NORMALISATIONS:
        sigma = singular_values(normalised(x.double(), kind))
        row["start"][kind] = [float(f"{s:.4g}") for s in (sigma.min(), sigma.max())]
        row["curves"][kind] = [[n, distance(x, exact, *method(kind, n))[0]] for n in STEPS]
        if of_training(row):
            spectra.setdefault(kind, []).append(sigma)
    for label, (triples, normalisation) in methods.items():
        error, out = distance(x, exact, triples, normalisation)
        sigma = singular_values(out)
        row["results"][label] = {"error": error, "lowest": float(sigma.min()), "highest": float(sigma.max())}
    return row


def of_training(row: dict) -> bool:
    """Whether a row's matrix was recorded in training, and is not zero (MLP-in has no gradient at step 1)."""
    return row["matrix"].startswith("step ") and row["rank"] > 0


def mean_curves(rows: list[dict]) -> dict[str, list]:
    """Normalisation -> [steps, mean error of the matrices of training]."""
    rows = [row for row in rows if of_training(row)]
    def mean(kind: str, i: int) -> float:
        return float(np.mean([row["curves"][kind][i][1] for row in rows]))

    return {kind: [[n, mean(kind, i)] for i, n in enumerate(STEPS)] for kind in NORMALISATIONS if rows}


def fitted(spectra: list[np.ndarray], kind: str, steps: int) -> dict:
    """The interval that suits these spectra best after a normalisation, and the one in use, with errors."""
    (best, best_error), in_use = fit(spectra, steps), lower_end(NORMALISATIONS[kind], steps)
    error = float(np.mean([polar_error(polar_express(steps, in_use), sigma) for sigma in spectra]))
    return dict(method=f"{kind} {steps}", in_use=in_use, error=error, best=best, best_error=best_error)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def table(rows: list[dict]) -> str:
    """A line for each matrix."""
    lines = []
    for row in rows:
        starts = [f"{low:.0e} … {high:.2g}" for low, high in row["start"].values()]
        found = [f"{result['error']:.3f} ({result['lowest']:.2g} … {result['highest']:.2f})"
                 for result in row["results"].values()]
        lines.append([row["matrix"], *starts, *found])
    return markdown(["matrix", "σ at the start: plain", "AOL", *rows[0]["results"]], lines)


def tables(path: Path = RESULT) -> str:
    """All tables of a run in Markdown, as kernels/README.md has them."""
    report = json.loads(path.read_text())
    parts = [f"One {report['machine']}, {report['dtype']}, {report['date']}.", table(report["rows"])]
    if curves := report["mean_curves"]:
        steps = [str(n) for n, _ in next(iter(curves.values()))]
        means = [[kind, *(f"{error:.3f}" for _, error in curve)] for kind, curve in curves.items()]
        parts += [f"Mean error of all {report['of_training']} matrices of training:",
                  markdown(["steps", *steps], means)]
    if report["fits"]:
        fits = [[fit["method"], f"{fit['in_use']:.1e}", f"{fit['error']:.3f}", f"{fit['best']:.1e}",
                 f"{fit['best_error']:.3f}"] for fit in report["fits"]]
        parts += ["The lower end of Polar Express's interval, and the error of σ without the direction:",
                  markdown(["", "in use", "error of σ", "best for these", "error of σ"], fits)]
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m kernels.lab.polar_error", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", help="a file of kernels.lab.record_momentum")
    parser.add_argument("--size", type=int, default=768, help="rows of the synthetic matrices")
    parser.add_argument("--out", type=Path, default=Path("polar_error.json"))
    options = parser.parse_args(argv)
    methods = {"plain 5": method("plain", 5), "AOL 4": method("AOL", 4), "AOL 5": method("AOL", 5)}
    names = {**synthetic(options.size), **(real(options.real) if options.real else {})}
    spectra: dict[str, list[np.ndarray]] = {}
    rows = [measure(name, x, methods, spectra) for name, x in names.items()]
    report = {"machine": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
              "date": date.today().isoformat(), "dtype": "bfloat16" if DEVICE == "cuda" else "float32",
              "of_training": sum(map(of_training, rows)), "rows": rows, "mean_curves": mean_curves(rows),
              "fits": [fitted(spectra[kind], kind, steps) for kind in spectra for steps in (4, 5, 6)]}
    options.out.write_text(json.dumps(report, ensure_ascii=False))
    print(tables(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
