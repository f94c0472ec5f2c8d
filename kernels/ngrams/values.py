"""What the layers add to their values from n-gram rows that all of them share.

How the layers' kernels and the sum of their gradients (`shared_gradient.py`) find each other:

    forward    rows ── Share (identity) ──┬── layer 0 adds b_0 · rows
                                          ├── layer 1 adds b_1 · rows
                                          └── ...
               `share_values` makes one NGramValues a layer, all with the same lists `grads` and `seen`.
    backward   Each layer sets grads[layer] (`leave_gradient`) and gives autograd None for the rows.
               Autograd then calls Share.backward, since all who read the rows have run: it sums `grads`.

What a layer stores is a view: some heads of the gradient of its values, read where it stands. Nothing is
copied, but the whole gradient, 75 MB a layer for 49,152 tokens of 6 heads, lives until the last layer has
run.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import check
from kernels.fp8.formats import Quantized
from kernels.ngrams.row_gate import first_channels, row_scale, row_scale_reference
from kernels.ngrams.shared_gradient import sum_over_layers


class NGramValues(NamedTuple):
    """What one layer adds to its first heads' values: scale[…, j] · rows[:, j] to those of head j."""
    rows: Tensor  # (n, k, head_dim), contiguous, of the values' dtype; the same for all layers
    scale: Tensor  # (k,) float32, learned; or (n, k), of each token
    gate: Tensor | None = None  # (k, 2 channels) float32, of `gated`; None: all tokens have the same scale
    grads: list[Tensor | None] | None = None  # where each layer's kernel stores its gradient
    seen: list[Tensor | None] | None = None  # and what its gate saw of the tokens
    layer: int = 0  # this layer's place in both lists

    def gated(self, x: Tensor | Quantized) -> "NGramValues":
        """With a scale for each token, if there is a gate. x (n, width): the layer's normed input."""
        if self.gate is None:
            return self
        seen, factor = first_channels(x, self.gate.size(1) // 2)
        if self.grads is None:
            return self._replace(scale=row_scale_reference(seen, self.rows, self.scale, self.gate))
        scale, self.seen[self.layer] = row_scale(seen, self.rows.detach(), self.scale, self.gate, factor)
        return self._replace(scale=scale)


def share_values_reference(rows: Tensor, scales: Tensor, gates: Tensor | None = None) -> list[NGramValues]:
    """Plain PyTorch form of `share_values`, for `qkv_heads_reference`: autograd sums over the layers."""
    each = [None] * len(scales) if gates is None else gates
    return [NGramValues(rows, scale, gate) for scale, gate in zip(scales, each)]


class Share(torch.autograd.Function):
    """The identity in forward. Its backward sums the gradients that the layers have stored in `grads`.

    The layers are its readers, so autograd calls its backward last, when every layer has stored its gradient.
    What autograd itself brings is None, because the layers return no gradient for the rows; unless something
    else reads the rows, then it is that one.
    """
    @staticmethod
    def forward(ctx, rows: Tensor, scales: Tensor, gates: Tensor | None, grads: list[Tensor | None],
                seen: list[Tensor | None]) -> Tensor:
        ctx.set_materialize_grads(False)  # None stays None: no zeros as long as the rows are made
        ctx.save_for_backward(rows, scales, gates)
        ctx.grads, ctx.seen = grads, seen
        return rows

    @staticmethod
    def backward(ctx, other_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, scales, gates = ctx.saved_tensors
        found = [grad for grad in ctx.grads if grad is not None]
        if len(found) < len(ctx.grads):  # the gradient of a layer that nothing reads is zero
            zeros = torch.zeros_like(rows)
            if found:  # rows as far apart as those of the others, for the kernel
                zeros = rows.new_zeros(len(rows), found[0].stride(0))[:, :rows[0].numel()].view_as(rows)
            found = [zeros if grad is None else grad for grad in ctx.grads]
        seen = ()
        if gates is not None:  # a gate that never looked has no gradient, whatever it would have seen
            nothing = rows.new_zeros(len(rows), gates.size(-1) // 2)
            seen = [nothing if x is None else x for x in ctx.seen]
        total, scales_grad, gates_grad = sum_over_layers(found, rows, scales, gates, seen)
        ctx.grads[:] = [None] * len(ctx.grads)  # frees memory, and a second backward pass starts anew
        return total if other_grad is None else total + other_grad, scales_grad, gates_grad, None, None


def share_values(rows: Tensor, scales: Tensor, gates: Tensor | None = None) -> list[NGramValues]:
    """What each layer passes to `qkv_heads` or `qkv_fp8`, after `gated` if there are gates.

    rows (n, k, head_dim), scales (layers, k) float32, gates (layers, k, 2 channels) float32. The gradients of
    all three are made by these two functions' backward passes alone. Any other use of an `NGramValues`, also
    by `qkv_heads_reference`, gives `scales` and `gates` none.
    """
    grads: list[Tensor | None] = [None] * len(scales)
    seen = list(grads)
    rows = Share.apply(rows, scales, gates, grads, seen)
    each = grads if gates is None else gates.detach()
    return [NGramValues(rows, scale, gate, grads, seen, layer)
            for layer, (scale, gate) in enumerate(zip(scales.detach(), each))]


def leave_gradient(ngrams: NGramValues | None, v_grad: Tensor) -> Tensor:
    """`v_grad` (n, heads, head_dim), contiguous. A view of its first heads is stored: the rows' gradient."""
    v_grad = v_grad.contiguous()
    if ngrams is not None:
        if ngrams.grads is None:
            raise ValueError("ngrams must be from `share_values`, or its rows and scales get no gradient, "
                             "but is from `share_values_reference`")
        ngrams.grads[ngrams.layer] = v_grad[:, :ngrams.rows.size(1)]
    return v_grad


def kernel_arguments(ngrams: NGramValues | None, v: Tensor) -> tuple[tuple, int]:
    """The rows, the scale and how far apart it lies for two tokens; and how many heads of v get rows.

    v (n, heads, head_dim). All are checked.
    """
    if ngrams is None:
        return (None, None, 0), 0
    (n, heads, head_dim), rows, scale = v.shape, ngrams.rows, ngrams.scale
    fits = rows.ndim == 3 and rows.shape == (n, min(rows.size(1), heads), head_dim)
    check(fits and rows.is_contiguous() and rows.dtype == v.dtype, "ngrams.rows", rows,
          f"contiguous ({n}, k, {head_dim}) {v.dtype}, of {heads} heads at most")
    fits = scale.shape in (rows.shape[1:2], rows.shape[:2]) and scale.is_contiguous()
    check(fits and scale.dtype == torch.float32, "ngrams.scale", scale,
          f"({rows.size(1)},) or ({n}, {rows.size(1)}) float32, contiguous")
    return (rows, scale, scale.stride(0) if scale.ndim == 2 else 0), rows.size(1)
