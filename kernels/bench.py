"""Check, then time, every kernel against its torch.compiled plain twin: `python -m kernels.bench [filter]`.

Needs a CUDA GPU. Prints a table and writes its rows as JSON (--out). "errors" are relative Frobenius distances
to float64, ours / that of the plain twin at the same dtype; a kernel more than twice as far off as its twin
is reported and ends the run with status 1. TFLOP/s are effective, those of the textbook product (2·m·n·k): a
symmetric product can pass the ceiling. "roofline" is the least time that the textbook's FLOP and bytes allow
over the time taken. Times are medians of CUDA graph replays.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels import cross_entropy, mlp, newton_schulz, quantize, symmetric, transpose
from kernels.backend import triton
from kernels.coefficients import polar_express

CEILING = 790e12  # bf16 FLOP/s that one H200 sustains in an 8192³ product of random numbers
BANDWIDTH = 4.24e12  # bytes/s, device copy
PLAIN_5, AOL_4 = polar_express(5), polar_express(4, lower=7e-3)


@dataclass
class Case:
    name: str
    shape: str
    inputs: Callable[[], tuple]
    kernel: Callable
    reference: Callable  # the twin: plain for the errors, compiled for the time
    flop: float
    bytes: float
    baseline: Callable | None = None  # what to time against, where it is not the twin
    exact: Callable | None = None  # the result in float64, where it is not the twin on float64 inputs
    check_inputs: Callable[[], tuple] | None = None  # smaller ones, where float64 would not fit
    configs: tuple = ()  # values of the kernel's argument `tuned`, for --sweep


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def matrices(batch: int, m: int, n: int) -> Tensor:
    """Random matrices that lie in memory as (m, n), seen as wide ones."""
    return random(batch, m, n).mT if m > n else random(batch, m, n)


def product_cases() -> Iterator[Case]:
    squares = [(batch, 768, 768) for batch in (1, 4, 8, 16, 32)]
    tall = [(batch, 3072, 768) for batch in (1, 4, 8, 32)]
    large = [(1, 2048, 2048), (4, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192)]
    for batch, m, n in squares + tall + large:
        shape = f"{batch} × {m} × {n}"
        flop, x = 2.0 * batch * m * n * n, partial(matrices, batch, m, n)
        yield Case("gram " + ("XᵀX" if m > n else "XXᵀ"), shape, lambda x=x: (x(),), symmetric.gram,
                   symmetric.gram_reference, flop, 2.0 * batch * (m * n + n * n), configs=symmetric.CONFIGS)
        if m == n:
            yield Case("polynomial", shape, lambda x=x, n=n: (symmetric.gram(x()) / n, 3.9, -2.8, 0.5),
                       symmetric.polynomial, symmetric.polynomial_reference, flop, 4.0 * batch * n * n,
                       configs=symmetric.CONFIGS)


def orthogonalisation_cases() -> Iterator[Case]:
    methods = {"AOL 4": (AOL_4, "aol"), "AOL 5": (PLAIN_5, "aol"), "plain 5": (PLAIN_5, "frobenius")}
    for batch, m, n in [(4, 3072, 768), (8, 3072, 768), (22, 3072, 768), (16, 768, 768), (40, 768, 768),
                        (1, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192)]:
        plain = partial(newton_schulz.newton_schulz_reference, triples=PLAIN_5, normalisation="frobenius")
        for name, (triples, normalisation) in methods.items():
            arguments = dict(triples=triples, normalisation=normalisation)
            yield Case(f"orthogonalise, {name} (against plain 5)", f"{batch} × {m} × {n}",
                       lambda b=batch, m=m, n=n: (random(b, m, n),),
                       partial(newton_schulz.newton_schulz, **arguments),
                       partial(newton_schulz.newton_schulz_reference, **arguments),
                       2.0 * batch * (2 * m * n * n + n**3) * len(triples), 4.0 * batch * m * n,
                       baseline=plain)


def cross_entropy_cases(vocabulary: int = 50304) -> Iterator[Case]:
    def inputs(tokens: int, k: int) -> tuple:
        weights, scale = torch.tensor([1.0, 0.5, 0.25][:k], device="cuda"), torch.tensor(0.75 / 448, device="cuda")
        return random(tokens, vocabulary) * 4, torch.randint(vocabulary, (tokens, k), device="cuda"), weights, scale

    def kernel(logits: Tensor, targets: Tensor, weights: Tensor, scale: Tensor, dtype, both=False, tuned=None) -> tuple:
        grad = None if dtype is None else torch.empty_like(logits, dtype=dtype)
        transposed = grad.new_empty(logits.shape[::-1]) if both else None
        return cross_entropy.cross_entropy(logits, targets, weights, grad, transposed, scale, tuned), grad, transposed

    def twin(logits: Tensor, targets: Tensor, weights: Tensor, scale: Tensor, dtype, both=False) -> tuple:
        losses, grad = cross_entropy.cross_entropy_reference(logits, targets, weights, scale, dtype)
        return losses, grad, grad.mT.contiguous() if both else None

    for tokens in (16384, 49152):
        for k, dtype, both in ((1, None, False), (3, torch.bfloat16, False), (3, torch.float8_e5m2, False),
                               (3, torch.float8_e5m2, True)):
            kind = "loss only" if dtype is None else f"gradient {dtype} + transpose" if both else f"gradient {dtype}"
            name = f"cross-entropy, {k} targets, {kind}".replace("torch.", "")
            yield Case(name, f"{tokens} × {vocabulary}", partial(inputs, tokens, k),
                       partial(kernel, dtype=dtype, both=both), partial(twin, dtype=dtype, both=both), 0.0,
                       tokens * vocabulary * (2.0 + (dtype.itemsize * (1 + both) if dtype else 0)),
                       exact=partial(twin, dtype=dtype and torch.float64, both=both),
                       check_inputs=partial(inputs, 1024, k), configs=cross_entropy.CONFIGS)


def mlp_cases(width: int = 768, hidden: int = 3072) -> Iterator[Case]:
    fp8, scale = torch.float8_e4m3fn, torch.tensor(0.02, device="cuda")

    def compiled_fp8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        one = torch.ones((), device="cuda")
        pre = torch._scaled_mm(x, w.mT, scale, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return torch.relu(pre).square()

    for tokens in (16384, 49152):
        shape, flop = f"{tokens} × {width} × {hidden}", 2.0 * tokens * width * hidden
        inputs = lambda t=tokens: (random(t, width), random(hidden, width))  # noqa: E731
        yield Case("MLP relu²", shape, inputs, mlp.relu_squared, mlp.relu_squared_reference, flop,
                   2.0 * (tokens * width + tokens * hidden), configs=mlp.CONFIGS)
        yield Case("MLP relu² backward", shape, lambda t=tokens, i=inputs: (*i(), random(t, hidden).relu().square()),
                   mlp.relu_squared_backward, mlp.relu_squared_backward_reference, flop,
                   2.0 * (tokens * width + 2 * tokens * hidden), configs=mlp.CONFIGS)
        yield Case("MLP relu² of FP8 (against _scaled_mm)", shape, lambda i=inputs: (*[x.to(fp8) for x in i()], scale),
                   mlp.relu_squared, mlp.relu_squared_reference, flop / 2, tokens * (width + 2.0 * hidden),
                   baseline=compiled_fp8, configs=mlp.CONFIGS)


def moving_cases() -> Iterator[Case]:
    for shape in ((49152, 768), (49152, 3072), (50304, 768)):
        name, size = "{} × {}".format(*shape), shape[0] * shape[1]
        yield Case("quantise and transpose", name, lambda s=shape: (random(*s), torch.tensor(4 / 448, device="cuda")),
                   quantize.quantize, quantize.quantize_reference, 0.0, 4.0 * size, configs=quantize.CONFIGS,
                   exact=lambda x, scale: (x / scale, x.mT / scale))
    yield Case("transpose", name, lambda: (random(*shape),), transpose.transpose, transpose.transpose_reference,
               0.0, 4.0 * size, configs=transpose.CONFIGS)
    yield Case("add transposed", name, lambda: (random(*shape[::-1]), random(*shape)), transpose.add_transposed,
               transpose.add_transposed_reference, 0.0, 6.0 * size, configs=transpose.CONFIGS)
    yield Case("transpose float8_e5m2", "16384 × 50304", lambda: (random(16384, 50304).to(torch.float8_e5m2),),
               transpose.transpose, transpose.transpose_reference, 0.0, 2.0 * 16384 * 50304, configs=transpose.CONFIGS)


def errors(case: Case) -> tuple[float, float]:
    """The largest relative error over the outputs: the kernel's, and that of its plain twin."""
    inputs = (case.check_inputs or case.inputs)()
    in_double = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    exact = (case.exact or case.reference)(*in_double)
    found = []
    for function in (case.kernel, case.reference):
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
    time = microseconds(case.kernel, *inputs)
    baseline = case.baseline or case.reference
    compiled = known.get((baseline, case.shape))
    if compiled is None:
        torch._dynamo.reset()
        compiled = known[baseline, case.shape] = microseconds(torch.compile(baseline, dynamic=False), *inputs)
    least = 1e6 * max(case.flop / CEILING, case.bytes / BANDWIDTH)
    return dict(name=case.name, shape=case.shape, error=ours, plain_error=plain, correct=ours <= 2 * plain + 1e-6,
                us=time, compiled_us=compiled, speedup=compiled / time, effective_tflops=case.flop / time / 1e6,
                roofline=least / time)


