"""Check an example, then time its kernel and what it is compared with. Needs a CUDA GPU."""
from collections.abc import Callable
from functools import partial

import torch

from kernels.backend import triton
from kernels.example import Example, errors

CEILING = 790e12  # bf16 FLOP/s that one H200 sustains in a matmul of 8192³ random numbers
BANDWIDTH = 4.24e12  # bytes/s of a device copy on one H200


def microseconds(function: Callable, *inputs) -> float:
    """The median of CUDA graph replays."""
    for _ in range(3):
        function(*inputs)
    torch.cuda.synchronize()  # The graph is captured on another stream, which must find the inputs written.
    return 1e3 * triton.testing.do_bench_cudagraph(lambda: function(*inputs), rep=30, return_mode="median")


def check(example: Example) -> dict:
    """A row with the relative Frobenius distances to float64, the kernel's and the reference's."""
    ours, plain = errors(example)
    return dict(name=example.name, shape=example.shape, error=ours, plain_error=plain,
                correct=ours <= 2 * plain + example.slack)


def measure(example: Example, known: dict) -> dict:
    """A row with errors and times. `known` keeps the times of baselines that several examples share."""
    row = check(example)
    inputs = example.inputs()
    time = microseconds(example.wrap(example.kernel), *inputs)
    baseline = example.baseline or example.reference
    key = baseline, example.wrap, example.shape
    if key not in known:
        torch._dynamo.reset()
        fastest = torch.compile(baseline, dynamic=False) if example.compile else baseline
        known[key] = microseconds(example.wrap(fastest), *inputs)
    times = dict(us=time, baseline_us=known[key])
    return row | dict(flop=example.flop, bytes=example.bytes, rate=example.rate) | times


def roofline(row: dict) -> float:
    """The least time that the textbook's FLOP and bytes allow, over the time taken."""
    return 1e6 * max(row["flop"] / row["rate"] / CEILING, row["bytes"] / BANDWIDTH) / row["us"]


def tflops(row: dict) -> float:
    """Effective TFLOP/s, those of the textbook's matmuls (2·m·n·k): a symmetric one can pass the ceiling."""
    return row["flop"] / row["us"] / 1e6


def sweep(example: Example) -> None:
    """Print the times of all hand-written configurations, best first."""
    inputs, times = example.inputs(), {}
    for tuned in example.configs:
        try:
            times[tuned] = microseconds(example.wrap(partial(example.kernel, tuned=tuned)), *inputs)
        except triton.runtime.errors.OutOfResources as error:
            print(f"  {tuned}: {error}")
    best_first = ", ".join(f"{tuned} {times[tuned]:.1f} µs" for tuned in sorted(times, key=times.get))
    print(f"sweep {example.name}, {example.shape}: {best_first}", flush=True)


def line(row: dict) -> str:
    """A row as it is printed."""
    text = (f"{row['name']:44} | {row['shape']:20} | errors {row['error']:.1e} / {row['plain_error']:.1e} "
            f"{'ok' if row['correct'] else 'WRONG':5}")
    if "us" in row:
        text += (f" | {row['us']:8.1f} µs | against {row['baseline_us']:8.1f} µs | "
                 f"{row['baseline_us'] / row['us']:5.2f}× | {tflops(row):6.0f} TFLOP/s | "
                 f"roofline {roofline(row):4.0%}")
    return text
