"""The MLP of a layer, and the residual stream that runs past it.

In reading order:
- `residual.py`: the residual stream as the model sees it (`Residual`), and its sums and norms in plain
  PyTorch.
- `residual_norm.py`: sum and norm in one pass.
- `residual_fp8.py`: sum and norm in one pass, with the norm in FP8, for matmuls that read only FP8.
- `residual_gradient.py`: the gradient of sum and norm, in one pass.
- `head_input.py`: the head's input, which is the norm of a difference of sums, with its gradient.
- `feed_forward.py`: relu(x W_inᵀ)² W_out, in plain PyTorch and in FP8, with its gradients.
- `relu_squared.py`: the MLP's matmul kernels, whose epilogue is the activation or its gradient.
"""
from kernels.mlp.feed_forward import (
    FeedForwardWeights,
    feed_forward_fp8,
    feed_forward_reference,
    feed_forward_weights,
    has_feed_forward_fp8,
)
from kernels.mlp.head_input import before_head
from kernels.mlp.residual import (
    Residual,
    Summands,
    add_up,
    before_head_reference,
    mlp_input_reference,
    norm,
    norm_fork_reference,
)
from kernels.mlp.residual_fp8 import mlp_input_fp8, norm_fork_fp8
from kernels.mlp.residual_norm import mlp_input, norm_fork
