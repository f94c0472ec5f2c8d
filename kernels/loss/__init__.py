"""The head, and the loss that it is trained with.

In reading order:

- `head.py`: `head_loss`, the matmul with the head and the loss of the next one to three tokens. The next
  token's probability may be mixed with another source's (`Mixture`).
- `sampled.py`: this loss over a weighted sample of the vocabulary, the candidates (`sampled_head_loss`).
- `cross_entropy.py`: what stands between logits and loss, and the gradient of the logits, by Triton kernels.
"""
from kernels.loss.head import Mixture, Targets, head_loss, head_loss_reference, later_targets, ruled_out
from kernels.loss.sampled import among_candidates, sampled_head_loss
