"""What the tests of kernels share: where they run, in which dtypes, and how an example is checked."""
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernels.example import Example, errors, tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter computes tl.dot wrongly in bfloat16. On a GPU kernels in float32 take minutes to
# compile.
DTYPES = [torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
DTYPE = DTYPES[0]


def each_odd_example(examples: Callable) -> pytest.MarkDecorator:
    """Run a test once for each of a kernel module's small examples, as its argument `example`."""
    found = list(examples("odd", DEVICE, DTYPE))
    return pytest.mark.parametrize("example", found, ids=lambda e: f"{e.name}, {e.shape}")


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """‖out − exact‖ / ‖exact‖."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def assert_as_exact_as_pytorch(out: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor,
                               slack: float = 1e-7) -> None:
    """Of the reference's shape and dtype, and at most twice as far from float64."""
    assert out.shape == plain.shape and out.dtype == plain.dtype
    assert error(out, exact) <= 2 * error(plain, exact) + slack


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    a_bits, b_bits = (x.contiguous().view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(a_bits, b_bits)


def check(example: Example) -> None:
    """At most twice as far from float64 as the reference, in every configuration; repeated, the same bits."""
    kernel = example.kernel
    for tuned in (None, *example.configs):
        example.kernel = kernel if tuned is None else partial(kernel, tuned=tuned)
        ours, plain = errors(example)
        assert ours <= 2 * plain + example.slack, (example.name, example.shape, tuned, ours, plain)
    example.kernel = kernel
    torch.manual_seed(1)
    inputs = example.inputs()
    torch.manual_seed(1)
    again = example.inputs()
    run = example.wrap(kernel)
    for a, b in zip(tensors(run(*inputs)), tensors(run(*again)), strict=True):
        assert same_bits(a, b), (example.name, example.shape)
