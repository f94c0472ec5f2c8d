"""Two checkouts of the project timed in turn, each by its own `ablate`: the other, this, the other, this."""
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from records.run.settings import UserError
from records.tools.markdown import table

ROOT = Path(__file__).resolve().parent.parent.parent
WORKER = Path(__file__).with_name("worker.py")
TURNS = 2
# Variables that torchrun sets for its processes. A torchrun that one of these starts must not get them.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
            "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Timed(NamedTuple):
    """One turn of a checkout."""
    ms: dict[str, float]    # milliseconds of a step, by the tokens of the stage
    gib: float | None       # peak memory of a GPU; None without one
    startup_s: float        # from the start of the process to the end of the warm-up


def compare_checkouts(other: Path, settings: list[str], steps: int) -> str:
    """A table: a row for each turn, and the difference in per cent between the means of both checkouts.

    Each turn has as many ranks as torchrun started this process with, and the same settings of train_gpt.py.
    """
    turns: dict[str, list[Timed]] = {"other": [], "this": []}
    for _ in range(TURNS):
        for name, folder in (("other", other.resolve()), ("this", ROOT)):
            turns[name].append(time_checkout(folder, settings, steps))
            print(f"{name} ({folder}):", *cells(turns[name][-1]), file=sys.stderr, flush=True)
    stages = turns["other"][0].ms
    if any(turn.ms.keys() != stages.keys() for side in turns.values() for turn in side):
        raise UserError("--against: the checkouts have other stages: " + "; ".join(
            f"{name} {', '.join(side[0].ms)} tokens" for name, side in turns.items()))
    rows = [[name, *cells(turn)] for pair in zip(*turns.values()) for name, turn in zip(turns, pair)]
    rows.append(["this - other", *difference_cells(turns["other"], turns["this"])])
    return table(["ms a step", *stages, "peak GiB", "started in s"], rows)


def cells(turn: Timed) -> list[str]:
    return [*(f"{ms:.2f}" for ms in turn.ms.values()), "n/a" if turn.gib is None else f"{turn.gib:.2f}",
            f"{turn.startup_s:.1f}"]


def difference_cells(a: list[Timed], b: list[Timed]) -> list[str]:
    """B - A in per cent of A, by the means of their turns."""
    def per_cent(values_a: list[float | None], values_b: list[float | None]) -> str:
        if None in values_a + values_b:
            return "n/a"
        return f"{100 * (statistics.mean(values_b) / statistics.mean(values_a) - 1):+.1f}%"

    return [*(per_cent([turn.ms[stage] for turn in a], [turn.ms[stage] for turn in b]) for stage in a[0].ms),
            per_cent([turn.gib for turn in a], [turn.gib for turn in b]),
            per_cent([turn.startup_s for turn in a], [turn.startup_s for turn in b])]


def time_checkout(folder: Path, settings: list[str], steps: int) -> Timed:
    """Run the `ablate` of the checkout in `folder`; UserError with the end of its output where that fails."""
    modules = [name for name in ("records.tools.ablate", "records.ablate")
               if (folder / (name.replace(".", "/") + ".py")).exists()]
    if not modules:
        raise UserError(f"--against {folder}: no checkout of this project (it has no "
                        "records/tools/ablate.py)")
    ranks = os.environ.get("WORLD_SIZE", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
               str(WORKER), modules[0], *settings, "--repeat", str(steps)]
    environment = {name: value for name, value in os.environ.items()
                   if name not in LAUNCHER and not name.startswith("TORCHELASTIC_")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"--against: the run in {folder} failed: "
                        f"{(done.stderr or done.stdout).strip()[-2000:]}")
    return read_output(done.stdout)


def read_output(text: str) -> Timed:
    """The first table of milliseconds and the worker's last line in what a turn printed."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
            if line.startswith("|")]
    head = next((row for row in rows if row[0] == "ms a step"), None)
    given = next((row for row in rows if row[0] == "as given"), None)
    if head is None or given is None:
        raise UserError(f"--against: no table of milliseconds in the output of a turn: {text[-2000:]}")
    measured = json.loads(text.strip().splitlines()[-1])
    return Timed(dict(zip(head[1:], map(float, given[1:]))), measured["gib"], measured["startup_s"])
