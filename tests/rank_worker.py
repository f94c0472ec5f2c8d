"""Started by the tests: take some steps on 1, 2, 4 and 8 ranks, one after the other, and save what every rank ends with.

    rank_worker.py OUT STEPS [settings]

Twice: with the collectives under the computation, and with all of them before and behind it. The ranks are forks of this process, for
to import torch in each of them would take longer than their steps.
"""
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

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


def run(rank: int, ranks: int, port: int, out: Path, steps: int, settings: list[str]) -> None:
    """One rank, with torchrun's variables."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    config, world = train_gpt.parse_config(settings), train_gpt.World()
    torch.save({overlap: results(replace(config, overlap=overlap, check_ranks=True), world, steps) for overlap in (True, False)},
               out / f"{ranks}-{rank}.pt")
    world.close()


def main() -> None:
    out, steps, settings = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for ranks in (1, 2, 4, 8):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)      # where they meet, as torchrun gives them one
        torch.multiprocessing.start_processes(run, (ranks, store.port, out, steps, settings), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main()
