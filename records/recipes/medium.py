"""GPT-2 medium's size, towards a validation loss of 2.92: a starting point for whoever wants to tune it.

    torchrun --standalone --nproc_per_node=8 -m records.recipes.medium [--steps 4500 …]

Its learning rates, batches and steps are guesses from the small model's. GPUs have seen its first 100 steps.
The file also shows how to run a table of layers of your own without changing train_gpt.py.
"""
import sys

import train_gpt
from records.run.ending import leave
from records.run.settings import change
from train_gpt import Layer

LAYERS = (
    Layer(),
    Layer(value_embedding=True),
    Layer(value_embedding=True),
    Layer(long_window=True),
    Layer(),
    Layer(),
    Layer(),
    Layer(long_window=True),
    Layer(backout=True),
    Layer(),
    Layer(),
    Layer(long_window=True),
    Layer(kept=True),
    Layer(reads_kept=True, value_embedding=True),
    Layer(reads_kept=True, value_embedding=True),
    Layer(reads_kept=True, value_embedding=True, long_window=True),
)

MEDIUM = change(
    train_gpt.SPEEDRUN, preset="medium", target=2.92, layers=LAYERS, width=1024, heads=8, muon_lr=0.015,
    adam_lr=0.006, steps=4500, extra_steps=30, batch_tokens=(262_144, 393_216, 524_288),
    lr_scale=(1.0, 1.22, 1.41))


def main() -> int:
    """As `train_gpt.main`, with one preset more."""
    train_gpt.PRESETS["medium"] = MEDIUM
    return train_gpt.main(["--preset", "medium", *sys.argv[1:]])


if __name__ == "__main__":
    leave(main())
