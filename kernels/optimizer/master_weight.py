"""w ← w − lr (u + decay w) on an exact float32 master weight, stored as a bf16 weight and the 16 bits that it lost.

The two halves take the memory of the float32 alone (a bf16 copy beside a float32 master takes half as much again), and the
half with the 16 lost bits lives only on the rank that updates the weight.
"""
import torch
from torch import Tensor


def master_weight(weight: Tensor, mantissa_bits: Tensor | None) -> Tensor:
    """The float32 value of a weight in bf16 and its lost bits (int16); a weight without any is its own master."""
    if mantissa_bits is None:
        return weight.float()
    return (weight.view(torch.int16).int() << 16 | mantissa_bits.int() & 0xFFFF).view(torch.float32)


def store_master_weight(weight: Tensor, mantissa_bits: Tensor | None, master: Tensor) -> None:
    """Split a float32 master in place. The bf16 half is the master cut off, not rounded, so that the halves join exactly."""
    if mantissa_bits is None:
        weight.copy_(master)
        return
    bits = master.view(torch.int32)
    weight.view(torch.int16).copy_((bits >> 16).to(torch.int16))
    mantissa_bits.copy_((bits << 16 >> 16).to(torch.int16))


def apply_update(weight: Tensor, mantissa_bits: Tensor | None, update: Tensor, finite: Tensor, lr: Tensor, decay: Tensor,
                 cautious: bool) -> None:
    """weight -= lr (update + decay weight) in place, if `finite` (0-dim bool).

    `cautious`: the decay acts only where it and the update move the weight the same way (arXiv 2411.16085).
    """
    master = master_weight(weight, mantissa_bits)
    decayed = torch.where(update * master > 0, decay * master, 0) if cautious else decay * master
    store_master_weight(weight, mantissa_bits, torch.where(finite, master - lr * (update + decayed), master))
