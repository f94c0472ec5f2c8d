"""Triton, or a stand-in where it is not installed, so that the plain twins can be imported everywhere; and what several files need."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch builds for CPUs come without Triton
    def _missing(*_args, **_kwargs):
        raise ModuleNotFoundError("this kernel needs Triton (pip install triton); its plain twin, …_reference, not")

    triton = SimpleNamespace(jit=lambda function: function, cdiv=_missing)
    tl = SimpleNamespace(constexpr=None)


def check(condition: bool, name: str, tensor: torch.Tensor, wanted: str) -> None:
    """Raise a ValueError that says what the kernel wants and what it was given."""
    if not condition:
        raise ValueError(f"{name} must be {wanted}, but has shape {tuple(tensor.shape)}, strides {tensor.stride()}, "
                         f"dtype {tensor.dtype} on {tensor.device}")


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    """The leaf's `.grad`, zeros at first: what a backward pass adds to by itself."""
    if leaf.grad is None:
        leaf.grad = torch.zeros_like(leaf)
    return leaf.grad


@cache
def side_stream(name: str) -> torch.cuda.Stream:
    """The process's stream of that name.

    Made once: torch deals out 32 in turn, and a later run's new one could be that which records graphs, beside which nothing runs.
    """
    return torch.cuda.Stream()


@contextmanager
def beside(stream: torch.cuda.Stream | None, behind: torch.cuda.Stream | None = None) -> Iterator[None]:
    """What is launched inside runs on that stream, behind all that `behind`, or else the current one, was given; None: on the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(behind or torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
