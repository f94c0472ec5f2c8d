"""Where the gradient of a weight goes: one protocol for every kernel that makes one.

Autograd's own way is to return a gradient, which a second kernel then adds to `weight.grad`. For large
weights that is a pass over memory and a launch that nobody needs, so here a kernel's backward pass is told
where the gradient belongs and whether to add it there. (Megatron-LM calls this "gradient accumulation
fusion"; BLAS has had it since 1979, as beta.)

- A kernel takes `grad: Gradient`. Its backward pass fills the buffer and returns None for the weight.
- With `grad=None` it returns the gradient to autograd. Tests and weights that are no leaves use this.
- A reference in plain PyTorch has no backward pass of its own. It ignores `grad`, and autograd adds to
  `weight.grad`, which is the same buffer.
- Scalars and gates are a few hundred numbers. Their gradients go through autograd everywhere.

The first micro-batch of a step writes (`accumulate=False`) and the later ones add, wherever a kernel covers
the whole buffer. Tables of rows always add: a backward pass reaches only the rows that were read.
"""
from typing import NamedTuple

import torch
from torch import Tensor


class Gradient(NamedTuple):
    """Where a weight's gradient goes, and how."""
    buffer: Tensor  # like the weight that the kernel reads; usually a view of `weight.grad`
    accumulate: bool = True  # True: add to what the buffer holds. False: write over it


def gradient_of(weight: Tensor, accumulate: bool = True) -> Gradient:
    """The gradient of a leaf goes to its `.grad`, which is made of zeros if it is not there yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return Gradient(weight.grad, accumulate)


def gradient(leaf: Tensor) -> Tensor:
    """The buffer of `gradient_of` alone."""
    return gradient_of(leaf).buffer
