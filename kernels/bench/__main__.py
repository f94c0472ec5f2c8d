"""Check, then time, every kernel against its torch.compiled plain twin: `python -m kernels.bench [filter]`.

`--draw kernels.json` draws the effective TFLOP/s of an earlier run; all else needs a CUDA GPU. Prints a table and
writes its rows as JSON (--out). "errors" are relative Frobenius distances to float64, ours / that of the plain twin
at the same dtype; a kernel more than twice as far off as its twin is reported and ends the run with status 1.
TFLOP/s are effective, those of the textbook product (2·m·n·k): a symmetric product can pass the ceiling. "roofline"
is the least time that the textbook's FLOP and bytes allow over the time taken. Times are medians of CUDA graph
replays.
"""

import argparse
import json
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.backend import triton
from kernels.bench import cases as bench_cases
from kernels.bench import layers as bench_layers
from kernels.bench import mlp_cases as bench_mlp
from kernels.bench.cases import Case

CEILING = 790e12  # bf16 FLOP/s that one H200 sustains in an 8192³ product of random numbers
BANDWIDTH = 4.24e12  # bytes/s, device copy
FIGURE = Path(__file__).parent / "figures" / "tflops.svg"


def errors(case: Case) -> tuple[float, float]:
    """The largest relative error over the outputs: the kernel's, and that of its plain twin."""
    inputs = (case.check_inputs or case.inputs)()
    in_double = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    exact = (case.exact or case.reference)(*in_double)
    found = []
    for function in (case.wrap(case.kernel), case.wrap(case.reference)):
        out = function(*[x.clone() if isinstance(x, Tensor) else x for x in inputs])  # some work in place
        pairs = zip(*[(x,) if isinstance(x, Tensor) else [y for y in x if y is not None] for x in (out, exact)])
        found.append(max(((x.double() - y).norm() / y.norm()).item() for x, y in pairs))
    return found[0], found[1]


def microseconds(function: Callable, *inputs) -> float:
    for _ in range(3):
        function(*inputs)
    torch.cuda.synchronize()  # the graph is captured on another stream, which must find the inputs written
    return 1e3 * triton.testing.do_bench_cudagraph(lambda: function(*inputs), rep=30, return_mode="median")


def measure(case: Case, known: dict) -> dict:
    """One row of the table; `known` keeps the times of baselines that several cases share."""
    ours, plain = errors(case)
    inputs = case.inputs()
    time = microseconds(case.wrap(case.kernel), *inputs)
    baseline = case.baseline or case.reference
    compiled = known.get((baseline, case.wrap, case.shape))
    if compiled is None:
        torch._dynamo.reset()
        fastest = torch.compile(baseline, dynamic=False) if case.compile else baseline
        compiled = known[baseline, case.wrap, case.shape] = microseconds(case.wrap(fastest), *inputs)
    least = 1e6 * max(case.flop / case.rate / CEILING, case.bytes / BANDWIDTH)
    return dict(name=case.name, shape=case.shape, error=ours, plain_error=plain, correct=ours <= 2 * plain + 1e-6,
                flop=case.flop, us=time, compiled_us=compiled, speedup=compiled / time, effective_tflops=case.flop / time / 1e6,
                roofline=least / time)


def sweep(case: Case) -> None:
    """The times of all hand-written configurations, best first."""
    inputs = case.inputs()
    times = {}
    for tuned in case.configs:
        try:
            times[tuned] = microseconds(case.wrap(partial(case.kernel, tuned=tuned)), *inputs)
        except triton.runtime.errors.OutOfResources as error:
            print(f"  {tuned}: {error}")
    best_first = ", ".join(f"{tuned} {times[tuned]:.1f} µs" for tuned in sorted(times, key=times.get))
    print(f"sweep {case.name}, {case.shape}: {best_first}", flush=True)


def line(row: dict) -> str:
    text = (f"{row['name']:44} | {row['shape']:20} | errors {row['error']:.1e} / {row['plain_error']:.1e} "
            f"{'ok' if row['correct'] else 'WRONG':5}")
    if "us" in row:
        text += (f" | {row['us']:8.1f} µs | compiled {row['compiled_us']:8.1f} µs | {row['speedup']:5.2f}× | "
                 f"{row['effective_tflops']:6.0f} TFLOP/s | roofline {row['roofline']:4.0%}")
    return text


def families(rows: list[dict]) -> dict[str, list[str]]:
    """The shapes of (batch × rows × columns) in rows that are measured in steps of one thing: family -> shapes by size."""
    flop: dict[str, dict[str, float]] = {"batch × 768 × 768": {}, "batch × 3072 × 768": {}, "1 × n × n": {}}
    for row in rows:
        batch, m, n = row["shape"].split(" × ")
        family = f"batch × {m} × {n}"
        flop[family if family in flop else "1 × n × n"][row["shape"]] = row["flop"]
    return {family: sorted(sizes, key=sizes.get) for family, sizes in flop.items()}


