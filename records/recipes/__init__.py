"""Presets that are made from those of train_gpt.py, which adds them to its own. They import nothing of it."""
from records.recipes import medium, sprint


def added_to(presets: dict) -> dict:
    """The `presets`, by name, and those made from them."""
    made = [recipe.preset(presets) for recipe in (medium, sprint)]
    return presets | {config.preset: config for config in made}
