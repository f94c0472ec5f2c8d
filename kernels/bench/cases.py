"""What kernels.bench checks and times: each kernel, its plain twin, inputs of real shapes, FLOP and bytes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.embedding import rows as embedding
from kernels.embedding import smear
from kernels.fp8 import quantize, transpose
from kernels.loss import cross_entropy, head_loss
from kernels.ngrams import row_gradients
from kernels.optimizer import newton_schulz, row_adam, symmetric
from kernels.optimizer.coefficients import lower_end, polar_express

PLAIN_5, AOL_4, AOL_5 = polar_express(5), *(polar_express(steps, lower_end("aol", steps)) for steps in (4, 5))


@dataclass
class Case:
    name: str
    shape: str
    inputs: Callable[[], tuple]
    kernel: Callable
    reference: Callable  # the twin: plain for the errors, compiled for the time
    flop: float
    bytes: float
    rate: float = 1.0  # of the matrix units against bf16: 2 in FP8
    baseline: Callable | None = None  # what to time against, where it is not the twin
    exact: Callable | None = None  # the result in float64, where it is not the twin on float64 inputs
    check_inputs: Callable[[], tuple] | None = None  # smaller ones, where float64 would not fit
    wrap: Callable = lambda function: function  # makes of a kernel or its twin what is run: the same with its gradients
    compile: bool = True  # False where the baseline is one library call, of which compiling makes the same call
    configs: tuple = ()  # values of the kernel's argument `tuned`, for --sweep


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def matrices(batch: int, m: int, n: int) -> Tensor:
    """Random matrices that lie in memory as (m, n), seen as wide ones."""
    return random(batch, m, n).mT if m > n else random(batch, m, n)


def product_cases() -> Iterator[Case]:
    squares = [(batch, 768, 768) for batch in (1, 4, 8, 32)]
    tall = [(batch, 3072, 768) for batch in (1, 4, 8, 32)]
    large = [(1, 2048, 2048), (1, 4096, 4096), (1, 8192, 8192)]
    for batch, m, n in squares + tall + large:
        shape = f"{batch} × {m} × {n}"
        flop, x = 2.0 * batch * m * n * n, partial(matrices, batch, m, n)
        yield Case("gram " + ("XᵀX" if m > n else "XXᵀ"), shape, lambda x=x: (x(),), symmetric.gram,
                   symmetric.gram_reference, flop, 2.0 * batch * (m * n + n * n), compile=False, configs=symmetric.CONFIGS)
        if m == n:
            yield Case("polynomial", shape, lambda x=x, n=n: (symmetric.gram(x()) / n, 3.9, -2.8, 0.5),
                       symmetric.polynomial, symmetric.polynomial_reference, flop, 4.0 * batch * n * n,
                       configs=symmetric.CONFIGS)
            yield Case("product PQ of what commutes", shape, lambda x=x, n=n: (symmetric.gram(x()) / n,) * 2,
                       symmetric.product, torch.bmm, flop, 6.0 * batch * n * n, compile=False, configs=symmetric.CONFIGS)
        # aI inside P leaves a plain product, for which no kernel here is faster: against aX + BX in one call.
        yield Case("last product PX, bmm (against baddbmm)", shape,
                   lambda x=x, n=n: (symmetric.gram(x()) / n, x()), torch.bmm, torch.bmm, flop,
                   2.0 * batch * (2 * m * n + n * n), baseline=last_product_unfolded, compile=False)


def last_product_unfolded(p: Tensor, x: Tensor) -> Tensor:
    return torch.baddbmm(x, p, x, beta=3.9)


def orthogonalisation_cases() -> Iterator[Case]:
    methods = {"AOL 4": (AOL_4, "aol"), "AOL 5": (AOL_5, "aol"), "plain 5": (PLAIN_5, "frobenius")}
    record = [(4, 3072, 768), (22, 3072, 768), (16, 768, 768), (40, 768, 768), (1, 4096, 4096)]
    other = [(1, 3072, 768), (8, 3072, 768), (32, 3072, 768), (1, 768, 768), (4, 768, 768), (8, 768, 768), (32, 768, 768),
             (1, 2048, 2048), (1, 8192, 8192)]
    plain = partial(newton_schulz.newton_schulz_reference, triples=PLAIN_5, normalisation="frobenius")
    for batch, m, n in record + other:
        for name, (triples, normalisation) in methods.items():
            if name == "AOL 5" and (batch, m, n) in other:
                continue
            arguments = dict(triples=triples, normalisation=normalisation)
            yield Case(f"orthogonalise, {name} (against plain 5)", f"{batch} × {m} × {n}",
                       lambda b=batch, m=m, n=n: (random(b, m, n),),
                       partial(newton_schulz.newton_schulz, **arguments),
                       partial(newton_schulz.newton_schulz_reference, **arguments),
                       2.0 * batch * (2 * m * n * n + n**3) * len(triples), 4.0 * batch * m * n,
                       baseline=plain)


def sampled(columns: int) -> Tensor:
    """Weights of a sample's columns, as of a vocabulary of 50,304 and a batch whose targets are the first half of them."""
    targets = columns // 2
    return torch.where(torch.arange(columns, device="cuda") < targets, 1.0, (50304 - targets) / (columns - targets))


