"""Shifts along packed sequences that never cross the start of one."""
import torch
from torch import Tensor


def previous(x: Tensor, is_start: Tensor) -> Tensor:
    """Each token's predecessor's row (n, ...); zero where a sequence starts, so that nothing crosses a document."""
    shifted = torch.cat([x[:1], x[:-1]])
    return shifted.masked_fill(is_start.view(-1, *[1] * (x.dim() - 1)), 0)
