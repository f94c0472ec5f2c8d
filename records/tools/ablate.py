"""What settings cost: each is tried in turn, on one machine, by the whole program.

    torchrun --standalone --nproc_per_node=4 -m records.tools.ablate --preset corpus \\
        --try capture=false --try overlap=false,smear=false

This prints the milliseconds of a step in each stage. Steps with and without Adam's update take turns, and the
number is the mean of the two kinds' medians. There is a row for the settings as given and one for each
`--try`, which changes some of them. The first row is repeated at the end to show the machine's drift. All
settings of train_gpt.py can be given. It can do more:

--train            train the whole schedule with each, and time no steps. `--runs 5` takes five
                   seeds, each with every `--try`, and tests the difference: one seed says little.
--screen           train whole schedules, each with about half of the `--try`s, and print the effect of each:
                   12 runs for eight changes, each run with a seed of its own (records/tools/screen.py).
                   `--runs 2` adds 12 runs; each makes the changes that a run of the first 12 did not make.
                   Then pairs of changes that help or harm each other move no effect.
--apart            with --train or --screen: each rank of torchrun trains whole runs alone on its GPU, all
                   ranks at once. A run must fit one GPU. GPUs differ in speed, so take times without this.
--against FOLDER   time another checkout of this project in turn with this one, with the same settings
--check N          before the rest take N steps of the settings as given from the same weights, twice eagerly
                   and twice as CUDA graphs, and print how far their losses differ: with deterministic
                   kernels, and with those of training
"""
import argparse
import functools
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import train_gpt
from kernels import optimizer as updates
from records.run.clock import Clock
from records.run.ending import EXPECTED, exit_status, leave
from records.run.fit import fitted
from records.run.settings import UserError, change, defaults, split_values, without
from records.tools.against import compare_checkouts
from records.tools.apart import Share, separate
from records.tools.compare import difference_text
from records.tools.markdown import table
from records.tools.pool import common_texts, scores_text
from records.tools.schema import RecordError
from records.tools.screen import design, effects
from records.tools.stats import describe, welch

AS_GIVEN = "as given"
Pair = tuple[train_gpt.Step, train_gpt.Step]


class Result(NamedTuple):
    """What a whole run came to."""
    loss: float             # the last validation's, nats a token
    seconds: float
    stage_ms: list[float]   # median step of each stage, in the run's order
    scores: dict[str, float]    # of other texts, nats a token


def pairs_of_stages(schedule: train_gpt.Schedule) -> list[Pair]:
    """Two successive steps of one program for each size of batch; Adam updates in the second.

    With `adam_every` above 1 it does not in the first. Extra steps come last and are no such pair.
    """
    def program(step: train_gpt.Step) -> tuple:
        return step.batch_tokens, step.windows, step.samples, len(step.multi_token)

    pairs: dict[int, Pair] = {}
    steps = list(schedule)
    for first, second in zip(steps, steps[1:]):
        if program(first) == program(second) and second.update_adam:
            pairs.setdefault(first.batch_tokens, (first, second))
    return list(pairs.values())


def measure(trainer: train_gpt.Trainer, steps: int) -> list[float]:
    """The milliseconds of a step in each stage, over `steps` steps after four that are not timed.

    Adam updates in every second step, and such a step takes longer. A median over both kinds could lie
    anywhere in the gap between them, so the result is the mean of the two kinds' medians. Batches come
    prepared: a run prepares them during earlier steps, which is not timed here.
    """
    device, times = trainer.world.device, []
    for pair in pairs_of_stages(trainer.schedule):
        batches = [[trainer.prepared(batch) for batch in trainer.loader.batches(step.index)] for step in pair]
        clock, laps = Clock(device), []
        for i in range(4 + steps):
            if i == 4:
                trainer.world.barrier()
                clock.start()
            trainer.step(pair[i % 2], batches[i % 2])
            if i >= 4:
                laps.append(clock.lap())
        clock.stop()
        ms = [lap.ms() for lap in laps]
        times.append((statistics.median(ms[::2]) + statistics.median(ms[1::2])) / 2)
    return times


def changes_of(text: str) -> list[tuple[str, str]]:
    """The names and values of "capture=false,muon_lr=0.03"."""
    return [part.partition("=")[::2] for part in split_values(text)]


def vary(text: str, argv: list[str], train: bool) -> train_gpt.Config:
    """The configuration of `argv` with the changes of `text`."""
    given = changes_of(text)
    # Stages are the columns of the table of milliseconds, so steps that are timed keep their batches.
    fixed = {"preset", "seed", "runs"} | (set() if train else {"batch_tokens"})
    known = defaults(train_gpt.parse(argv)[0]).keys() - fixed
    for name, _ in given:
        if name not in known:
            raise UserError(f"--try {text}: no setting {name!r} to change here (train_gpt.py --help lists "
                            "all)")
    # If a flag with names were given twice, the names would add up.
    kept = without(argv, (name for name, _ in given))
    return train_gpt.parse([*kept, *(f"--{name}={value}" for name, value in given)])[0]


