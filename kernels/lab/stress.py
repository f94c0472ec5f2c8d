"""Thousands of orthogonalisations of changing matrices, and every kernel once on odd shapes for compute-sanitizer.

    python -m kernels.lab.stress [--real momentum.pt] [--calls 10000]
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m kernels.lab.stress --each   # or racecheck

Each call gets other matrices whose polar factor is known nevertheless: a base matrix X (one that kernels.lab.record_momentum saved, or a
made-up one) times a power of two, under signed permutations P and Q, for which polar(P X Q) = P polar(X) Q. Checked every time:
finite, no farther from the polar factor than 1.25 times the plain twin on the base at the same dtype (and 0.03), no singular
value past 1.3 (by a power iteration), and a second call equal bit for bit.
"""
import argparse
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.attention import fp8_qkv, qkv
from kernels.attention import output as linear
from kernels.embedding import rows as embedding
from kernels.embedding import smear
from kernels.fp8 import quantize, transpose
from kernels.fp8 import scales as fp8_scales
from kernels.fp8 import weights as fp8_weights
from kernels.lab.polar_error import polar_factor, real, synthetic
from kernels.loss import cross_entropy, head_loss
from kernels.mlp import fp8_mlp as mlp
from kernels.mlp import residual, residual_fp8
from kernels.ngrams import row_gradients
from kernels.ngrams import shared_gradient as shared_rows
from kernels.optimizer import newton_schulz, row_adam, symmetric
from kernels.optimizer.coefficients import lower_end, polar_express

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32        # the interpreter's bf16 products are wrong
METHODS = {"plain 5": (polar_express(5), "frobenius"), "AOL 4": (polar_express(4, lower_end("aol", 4)), "aol")}


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def signed_permutation(n: int) -> tuple[Tensor, Tensor]:
    """Which index goes where, and a sign (exact in any dtype) for each."""
    return torch.randperm(n, device=DEVICE), torch.randint(0, 2, (n,), device=DEVICE).mul(2).sub(1).to(DTYPE)


def largest_singular_value(x: Tensor, steps: int = 8) -> Tensor:
    """A lower bound (batch,), near the truth after a few steps of power iteration."""
    v = torch.ones(*x.shape[:-2], x.shape[-1], 1, device=x.device) / x.shape[-1] ** 0.5
    for _ in range(steps):
        v = torch.nn.functional.normalize(x.mT @ (x @ v), dim=-2)
    return (x @ v).norm(dim=(-2, -1))


def stress(bases: Tensor, triples: tuple, normalisation: str, calls: int, batch: int = 4) -> dict[str, float]:
    """Call newton_schulz `calls` times on variants of (n, rows, columns) `bases`; counts of what went wrong, and extremes."""
    run, twin = newton_schulz.newton_schulz, newton_schulz.newton_schulz_reference
    exact = torch.stack([polar_factor(x.double()) for x in bases]).float()
    norms = exact.norm(dim=(-2, -1)).clamp(min=1)
    allowed = 1.25 * (twin(bases, triples, normalisation).float() - exact).norm(dim=(-2, -1)) / norms + 0.03
    wrong = {name: torch.zeros((), device=DEVICE) for name in ("not finite", "too far", "too large", "not repeated")}
    worst = torch.zeros(3, device=DEVICE)                                # error, error over what is allowed, singular value
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
    return {name: int(count) for name, count in wrong.items()} | {"error": error, "of allowed": share, "largest": largest}


