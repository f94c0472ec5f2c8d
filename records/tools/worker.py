"""Started by `ablate --against` in a checkout: run its own `ablate`, then print memory and start-up time.

    worker.py MODULE [settings]

It imports nothing of the checkout that it lies in, but all from the folder that it is started in.
"""
import time

START = time.time()

import os
import sys

sys.path[0] = os.getcwd()       # this file's own folder stood there

import importlib
import json

import torch

import train_gpt


def main() -> int:
    ablate = importlib.import_module(sys.argv.pop(1))
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
