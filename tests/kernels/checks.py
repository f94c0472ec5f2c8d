"""What the tests of kernels share: where they run, in which dtypes, and how an example is checked."""
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernels.example import Example, copied, in_double, largest_error, tensors
from kernels.optimizer import Master, write_master

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter computes tl.dot wrongly in bfloat16. On a GPU kernels in float32 take minutes to
# compile.
DTYPES = [torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32, torch.float16]
DTYPE = DTYPES[0]


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def in_halves(value: torch.Tensor) -> Master:
    """A float32 master weight of this value."""
    master = Master(torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16))
    write_master(master, value)
    return master


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
    a_bits, b_bits = (x.flatten().view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(a_bits, b_bits)


def refused(*cases: tuple[str, Callable]) -> None:
    """Each call ends in a ValueError that says what the argument of this name must be."""
    for name, call in cases:
        with pytest.raises(ValueError, match=f"{name} must be"):
            call()


def check(example: Example) -> None:
    """At most twice as far from float64 as the reference, in every configuration; repeated, the same bits."""
    given = (example.check_inputs or example.inputs)()
    exact = tensors((example.exact or example.wrap(example.reference))(*map(in_double, given)))

    def run(**tuned) -> list[torch.Tensor]:
        return tensors(example.wrap(partial(example.kernel, **tuned))(*map(copied, given)))

    plain = tensors(example.wrap(example.reference)(*map(copied, given)))
    allowed = 2 * largest_error(plain, exact) + example.slack
    first, *_ = results = [run(), *(run(tuned=tuned) for tuned in example.configs)]
    for tuned, out in zip((None, *example.configs), results, strict=True):
        found = largest_error(out, exact)
        assert found <= allowed, (example.name, example.shape, tuned, found, allowed)
    for a, b in zip(first, run(), strict=True):
        assert same_bits(a, b), (example.name, example.shape)