def build(config: train_gpt.Config, world: train_gpt.World) -> train_gpt.Trainer:
    """A trainer that has warmed up, in free memory."""
    world.release()
    trainer = train_gpt.Trainer(config, world)
    trainer.warm_up()
    return trainer


def time_in_turn(variants: dict[str, train_gpt.Config], world: train_gpt.World, steps: int,
                 say: Callable) -> str:
    """A table of every variant's milliseconds. The first variant is timed again at the end."""
    if steps < 2:
        raise UserError(f"--repeat {steps}: half of the steps update by Adam; use at least 2")
    if slow := [name for name, config in variants.items() if config.adam_every > 2]:
        raise UserError(f"--adam_every above 2 ({slow[0]}): Adam updates in every second step that is timed; "
                        "compare whole runs, by --train")
    names, rows = [*variants, *list(variants)[:len(variants) > 1]], []
    for name in names:
        rows.append([name, *(f"{ms:.2f}" for ms in measure(build(variants[name], world), steps))])
        say(*rows[-1])
    pairs = pairs_of_stages(train_gpt.Schedule(variants[AS_GIVEN]))
    return table(["ms a step", *(f"{first.batch_tokens:,}" for first, _ in pairs)], rows)


def trained(config: train_gpt.Config, world: train_gpt.World) -> Result:
    world.release()
    named = change(config, name=config.name or "ablate", save="")      # Only its numbers are wanted.
    report = train_gpt.run(named, world, time.time())
    by_stage: dict[int, list[float]] = {}
    for step, ms in zip(train_gpt.Schedule(config), report.step_ms):
        by_stage.setdefault(step.batch_tokens, []).append(ms)
    return Result(report.validation_loss, report.clock.seconds,
                  [statistics.median(ms) for ms in by_stage.values()], report.scores)


def whole_runs(runs: dict[str, train_gpt.Config], world: train_gpt.World, share: Share,
               say: Callable) -> list[Result]:
    """The results of all `runs`, of which this process trains its share. `say` gets a line of each."""
    mine = []
    for text, config in share.of(list(runs.items())):
        mine.append(run := trained(config, world))
        say(f"{text}: {run.loss:.4f} in {run.seconds:.2f} s; {scores_text(run.scores)}")
    return [Result(*run) for run in share.collected(mine)]


def train_in_turn(variants: dict[str, train_gpt.Config], world: train_gpt.World, share: Share,
                  say: Callable) -> str:
    """A table of means over seeds. Each seed is trained with every variant before the next seed.

    Every second seed reverses the order, so that a drift of the machine favours no variant. Where ranks train
    apart, a variant may lie on one GPU more often than another.
    """
    first = variants[AS_GIVEN]
    order = [(name, first.seed + i) for i in range(first.runs)
             for name in list(variants)[::-1 if i % 2 else 1]]
    runs = {f"{name}, seed {seed}": change(variants[name], seed=seed, runs=1) for name, seed in order}
    results: dict[str, list[Result]] = {name: [] for name in variants}
    for (name, _), run in zip(order, whole_runs(runs, world, share, say)):
        results[name].append(run)
    losses = [run.loss for run in results[AS_GIVEN]]
    texts = common_texts([run for runs in results.values() for run in runs])
    head = ["", "n", "loss", *texts, "s", "ms a step in each stage",
            "loss against the first row, by Welch's test"]
    rows = [result_row(name, runs, losses, texts) for name, runs in results.items()]
    return table(head, rows, words={0, len(head) - 1})


def result_row(name: str, runs: list[Result], first: list[float], texts: list[str]) -> list[str]:
    """Means over seeds, the losses' standard deviation, and their test against those of the `first` row."""
    scores = [f"{statistics.mean(run.scores[text] for run in runs):.4f}" for text in texts]
    losses = [run.loss for run in runs]
    sample, difference = describe(losses), difference_text(asdict(welch(first, losses)), 4, "nats/token")
    spread = f" ± {sample.standard_deviation:.4f}" if sample.n > 1 else ""
    stage_ms = (statistics.mean(each) for each in zip(*(run.stage_ms for run in runs)))
    seconds = statistics.mean(run.seconds for run in runs)
    return [name, str(sample.n), f"{sample.mean:.4f}{spread}", *scores, f"{seconds:.2f}",
            ", ".join(f"{ms:.1f}" for ms in stage_ms), "" if name == AS_GIVEN else difference]


