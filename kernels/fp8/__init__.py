"""FP8: 8-bit numbers, their scales, and the matmuls that take them.

The lowest layer: it imports none of the other folders.

In reading order:
- `formats.py` explains how this project trains in FP8: the two formats, scales from row norms, transposes,
  paired order.
- `quantize.py` writes x / scale in FP8, with its transpose, in one read. Its function is imported from there,
  because here `quantize` is the module.
- `scales.py` makes the scales of gradients and activations from row norms.
- `weights.py` quantises a layer's weights, once a step.
- `matmul.py` multiplies, and holds the FP8 head.
"""
from kernels.fp8.formats import E4M3, E5M2, Quantized, has_fp8, normed_scale, paired, round_to_fp8
from kernels.fp8.matmul import (
    HEAD_GRADIENT_SCALE,
    HEAD_INPUT_SCALE,
    HEAD_WEIGHT_SCALE,
    fp8_linear,
    fp8_matmul,
)
from kernels.fp8.quantize import quantize_reference
from kernels.fp8.scales import gradient_scales, mlp_scales, qkv_scales
from kernels.fp8.weights import FP8Weight, fp8_weights, fp8_weights_reference
