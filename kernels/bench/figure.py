"""Effective TFLOP/s of the symmetric matmuls and of Newton–Schulz by the matrices' size, in an SVG."""
from pathlib import Path

from kernels.bench.results import DRAWN, MACHINE
from kernels.bench.timing import CEILING
from records.tools.svg import compact

BLUE, VERMILION = "#0072B2", "#D55E00"  # safe for the colour-blind
STYLE = {"font.size": 9, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
         "axes.spines.top": False, "axes.spines.right": False,
         "svg.fonttype": "none", "svg.hashsalt": "kernels"}
# (legend, how the examples' names begin, which time, colour)
MATMULS = (("XXᵀ, XᵀX: gram", "gram", "us", BLUE), ("XXᵀ, XᵀX: torch", "gram", "baseline_us", BLUE),
           ("bA + cAA: polynomial", "polynomial", "us", VERMILION),
           ("bA + cAA: compiled", "polynomial", "baseline_us", VERMILION))
METHODS = (("AOL 4", "orthogonalise, AOL 4", "us", VERMILION),
           ("plain 5", "orthogonalise, plain 5", "us", BLUE),
           ("plain 5, compiled", "orthogonalise, plain 5", "baseline_us", BLUE))
SQUARES = "1 × n × n"


def families(rows: list[dict]) -> dict[str, list[str]]:
    """The shapes (batch × rows × columns) in which one thing grows: family -> shapes by size."""
    flop: dict[str, dict[str, float]] = {"batch × 768 × 768": {}, "batch × 3072 × 768": {}, SQUARES: {}}
    for row in rows:
        _, m, n = row["shape"].split(" × ")
        family = f"batch × {m} × {n}"
        flop[family if family in flop else SQUARES][row["shape"]] = row["flop"]
    return {family: sorted(sizes, key=sizes.get) for family, sizes in flop.items()}


def draw_panel(axis, rows: list[dict], curves: tuple[tuple[str, str, str, str], ...]) -> None:
    """Each family of shapes is a line of each curve."""
    drawn = {curve: {row["shape"]: row["flop"] / row[curve[2]] / 1e6 for row in rows
                     if row["name"].startswith(curve[1])} for curve in curves}
    ticks, labels = [], []
    for family, shapes in families([row for row in rows if row["name"].startswith(curves[0][1])]).items():
        start, space = ticks[-1] + 1.6 if ticks else 0, 1.4 if family == SQUARES else 1
        places = {shape: start + space * i for i, shape in enumerate(shapes)}
        for (label, _, time, color), found in drawn.items():
            points = [(places[shape], found[shape]) for shape in shapes if shape in found]
            ours = time == "us"
            axis.plot([x for x, _ in points], [y for _, y in points], color=color, markersize=4,
                      linestyle="-" if ours else "--", marker="o" if ours else "s",
                      markerfacecolor=color if ours else "white", label=None if ticks else label)
        ticks += places.values()
        labels += [shape.split(" × ")[2 if family == SQUARES else 0] for shape in shapes]
        axis.text(start + space * (len(shapes) - 1) / 2, -0.1, family, transform=axis.get_xaxis_transform(),
                  ha="center", va="top")
    axis.axhline(CEILING / 1e12, color="#1a1b1e", linewidth=1, linestyle=":")
    axis.text(ticks[0], CEILING / 1e12 + 10, f"torch, one matmul of 8192³: {CEILING / 1e12:.0f}", va="bottom")
    axis.set_xticks(ticks, labels)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(frameon=False, loc="upper left")


def draw(rows: list[dict], path: Path) -> None:
    """Draw measured rows of symmetric.py and orthogonalize.py. Needs matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = [row for row in rows if row["name"].startswith(DRAWN)]
    origins = sorted({tuple(row[key] for key in (*MACHINE, "date")) for row in rows})
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
        draw_panel(left, rows, MATMULS)
        draw_panel(right, rows, METHODS)
        left.set(title="symmetric matmuls (2mnk FLOP)", ylabel="effective TFLOP/s", ylim=(0, 1300))
        right.set(title="Newton–Schulz (textbook FLOP of its own steps)")
        figure.suptitle("; ".join("{}, torch {}, triton {}, {}".format(*origin) for origin in origins))
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    path.write_text(compact(path.read_text()))
    print(f"drew {path}")