def train_screened(tries: list[str], argv: list[str], world: train_gpt.World, share: Share,
                   say: Callable) -> str:
    """A table of each change's effect, from whole runs that make about half of the changes each."""
    names = [name for text in tries for name, _ in changes_of(text)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--screen: more than one --try changes {', '.join(twice)}")
    first = train_gpt.parse(argv)[0]
    made, runs = design(len(tries), first.runs), {}
    for i, row in enumerate(made):
        chosen = [text for text, on in zip(tries, row) if on]
        config = vary(",".join(chosen), argv, train=True) if chosen else first
        text = f"{i + 1} of {len(made)}, with {' '.join(chosen) or 'no change'}"
        runs[text] = change(config, seed=first.seed + i, runs=1)
    results = whole_runs(runs, world, share, say)
    columns = {"loss": [run.loss for run in results],
               **{text: [run.scores[text] for run in results] for text in common_texts(results)},
               "s": [run.seconds for run in results]}
    head, rows = [f"{len(results)} runs"], [[text] for text in ("no change, by the sums of effects", *tries)]
    for name, values in columns.items():
        found, half = effects(made, np.array(values))
        digits = 2 if name == "s" else 4
        head.append(f"{name} ± {half:.{digits}f}")
        for cells, number in zip(rows, [np.mean(values) - found.sum() / 2, *found]):
            cells.append(f"{number:{'+' if cells[0] in tries else ''}.{digits}f}")
    return table(head, rows)


def first_losses(trainer: train_gpt.Trainer, start: list[torch.Tensor | None], count: int) -> list[float]:
    """The first `count` training losses from the weights and optimizer state `start`."""
    updates.restore(trainer.optimizer.state(), start)
    steps = list(trainer.schedule)[:count]
    return torch.stack([trainer.step(step, trainer.loader.batches(step.index)) for step in steps]).tolist()


def difference_of(a: list[float], b: list[float]) -> str:
    """By how much two lists of losses differ at most, and from which step on."""
    first = next((i for i, (x, y) in enumerate(zip(a, b), 1) if x != y), None)
    return f"{max(abs(x - y) for x, y in zip(a, b)):.6f}" + (f" (first at {first})" if first else "")


def check(config: train_gpt.Config, world: train_gpt.World, count: int, deterministic: bool) -> str:
    """How far the first losses of two eager runs and two of graphs differ, all from the same weights."""
    trainer = build(change(config, deterministic=deterministic), world)
    start, graphs, runs = updates.snapshot(trainer.optimizer.state()), trainer.graphs, []
    for chosen in ({}, {}, graphs, graphs):
        trainer.graphs = chosen
        runs.append(first_losses(trainer, start, count))
    world.be_deterministic(False)
    return (f"{count} losses{' of deterministic kernels' * deterministic} differ by at most: eager twice "
            f"{difference_of(*runs[:2])}, eager and graphs {difference_of(runs[0], runs[2])} and "
            f"{difference_of(runs[1], runs[2])}, graphs twice {difference_of(*runs[2:])}"
            + ("" if graphs else " (there are no graphs here)"))


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options of this tool, and the settings of train_gpt.py."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="NAME=VALUE,...",
                        help="settings to change; repeatable")
    parser.add_argument("--repeat", type=int, default=50, metavar="N",
                        help="timed steps of each stage (default: 50)")
    whole = parser.add_mutually_exclusive_group()
    whole.add_argument("--train", action="store_true",
                       help="train the whole schedule instead of timing steps")
    whole.add_argument("--screen", action="store_true",
                       help="train whole schedules with about half of the changes each")
    parser.add_argument("--apart", action="store_true",
                        help="each GPU trains runs of its own")
    parser.add_argument("--against", type=Path, metavar="FOLDER",
                        help="time another checkout in turn with this one")
    parser.add_argument("--check", type=int, default=0, metavar="N",
                        help="compare the first N losses of eager runs and of graphs")
    options, settings = parser.parse_known_args()
    if options.against and (options.tries or options.train or options.screen or options.check):
        raise UserError("--against times two checkouts with the same settings: leave out --try, --train, "
                        "--screen and --check")
    if options.apart and (options.check or not (options.train or options.screen)):
        raise UserError("--apart shares out whole runs: give --train or --screen, and leave out --check")
    return options, settings


def main() -> int:
    rank = 0
    try:
        rank, _, _ = train_gpt.launched()
        options, settings = arguments()
        share = separate() if options.apart else Share()
        train_gpt.parse(settings)           # Wrong settings end here.
        # Each checkout runs in processes of its own, started by the first rank.
        if options.against:
            if rank == 0:
                print(compare_checkouts(options.against, settings, options.repeat))
            return 0
        world = train_gpt.World()
        settings = fitted(settings, world, train_gpt)
        if len(set(map(tuple, fits := share.gathered("settings", settings)))) > 1:
            raise UserError("the GPUs have room for different settings, which no table should mix: "
                            + "; ".join(shlex.join(each) for each in fits))
        config = train_gpt.parse(settings)[0]
        whole = options.train or options.screen
        variants = {AS_GIVEN: config} | {text: vary(text, settings, whole) for text in options.tries}
        say = functools.partial(print, flush=True) if world.rank == 0 else lambda *_: None
        if options.check:
            for deterministic in (True, False):
                say(check(config, world, options.check, deterministic))
        text = (train_screened(options.tries, settings, world, share, say) if options.screen else
                train_in_turn(variants, world, share, say) if options.train else
                time_in_turn(variants, world, options.repeat, say))
        if share.rank == 0:
            say(text)
    except (*EXPECTED, RecordError) as error:
        return exit_status(error, rank, "records.tools.ablate")
    world.close()
    return 0


if __name__ == "__main__":
    leave(main())