def stress_all(matrices: dict[str, Tensor], calls: int) -> int:
    """`calls` in all, over both methods and every shape among the matrices. Returns how many calls went wrong."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for x in matrices.values():
        shapes.setdefault(x.shape, []).append(x.to(DEVICE, DTYPE))
    failed = 0
    for shape, bases in shapes.items():
        for name, (triples, normalisation) in METHODS.items():
            begin, share = time.time(), -(-calls // (len(METHODS) * len(shapes)))
            found = stress(torch.stack(bases), triples, normalisation, share)
            failed += sum(found[name] for name in ("not finite", "too far", "too large", "not repeated"))
            facts = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
            print(f"{share} × 2 calls of 4, {name}, {tuple(shape)}: {facts}; {time.time() - begin:.0f} s", flush=True)
    return failed


def products() -> Iterator[tuple[str, Callable]]:
    for shape in ((3, 130, 70), (3, 65, 129), (1, 1, 9)):
        x, square, scale = random(*shape), random(2, shape[1], shape[1]), torch.rand(2, shape[1], device=DEVICE)
        yield f"gram {shape}", lambda x=x: symmetric.gram(x)
        yield f"gram of the transpose {shape}", lambda x=x: symmetric.gram_with_row_sums(x.mT)
        yield f"polynomial {shape}", lambda a=symmetric.gram(square), s=scale: symmetric.polynomial(a, 3.5, -2.5, 0.5, s)
        yield f"product {shape}", lambda a=symmetric.gram(square), s=scale: symmetric.product(a, a, 3.5, -2.5, 0.5, s)
        for name, (triples, normalisation) in METHODS.items():
            yield f"newton_schulz {name} {shape}", lambda x=x, t=triples, n=normalisation: newton_schulz.newton_schulz(x, t, n)


def losses() -> Iterator[tuple[str, Callable]]:
    logits, targets = random(37, 515), torch.randint(-1, 515, (37, 3), device=DEVICE)
    weights, scale = torch.tensor([1, 0.5, 0.25], device=DEVICE), torch.tensor(0.75 / 448, device=DEVICE)
    fp8 = torch.empty(logits.shape, dtype=torch.float8_e5m2, device=DEVICE)
    yield "cross_entropy", lambda: cross_entropy.cross_entropy(logits, targets, weights)
    yield "cross_entropy, FP8 gradient both ways", lambda: cross_entropy.cross_entropy(
        logits, targets, weights, fp8, fp8.new_empty(515, 37), scale)
    yield "cross_entropy in place", lambda: cross_entropy.cross_entropy(logits.clone(), targets, weights, logits)
    candidate_weights = torch.where(torch.rand(515, device=DEVICE) < 0.5, 1.0, 3.0)
    yield "cross_entropy of a sample, FP8 gradient both ways", lambda: cross_entropy.cross_entropy(
        logits, targets, weights, fp8, fp8.new_empty(515, 37), scale, candidate_weights)
    x, head = random(48, 32).requires_grad_(), random(320, 32).requires_grad_()
    wanted, is_start = targets[:, 0].int().clamp(max=319).repeat(2)[:48], torch.arange(48, device=DEVICE) % 7 == 0
    for name in ("bf16", "FP8"):
        def both(fp8=name == "FP8"):
            total, _ = head_loss.head_loss(x, head, wanted, is_start, weights, fp8)
            return torch.autograd.grad(total, (x, head))
        yield f"head_loss {name}", both


def hidden() -> Iterator[tuple[str, Callable]]:
    for tokens, width, units in ((16, 16, 16), (304, 80, 272)):
        x, w_in, w_out = (random(rows, width).requires_grad_() for rows in (tokens, units, units))
        for name, *fp8 in (("bf16", False, False), ("FP8", True, False), ("FP8, weights' gradients too", True, True)):
            def both(x=x, w_in=w_in, w_out=w_out, fp8=fp8):
                out = residual.add_up(mlp.mlp(2 * x, torch.nn.functional.rms_norm(x, x.shape[1:]), w_in, w_out, *fp8))
                return torch.autograd.grad(out.float().square().sum(), (x, w_in, w_out))
            yield f"mlp {name} {tokens} × {width} × {units}", both


def normed_into_fp8() -> Iterator[tuple[str, Callable]]:
    """Layers whose MLPs and attention read FP8 alone: of one, two and three summands."""
    scales = torch.tensor([0.9, 1.1], device=DEVICE).requires_grad_()
    for n, width, units in ((16, 16, 16), (48, 80, 272), (304, 768, 144)):
        x, update, w_in, w_out = (random(m, width).requires_grad_() for m in (n, n, units, units))

        def both(x=x, update=update, weights=(w_in, w_out)):
            summands = x,
            for _ in range(3):
                _, y = residual_fp8.norm_fork_fp8(summands)
                summands = mlp.mlp(*residual_fp8.mlp_input_fp8((y, x, update), scales), *weights, True, True)
            return torch.autograd.grad(summands, (x, update, *weights, scales), (x, x))
        yield f"layers normed into FP8 {n} × {width} × {units}", both
        for tuned in residual_fp8.CONFIGS:
            yield f"residual in FP8 {n} × {width} {tuned}", lambda x=x, t=tuned: residual_fp8.residual_fp8((x, x), scales, t)


def heads() -> Iterator[tuple[str, Callable]]:
    b = torch.tensor([[0.5], [0.7]], device=DEVICE).requires_grad_()     # of two layers, of which one is read
    for n, count, qk_dim, head_dim in ((1, 1, 16, 16), (37, 6, 128, 128), (21, 4, 64, 32), (37, 6, 64, 128)):
        cos, sin = (torch.rand(n, qk_dim // 4, device=DEVICE) for _ in range(2))
        widths = count * (2 * qk_dim + head_dim), 6, count * head_dim
        x, seen, row = (random(n, width).requires_grad_() for width in widths)
        gate, shared = torch.randn(count, 12, device=DEVICE).requires_grad_(), (random(n, 1, head_dim).requires_grad_(), b)
        is_start = torch.arange(n, device=DEVICE) % 5 == 0
        for name, value in (("", (None, None, None)), (", value rows and a shared row", (seen, row, gate))):
            def both(tensors=(x, cos, sin, is_start, *value), dims=(qk_dim, head_dim), shared=shared if name else ()):
                term = shared_rows.share(*shared)[0] if shared else None
                loss = sum(out.float().square().sum() for out in qkv.qkv_heads(*tensors, *dims, True, term))
                return torch.autograd.grad(loss, [x for x in (*tensors, *shared) if x is not None and x.requires_grad])
            yield f"qkv_heads {n} × {count} × (2 × {qk_dim} + {head_dim}){name}", both


def fp8_heads() -> Iterator[tuple[str, Callable]]:
    scale = torch.tensor(0.5, device=DEVICE).requires_grad_()
    for n, heads, k, qk_dim, head_dim in ((16, 1, 1, 16, 16), (48, 6, 1, 128, 128), (304, 6, 3, 64, 128)):
        cos, sin = (torch.rand(n, qk_dim // 4, device=DEVICE) for _ in range(2))
        x = torch.nn.functional.rms_norm(random(n, heads * head_dim), (heads * head_dim,)).requires_grad_()
        weight, row = (random(m, heads * head_dim).requires_grad_() for m in (heads * (2 * qk_dim + head_dim), n))
        gate, is_start = torch.randn(heads, 12, device=DEVICE).requires_grad_(), torch.arange(n, device=DEVICE) % 5 == 0
        shared = random(n, k, head_dim).requires_grad_(), torch.rand(2, k, device=DEVICE).requires_grad_()
        for name, value in (("", (None, None)), (", value rows and a shared row", (row, gate))):
            def both(tensors=(x, weight, scale, cos, sin, is_start, *value), dims=(qk_dim, head_dim), shared=shared if name else ()):
                term = shared_rows.share(*shared)[0] if shared else None
                loss = sum(out.float().square().sum() for out in fp8_qkv.fp8_qkv_heads(*tensors, *dims, True, term))
                return torch.autograd.grad(loss, [x for x in (*tensors, *shared) if x is not None and x.requires_grad])
            yield f"fp8_qkv_heads {n} × {heads} × (2 × {qk_dim} + {head_dim}){name}", both


def residuals() -> Iterator[tuple[str, Callable]]:
    scales = torch.tensor([0.9, 1.1], device=DEVICE).requires_grad_()
    for n, width in ((1, 1), (37, 133), (301, 768)):
        x, rows = random(n, width).requires_grad_(), random(n, width).requires_grad_()

        def both(x=x, rows=rows):
            y = x
            for _ in range(3):
                update, y = residual.norm_fork((y, rows))
                y, seen = residual.mlp_input((y, update), scales)
            return torch.autograd.grad((y, seen), (x, rows, scales), (x, rows))
        yield f"residual of three layers {n} × {width}", both
        bounds = torch.ones(2, device=DEVICE).unbind()
        yield f"FP8 scales {n} × {width}", lambda x=x: fp8_scales.mlp_scales(*bounds, 9) + fp8_scales.gradient_scales(x, *bounds)
        yield f"FP8 weights {width} × {16 * n}", lambda n=width, w=16 * n: sum(fp8_weights.fp8_weights((random(n, w), random(9, w))), ())


def movers() -> Iterator[tuple[str, Callable]]:
    x, scale, amax = random(71, 133), torch.tensor(0.05, device=DEVICE), torch.zeros(1, device=DEVICE)
    yield "quantize", lambda: quantize.quantize(x, scale, amax=amax)
    yield "quantize in pairs", lambda: quantize.quantize(x[:48], scale, in_pairs=True)
    yield "quantize alone", lambda: quantize.quantize(x[:, 1:], scale, torch.float8_e5m2, both=False)
    yield "transpose", lambda: transpose.transpose(x)
    yield "scaled", lambda: linear.scaled(x, scale)
    yield "add_scaled", lambda: linear.weight_gradients(None, x, x, scale, True, 7)
    order = embedding.sort_rows(torch.randint(9, (71,), device=DEVICE))
    yield "embedding", lambda: (embedding.take_rows(x, order.index), embedding.add_rows(random(9, 133), x, *order[1:3]))
    seen = x, torch.rand(71, device=DEVICE) < 0.3, torch.rand(12, device=DEVICE), scale
    yield "smear", lambda: (smear.smear_forward(*seen), *smear.smear_backward(x, *seen))
    rows, positions = embedding.sort_rows(torch.randint(150, (71,), device=DEVICE))[1:3]
    table, numbers = random(150, 128), [torch.tensor(number, device=DEVICE) for number in (3.0, True, 0.1, 0.1)]
    gradients, state = row_gradients.no_gradients(table, 60), (torch.zeros(150, 8, device=DEVICE), torch.zeros(150, device=DEVICE))

    def update() -> list[Tensor]:
        embedding.add_rows(gradients.grads, x[:, 5:], row_gradients.enlist(rows, gradients), positions)
        row_adam.row_adam(table, gradients, *state, *numbers, 0.95, True)
        return [table, *state]
    yield "row_adam", update
    yield "add_transposed", lambda: transpose.add_transposed(random(133, 71), x)


def launch_each(times: int = 2) -> int:
    """Launch every kernel on small shapes, most no multiple of a tile; returns how many gave something that is not finite."""
    failed, groups = 0, (products, losses, hidden, normed_into_fp8, heads, fp8_heads, residuals, movers)
    for group in groups:
        for name, call in group():
            out = [call() for _ in range(times)][-1]
            tensors = [out] if isinstance(out, Tensor) else [tensor for tensor in out if tensor is not None]
            finite = all(tensor.float().isfinite().all() for tensor in tensors)
            failed += not finite
            print(f"{'ok' if finite else 'NOT FINITE'}: {name}", flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", help="a file of kernels.lab.record_momentum; without it, made-up matrices")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=768, help="rows of the made-up matrices")
    parser.add_argument("--each", action="store_true", help="instead, launch every kernel once or twice")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    if options.each:
        return int(launch_each() > 0)
    failed = stress_all(real(options.real) if options.real else synthetic(options.size), options.calls)
    print(f"{failed} calls went wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