def sweep(case: Case) -> None:
    """The times of all hand-written configurations, best first."""
    inputs = case.inputs()
    times = {}
    for tuned in case.configs:
        try:
            times[tuned] = microseconds(partial(case.kernel, tuned=tuned), *inputs)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", help='only cases with one of these in "name, shape"; default: all')
    parser.add_argument("--check", action="store_true", help="only check, at real shapes")
    parser.add_argument("--sweep", action="store_true", help="time every configuration instead")
    parser.add_argument("--out", default="kernels.json", help="where the rows go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels.bench needs a CUDA GPU; on a CPU run the tests: python -m pytest tests/test_kernels.py")
    torch.manual_seed(0)
    machine = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    print(machine)
    rows, known = [], {}
    for group in (orthogonalisation_cases, cross_entropy_cases, mlp_cases, moving_cases, product_cases):
        for case in group():
            if options.filters and not any(text in f"{case.name}, {case.shape}" for text in options.filters):
                continue
            if options.sweep:
                sweep(case)
                continue
            if options.check:
                ours, plain = errors(case)
                rows.append(dict(name=case.name, shape=case.shape, error=ours, plain_error=plain,
                                 correct=ours <= 2 * plain + 1e-6))
            else:
                rows.append(measure(case, known))
            print(line(rows[-1]), flush=True)
            with open(options.out, "w") as file:
                json.dump(machine | dict(rows=rows), file, indent=1)
    return int(not all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
