"""Every kernel's examples: as near to float64 as the reference, in every configuration, and repeatable."""
from dataclasses import replace

import pytest
import torch
from checks import DEVICE, DTYPES, check

from kernels.bench import timing
from kernels.bench.discover import every_example
from kernels.example import Example

EXAMPLES = list(every_example("odd", DEVICE, DTYPES[0]))
for dtype in DTYPES[1:]:        # The kernels that round between dtypes by themselves, and store no FP8.
    rounding = "qkv", "output", "value_gate", "shared_gradient"
    EXAMPLES += [(module, replace(example, configs=()))
                 for module, example in every_example("odd", DEVICE, dtype)
                 if module.__name__.split(".")[-1] in rounding]
NAMES = [f"{module.__name__.split('.', 1)[1]}, {example.name}, {example.shape}"
         for module, example in EXAMPLES]


@pytest.mark.parametrize("example", [example for _, example in EXAMPLES], ids=NAMES)
def test_as_exact_as_pytorch(example):
    check(example)


def test_a_result_that_is_no_number_is_noticed_wherever_it_stands():
    """As where a kernel forgets to write one; max() of Python passes over it behind another number."""
    def results(x, *by):
        return tuple(x * factor for factor in by)

    for wrong in ((1.0, torch.nan), (torch.nan, 1.0)):
        kernel, reference = (lambda x, by=by: results(x, *by) for by in (wrong, (1.0, 1.0)))
        example = Example("x", "3", lambda: (torch.ones(3, device=DEVICE),), kernel, reference)
        assert not timing.check(example)["correct"]
        with pytest.raises(AssertionError):
            check(example)
