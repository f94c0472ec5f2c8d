"""Runs and records: what a run logged, whether a number may be believed, and how to show it.

A *run* is a folder with a log (`records/runs/`, not in git). A *record* is a folder beside this file that
keeps the logs of finished runs of one configuration, names the commit that they ran, and states their
statistics. There are three folders of code:

- `run/` holds what a training run itself needs: its settings, its log, its progress on the console.
  `train_gpt.py` imports it, and it imports nothing of `train_gpt.py`.
- `tools/` holds what reads logs afterwards or measures the program from outside. `python -m records --help`
  lists the commands. `ablate`, `memory`, `profile` and `scaling` train, and so they are programs of their
  own: `python -m records.tools.scaling`. `ablate` and `profile` also start with `torchrun -m`.
- `recipes/` holds presets that `train_gpt.py` adds to its own.
"""
