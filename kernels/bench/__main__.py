"""Check, then time, every kernel against PyTorch: `python -m kernels.bench [filter …]`. Needs a CUDA GPU.

Prints a line for each example and writes the rows as JSON (--out). "errors" are relative Frobenius distances
to float64, the kernel's and the reference's at the same dtype; a kernel more than twice as far off as its
reference is reported and ends the run with status 1. TFLOP/s are effective, those of the textbook's matmuls
(2·m·n·k). "roofline" is the least time that the textbook's FLOP and bytes allow over the time taken. Times
are medians of CUDA graph replays.

On a CPU work `--write`, which brings the tables of kernels/README.md up to date, `--draw`, which draws a
figure, and `--odd`, which is for compute-sanitizer: set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that it sees
each tensor's end.
"""
import argparse
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from kernels.bench import figure, results, timing
from kernels.bench.discover import every_example
from kernels.example import Example, tensors

FIGURE = Path(__file__).with_name("tflops.svg")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m kernels.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", help='only examples with one of these in "module: name, shape"')
    parser.add_argument("--check", action="store_true", help="only check, at real shapes")
    parser.add_argument("--sweep", action="store_true", help="time every configuration instead")
    parser.add_argument("--odd", action="store_true", help="only run every kernel, at small odd shapes")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"), help="where the rows go")
    parser.add_argument("--merge", action="store_true", help="put the rows into results.json too")
    parser.add_argument("--write", action="store_true", help="only write the tables of kernels/README.md")
    parser.add_argument("--draw", type=Path, nargs="?", const=results.RESULTS, metavar="JSON",
                        help="only draw what an earlier run wrote (default: results.json)")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    return parser.parse_args(argv)


def write_readme() -> None:
    """The generated sections, from the result files. Rows without an example are named, and left out."""
    results.README.write_text(results.with_tables(results.README.read_text(), tables()))
    for row in results.without_example(results.read()):
        print(f"no example any more: {row}")
    print(f"wrote the tables of {results.README}")


def tables() -> list[tuple[str, str]]:
    """(section, content) of all that is generated in kernels/README.md."""
    from kernels.lab import polar_error
    return [("times", results.times(results.read())), ("polar errors", polar_error.tables())]


def chosen(filters: list[str], *kind: object) -> list[tuple[ModuleType, Example]]:
    """The examples of this kind whose "module: name, shape" holds a filter; ends the program if none does."""
    found = [(module, example) for module, example in every_example(*kind) if not filters or any(
        text in f"{module.__name__}: {example.name}, {example.shape}" for text in filters)]
    if not found:
        sys.exit(f"kernels.bench: no example holds {' or '.join(filters)}")
    return found


def launch_odd(filters: list[str]) -> int:
    """Run these kernels' small examples twice. Returns how many gave a number that is not finite."""
    gpu, failed = torch.cuda.is_available(), 0
    # Triton's interpreter multiplies bfloat16 wrongly.
    kind = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    for module, example in chosen(filters, "odd", *kind):
        for tuned in (None, *example.configs):
            kernel = example.kernel if tuned is None else partial(example.kernel, tuned=tuned)
            for _ in range(2):
                out = tensors(example.wrap(kernel)(*example.inputs()))
            finite = all(x.float().isfinite().all() for x in out)
            failed += not finite
            name = f"{module.__name__}: {example.name}, {example.shape}" + (f", {tuned}" if tuned else "")
            print(f"{'ok' if finite else 'NOT FINITE'}: {name}", flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if options.write:
        write_readme()
        return 0
    if options.draw:
        figure.draw(results.read(options.draw), options.figure)
        return 0
    torch.manual_seed(0)
    if options.odd:
        return int(launch_odd(options.filters) > 0)
    if not torch.cuda.is_available():
        sys.exit("kernels.bench needs a CUDA GPU; on a CPU, run the tests: python -m pytest tests/kernels")
    rows, known = [], {}
    for module, example in chosen(options.filters, "real", torch.device("cuda"), torch.bfloat16):
        if options.sweep:
            if example.configs:
                timing.sweep(example)
            continue
        row = timing.check(example) if options.check else timing.measure(example, known)
        rows.append(row | results.origin(module))
        print(timing.line(row), flush=True)
        results.write(rows, options.out)
    if options.merge and not options.check:
        results.write(results.merged(results.read(), rows), results.RESULTS)
    return int(not all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
