"""y = a Σ summands, and norm(y) = y / rms(y): the residual stream as the model sees it, in plain PyTorch.

A layer adds attention's update to the stream, norms the sum for the MLP, and adds the MLP's update. The
matmuls that make the updates are FP8, and an FP8 matmul cannot add to its output. So the stream between two
layers is a tuple of summands, and its first reader sums them while it norms them. `residual_norm.py` and, for
readers in FP8, `residual_fp8.py` do both in one pass, which saves a pass over memory for every sum;
`head_input.py` does it for the head.
"""
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from kernels.fp8.formats import Quantized

Summands = tuple[Tensor, ...]  # (n, width) each, one or more


def norm(x: Tensor) -> Tensor:
    """Each row divided by its root mean square."""
    return F.rms_norm(x, (x.size(-1),))


def add_up(summands: Summands) -> Tensor:
    """The sum; of a single summand it is the summand itself, not a copy."""
    return sum(summands[1:], summands[0])


def norm_fork_reference(summands: Summands, readers: int = 1) -> tuple[Tensor, ...]:
    """norm(y) for each reader, and y = Σ summands (n, width) for the next layer and for a later reader."""
    return *(norm(x := add_up(summands)),) * readers, x, x


def mlp_input_reference(summands: Summands, scales: Tensor) -> tuple[Tensor, Tensor]:
    """c y, which bypasses the MLP, and norm(y), which the MLP reads, where y = a Σ summands.

    `scales` (2,) float32: a and c, both learned.
    """
    x = scales[0] * add_up(summands)
    return scales[1] * x, norm(x)


def before_head_reference(last: Summands, kept: Summands | None, backout: Tensor) -> tuple[Tensor, Tensor]:
    """The norm (n, width) of the stream less a learned share of an earlier one: for the head, and for the
    copy head.

    `kept` is None where nothing is subtracted; `backout` is 0-dim float32.
    """
    return (norm(add_up(last) if kept is None else add_up(last) - backout * add_up(kept)),) * 2


class Residual:
    """The stream between two layers: a sum that its first reader makes, and its norm for every reader.

    Several layers may read the norm of one stream. Autograd would add their gradients in passes of their own.
    So each reader gets a copy of its own (the same numbers, another autograd output), and the norm's backward
    kernel adds up the gradients of the copies while it reads them. The sum itself has a copy, too, because
    both the next layer and the head's input may read it.
    """

    def __init__(self, *summands: Tensor, readers: int = 1):
        self._summands, self._readers = summands, readers
        self._later = summands
        self._copies: list[Tensor | Quantized] | None = None  # of the norm; None: it has not been made yet

    @property
    def summands(self) -> Summands:
        """The tensors whose sum is the stream; a single one once `normed` has summed them."""
        return self._summands

    @property
    def later(self) -> Summands:
        """The stream for a reader behind the next layer; a single tensor once `normed` has summed it."""
        return self._later

    @property
    def newest(self) -> Tensor:
        """The last summand. Once its gradient exists, the gradients of all later layers exist too.

        Autograd runs in reverse, so it has finished the later layers by then.
        """
        return self._summands[-1]

    def normed(self, norm_fork: Callable[[Summands, int], tuple]) -> Tensor | Quantized:
        """The norm, for one of the readers. The first call makes it, by `norm_fork(summands, readers)`."""
        if self._copies is None:
            *self._copies, total, again = norm_fork(self._summands, self._readers)
            self._summands, self._later = (total,), (again,)
        if not self._copies:
            raise ValueError(f"this stream was made for {self._readers} readers, and all have had its norm; "
                             f"make it with Residual(…, readers={self._readers + 1})")
        return self._copies.pop()