def draw_panel(axis, rows: list[dict], curves: list[tuple[str, str, str, str]]) -> None:
    """Effective TFLOP/s of `curves` (legend, start of the cases' names, which time, colour), each family of shapes a line."""
    drawn = {curve: {row["shape"]: row["flop"] / row[curve[2]] / 1e6 for row in rows if row["name"].startswith(curve[1])}
             for curve in curves}
    ticks, labels = [], []
    for family, shapes in families([row for row in rows if row["name"].startswith(curves[0][1])]).items():
        start, space = ticks[-1] + 1.6 if ticks else 0, 1.4 if family == "1 × n × n" else 1
        places = {shape: start + space * i for i, shape in enumerate(shapes)}
        for (label, _, time, color), found in drawn.items():
            points = [(places[shape], found[shape]) for shape in shapes if shape in found]
            ours = time == "us"
            axis.plot([x for x, _ in points], [y for _, y in points], color=color, markersize=4,
                      linestyle="-" if ours else "--", marker="o" if ours else "s",
                      markerfacecolor=color if ours else "white", label=None if ticks else label)
        ticks += places.values()
        labels += [shape.split(" × ")[2 if family == "1 × n × n" else 0] for shape in shapes]
        axis.text(start + space * (len(shapes) - 1) / 2, -0.1, family, transform=axis.get_xaxis_transform(), ha="center", va="top")
    axis.axhline(CEILING / 1e12, color="#1a1b1e", linewidth=1, linestyle=":")
    axis.text(ticks[0], CEILING / 1e12 + 10, f"torch, one product of 8192³: {CEILING / 1e12:.0f}", va="bottom")
    axis.set_xticks(ticks, labels)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(frameon=False, loc="upper left")


def draw(report: dict, path: Path) -> None:
    """Effective TFLOP/s over size: the products, and the whole orthogonalisation."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    blue, vermilion = "#0072B2", "#D55E00"  # safe for the colour-blind
    style = {"font.size": 9, "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False,
             "svg.fonttype": "none", "svg.hashsalt": "kernels"}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
        draw_panel(left, report["rows"], [
            ("XXᵀ, XᵀX: gram", "gram", "us", blue), ("XXᵀ, XᵀX: torch", "gram", "compiled_us", blue),
            ("bA + cAA: polynomial", "polynomial", "us", vermilion), ("bA + cAA: compiled", "polynomial", "compiled_us", vermilion)])
        draw_panel(right, report["rows"], [
            ("AOL 4", "orthogonalise, AOL 4", "us", vermilion), ("plain 5", "orthogonalise, plain 5", "us", blue),
            ("plain 5, compiled", "orthogonalise, plain 5", "compiled_us", blue)])
        left.set(title="symmetric products (2mnk FLOP)", ylabel="effective TFLOP/s", ylim=(0, 1300))
        right.set(title="Newton–Schulz (textbook FLOP of its own steps)")
        figure.suptitle(f"{report['device']}, torch {report['torch']}, triton {report['triton']}, {report['date']}")
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    print(f"drew {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", help='only cases with one of these in "name, shape"; default: all')
    parser.add_argument("--check", action="store_true", help="only check, at real shapes")
    parser.add_argument("--sweep", action="store_true", help="time every configuration instead")
    parser.add_argument("--out", default="kernels.json", help="where the rows go")
    parser.add_argument("--draw", metavar="JSON", help="only draw what an earlier run wrote")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(Path(options.draw).read_text()), options.figure)
        return 0
    if not torch.cuda.is_available():
        sys.exit("kernels.bench needs a CUDA GPU; on a CPU run the tests: python -m pytest tests/test_kernels.py")
    torch.manual_seed(0)
    machine = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__,
                   date=date.today().isoformat())
    print(machine)
    rows, known = [], {}
    for case in (case for group in bench_cases.CASES + bench_mlp.CASES + bench_layers.CASES for case in group()):
        if options.filters and not any(text in f"{case.name}, {case.shape}" for text in options.filters):
            continue
        if options.sweep:
            if case.configs:
                sweep(case)
            continue
        if options.check:
            ours, plain = errors(case)
            rows.append(dict(name=case.name, shape=case.shape, error=ours, plain_error=plain, correct=ours <= 2 * plain + 1e-6))
        else:
            rows.append(measure(case, known))
        print(line(rows[-1]), flush=True)
        with open(options.out, "w") as file:
            json.dump(machine | dict(rows=rows), file, indent=1)
    return int(not all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
