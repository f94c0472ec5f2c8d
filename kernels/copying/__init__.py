"""The copy head gives a part of the next token's probability to tokens that followed similar states.

    p(y) = (1 − a) p_head(y) + a Σ_j [token j+1 = y] softmax_j(q_t · k_j),    j < t in the same sequence

The copy head is off by default. A model's head gives a probability to every token of the vocabulary, as if
none had been seen yet. A text repeats its own names and phrases, and a pointer to them needs no learning of
each. Queries and keys are two small projections of the head's input. The share a comes out of the same
softmax: a score of not copying stands beside the keys' scores, so that a is large where a key fits well (the
sentinel of Merity et al., arXiv 1609.07843; pointers: Vinyals et al., arXiv 1506.03134).

- `pointer.py`: `pointer_sums`, the logarithms of the pointer's mass on the next token and on all, by Triton
  kernels.
- `head.py`: `CopyHead`, the parameters and what the loss takes of them.
- What mixes both probabilities is in kernels/loss.

An open proposal to the public speedrun takes a from a further logit of the head; its authors save 12% of the
steps for 1% of a step's time. What ours is worth, and what it taught us, is in records/ideas.md: the score of
not copying needs a high rate, the head must learn as if there were no pointer, and queries and keys start
alike.
"""
from kernels.copying.head import CopyHead, project, project_reference
from kernels.copying.pointer import pointer_sums, pointer_sums_reference
