"""Started by tests: take some steps on 1, 2, 4 and 8 ranks in turn, and save what every rank ends with.

    rank_worker.py OUT STEPS [settings]

Each number of ranks runs twice: with collectives under computation, and with all of them before and behind
it. The ranks are forks of this process, because importing torch in each would take longer than their steps.
"""
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from checkpoint_worker import start, train_gpt


def parsed(settings: list[str]) -> train_gpt.Config:
    """The settings with shared updates: as if bytes were tokens like GPT-2's, which have features."""
    features = np.stack([np.arange(257) // 2, np.arange(257) // 10, np.arange(257) % 7], 1)
    train_gpt.gpt2_features = lambda: features
    return replace(train_gpt.parse(settings)[0], shared_updates=True)


def whole(model: train_gpt.GPT) -> dict[str, torch.Tensor]:
    """A copy of all weights by name, with all columns of the n-gram table."""
    weights, table = model.state_dict(), model.ngrams.table
    weights["ngrams.table"] = torch.zeros(len(table), model.config.head_dim)
    for numbers, rows in model.ngrams.written_rows():
        weights["ngrams.table"][numbers.long()] = rows.float()
    return {name: weight.clone() for name, weight in weights.items()}


def results(config: train_gpt.Config, world: train_gpt.World, steps: int) -> dict:
    """Losses, the parameters after each of the steps, and the validation loss at their end."""
    trainer = train_gpt.Trainer(config, world)
    losses, parameters = [], []
    for step in list(trainer.schedule)[:steps]:
        losses.append(trainer.step(step, trainer.loader.batches(step.index)).item())
        trainer.optimizer.gather()
        parameters.append(whole(trainer.model))
    validation = trainer.validate(trainer.schedule.validation(steps))
    return {"losses": losses, "parameters": parameters, "validation": validation}


def run(rank: int, out: Path, steps: int, settings: list[str]) -> None:
    config, world, found = parsed(settings), train_gpt.World(), {}
    for overlap in (True, False):
        found[overlap] = results(replace(config, overlap=overlap, check_ranks=1), world, steps)
    torch.save(found, out / f"{world.size}-{rank}.pt")
    world.close()


if __name__ == "__main__":
    out, steps, settings = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for ranks in (1, 2, 4, 8):
        start(ranks, out, run, out, steps, settings)
