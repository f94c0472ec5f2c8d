"""What settings cost: one process, one machine, one after the other, the whole program each time.

    torchrun --standalone --nproc_per_node=4 -m records.ablate --preset corpus --try capture=false --try overlap=false,fp8_mlp=false

Prints a row for the settings given, one for each `--try` (changes on top of them) and, first and last the same, how far the machine
drifted: the median milliseconds over steps of each stage, half of them with an update by Adam. Takes train_gpt.py's settings; --train
takes the whole schedule with each and prints what it ends at as well, logged as any run, with `--runs 5` for five seeds, each with
every `--try` in turn, and the difference that they show (one seed says little where a change is of rates); --check first
takes the first steps twice eagerly and twice as graphs, from the same weights, and prints how far the losses differ: with attention's
gradients summed in one order, and as they are trained with, in any.
"""
import argparse
import functools
import gc
import statistics
import sys
import time
from dataclasses import asdict, fields, replace
from typing import Callable, NamedTuple

import torch

import train_gpt
from data.loader import to_device
from data.shards import ShardError
from records.clock import Clock
from records.compare import difference_text
from records.markdown import table
from records.schema import RecordError
from records.settings import split_values
from records.stats import describe, welch

Pair = tuple[train_gpt.Step, train_gpt.Step]


class Result(NamedTuple):
    """Of a whole run."""
    loss: float
    seconds: float
    stage_ms: list[float]   # median step of each batch size, in the run's order


def stages(schedule: train_gpt.Schedule) -> list[Pair]:
    """Two following steps of each batch size, a step without Adam's update and one with it, where there are both."""
    pairs: dict[int, Pair] = {}
    steps = list(schedule)
    for first, second in zip(steps, steps[1:]):
        if first.kind[:-2] == second.kind[:-2] and (second.update_adam or schedule.config.adam_every == 1):
            pairs.setdefault(first.batch_tokens, (first, second))
    return list(pairs.values())


def measure(trainer: train_gpt.Trainer, steps: int) -> list[float]:
    """The median milliseconds of a step in each stage, over `steps` of them, after four that are not timed."""
    device, medians = trainer.world.device, []
    for pair in stages(trainer.schedule):
        batches = [[to_device(batch, device) for batch in trainer.loader.batches(step.index)] for step in pair]
        clock, laps = Clock(device), []
        for i in range(4 + steps):
            if i == 4:
                trainer.world.barrier()
                clock.start()
            trainer.step(pair[i % 2], batches[i % 2])
            if i >= 4:
                laps.append(clock.lap())
        clock.stop()
        medians.append(statistics.median(lap.ms() for lap in laps))
    return medians


def changes(text: str, config: train_gpt.Config, train: bool) -> dict[str, object]:
    """What "capture=false,muon_lr=0.03" changes in `config`: values by name."""
    pairs = [part.partition("=") for part in split_values(text)]
    known = {f.name for f in fields(config)} - {"preset", "layers", "seed", "runs"}
    known -= set() if train else {"batch_tokens"}                        # whose stages are the columns
    unknown = [name for name, _, _ in pairs if name not in known]
    if unknown:
        raise train_gpt.UserError(f"--try {text}: no setting {unknown[0]!r} to change here (train_gpt.py --help lists all)")
    changed = {name: train_gpt.parse_value(name, value, getattr(config, name)) for name, _, value in pairs}
    train_gpt.check_config(replace(config, **changed))
    return changed


