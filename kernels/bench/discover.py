"""All examples of all kernel modules: every module under kernels/ that defines `examples`."""
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import torch

import kernels
from kernels.example import Example

# In the order of the model.
ROOMS = ("embedding", "ngrams", "attention", "mlp", "loss", "fp8", "optimizer", "ranks")
TOOLS = ("bench", "lab")


def kernel_modules() -> list[ModuleType]:
    """Those with examples, by folder in the order of the model, then by name."""
    names = [found.name for found in pkgutil.walk_packages(kernels.__path__, "kernels.")]
    rooms = {name: name.split(".")[1] for name in names}
    names = [name for name in names if rooms[name] not in TOOLS]
    names.sort(key=lambda name: (ROOMS.index(rooms[name]) if rooms[name] in ROOMS else len(ROOMS), name))
    modules = [importlib.import_module(name) for name in names]
    return [m for m in modules if getattr(getattr(m, "examples", None), "__module__", None) == m.__name__]


def every_example(size: str, device: torch.device,
                  dtype: torch.dtype) -> Iterator[tuple[ModuleType, Example]]:
    """Each example with its module. Nothing runs before an example's inputs are made."""
    for module in kernel_modules():
        for example in module.examples(size, device, dtype):
            yield module, example
