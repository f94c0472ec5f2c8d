"""Six layers and three heads, and a score that looks the training text up: 34.9 s on two H200s.

    torchrun --standalone --nproc_per_node=2 train_gpt.py --preset sprint

On the records' corpus five runs end at 3.2395 on `val` and 3.5697 on `clean`, where 3.570 is the limit. So on
two H200s no step can be left out (records/2026-11-29_two-h200-sprint-retrieval). Preset `corpus` has more: a
seventh layer, the fifth of them, which is 10.6% of the time for some 0.02 on `clean`, two more heads, and
n-grams of 4 and 5 tokens. States of the training text (`--states`) gain more than that back. A run reads
nearly all of the corpus. One H200 has memory for it with `--ngram_rows 150994944`, and takes 67.4 s with
`--steps 1372`.
"""
from records.run.settings import change


def preset(presets: dict):
    """Preset `sprint`, from `corpus`."""
    corpus = presets["corpus"]
    return change(corpus, preset="sprint", layers=corpus.layers[:4] + corpus.layers[5:], heads=3,
                  ngrams=(2, 3), steps=1324, retrieval=(2, 3), states=160_000_000, val_every=0)
