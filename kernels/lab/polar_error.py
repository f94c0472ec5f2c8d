"""‖Q − UVᵀ‖ / ‖UVᵀ‖ and the singular values of Q = newton_schulz(X), for matrices harmless, hostile and real.

    python -m kernels.lab.polar_error [--real momentum.pt] [--size 768] [--out polar_error.json]
    python -m kernels.lab.polar_error --draw polar_error.json        # kernels/figures/polar_error.svg, needs matplotlib

On a GPU it runs the kernel in bfloat16, elsewhere the plain twin in float32; the reference is the SVD of the very same
matrix in float64 (where it has no full rank the partial isometry, whose null space is X's own). --real takes what kernels.lab.record_momentum
saved; the interval of Polar Express that suits their spectra best is then fitted and set against the one in use.
"""
import argparse
import json
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.optimizer.coefficients import (
    Triple,
    fit,
    lower_end,
    polar_error,
    polar_express,
    sample_matrices,
)
from kernels.optimizer.newton_schulz import (
    SAFETY,
    newton_schulz,
    newton_schulz_reference,
)

FIGURE = Path(__file__).parent / "figures" / "polar_error.svg"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMALISATIONS = {"plain": "frobenius", "AOL": "aol"}
STEPS = range(2, 8)                                    # of the curves
Method = tuple[tuple[Triple, ...], str]


def method(name: str, steps: int, lower: float | None = None) -> Method:
    """As the optimizer does it, unless another `lower` is given."""
    return polar_express(steps, lower or lower_end(NORMALISATIONS[name], steps)), NORMALISATIONS[name]


