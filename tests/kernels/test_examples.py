"""Every kernel's examples: as near to float64 as the reference, in every configuration, and repeatable."""
from dataclasses import replace

import pytest
from checks import DEVICE, DTYPES, check

from kernels.bench.discover import every_example

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
