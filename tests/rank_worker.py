"""Started by torchrun in the tests: take some steps on the ranks there are and save what every rank ends with.

    rank_worker.py OUT STEPS [settings]

Twice: with the collectives under the computation, and with all of them before and behind it.
"""
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt  # noqa: E402


def results(config: train_gpt.Config, world: train_gpt.World, steps: int) -> dict:
    trainer = train_gpt.Trainer(config, world)
    losses, parameters = [], []
    for step in list(trainer.schedule)[:steps]:
        losses.append(trainer.step(step, trainer.loader.batches(step.index)).item())
        trainer.optimizer.gather()
        parameters.append({name: weight.clone() for name, weight in trainer.model.weights().items()})
    return {"losses": losses, "parameters": parameters, "validation": trainer.validate(trainer.schedule.validation(steps))}


def main() -> None:
    out, steps, settings = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    config, world = train_gpt.parse_config(settings), train_gpt.World()
    torch.save({overlap: results(replace(config, overlap=overlap, check_ranks=True), world, steps) for overlap in (True, False)},
               out / f"{world.size}-{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    main()
