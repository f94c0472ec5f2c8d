"""GPT-2 medium's size, towards a validation loss of 2.92: a starting point for whoever wants to tune it.

    torchrun --standalone --nproc_per_node=8 train_gpt.py --preset medium

Its learning rates, batches and steps are guesses from the small model's. It has run with `--steps 100` only.
Its 4,500 steps want some 25 shards of FineWeb: python -m data.fineweb --shards 25. For a table of layers of
your own copy this file, and name the copy in `__init__.py`.
"""
from records.run.settings import change


def preset(presets: dict):
    """Preset `medium`, from `speedrun`."""
    speedrun = presets["speedrun"]
    layer = type(speedrun.layers[0])    # train_gpt.Layer
    layers = (
        layer(),
        layer(value_embedding=True),
        layer(value_embedding=True),
        layer(long_window=True),
        layer(),
        layer(),
        layer(),
        layer(long_window=True),
        layer(backout=True),
        layer(),
        layer(),
        layer(long_window=True),
        layer(kept=True),
        layer(reads_kept=True, value_embedding=True),
        layer(reads_kept=True, value_embedding=True),
        layer(reads_kept=True, value_embedding=True, long_window=True),
    )
    return change(
        speedrun, preset="medium", target=2.92, layers=layers, width=1024, heads=8, muon_lr=0.015,
        adam_lr=0.006, steps=4500, extra_steps=30, batch_tokens=(262_144, 393_216, 524_288),
        lr_scale=(1.0, 1.22, 1.41))
