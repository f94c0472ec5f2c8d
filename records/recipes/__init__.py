"""Presets that are not part of the program: each is a module that adds one and runs it."""
