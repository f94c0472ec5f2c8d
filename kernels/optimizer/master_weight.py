"""w ← w − lr (u + decay w) on a float32 master weight, stored as a bf16 weight and the 16 bits it lacks.

The two halves together take the memory of the float32 alone; a bf16 copy beside a float32 master takes half
as much again. The half with the mantissa bits lives only on the rank that updates the weight. The idea is
@YouJiacheng's (the speedrun's medium track).

Cautious decay (Chen et al., arXiv 2510.12402) acts only where the decay and the update move a
weight the same way. A run with it ends 0.0003 of loss lower than one without, which is less than one pair of
runs can show.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import tl, triton


class Master(NamedTuple):
    """A float32 master weight in two halves."""
    weight: Tensor  # bfloat16: the upper 16 bits. Any dtype, if there are no mantissa bits.
    mantissa_bits: Tensor | None  # int16, like the weight in shape: the lower 16 bits


class Rule(NamedTuple):
    """How a step moves a weight. The tensors may change from step to step without a new compiled program."""
    finite: Tensor  # bool, 0-dim or broadcast against the weight: where it is False, nothing moves
    lr: Tensor  # float32, 0-dim or broadcast against the weight: the learning rate
    decay: Tensor  # float32, 0-dim: weight decay, a share of the weight that is multiplied by lr
    cautious: bool  # decay only where it moves the weight the same way as the update


def read_master(master: Master) -> Tensor:
    """The float32 value of a master weight."""
    weight, mantissa_bits = master
    if mantissa_bits is None:
        return weight.float()
    return (weight.view(torch.int16).int() << 16 | mantissa_bits.int() & 0xFFFF).view(torch.float32)


def write_master(master: Master, value: Tensor) -> None:
    """Store a float32 value in place. Its upper half is not rounded, so that the halves join exactly."""
    weight, mantissa_bits = master
    if mantissa_bits is None:
        weight.copy_(value)
        return
    bits = value.view(torch.int32)
    weight.view(torch.int16).copy_((bits >> 16).to(torch.int16))
    mantissa_bits.copy_((bits << 16 >> 16).to(torch.int16))


def apply_update(weight: Master, update: Tensor, rule: Rule) -> None:
    """weight -= lr (update + decay weight) in place, where `rule.finite`. `update` is float32."""
    value = read_master(weight)
    decayed = torch.where(update * value > 0, rule.decay * value, 0) if rule.cautious else rule.decay * value
    write_master(weight, torch.where(rule.finite, value - rule.lr * (update + decayed), value))


@triton.jit
def moved_by(value, update, lr, decay, CAUTIOUS: tl.constexpr):
    """In a kernel, what `apply_update` makes of a float32 value where the step is finite."""
    decayed = decay * value
    if CAUTIOUS:
        decayed = tl.where(update * value > 0, decayed, 0.0)
    return value - lr * (update + decayed)


@triton.jit
def apply_update_at(weight_ptr, bits_ptr, at, mine, update, finite, lr, decay, CAUTIOUS: tl.constexpr):
    """In a kernel, `apply_update` to the elements `at` that are `mine`. Halves are both read as int16."""
    if bits_ptr is None:
        value = tl.load(weight_ptr + at, mask=mine, other=0.0).to(tl.float32)
    else:
        high = tl.load(weight_ptr + at, mask=mine, other=0).to(tl.int32)
        low = tl.load(bits_ptr + at, mask=mine, other=0).to(tl.int32)
        value = (high << 16 | low & 0xFFFF).to(tl.float32, bitcast=True)
    value = tl.where(finite, moved_by(value, update, lr, decay, CAUTIOUS), value)
    if bits_ptr is None:
        tl.store(weight_ptr + at, value.to(weight_ptr.dtype.element_ty), mask=mine)
    else:
        joined = value.to(tl.int32, bitcast=True)
        tl.store(weight_ptr + at, (joined >> 16).to(tl.int16), mask=mine)
        tl.store(bits_ptr + at, joined.to(tl.int16), mask=mine)
