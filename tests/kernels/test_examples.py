"""Every kernel's examples: as near to float64 as the reference, in every configuration, and repeatable."""
import pytest
from checks import DEVICE, DTYPE, check

from kernels.bench.discover import every_example

EXAMPLES = list(every_example("odd", DEVICE, DTYPE))
NAMES = [f"{module.__name__}, {example.name}, {example.shape}" for module, example in EXAMPLES]


@pytest.mark.parametrize("example", [example for _, example in EXAMPLES], ids=NAMES)
def test_as_exact_as_pytorch(example):
    check(example)
