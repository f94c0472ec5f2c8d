"""One example of a kernel: what feeds its tests, its benchmark and the sanitizer's run.

Each kernel module ends with a function

    def examples(size: str, device: torch.device, dtype: torch.dtype) -> Iterator[Example]

`size` is "odd" (small shapes, most of them no multiple of a tile: for tests and compute-sanitizer) or "real"
(the shapes of training: for the benchmark). `tests/kernels/checks.py` checks an example against float64, and
`kernels/bench` times it.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Example:
    name: str  # the kernel, and what is particular about this example
    shape: str  # as tables show it, "49,152 × 768"
    inputs: Callable[[], tuple]  # makes the arguments, anew each time, for a kernel may work in place
    kernel: Callable  # takes the inputs; returns a tensor, or a tuple of tensors and None
    reference: Callable  # the same in plain PyTorch
    flop: float = 0.0  # of the textbook's form
    bytes: float = 0.0  # the least that must cross memory
    rate: float = 1.0  # speed of the matrix units against bfloat16: 2 in FP8
    baseline: Callable | None = None  # what the benchmark times beside the kernel, if not the reference
    compile: bool = True  # False: the baseline is one library call, and compiling it changes nothing
    exact: Callable | None = None  # the float64 result, if it is not the reference on float64 inputs
    check_inputs: Callable[[], tuple] | None = None  # smaller inputs, where float64 would not fit
    slack: float = 1e-6  # what the kernel's relative error may exceed twice the reference's by
    configs: tuple = ()  # values of the kernel's argument `tuned`; tests check all, `--sweep` times all
    wrap: Callable[[Callable], Callable] = lambda function: function  # e.g. adds the backward pass


def errors(example: Example) -> tuple[float, float]:
    """The largest error over the outputs, relative to float64, of the kernel and of the reference."""
    inputs = (example.check_inputs or example.inputs)()
    exact = (example.exact or example.wrap(example.reference))(*map(in_double, inputs))
    found = []
    for function in (example.wrap(example.kernel), example.wrap(example.reference)):
        out = function(*map(copied, inputs))
        found.append(largest_error(tensors(out), tensors(exact)))
    return found[0], found[1]


def largest_error(out: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative error of a result; nan if one is not finite, which `max` could pass over."""
    found = torch.tensor([relative_error(x, y) for x, y in zip(out, exact, strict=True)])
    return found.max().item()           # of tensors nan is the largest


def relative_error(x: Tensor, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖, in float64; nan where x is not finite."""
    return ((x.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


def tensors(out: Any) -> list[Tensor]:
    """The tensors among a function's results."""
    return [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]


def in_double(x: Any) -> Any:
    """A floating-point tensor in float64, and those inside a tuple; anything else as it is."""
    if isinstance(x, tuple):
        return type(x)(*map(in_double, x)) if hasattr(x, "_fields") else tuple(map(in_double, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def copied(x: Any) -> Any:
    """A copy of a tensor, and of those inside a tuple; anything else as it is."""
    if isinstance(x, tuple):
        return type(x)(*map(copied, x)) if hasattr(x, "_fields") else tuple(map(copied, x))
    return x.clone() if isinstance(x, Tensor) else x


def both_ways(function: Callable, gradients: Callable[[], tuple], wanted: tuple[int, ...]) -> Callable:
    """A function that returns the results and the gradients of the inputs numbered `wanted`.

    `gradients` makes the gradient of each result, the same at each call. It is called late, because listing
    the examples makes them all. The inputs `wanted` are made leaves. For `Example.wrap`.
    """
    def run(*inputs: Any) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() if i in wanted else x for i, x in enumerate(inputs)]
        out = tensors(function(*leaves))
        given = [grad.to(x.dtype) for grad, x in zip(gradients(), out)]
        return *out, *torch.autograd.grad(out, [leaves[i] for i in wanted], given)
    return run
