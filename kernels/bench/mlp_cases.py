"""The cases of kernels.bench of the MLP: its product kernels in bfloat16 and FP8, and the whole of it both ways."""
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.bench.cases import Case, leaf, random
from kernels.fp8.formats import paired
from kernels.mlp import fp8_mlp as mlp
from kernels.mlp import relu_squared
from kernels.mlp.residual import add_up


def mlp_cases(width: int = 768, hidden: int = 3072) -> Iterator[Case]:
    fp8, scale = torch.float8_e4m3fn, torch.tensor(0.02, device="cuda")

    def compiled_fp8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        one = torch.ones((), device="cuda")
        pre = torch._scaled_mm(x, w.mT, scale, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return torch.relu(pre).square()

    for tokens in (16384, 49152):
        shape, flop = f"{tokens} × {width} × {hidden}", 2.0 * tokens * width * hidden
        inputs = lambda t=tokens: (random(t, width), random(hidden, width))  # noqa: E731
        yield Case("MLP relu²", shape, inputs, relu_squared.relu_squared, relu_squared.relu_squared_reference, flop,
                   2.0 * (tokens * width + tokens * hidden), configs=relu_squared.CONFIGS)
        yield Case("MLP relu² backward", shape, lambda t=tokens, i=inputs: (*i(), random(t, hidden).relu().square()),
                   relu_squared.relu_squared_backward, relu_squared.relu_squared_backward_reference, flop,
                   2.0 * (tokens * width + 2 * tokens * hidden), configs=relu_squared.CONFIGS)
        yield Case("MLP relu² of FP8 (against _scaled_mm)", shape, lambda i=inputs: (*[x.to(fp8) for x in i()], scale),
                   relu_squared.relu_squared, relu_squared.relu_squared_reference, flop, tokens * (width + 2.0 * hidden), rate=2,
                   baseline=compiled_fp8, configs=relu_squared.CONFIGS)


def fp8_cases(width: int = 768, hidden: int = 3072) -> Iterator[Case]:
    """From FP8 to FP8 and its transpose, with scales that saturate nothing."""
    scale, act_scale, pre_scale = (torch.tensor(number, device="cuda") for number in (0.02, 0.05, 1e-3))

    def inputs(tokens: int, backward: bool) -> tuple:
        x, w = (random(rows, width).to(relu_squared.E4M3) for rows in (tokens, hidden))
        if not backward:
            return x, w, scale, act_scale
        return x, w, random(tokens, hidden).relu().square().to(relu_squared.E4M3), scale, act_scale, pre_scale

    def exact(x: Tensor, w: Tensor, scale: Tensor, act_scale: Tensor) -> tuple[Tensor, Tensor]:
        act = relu_squared.relu_squared_reference(x, w, scale) / act_scale
        return act, paired(act.T)

    def exact_backward(grad: Tensor, w: Tensor, act: Tensor, scale: Tensor, act_scale: Tensor, pre_scale: Tensor) -> tuple[Tensor, Tensor]:
        pre = relu_squared.relu_squared_backward_reference(grad, w, act * act_scale, scale) / pre_scale
        return pre, paired(pre.T)

    for tokens in (16384, 49152):
        shape, flop = f"{tokens} × {width} × {hidden}", 2.0 * tokens * width * hidden
        yield Case("MLP relu² from FP8 to FP8 and its transpose", shape, partial(inputs, tokens, False), relu_squared.relu_squared_fp8,
                   relu_squared.relu_squared_fp8_reference, flop, tokens * (width + 2.0 * hidden), rate=2, exact=exact,
                   configs=relu_squared.FP8_CONFIGS)
        yield Case("MLP relu² backward from FP8 to FP8 and its transpose", shape, partial(inputs, tokens, True),
                   relu_squared.relu_squared_backward_fp8, relu_squared.relu_squared_backward_fp8_reference, flop,
                   tokens * (width + 3.0 * hidden), rate=2, exact=exact_backward, configs=relu_squared.FP8_BACKWARD_CONFIGS)


def mlp_gradients(function: Callable) -> Callable:
    def run(residual: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, grad: Tensor, *fp8: bool) -> tuple:
        x, w_in, w_out = leaf(x), leaf(w_in), leaf(w_out)
        out = add_up(function(residual.detach(), x, w_in, w_out, *fp8))
        return out.detach(), *torch.autograd.grad(out, (x, w_in, w_out), grad)
    return run


def whole_mlp_cases(width: int = 768, hidden: int = 3072) -> Iterator[Case]:
    def inputs(tokens: int, *fp8: bool) -> tuple:
        x = torch.nn.functional.rms_norm(random(tokens, width), (width,))
        return random(tokens, width), x, random(hidden, width) * 0.02, random(hidden, width) * 0.02, random(tokens, width), *fp8

    for tokens in (16384, 49152):
        for name, rate, *fp8 in (("bf16", 1.0, False, False), ("FP8 (against bf16)", 1.5, True, False),       # four of six products,
                                 ("FP8 with the weights' gradients (against bf16)", 2.0, True, True)):        # six
            yield Case(f"MLP, both ways, {name}", f"{tokens} × {width} × {hidden}",
                       partial(inputs, tokens, *fp8), mlp.mlp, mlp.mlp_reference, 12.0 * tokens * width * hidden,
                       8.0 * tokens * (width + hidden), rate=rate,
                       exact=lambda *tensors: mlp_gradients(bf16_mlp)(*tensors), baseline=bf16_mlp, wrap=mlp_gradients)


def bf16_mlp(residual: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor, *_: bool) -> tuple[Tensor, ...]:
    return mlp.mlp_reference(residual, x, w_in, w_out, False)


CASES = (mlp_cases, fp8_cases, whole_mlp_cases)
