"""Started by torchrun in the tests: take some steps on the ranks there are and save what every rank ends with.

    rank_worker.py OUT STEPS [settings]
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt  # noqa: E402


def main() -> None:
    out, steps, settings = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    config = train_gpt.parse_config(settings)
    world = train_gpt.World()
    trainer = train_gpt.Trainer(config, world)
    losses, parameters = [], []
    for step in list(trainer.schedule)[:steps]:
        losses.append(trainer.step(step, trainer.loader.batches(step.index)).item())
        parameters.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    validation = trainer.validate(trainer.schedule.validation(steps))
    torch.save({"losses": losses, "parameters": parameters, "validation": validation}, out / f"{world.size}-{world.rank}.pt")
    world.close()


if __name__ == "__main__":
    main()
