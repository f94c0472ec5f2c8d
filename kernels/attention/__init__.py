"""Attention: how each token gathers what earlier tokens of its document have to say. In reading order:

1. `inputs.py`: the shapes of everything below, as NamedTuples.
2. `output.py`: `scaled_linear`, a matmul whose weight has a learned scale. It makes Q, K and V of the normed
   residual x, and at the end it brings attention's result y back to the residual's width (the matrix O).
3. `qkv.py`: from the matmul to attention. Each query and key is normed (QK-norm), so that scores cannot
   explode, and half of its channels are rotated by the token's position (`rotary.py`), so that scores depend
   on distances; the other half has no position. In layers with a long window a key takes that other half
   from the token before it (the key offset). A query can then find tokens by what preceded them and read what
   followed last time: induction, which otherwise takes two layers, in one.
   Values get two additions. Some layers have a table of value embeddings, one row a token, which brings the
   token's identity straight into attention; a gate says how much of that row each head takes
   (`value_gate.py`). And the first heads of every layer add a row for the last two, three, ... tokens
   (n-grams, `kernels/ngrams`). `qkv_kernels.py` has the Triton kernels.
4. `fp8_qkv.py`: 2 and 3 as one function, with the matmul and both of its gradients in FP8.
5. `flash.py`: softmax(scale · q kᵀ) v over a sliding window within each document, by the fastest backend that
   runs here. A gate that sees the query says how much of the result each head passes on (`plain.py`).
"""
from kernels.attention.flash import ATTENTION, choose_attention, why_not
from kernels.attention.fp8_qkv import QKV_GRADIENT_SCALE, qkv_fp8, qkv_fp8_reference, qkv_weight
from kernels.attention.inputs import HeadShape, Positions, Projection, QKVWeight, Rows, ValueRows
from kernels.attention.output import scaled_linear, scaled_linear_reference
from kernels.attention.qkv import project_heads, qkv_heads, qkv_heads_reference
from kernels.attention.rotary import rotary_tables, rotate
from kernels.attention.value_gate import value_mix, value_mix_reference, value_rows