def free(world: train_gpt.World) -> None:
    """What the trainer before left in memory."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def build(config: train_gpt.Config, world: train_gpt.World) -> train_gpt.Trainer:
    """A warm trainer, in free memory."""
    free(world)
    trainer = train_gpt.Trainer(config, world)
    trainer.warm_up()
    return trainer


def time_in_turn(variants: dict[str, dict], config: train_gpt.Config, world: train_gpt.World, steps: int, say: Callable) -> str:
    """A table: milliseconds of every variant, and of the first once more."""
    names, rows = [*variants, *list(variants)[:len(variants) > 1]], []
    for name in names:
        rows.append([name, *(f"{ms:.1f}" for ms in measure(build(replace(config, **variants[name]), world), steps))])
        say(*rows[-1])
    return table(["ms a step", *(f"{first.batch_tokens:,}" for first, _ in stages(train_gpt.Schedule(config)))], rows)


def trained(config: train_gpt.Config, world: train_gpt.World) -> Result:
    free(world)
    report = train_gpt.run(config, world, time.time())
    by_size: dict[int, list[float]] = {}
    for step, ms in zip(train_gpt.Schedule(config), report.step_ms):
        by_size.setdefault(step.batch_tokens, []).append(ms)
    return Result(report.validation_loss, report.clock.seconds, [statistics.median(each) for each in by_size.values()])


def train_in_turn(variants: dict[str, dict], config: train_gpt.Config, world: train_gpt.World, say: Callable) -> str:
    """Every seed with every variant before the next seed, so that a drift of the machine takes no side; a table of the means."""
    results: dict[str, list[Result]] = {name: [] for name in variants}
    for seed in range(config.seed, config.seed + config.runs):
        for name, changed in variants.items():
            results[name].append(run := trained(replace(config, seed=seed, runs=1, **changed), world))
            say(f"{name}, seed {seed}: {run.loss:.4f} in {run.seconds:.2f} s")   # each as it comes; the table at the end
    head = ["", "n", "loss", "s", "ms a step in each stage", "loss against the first row, by Welch's test"]
    first = [run.loss for run in results["as given"]]
    return table(head, [result_row(name, runs, first) for name, runs in results.items()], words={0, 5})


def result_row(name: str, runs: list[Result], first: list[float]) -> list[str]:
    """Means over seeds, the losses' standard deviation, and what they show against the losses of the `first` row."""
    losses = [run.loss for run in runs]
    sample, difference = describe(losses), difference_text(asdict(welch(first, losses)), 4, "nats/token")
    spread = f" ± {sample.standard_deviation:.4f}" if sample.n > 1 else ""
    stage_ms = (statistics.mean(each) for each in zip(*(run.stage_ms for run in runs)))
    return [name, str(sample.n), f"{sample.mean:.4f}{spread}", f"{statistics.mean(run.seconds for run in runs):.2f}",
            ", ".join(f"{ms:.1f}" for ms in stage_ms), "" if name == "as given" else difference]


def losses(trainer: train_gpt.Trainer, start: tuple, count: int) -> list[float]:
    trainer.optimizer.restore(start)
    steps = list(trainer.schedule)[:count]
    return torch.stack([trainer.step(step, trainer.loader.batches(step.index)) for step in steps]).tolist()


def apart(a: list[float], b: list[float]) -> str:
    """By how much at most, and from which step on."""
    first = next((i for i, (x, y) in enumerate(zip(a, b), 1) if x != y), None)
    return f"{max(abs(x - y) for x, y in zip(a, b)):.6f}" + (f" (first at {first})" if first else "")


def check(config: train_gpt.Config, world: train_gpt.World, count: int, deterministic: bool) -> str:
    """How far the first losses of two eager runs and two of graphs, from the same weights, differ from each other."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(deterministic, warn_only=True)    # attention's backward pass obeys it
    torch.utils.deterministic.fill_uninitialized_memory = False          # the program as it is
    try:
        trainer = build(config, world)
        start, graphs, runs = trainer.optimizer.snapshot(), trainer.graphs, []
        for chosen in ({}, {}, graphs, graphs):
            trainer.graphs = chosen
            runs.append(losses(trainer, start, count))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
    return (f"{count} losses{' of deterministic kernels' * deterministic} differ by at most: eager twice {apart(*runs[:2])}, "
            f"eager and graphs {apart(runs[0], runs[2])} and {apart(runs[1], runs[2])}, graphs twice {apart(*runs[2:])}"
            + ("" if graphs else " (there are no graphs here)"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="NAME=VALUE,...", help="settings to change; repeatable")
    parser.add_argument("--repeat", type=int, default=50, metavar="N", help="timed steps of each stage (default: 50)")
    parser.add_argument("--train", action="store_true", help="train the whole schedule with each, in place of those steps")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="compare so many first losses, eager and as graphs")
    options, settings = parser.parse_known_args()
    try:
        config = train_gpt.parse_config(settings)
        variants = {"as given": {}} | {text: changes(text, config, options.train) for text in options.tries}
        world = train_gpt.World()
        say = functools.partial(print, flush=True) if world.rank == 0 else lambda *_: None
        if options.check:
            for deterministic in (True, False):
                say(check(config, world, options.check, deterministic))
        say(train_in_turn(variants, config, world, say) if options.train else time_in_turn(variants, config, world, options.repeat, say))
    except (train_gpt.UserError, train_gpt.Diverged, train_gpt.LogError, ShardError, RecordError) as error:
        print(f"records.ablate: {error}", file=sys.stderr)
        return 2
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
