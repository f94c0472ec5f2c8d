"""The shapes of what attention's inputs are made of. n: tokens of a batch, one sequence after another."""
from typing import NamedTuple

from torch import Tensor

from kernels.fp8.weights import FP8Weight
from kernels.gradients import Gradient


class HeadShape(NamedTuple):
    """What a layer's heads look like. Queries and keys may be narrower than values."""
    qk_dim: int  # channels of a query and of a key; a power of two in the kernels
    head_dim: int  # channels of a value; a power of two in the kernels
    key_offset: bool  # whether a key's channels without a position come from the token before


class Positions(NamedTuple):
    """Where the tokens stand in their sequences."""
    cos: Tensor  # (n, r) float32, contiguous, 2r <= qk_dim: of the angle that rotates channels i and i + r
    sin: Tensor  # like cos
    is_start: Tensor  # (n,) bool: where sequences start. The first token counts as a start in any case


class Rows(NamedTuple):
    """A row of a matrix for each of n tokens."""
    table: Tensor  # (rows, width), contiguous
    index: Tensor | None = None  # (n,) integers, contiguous: each token's row; None: token i has row i


class ValueRows(NamedTuple):
    """What a value embedding adds to the values: mix · rows. A gate makes the mix of each token and head."""
    rows: Tensor  # (n, heads head_dim), of the dtype of q, k and v: each token's row of the embedding's table
    gate: Tensor  # (heads, 2 channels) float32: it sees x's first channels, and as many of the row's
    # Where the rows are if nobody has gathered them. `rows` are then zeros, which get the rows' gradient.
    where: Rows | None = None

    @property
    def source(self) -> Rows:
        """Where the rows are."""
        return self.where or Rows(self.rows)


class QKVWeight(NamedTuple):
    """The weight of Q, K and V in FP8, and all scales of its matmuls; `qkv_weight` makes it, once a step."""
    weight: FP8Weight
    learned_scale: Tensor  # the weight's scale times the learned one, which costs no pass over the weight
    x_scale: Tensor  # of the input
    grad_scale: Tensor  # of the gradient of Q, K and V


class Projection(NamedTuple):
    """The matmul that makes Q, K and V: x (scale · weight)ᵀ."""
    weight: Tensor  # (heads (2 qk_dim + head_dim), width): the rows of Q, then those of K, then those of V
    scale: Tensor  # 0-dim float32, learned
    grad: Gradient | None = None  # where the weight's gradient goes; None: autograd gets it
    fp8: QKVWeight | None = None  # read by `qkv_fp8` alone, which makes it if it is None