def cross_entropy_cases() -> Iterator[Case]:
    def inputs(tokens: int, vocabulary: int, k: int) -> tuple:
        weights, scale = torch.tensor([1.0, 0.5, 0.25][:k], device="cuda"), torch.tensor(0.75 / 448, device="cuda")
        full = vocabulary == 50304
        targets = torch.randint(vocabulary if full else vocabulary // 2, (tokens, k), device="cuda")
        return random(tokens, vocabulary) * 4, targets, weights, scale, None if full else sampled(vocabulary)

    def kernel(logits: Tensor, targets: Tensor, weights: Tensor, scale: Tensor, columns: Tensor | None, dtype, both=False,
               tuned=None) -> tuple:
        grad = None if dtype is None else torch.empty_like(logits, dtype=dtype)
        transposed = grad.new_empty(logits.shape[::-1]) if both else None
        return cross_entropy.cross_entropy(logits, targets, weights, grad, transposed, scale, columns, tuned), grad, transposed

    def twin(logits: Tensor, targets: Tensor, weights: Tensor, scale: Tensor, columns: Tensor | None, dtype, both=False) -> tuple:
        losses, grad = cross_entropy.cross_entropy_reference(logits, targets, weights, scale, dtype, columns)
        return losses, grad, grad.mT.contiguous() if both else None

    for tokens, vocabulary in ((16384, 50304), (49152, 50304), (49152, 16384)):
        for k, dtype, both in ((1, None, False), (3, torch.bfloat16, False), (3, torch.float8_e5m2, True)):
            kind = "loss only" if dtype is None else f"gradient {dtype} + transpose" if both else f"gradient {dtype}"
            name = f"cross-entropy{' of a sample' * (vocabulary < 50304)}, {k} targets, {kind}".replace("torch.", "")
            yield Case(name, f"{tokens} × {vocabulary}", partial(inputs, tokens, vocabulary, k),
                       partial(kernel, dtype=dtype, both=both), partial(twin, dtype=dtype, both=both), 0.0,
                       tokens * vocabulary * (2.0 + (dtype.itemsize * (1 + both) if dtype else 0)),
                       exact=partial(twin, dtype=dtype and torch.float64, both=both),
                       check_inputs=partial(inputs, 1024, vocabulary, k), configs=cross_entropy.CONFIGS)


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def head_gradients(function: Callable) -> Callable:
    def run(x: Tensor, head: Tensor, *rest) -> tuple:
        x, head = leaf(x), leaf(head)
        return torch.autograd.grad(function(x, head, *rest)[0], (x, head))
    return run


def head_cases(width: int = 768) -> Iterator[Case]:
    def inputs(tokens: int, vocabulary: int) -> tuple:
        x, head = torch.nn.functional.rms_norm(random(tokens, width), (width,)), random(vocabulary, width) * 0.02
        full = vocabulary == 50304
        targets = torch.randint(vocabulary if full else vocabulary // 2, (tokens,), device="cuda", dtype=torch.int32)
        is_start = torch.arange(tokens, device="cuda") % 512 == 0
        weights = torch.tensor([1.0, 0.5, 0.25], device="cuda")
        return x, head, targets, is_start, weights, True, None if full else sampled(vocabulary)

    def exact(*tensors: Tensor) -> tuple:
        return head_gradients(head_loss.head_loss_reference)(*tensors[:5], False, tensors[6])

    for tokens, vocabulary in ((16384, 50304), (49152, 50304), (49152, 16384)):
        name = f"head and loss{' of a sample' * (vocabulary < 50304)}, both ways, FP8, 3 targets"
        yield Case(name, f"{tokens} × {width} × {vocabulary}", partial(inputs, tokens, vocabulary),
                   head_loss.head_loss, head_loss.head_loss_reference, 6.0 * tokens * width * vocabulary,
                   tokens * vocabulary * (2.0 * 3 + 1.0 * 4), rate=2, wrap=head_gradients,
                   check_inputs=partial(inputs, 1024, vocabulary), exact=exact)


def embedding_cases() -> Iterator[Case]:
    def inputs(rows: int, tokens: int, width: int) -> tuple:
        index = (rows ** torch.rand(tokens, device="cuda")).long() - 1          # the k-th row about as often as 1/k, as words are
        return random(rows, width), random(tokens, width), index

    def kernel(out: Tensor, grad: Tensor, index: Tensor, tuned: tuple = embedding.CONFIGS[0]) -> Tensor:
        return embedding.add_rows(out, grad, *embedding.sort_rows(index)[1:3], tuned=tuned)

    def dense(out: Tensor, grad: Tensor, index: Tensor) -> Tensor:
        return out.add_(torch.ops.aten.embedding_dense_backward(grad, index, len(out), -1, False))

    for tokens, rows, width in ((16384, 50304, 768), (49152, 50304, 768), (16384, 377280, 768), (49152, 377280, 768),
                                (196608, 33554432, 32), (589824, 33554432, 32)):
        yield Case("embedding's gradient, with the sort", f"{tokens} of {rows} × {width}", partial(inputs, rows, tokens, width),
                   kernel, dense, 0.0, 6.0 * tokens * width, configs=embedding.CONFIGS)
    for tokens, rows, width in ((65536, 33554432, 32), (196608, 33554432, 32), (65536, 1572864, 192), (196608, 1572864, 192)):
        yield Case("rows of a narrow table", f"{tokens} of {rows} × {width}",
                   lambda n=tokens, rows=rows, width=width: (random(rows, width), torch.randint(rows, (n,), device="cuda")),
                   embedding.take_rows, lambda table, index: torch.nn.functional.embedding(index, table), 0.0, 4.0 * tokens * width,
                   configs=embedding.TAKE_CONFIGS)


def row_adam_cases() -> Iterator[Case]:
    numbers = [torch.tensor(number, device="cuda") for number in (True, 0.01, 0.1)]

    def inputs(rows: int, read: int, width: int, block: int) -> tuple:
        index, weight = torch.randint(rows, (read,), device="cuda").unique(), random(rows, width)
        second, last, steps = torch.rand(rows, width // block, device="cuda"), torch.zeros(rows, device="cuda"), torch.tensor(9.0, device="cuda")
        return weight, second, last, steps, index, random(len(index), width), row_gradients.no_gradients(weight, read)

    def by_row(weight: Tensor, second: Tensor, last: Tensor, steps: Tensor, index: Tensor, grad: Tensor, into: tuple, **tuned) -> Tensor:
        into.grads.index_copy_(0, row_gradients.enlist(index.int(), into).long(), grad)
        row_adam.row_adam(weight, into, second, last, steps, *numbers, 0.95, True, **tuned)
        return weight

    def dense(weight: Tensor, second: Tensor, last: Tensor, steps: Tensor, index: Tensor, grad: Tensor, _: tuple) -> Tensor:
        row_adam.row_adam_reference(weight, torch.zeros_like(weight).index_copy_(0, index, grad), second, last, steps, *numbers, 0.95, True)
        return weight

    for rows, read, width, block in ((377280, 100_000, 192, 1), (1509120, 100_000, 192, 1), (1509120, 400_000, 192, 1),
                                     (6291456, 100_000, 192, 16), (33554432, 100_000, 32, 16), (33554432, 400_000, 32, 16)):
        touched = rows * (1 - (1 - 1 / rows) ** read)
        yield Case("Adam on the rows read, listed and with a copy of their gradients", f"{read} of {rows} × {width} / {block}",
                   partial(inputs, rows, read, width, block), by_row, dense, 0.0, (12.0 + 8.0 / block) * width * touched,
                   configs=row_adam.CONFIGS)


def moving_cases() -> Iterator[Case]:
    for shape in ((49152, 768), (49152, 3072), (50304, 768)):
        name, size = "{} × {}".format(*shape), shape[0] * shape[1]
        yield Case("round_to_fp8 and transpose", name, lambda s=shape: (random(*s), torch.tensor(4 / 448, device="cuda")),
                   quantize.quantize, quantize.quantize_reference, 0.0, 4.0 * size, configs=quantize.CONFIGS,
                   exact=lambda x, scale: (x / scale, x.mT / scale))
    yield Case("transpose", name, lambda: (random(*shape),), transpose.transpose, transpose.transpose_reference,
               0.0, 4.0 * size, configs=transpose.CONFIGS)
    yield Case("add transposed", name, lambda: (random(*shape[::-1]), random(*shape)), transpose.add_transposed,
               transpose.add_transposed_reference, 0.0, 6.0 * size, configs=transpose.CONFIGS)
    yield Case("transpose float8_e5m2", "16384 × 50304", lambda: (random(16384, 50304).to(torch.float8_e5m2),),
               transpose.transpose, transpose.transpose_reference, 0.0, 2.0 * 16384 * 50304, configs=transpose.CONFIGS)


def smear_cases(width: int = 768, channels: int = 12) -> Iterator[Case]:
    """Behind the embedding. Its gradients alone against torch as it is: no other case has their configurations."""
    def inputs(n: int) -> tuple:
        is_start = torch.arange(n, device="cuda") % 512 == 0
        return random(n, width), is_start, random(channels).float(), torch.tensor(0.5, device="cuda"), random(n, width)

    def both_ways(function: Callable) -> Callable:
        def run(rows: Tensor, is_start: Tensor, gate: Tensor, share: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            leaves = [leaf(x) for x in (rows, gate, share)]
            out = function(leaves[0], is_start, *leaves[1:])
            return out.detach(), *torch.autograd.grad(out, leaves, grad)
        return run

    def back(rows: Tensor, is_start: Tensor, gate: Tensor, share: Tensor, grad: Tensor, **tuned) -> tuple[Tensor, ...]:
        return smear.smear_backward(grad, rows, is_start, gate, share, **tuned)

    for n in (16384, 49152):
        shape, one, make = f"{n} × {width}", 2.0 * n * width, partial(inputs, n)
        yield Case("smear", shape, lambda make=make: make()[:-1], smear.smear_forward, smear.smear_reference, 0.0, 2 * one,
                   configs=smear.CONFIGS)
        yield Case("smear, both ways", shape, make, smear.smear, smear.smear_reference, 0.0, 5 * one, wrap=both_ways,
                   exact=both_ways(smear.smear_reference))
        yield Case("smear's gradients alone (against both ways)", shape, make, back, lambda *x: both_ways(smear.smear_reference)(*x)[1:],
                   0.0, 3 * one, compile=False, configs=smear.BACKWARD_CONFIGS)


CASES = (orthogonalisation_cases, product_cases, head_cases, cross_entropy_cases, embedding_cases, smear_cases, row_adam_cases,
         moving_cases)
