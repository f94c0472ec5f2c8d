"""Thousands of orthogonalisations of changing matrices, or every kernel on odd shapes for compute-sanitizer.

    python -m kernels.lab.stress [--real momentum.pt] [--calls 10000]
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python -m kernels.lab.stress --each        # or racecheck

Each call gets other matrices, whose polar factor is known nevertheless: a base matrix X (one that
kernels.lab.record_momentum saved, or a made-up one) times a power of two, under signed permutations P and Q,
because polar(P X Q) = P polar(X) Q. Each result is checked. It must be finite and no farther from the polar
factor than 1.25 times the plain form of the base at the same dtype (plus 0.03). No singular value may pass
1.3 (by a power iteration), and a second call must give the same bits.
"""
import argparse
import sys
import time
from functools import partial

import torch
from torch import Tensor

from kernels.bench.discover import every_example
from kernels.example import tensors
from kernels.lab.polar_error import polar_factor, real, synthetic
from kernels.optimizer import orthogonalize
from kernels.optimizer.coefficients import lower_end, polar_express

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter multiplies bfloat16 wrongly.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
FAULTS = ("not finite", "too far", "too large", "not repeated")
METHODS = {"plain 5": (polar_express(5), "frobenius"),
           "AOL 4": (polar_express(4, lower_end("aol", 4)), "aol")}


def signed_permutation(n: int) -> tuple[Tensor, Tensor]:
    """Which index goes where, and a sign (exact in any dtype) for each."""
    signs = torch.randint(0, 2, (n,), device=DEVICE).mul(2).sub(1).to(DTYPE)
    return torch.randperm(n, device=DEVICE), signs


def largest_singular_value(x: Tensor, steps: int = 8) -> Tensor:
    """A lower bound (batch,), near the truth after a few steps of power iteration."""
    v = torch.ones(*x.shape[:-2], x.shape[-1], 1, device=x.device) / x.shape[-1] ** 0.5
    for _ in range(steps):
        v = torch.nn.functional.normalize(x.mT @ (x @ v), dim=-2)
    return (x @ v).norm(dim=(-2, -1))


def stress(bases: Tensor, triples: tuple, normalisation: str, calls: int, batch: int = 4) -> dict[str, float]:
    """Call newton_schulz `calls` times on variants of bases (n, rows, columns); count faults."""
    run, plain = orthogonalize.newton_schulz, orthogonalize.newton_schulz_reference
    exact = torch.stack([polar_factor(x.double()) for x in bases]).float()
    norms = exact.norm(dim=(-2, -1)).clamp(min=1)
    allowed = 1.25 * (plain(bases, triples, normalisation).float() - exact).norm(dim=(-2, -1)) / norms + 0.03
    wrong = {name: torch.zeros((), device=DEVICE) for name in FAULTS}
    worst = torch.zeros(3, device=DEVICE)  # error, its share of the allowed one, largest singular value
    for call in range(calls):
        which = torch.randint(len(bases), (batch,), device=DEVICE)
        (rows, row_sign), (columns, column_sign) = (signed_permutation(n) for n in bases.shape[1:])
        sign = row_sign[:, None] * column_sign
        x = bases[which][:, rows][:, :, columns] * (sign * 2.0 ** (call % 41 - 20))
        out = run(x, triples, normalisation)
        wide = out.float()
        errors = (wide - exact[which][:, rows][:, :, columns] * sign).norm(dim=(-2, -1)) / norms[which]
        largest = largest_singular_value(wide)
        wrong["not finite"] += ~wide.isfinite().all()
        wrong["too far"] += ~(errors <= allowed[which]).all()
        wrong["too large"] += ~(largest < 1.3).all()
        wrong["not repeated"] += ~(out == run(x, triples, normalisation)).all()
        worst = worst.maximum(torch.stack([errors.max(), (errors / allowed[which]).max(), largest.max()]))
    error, share, largest = worst.tolist()
    extremes = {"error": error, "of allowed": share, "largest": largest}
    return {name: int(count) for name, count in wrong.items()} | extremes


def stress_all(matrices: dict[str, Tensor], calls: int) -> int:
    """`calls` in all, over both methods and every shape of matrix. Returns how many calls went wrong."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for x in matrices.values():
        shapes.setdefault(x.shape, []).append(x.to(DEVICE, DTYPE))
    failed = 0
    for shape, bases in shapes.items():
        for name, (triples, normalisation) in METHODS.items():
            begin, share = time.time(), -(-calls // (len(METHODS) * len(shapes)))
            found = stress(torch.stack(bases), triples, normalisation, share)
            failed += sum(found[name] for name in FAULTS)
            facts = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
            seconds = time.time() - begin
            print(f"{share} × 2 calls of 4, {name}, {tuple(shape)}: {facts}; {seconds:.0f} s", flush=True)
    return failed


def launch_each(times: int = 2) -> int:
    """Run every kernel's small examples. Returns how many gave a number that is not finite."""
    failed = 0
    for module, example in every_example("odd", DEVICE, DTYPE):
        for tuned in (None, *example.configs):
            kernel = example.kernel if tuned is None else partial(example.kernel, tuned=tuned)
            for _ in range(times):
                out = tensors(example.wrap(kernel)(*example.inputs()))
            finite = all(x.float().isfinite().all() for x in out)
            failed += not finite
            name = f"{module.__name__}: {example.name}, {example.shape}" + (f", {tuned}" if tuned else "")
            print(f"{'ok' if finite else 'NOT FINITE'}: {name}", flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m kernels.lab.stress", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", help="a file of kernels.lab.record_momentum; without it, made-up matrices")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=768, help="rows of the made-up matrices")
    parser.add_argument("--each", action="store_true", help="instead, run every kernel on odd shapes")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    if options.each:
        return int(launch_each() > 0)
    failed = stress_all(real(options.real) if options.real else synthetic(options.size), options.calls)
    print(f"{failed} calls went wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
