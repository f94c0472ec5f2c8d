"""Started by `ablate --against` in a checkout: run its own `ablate`, then print memory and start-up time.

    worker.py MODULE [settings]

This file imports the project's modules from the folder that it is started in, not from the checkout that it
lies in. `measure` below times both checkouts: an older `ablate` takes one median over two kinds of step.
"""
import time

START = time.time()

import os
import sys

sys.path[0] = os.getcwd()       # this file's own folder stood there

import importlib
import json
import statistics
from functools import partial
from types import ModuleType

import torch

import train_gpt
from data.loader import to_device


def measure(ablate: ModuleType, trainer: train_gpt.Trainer, steps: int) -> list[float]:
    """As `ablate.measure` of the checkout that this file lies in: in turn steps with and without Adam."""
    device, times = trainer.world.device, []
    # An older checkout has no `prepared`; its steps prepare the batches themselves.
    prepared = getattr(trainer, "prepared", None) or partial(to_device, device=device)
    for pair in ablate.pairs_of_stages(trainer.schedule):
        batches = [[prepared(batch) for batch in trainer.loader.batches(step.index)] for step in pair]
        clock, laps = ablate.Clock(device), []
        for i in range(-4, steps):
            if i == 0:
                trainer.world.barrier()
                clock.start()
            trainer.step(pair[i % 2], batches[i % 2])
            laps += [clock.lap()] * (i >= 0)
        clock.stop()
        times.append(statistics.mean(statistics.median(lap.ms() for lap in laps[kind::2]) for kind in (0, 1)))
    return times


def main() -> int:
    ablate = importlib.import_module(sys.argv.pop(1))
    ablate.measure = partial(measure, ablate)
    warm_up, ready = train_gpt.Trainer.warm_up, []

    def timed_warm_up(trainer: train_gpt.Trainer) -> None:
        warm_up(trainer)
        ready.append(time.time() - START)

    train_gpt.Trainer.warm_up = timed_warm_up
    status = ablate.main()
    if not status and int(os.environ.get("RANK", 0)) == 0:
        gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        print(json.dumps({"gib": gib, "startup_s": ready[0]}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
