"""The cases of kernels.bench that stand between the large products of a layer: heads, residual, the FP8 MLP's scales."""
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import fp8_qkv, qkv
from kernels.attention import output as linear
from kernels.bench.cases import Case, leaf, random
from kernels.fp8 import scales as fp8_scales
from kernels.fp8 import weights as fp8_weights
from kernels.fp8.formats import normed_scale, paired
from kernels.fp8.quantize import quantize
from kernels.mlp import residual, residual_fp8
from kernels.ngrams import shared_gradient as shared_rows

LAYERS = 8


def heads_gradients(function: Callable) -> Callable:
    def run(*inputs) -> tuple:
        leaves = {i: leaf(inputs[i]) for i in (0, 4, 5, 6) if inputs[i] is not None}
        out = function(*(leaves.get(i, x) for i, x in enumerate(inputs[:-3])))
        return *(x.detach() for x in out), *torch.autograd.grad(out, tuple(leaves.values()), inputs[-3:])
    return run


def heads_cases(heads: int = 6, head_dim: int = 128) -> Iterator[Case]:
    def inputs(tokens: int, qk_dim: int, key_offset: bool, value: bool) -> tuple:
        is_start, (cos, sin) = torch.arange(tokens, device="cuda") % 512 == 0, random(2, tokens, qk_dim // 4).float()
        gates = (random(tokens, 6), random(tokens, heads * head_dim), random(heads, 12).float()) if value else (None, None, None)
        grads = (random(tokens, heads, dim) for dim in (qk_dim, qk_dim, head_dim))
        return random(tokens, heads * (2 * qk_dim + head_dim)), cos, sin, is_start, *gates, qk_dim, head_dim, key_offset, *grads

    for qk_dim, tokens in ((128, 16384), (128, 49152), (64, 49152)):
        for name, *has in (("", False, False), (", key offset", True, False), (", value rows", False, True)):
            channels = 10 * qk_dim + (7 if has[1] else 4) * head_dim
            yield Case("from QKV to attention, both ways", f"{tokens} × {heads} × (2 × {qk_dim} + {head_dim}){name}",
                       partial(inputs, tokens, qk_dim, *has), qkv.qkv_heads, qkv.qkv_heads_reference, 0.0, 2.0 * tokens * heads * channels,
                       exact=heads_gradients(qkv.qkv_heads_reference), wrap=heads_gradients, configs=qkv.CONFIGS)


def fp8_gradient_cases(heads: int = 6, head_dim: int = 128) -> Iterator[Case]:
    """Of QKV, and its transpose, from those of q, k, v; against the kernel that writes it in bf16."""
    scale = torch.tensor(fp8_qkv.GRADIENT_SCALE, device="cuda")

    def inputs(tokens: int, qk_dim: int) -> tuple:
        is_start, (cos, sin) = torch.arange(tokens, device="cuda") % 512 == 0, random(2, tokens, qk_dim // 4).float()
        grads = (random(tokens, heads, dim) for dim in (qk_dim, qk_dim, head_dim))
        return *grads, random(tokens, heads * (2 * qk_dim + head_dim)), cos, sin, is_start, qk_dim, head_dim, True

    def kernel(*tensors, tuned: tuple | None = None, scale: Tensor | None = scale) -> tuple:
        grad, _, _, transposed = qkv.heads_backward(*tensors[:7], None, None, *tensors[7:], tuned, scale)
        return grad, transposed

    def twin(*tensors) -> tuple:
        return fp8_qkv.heads_backward_reference(tensors[:3], tensors[3], tensors[4:7], (None, None, None), tensors[7:], scale)[:2]

    def exact(*tensors) -> tuple:
        grad = heads_gradients(qkv.qkv_heads_reference)(*tensors[3:7], None, None, None, *tensors[7:], *tensors[:3])[-1] / scale
        return grad, paired(grad.T)

    for qk_dim, tokens in ((128, 16384), (128, 49152), (64, 49152)):
        yield Case("gradient of QKV in FP8, both ways (against bf16)", f"{tokens} × {heads} × (2 × {qk_dim} + {head_dim})",
                   partial(inputs, tokens, qk_dim), kernel, twin, 0.0, 4.0 * tokens * heads * (3 * qk_dim + head_dim), exact=exact,
                   baseline=partial(kernel, scale=None), compile=False, configs=qkv.FP8_CONFIGS)


def attention_inputs(x: Tensor, weight: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, is_start: Tensor, value_row: Tensor | None,
                     value_gate: Tensor | None, *form) -> tuple[Tensor, ...]:
    """What `fp8_qkv_heads` does, as training does it in bf16."""
    seen = None if value_row is None else x[:, :value_gate.size(1) // 2].clone()
    return qkv.qkv_heads(F.linear(x, weight * scale), cos, sin, is_start, seen, value_row, value_gate, *form)


def attention_inputs_gradients(function: Callable) -> Callable:
    """The learned scale's gradient is made, but not returned: a sum of random numbers that nearly cancel."""
    def run(*tensors) -> tuple:
        leaves = {i: leaf(tensors[i]) for i in (0, 1, 2, 6, 7) if tensors[i] is not None}
        out = function(*(leaves.get(i, x) for i, x in enumerate(tensors[:-3])))
        grads = torch.autograd.grad(out, tuple(leaves.values()), tensors[-3:])
        return *(x.detach() for x in out), *(grad for i, grad in zip(leaves, grads) if i != 2)
    return run


def attention_inputs_cases(width: int = 768, heads: int = 6, head_dim: int = 128, channels: int = 6) -> Iterator[Case]:
    def inputs(tokens: int, qk_dim: int, value: bool) -> tuple:
        x, weight = torch.nn.functional.rms_norm(random(tokens, width), (width,)), random(heads * (2 * qk_dim + head_dim), width) * 0.02
        is_start, (cos, sin) = torch.arange(tokens, device="cuda") % 512 == 0, random(2, tokens, qk_dim // 4).float()
        gates = (random(tokens, heads * head_dim), random(heads, 2 * channels).float()) if value else (None, None)
        grads = (random(tokens, heads, dim) for dim in (qk_dim, qk_dim, head_dim))
        return x, weight, torch.tensor(0.5, device="cuda"), cos, sin, is_start, *gates, qk_dim, head_dim, True, *grads

    twin, wrap = fp8_qkv.fp8_qkv_heads_reference, attention_inputs_gradients
    for qk_dim, tokens, value in ((128, 16384, False), (128, 49152, False), (128, 49152, True), (64, 49152, False)):
        columns, name, make = heads * (2 * qk_dim + head_dim), "attention's inputs, both ways", partial(inputs, tokens, qk_dim, value)
        shape, flop = f"{tokens} × {width} × {columns}" + ", value rows" * value, 6.0 * tokens * width * columns
        moved = tokens * (10.0 * columns + 8.0 * width)                  # rows of values and their gradients not counted
        yield Case(f"{name}, bf16", shape, make, attention_inputs, twin, flop, moved, wrap=wrap, exact=wrap(twin), compile=False)
        yield Case(f"{name}, FP8 (against bf16)", shape, make, fp8_qkv.fp8_qkv_heads, partial(twin, fp8=True), flop, moved, rate=2,
                   baseline=attention_inputs, wrap=wrap, exact=wrap(twin), compile=False)


def into_the_mlp(enter: Callable) -> Callable:
    def run(x: Tensor, update: Tensor, scales: Tensor, *_, **tuned) -> tuple[Tensor, Tensor]:
        return enter((x, update), scales, **tuned)[:2]
    return run


def out_of_the_mlp(out_grad: Tensor, norm_grad: Tensor, kept: Tensor, rms: Tensor, scales: Tensor, **how) -> Tensor:
    return residual.residual_backward(out_grad, norm_grad, kept, rms, scales, **how)[0]


def out_of_the_mlp_reference(out_grad: Tensor, norm_grad: Tensor, normed: Tensor, rms: Tensor, scales: Tensor) -> Tensor:
    """As `residual_backward` makes it: from the norm of y and its root mean square."""
    normed, norm_grad = normed.float(), norm_grad.float()
    along = (norm_grad * normed).mean(1, keepdim=True) * normed
    return (scales[0] * (scales[1] * out_grad + (norm_grad - along) / rms[:, None])).type_as(out_grad)


def gradients(function: Callable, inputs: int) -> Callable:
    """Of the first `inputs` arguments, from gradients of both results, which come last.

    Scales' are made, but not returned to be checked: sums of random numbers that nearly cancel, right by luck on either side.
    """
    def run(*tensors: Tensor) -> tuple:
        leaves = [leaf(x) for x in tensors[:inputs]]
        found = torch.autograd.grad(function(*leaves, *tensors[inputs:]), leaves, tensors[-2:])
        return tuple(x for x in found if x.dim() == 2)
    return run


def residual_cases(width: int = 768) -> Iterator[Case]:
    kernel, twin = into_the_mlp(residual.mlp_input), into_the_mlp(residual.mlp_input_reference)

    def inputs(n: int) -> tuple:
        return random(n, width), random(n, width), torch.tensor([1.05, 0.95], device="cuda"), random(n, width), random(n, width)

    def backward_inputs(n: int) -> tuple:
        rms, scales = torch.rand(n, device="cuda") + 0.5, torch.tensor([1.05, 0.95], device="cuda")
        return *(random(n, width) for _ in range(2)), residual.norm(random(n, width)), rms, scales

    def shared_inputs(n: int, heads: int) -> tuple:
        rows, grads = random(n, heads, width // 6), random(LAYERS, n, 6, width // 6)[:, :, :heads]
        return grads.add_(rows / 2), rows, torch.rand(LAYERS, heads, device="cuda") + 0.5

    def shared(function: Callable) -> Callable:
        return lambda grads, rows, scales, **tuned: function(grads.unbind(), rows, scales, **tuned)

    def fork(function: Callable, count: int) -> Callable:
        return lambda *tensors: function(tensors[:count])

    into = partial(gradients, inputs=3)
    for n in (16384, 49152):
        shape, one = f"{n} × {width}", 2.0 * n * width
        yield Case("into the MLP", shape, partial(inputs, n), into_the_mlp(residual.residual), twin, 0.0, 4 * one,
                   configs=residual.CONFIGS)
        yield Case("into the MLP, both ways", shape, partial(inputs, n), kernel, twin, 0.0, 8 * one, wrap=into, exact=into(twin))
        yield Case("out of the MLP", shape, partial(backward_inputs, n), out_of_the_mlp, out_of_the_mlp_reference, 0.0, 4 * one,
                   configs=residual.BACKWARD_CONFIGS)
        for count, name in ((1, "the residual"), (2, "residual + update")):
            plain, beside = fork(residual.norm_fork_reference, count), partial(gradients, inputs=count)
            yield Case(f"norm beside {name}, both ways", shape, lambda n=n, count=count: tuple(random(n, width) for _ in range(2 + count)),
                       fork(residual.norm_fork, count), plain, 0.0, (4 + 2 * count) * one, wrap=beside, exact=beside(plain))
        for heads in (1, 3):
            yield Case(f"shared rows' gradient, {LAYERS} layers, {heads} of 6 heads", shape, partial(shared_inputs, n, heads),
                       shared(shared_rows.shared_rows), shared(shared_rows.shared_rows_reference), 0.0, (LAYERS + 2) * one * heads / 6,
                       configs=shared_rows.CONFIGS)


def fp8_residual_cases(width: int = 768) -> Iterator[Case]:
    """What FP8 products read of the residual, and back from it: against the two kernels that make it by way of the norm in bf16."""
    norm_scale = torch.tensor(normed_scale(width), device="cuda")

    def inputs(n: int) -> tuple:
        return random(n, width), random(n, width), torch.tensor([1.05, 0.95], device="cuda")

    def of_tensors(function: Callable) -> Callable:
        def run(x: Tensor, update: Tensor, scales: Tensor, **tuned) -> tuple[Tensor, ...]:
            return function((x, update), scales, **tuned)[:3]
        return run

    def two(*args) -> tuple[Tensor, ...]:
        x, normed, _ = residual.residual(*args)
        return x, *quantize(normed, norm_scale, in_pairs=True)

    def exact(*args) -> tuple[Tensor, ...]:
        x, normed = residual.mlp_input_reference(*args)
        return x, normed / norm_scale, paired(normed.T / norm_scale)

    def back_inputs(n: int) -> tuple:
        rms, scales = torch.rand(n, device="cuda") + 0.5, torch.tensor([1.05, 0.95], device="cuda")
        kept = scales[1] * rms[:, None] * residual.norm(random(n, width).float())
        return random(n, width), random(n, width), kept.bfloat16(), rms, scales

    def back_reference(out_grad: Tensor, norm_grad: Tensor, kept: Tensor, rms: Tensor, scales: Tensor) -> Tensor:
        return out_of_the_mlp_reference(out_grad, norm_grad, kept / (scales[1] * rms[:, None]), rms, scales)

    for n in (16384, 49152):
        shape, one = f"{n} × {width}", 2.0 * n * width
        yield Case("normed into FP8 both ways (against two kernels)", shape, partial(inputs, n), of_tensors(residual_fp8.residual_fp8),
                   of_tensors(residual_fp8.residual_fp8_reference), 0.0, 4 * one, exact=of_tensors(exact), baseline=of_tensors(two),
                   compile=False, configs=residual_fp8.CONFIGS)
        yield Case("its gradient, from the sum (against from the norm)", shape, partial(back_inputs, n),
                   partial(out_of_the_mlp, normed=False), back_reference, 0.0, 4 * one, baseline=out_of_the_mlp, compile=False,
                   configs=residual.BACKWARD_CONFIGS)


def scales_cases(width: int = 768, hidden: int = 3072, n: int = 49152) -> Iterator[Case]:
    def gradient_inputs() -> tuple:
        return random(n, width), torch.tensor(0.01, device="cuda"), torch.tensor(9.0, device="cuda")

    def flat(function: Callable) -> Callable:
        return lambda *weights, **tuned: sum(function(weights, **tuned), ())

    yield Case("a layer's weights in FP8, both ways", f"(1536 + 2 × {hidden}) × {width}",
               lambda: tuple(random(rows, width) for rows in (1536, hidden, hidden)), flat(fp8_weights.fp8_weights),
               flat(fp8_weights.fp8_weights_reference), 0.0, 6.0 * (1536 + 2 * hidden) * width, configs=fp8_weights.CONFIGS)
    yield Case("FP8 scales of a gradient", f"{n} × {width}", gradient_inputs, fp8_scales.gradient_scales,
               fp8_scales.gradient_scales_reference, 0.0, 2.0 * n * width, configs=fp8_scales.CONFIGS)


def scaled_weight_cases(rows: int = 1536, width: int = 768) -> Iterator[Case]:
    """Of Q, K, V with `qk_dim` 64. Of the gradients, with zeros to add to, the weight's alone: in the scale's much cancels."""
    scale = torch.tensor(0.7, device="cuda")

    def gradient(fused: bool) -> Callable:
        return lambda product, weight: linear.weight_gradients(None, product, weight, scale, fused)[0]

    yield Case("scaled weight", f"{rows} × {width}", lambda: (random(rows, width),), lambda weight: linear.scaled(weight, scale),
               lambda weight: (weight * scale[None]).type_as(weight), 0.0, 4.0 * rows * width,
               exact=lambda weight: weight * scale.to(weight.dtype))
    yield Case("gradients of a scaled weight", f"{rows} × {width}", lambda: (random(rows, width), random(rows, width)), gradient(True),
               gradient(False), 0.0, 10.0 * rows * width, exact=lambda product, weight: product * scale.to(product.dtype))


CASES = (heads_cases, fp8_gradient_cases, attention_inputs_cases, residual_cases, fp8_residual_cases, scales_cases, scaled_weight_cases)
