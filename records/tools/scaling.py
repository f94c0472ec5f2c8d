"""python -m records.tools.scaling: how many times as fast several GPUs are as one.

    python -m records.tools.scaling --ranks 1,2,4 --preset corpus --ngram_rows 134217728 --micro_batches 4

Trains for a few steps of each of three batches, on each number of ranks, with collectives by copies between
GPUs and by NCCL (gloo on a CPU), and reads the milliseconds out of the logs. Settings go to train_gpt.py,
except those that this tool sets itself; a line names the ones left out. Give `--micro_batches` for the most
ranks: without it the numbers of ranks may differ in micro-batches, and would not compute the same.
"""
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.errors import DataError, tool_parser
from records.run.settings import without
from records.tools.launch import launch, with_settings
from records.tools.markdown import table
from records.tools.schema import RecordError, Run

WARM, TIMED = 10, 40        # steps of each batch, before the clocks of the GPUs have settled and after
QUIET = {"extra_steps": "0", "val_every": "0", "average_steps": "0", "save": "", "score": "none",
         "val_tokens": "65536", "name": "scaling"}
HEAD = ["tokens a step", "ranks", "collectives", f"ms, median of {TIMED}", "middle half",
        "times as fast as {}", "efficiency"]


def times(run: Run) -> dict[str, tuple[float, float, float]]:
    """By batch: the quartiles of a step's milliseconds, over the last steps of its stretch."""
    return {name: tuple(np.percentile(ms[-TIMED:], [25, 50, 75]).tolist()) for name, ms in run.stages()
            if len(ms) >= TIMED}


def ways(ranks: list[int]) -> Iterator[tuple[int, str]]:
    """What is measured: each number of ranks, fewest first, with each kind of collectives."""
    for count in sorted(set(ranks)):
        yield from [(count, "copies"), (count, "nccl")] if count > 1 else [(1, "none")]


def measure(counts: list[int], batches: str, settings: list[str]) -> list[dict]:
    """A row for each batch, number of ranks and kind of collectives. RecordError where a run fails."""
    rows, stages = [], batches.count(",") + 1
    if (kept := without(settings, [*QUIET, "batch_tokens", "steps", "peer_copies"])) != settings:
        print(f"left out, because scaling sets these itself: {shlex.join(settings)} became "
              f"{shlex.join(kept)}", file=sys.stderr)
    for count, way in ways(counts):
        ranks = f"-m torch.distributed.run --standalone --nproc_per_node={count}"
        command = f"{shlex.quote(sys.executable)} {ranks} train_gpt.py {shlex.join(kept)}"
        command = with_settings(command, {"batch_tokens": batches, "steps": str(stages * (WARM + TIMED)),
                                          "peer_copies": str(way != "nccl").lower()} | QUIET)
        with tempfile.TemporaryDirectory() as folder:
            run = launch(f"RUNS_PATH={shlex.quote(folder)} {command}", Path(folder))
        if run.diverged:
            raise RecordError(f"{count} ranks by {way}: {run.stopped}")
        facts = {key: run.header[key] for key in ("devices", "versions", "commit", "dirty")}
        memory = run.summary["peak_memory_bytes"]
        rows += [{"batch": batch, "ranks": count, "collectives": way, "ms": ms, "peak_memory_bytes": memory,
                  "startup_s": run.summary["startup_s"], **facts} for batch, ms in times(run).items()]
    return rows


def scaling_text(rows: list[dict]) -> str:
    """The table: every row against the fewest ranks at the same batch, by their faster collectives."""
    fewest = min(row["ranks"] for row in rows)
    base: dict[str, float] = {}
    for row in rows:
        if row["ranks"] == fewest:
            base[row["batch"]] = min(row["ms"][1], base.get(row["batch"], math.inf))
    cells = []
    for row in sorted(rows, key=lambda row: (int(row["batch"].split()[0].replace(",", "")), row["ranks"])):
        low, middle, high = row["ms"]
        factor = base[row["batch"]] / middle
        cells.append([row["batch"], str(row["ranks"]), row["collectives"], f"{middle:.2f}",
                      f"{low:.2f} to {high:.2f}", f"{factor:.2f}", f"{factor * fewest / row['ranks']:.0%}"])
    ranks = f"{fewest} rank{'s' * (fewest > 1)}"
    return table([name.format(ranks) for name in HEAD], cells, words={0, 2})


def main(argv: list[str] | None = None) -> int:
    parser = tool_parser("records.tools.scaling", __doc__)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, as 1,2,4")
    parser.add_argument("--batch_tokens", default="65536,196608,393216", help="tokens a step, one a stage")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows, with devices and commit")
    options, settings = parser.parse_known_args(argv)
    try:
        rows = measure([int(count) for count in options.ranks.split(",")], options.batch_tokens, settings)
        print(scaling_text(rows))
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    except (DataError, RecordError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"python -m records.tools.scaling: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