def synthetic(m: int) -> dict[str, Tensor]:
    """The spectra of kernels.optimizer.coefficients, and what a kernel may stumble over."""
    matrices = {name: torch.from_numpy(x) for name, x in sample_matrices(m).items()}
    wide = matrices[f"Gaussian {m}×{4 * m}"]
    matrices |= {"Gaussian × 1e-8": wide * 1e-8, "Gaussian × 1e8": wide * 1e8,
                 "rows × 1e-8 … 1e8": wide * torch.logspace(-8, 8, m, dtype=torch.float64)[:, None],
                 "every row twice": wide[torch.arange(m) // 2], "zero": torch.zeros_like(wide)}
    return matrices


def real(path: str) -> dict[str, Tensor]:
    """"step 100, Q 3" -> matrix, from a file of kernels.lab.record_momentum."""
    matrices = torch.load(path, weights_only=True)["matrices"]
    return {f"step {step}, {name}": x for name, steps in matrices.items() for step, x in steps.items()}


def singular_values(x: Tensor) -> np.ndarray:
    """Of a float64 matrix, from the eigenvalues of its smaller Gram matrix: exact to 1e-8 of the largest, and fast."""
    gram = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().cpu().numpy()


def normalised(x: Tensor, name: str) -> Tensor:
    """What Newton-Schulz starts from, in float64."""
    if name == "plain":
        return x / (SAFETY * x.norm()).clamp(min=1e-300)
    wide = x.mT if x.shape[0] > x.shape[1] else x
    sums = (wide @ wide.mT).abs().sum(-1, keepdim=True)
    scaled = wide * torch.where(sums > 0, sums.rsqrt(), 0)
    return scaled.mT if x.shape[0] > x.shape[1] else scaled


def polar_factor(x: Tensor) -> Tensor:
    """U Vᵀ over the non-zero singular values of a float64 matrix."""
    u, sigma, v = torch.linalg.svd(x, full_matrices=False, driver="gesvd" if x.is_cuda else None)        # Jacobi's leaves small ones inexact
    kept = sigma > sigma.max() * max(x.shape) * torch.finfo(x.dtype).eps
    return u[:, kept] @ v[kept]


def distance(x: Tensor, exact: Tensor, triples: tuple[Triple, ...], normalisation: str) -> tuple[float, Tensor]:
    """The polar error of one orthogonalisation (for a zero matrix the norm of the result), and the result in float64."""
    out = (newton_schulz if DEVICE == "cuda" else newton_schulz_reference)(x[None], triples, normalisation)[0].double()
    return ((out - exact).norm() / exact.norm().clamp(min=1e-300 if exact.any() else 1)).item(), out


def measure(name: str, x: Tensor, methods: dict[str, Method]) -> dict:
    """One row: the start, each method's error and range of singular values, and the error after so many steps."""
    x = x.to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    exact = polar_factor(x.double())
    row = {"matrix": name, "shape": list(x.shape), "rank": round(exact.square().sum().item()),
           "start": {}, "results": {}, "curves": {}}
    for kind in NORMALISATIONS:
        sigma = singular_values(normalised(x.double(), kind))
        row["start"][kind] = [float(f"{s:.4g}") for s in sigma]
        row["curves"][kind] = [[n, distance(x, exact, *method(kind, n))[0]] for n in STEPS]
    for label, (triples, normalisation) in methods.items():
        error, out = distance(x, exact, triples, normalisation)
        sigma = singular_values(out)
        row["results"][label] = {"error": error, "lowest": float(sigma.min()), "highest": float(sigma.max())}
    return row


def fitted(rows: list[dict], kind: str, steps: int) -> str:
    """The interval that suits the spectra of these rows best after a normalisation, in words, against the one in use."""
    spectra = [np.array(row["start"][kind]) for row in rows]
    (lower, error), in_use = fit(spectra, steps), lower_end(NORMALISATIONS[kind], steps)
    ours, used = ([polar_error(polar_express(steps, low), sigma) for sigma in spectra] for low in (lower, in_use))
    return (f"{kind}, {steps} steps on {len(spectra)} real spectra: best lower {lower:.1e}, mean error of σ {error:.4f}; with "
            f"{in_use:.1e} {np.mean(used):.4f}; nearer on {sum(a < b for a, b in zip(ours, used))} of {len(spectra)}")


def table(rows: list[dict]) -> str:
    labels = list(rows[0]["results"])
    lines = [f"| matrix | σ at the start: plain | AOL | {' | '.join(labels)} |", f"| --- {'| --- ' * (2 + len(labels))}|"]
    for row in rows:
        starts = [f"{min(sigma):.0e} … {max(sigma):.2g}" for sigma in row["start"].values()]
        found = [f"{r['error']:.3f} ({r['lowest']:.2g} … {r['highest']:.2f})" for r in row["results"].values()]
        lines.append(f"| {' | '.join([row['matrix'], *starts, *found])} |")
    return "\n".join(lines)


def panels(rows: list[dict]) -> dict[str, list[dict]]:
    """Title -> what is drawn together: each kind of synthetic matrix alone, real ones by kind, early and late in training."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        name = row["matrix"]
        title = "\n".join(name.rsplit(" ", 1))
        if name.startswith("step "):
            early = int(name.split()[1].strip(",")) <= 10
            title = f"{'MLP' if 'MLP' in name else 'Q, K, V, O'} of training,\n{'first 10 steps' if early else 'later'}"
        if row["rank"] == min(row["shape"]) and " × 1e" not in name:
            groups.setdefault(title, []).append(row)
    return groups


def draw(report: dict, path: Path) -> None:
    """Polar error against the number of steps; real matrices as mean and range."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    style = {"font.size": 9, "font.family": "sans-serif", "axes.titlesize": 9, "axes.spines.top": False,
             "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "kernels"}
    groups = panels(report["rows"])
    with plt.rc_context(style):
        high = -(-len(groups) // 5)
        figure, axes = plt.subplots(high, 5, figsize=(10, 2.5 * high + 0.5), sharex=True, sharey=True, squeeze=False,
                                    constrained_layout=True)
        for axis in axes.flat[len(groups):]:
            axis.set_visible(False)
        for axis, (title, rows) in zip(axes.flat, groups.items()):
            for kind, color, marker in (("plain", "#0072B2", "o"), ("AOL", "#D55E00", "s")):
                steps = [n for n, _ in rows[0]["curves"][kind]]
                errors = np.array([[error for _, error in row["curves"][kind]] for row in rows])
                ends = ", ".join(f"{lower:g}" for lower in sorted(set(report.get("lower", {}).get(kind, [])), reverse=True))
                axis.plot(steps, errors.mean(0), color=color, marker=marker, markersize=3,
                          label=f"{kind}, interval from {ends}" if ends else kind)    # older reports do not say
                if len(rows) > 1:
                    axis.fill_between(steps, errors.min(0), errors.max(0), color=color, alpha=0.2, linewidth=0)
            axis.set(title=title if len(rows) == 1 else f"{title} ({len(rows)})", yscale="log", xticks=steps)
            axis.set_yticks((0.01, 0.1, 1), ("0.01", "0.1", "1"))
            axis.minorticks_off()
            axis.grid(alpha=0.25)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        for axis in axes[-1]:
            axis.set_xlabel("steps")
        figure.supylabel("relative distance to the polar factor", fontsize=9)
        figure.suptitle(f"newton_schulz on one {report['machine']}, {report['dtype']}, {report['date']}")
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    print(f"drew {path}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", help="a file of kernels.lab.record_momentum")
    parser.add_argument("--size", type=int, default=768, help="rows of the synthetic matrices")
    parser.add_argument("--out", default="polar_error.json")
    parser.add_argument("--draw", metavar="JSON", help="only draw what an earlier run wrote")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(argv)
    if options.draw:
        draw(json.loads(Path(options.draw).read_text()), options.figure)
        return 0
    methods = {"plain 5": method("plain", 5), "AOL 4": method("AOL", 4), "AOL 5": method("AOL", 5)}
    names = {**synthetic(options.size), **(real(options.real) if options.real else {})}
    rows = [measure(name, x, methods) for name, x in names.items()]
    print(table(rows))
    of_real = [row for row in rows if row["matrix"].startswith("step ") and row["rank"]]   # MLP-in has no gradient at step 1
    fits = [fitted(of_real, kind, steps) for kind in NORMALISATIONS for steps in (4, 5, 6)] if of_real else []
    print("\n".join(fits))
    report = {"machine": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", "date": date.today().isoformat(),
              "dtype": "bfloat16" if DEVICE == "cuda" else "float32", "rows": rows, "fits": fits,
              "lower": {kind: [lower_end(end, steps) for steps in STEPS] for kind, end in NORMALISATIONS.items()}}
    Path(options.out).write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
