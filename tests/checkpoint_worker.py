"""Started by tests: runs that stop and go on, on 1, 2 and 4 ranks, which are forks of this process.

    checkpoint_worker.py OUT [settings]

`moments` makes steps and saves what they end with. Whole runs are `train_gpt.main`, with logs in OUT.
"""
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt  # noqa: E402
from records.run import checkpoint  # noqa: E402

# The second is between the two steps of one Adam update.
MOMENTS = 2, 3, 6


def rank_of(rank: int, ranks: int, port: int, forked, out: Path, work, *arguments) -> None:
    """One rank, with torchrun's variables, which does `work(rank, *arguments)`; its errors go to a file."""
    forked.wait()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RUNS_PATH": str(out),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with open(out / f"errors-{rank}.txt", "a") as sys.stderr:
        work(rank, *arguments)
    os._exit(0)


def run(rank: int, status: int, settings: list[str], disturb=None) -> None:
    """A run that has to end with this `status`. `disturb()` may change the program before."""
    if disturb:
        disturb()
    found = train_gpt.main(settings)
    if found != status:
        raise SystemExit(f"rank {rank} ended with {found}")


def moments(rank: int, out: Path, settings: list[str]) -> None:
    """All steps with a checkpoint after each, then those that are left from some checkpoints on."""
    config, world, found = train_gpt.parse(settings)[0], train_gpt.World(), {}
    config = replace(config, checkpoint=str(out / f"kept-{world.size}"), checkpoint_every=1)
    for first in (0, *MOMENTS):
        trainer, losses = train_gpt.Trainer(config, world), []
        if first:
            folder = f"{config.checkpoint}/step-{first:07d}"
            checkpoint.restore(trainer, checkpoint.newest(replace(config, resume=folder)))
        with checkpoint.Keeper(trainer, train_gpt.RunLog("", False)) as keeper:
            for step in list(trainer.schedule)[first:]:
                losses.append(trainer.step(step, trainer.loader.batches(step.index)).item())
                if not first:
                    keeper.after(step.index + 1)
        found[first] = losses, [x.clone() for x in trainer.optimizer.state()]
    torch.save(found, out / f"{world.size}-{rank}.pt")
    world.close()


def start(ranks: int, out: Path, *work) -> None:
    """Run `work` on each of so many ranks, which meet at a store of this process, as under torchrun.

    No rank goes to the store before all are forked. Otherwise the store's thread may hold a lock while a
    later rank is forked, which then waits for it for ever: one start of 8 ranks in 12 did.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forked = torch.multiprocessing.get_context("fork").Event()
    processes = torch.multiprocessing.start_processes(
        rank_of, (ranks, store.port, forked, out, *work), nprocs=ranks, join=False, start_method="fork")
    forked.set()
    while not processes.join():
        pass


def signal_in_step_5() -> None:
    """The last rank gets SIGTERM behind the fifth step."""
    add = train_gpt.Report.add

    def disturbed(self, step, *given):
        if step.index == 4 and self.rank == self.ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, step, *given)
    train_gpt.Report.add = disturbed


def kill_in_step_4() -> None:
    """The process ends when all of the fourth checkpoint is written but its name."""
    publish = checkpoint.publish

    def killed(part, folder):
        if folder.name.endswith("4"):
            os._exit(0)
        publish(part, folder)
    checkpoint.publish = killed


def main() -> None:
    out, settings = Path(sys.argv[1]), sys.argv[2:]
    checkpoint.KEPT = 99

    def named(name: str, *more: str) -> list[str]:
        return [*settings, "--name", name, *more]

    kill, stop = str(out / "kill"), str(out / "stop")
    for ranks in (1, 2):
        start(ranks, out, moments, out, settings)
    start(1, out, run, 0, named("whole"))
    start(1, out, run, 0, named("killed", "--checkpoint", kill, "--checkpoint_every", "1"), kill_in_step_4)
    start(1, out, run, 0, named("on-1", "--resume", kill))
    on_stop = "--checkpoint", stop, "--checkpoint_on_stop", "true"
    start(2, out, run, 130, named("on-2", "--resume", kill, *on_stop), signal_in_step_5)
    start(4, out, run, 0, named("on-4", "--resume", stop))


if __name__ == "__main__":
    main()
