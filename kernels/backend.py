"""Triton, or a stand-in where it is not installed, so that references can be imported everywhere."""

from collections.abc import Callable
from functools import cache, wraps
from types import SimpleNamespace

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch builds for CPUs come without Triton
    def _missing(*_args, **_kwargs):
        raise ModuleNotFoundError(
            "this kernel needs Triton (pip install triton); its plain PyTorch form, …_reference, does not")

    triton = SimpleNamespace(jit=lambda function: function, cdiv=_missing)
    tl = SimpleNamespace(constexpr=None)


# What F.rms_norm adds to the mean square for every dtype up to float32, because it computes in float32.
EPS = torch.finfo(torch.float32).eps


def compiled(function: Callable) -> Callable:
    """`function` by torch.compile, from its first call on.

    Only that call imports torch.compile and its back end, which takes 5 to 7 s. A run whose operations all
    have kernels never does.
    """
    @cache
    def made() -> Callable:
        torch._dynamo.config.recompile_limit = 64       # one for each kind of layer and each batch size
        return torch.compile(function)

    return wraps(function)(lambda *args, **kwargs: made()(*args, **kwargs))


def multiprocessors(x: torch.Tensor) -> int:
    """How many x's GPU has, or the current GPU if x is counted on the meta device; 1 on a CPU."""
    device = x.device if x.device.type == "cuda" else None
    return torch.cuda.get_device_properties(device).multi_processor_count if x.is_cuda else 1


def tiled(x: torch.Tensor, *tile: int):
    """A descriptor of x, contiguous, by tiles of so many rows (and columns), for Hopper's loads and stores.

    An input that does not start at a multiple of 16 bytes is copied, for the hardware wants that.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor
    return TensorDescriptor.from_tensor(x if x.data_ptr() % 16 == 0 else x.clone(), list(tile))


def check(condition: bool, name: str, tensor: torch.Tensor, wanted: str) -> None:
    """Raise a ValueError that says what the kernel wants and what it was given."""
    if not condition:
        raise ValueError(f"{name} must be {wanted}, but has shape {tuple(tensor.shape)}, "
                         f"strides {tensor.stride()}, dtype {tensor.dtype} on {tensor.device}")
