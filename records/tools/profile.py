"""Where a step's time goes: a trace of every kind of step, and the milliseconds of each family of kernels.

    torchrun --standalone --nproc_per_node=4 -m records.tools.profile --preset corpus    (or ./run.sh profile)

Runs every kind of step of the schedule as training does, writes a trace of one step of each (open it in
ui.perfetto.dev) and prints the milliseconds of each family of kernels on rank 0. Takes train_gpt.py's
settings; `--out FOLDER` says where the traces go.
"""
import argparse
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import train_gpt
from records.run.ending import EXPECTED, exit_status, leave
from records.run.fit import fitted
from records.tools import markdown

# The family of a kernel is the first whose pattern its name has.
FAMILIES = {
    "communication": r"nccl|barrier_kernel|PtoP",
    "attention": r"flash|attention|attn|fmha",
    "copy head": r"pointer_(query_|key_)?kernel|halves",
    "search of states": r"neighbour|settle",
    "orthogonalisation": r"symmetric_kernel|rescale_kernel",
    "loss": r"(loss|gradient|target)_kernel|log_softmax|nll_loss",
    "matmul": r"gemm|gemv|nvjet|cutlass|matmul|_mm_|product_kernel|splitk",
    "embedding": r"add_(blocks|crossing)|(hash|take_rows|enlist)_kernel|embedding|gather|scatter|index|"
                 r"sort|radix",
    "optimizer": r"lerp|adam_kernel|momentum_kernel|neuron_|feature_kernel",
    "elementwise": r"triton_|elementwise|reduce|heads_(backward_)?kernel|value_mix|residual|shared_rows|"
                   r"smear|row_norms|_scales_|scaled_kernel",
    "copies": r"^mem(cpy|set)|copy|transpose|quantize|fill",
}
Interval = tuple[float, float]      # begin and end, microseconds


def family(name: str) -> str:
    """The family of the kernel of this name, "other" if none claims it."""
    return next((key for key, pattern in FAMILIES.items() if re.search(pattern, name, re.I)), "other")


def union(intervals: list[Interval]) -> list[Interval]:
    """The same stretches of time as intervals that do not overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in union(intervals))


def account(events: list[dict]) -> dict[str, float]:
    """Milliseconds on the GPU by family of kernels, from a trace's events.

    `wall` is the time from the first kernel's begin to the last one's end, and nothing runs in the time
    `idle`. Other kernels run beside `communication hidden`, and none beside `communication exposed`. Families
    other than communication may overlap each other, and then add up to more than the wall.
    """
    intervals: dict[str, list[Interval]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            intervals.setdefault(family(event["name"]), []).append((event["ts"], event["ts"] + event["dur"]))
    if not intervals:
        return {}
    communication = intervals.pop("communication", [])
    work = [interval for group in intervals.values() for interval in group]
    everything = union(communication + work)
    exposed = length(communication + work) - length(work)
    times = Counter({name: length(group) for name, group in intervals.items()})
    rows = dict(times.most_common())
    rows |= {"communication exposed": exposed, "communication hidden": length(communication) - exposed}
    wall = everything[-1][1] - everything[0][0]
    return {name: us / 1e3 for name, us in (rows | {"idle": wall - length(everything), "wall": wall}).items()}


def table(columns: dict[str, dict[str, float]]) -> str:
    """Markdown: a row for each family, a column for each kind of step."""
    last = ["idle", "wall"]
    names = [*dict.fromkeys(name for column in columns.values() for name in column if name not in last),
             *last]
    rows = [[name, *(f"{column.get(name, 0):.2f}" for column in columns.values())] for name in names]
    return markdown.table(["ms", *columns], rows)


def profile_steps(trainer: train_gpt.Trainer, out: Path) -> dict[str, dict[str, float]]:
    """Account for the third step of each kind, after two that are not traced. Rank 0 writes the traces."""
    device, columns = trainer.world.device, {}
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    kinds = trainer.schedule.kinds()
    for i, step in enumerate(tqdm(kinds, unit="kind", disable=trainer.world.rank > 0)):
        batches = [trainer.prepared(batch) for batch in trainer.loader.batches(step.index)]
        for _ in range(2):
            trainer.step(step, batches)
        trainer.world.barrier()
        with profile(activities=activities) as recorded:
            trainer.step(step, batches)
            if device.type == "cuda":
                torch.cuda.synchronize()
        if trainer.world.rank == 0:
            name = f"{i}-{step.batch_tokens}"
            name += "-adam" * step.update_adam
            path = out / f"{name}.json.gz"
            recorded.export_chrome_trace(str(path))
            with gzip.open(path) as file:
                columns[name] = account(json.load(file)["traceEvents"])
    return columns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profile"), metavar="FOLDER",
                        help="where traces go (default: profile)")
    options, settings = parser.parse_known_args()
    rank = 0
    try:
        rank, _, _ = train_gpt.launched()
        train_gpt.parse(settings)           # Wrong settings end here.
        options.out.mkdir(parents=True, exist_ok=True)
        world = train_gpt.World()
        trainer = train_gpt.Trainer(train_gpt.parse(fitted(settings, world, train_gpt))[0], world)
        trainer.warm_up()
        columns = profile_steps(trainer, options.out)
    except EXPECTED as error:
        return exit_status(error, rank, "records.tools.profile")
    # A communicator lives as long as a graph that holds its collectives; `close` would wait for it for ever.
    trainer.graphs.clear()
    if world.rank == 0:
        print(table(columns) if any(columns.values()) else "no GPU: the traces show what the CPU did")
        print(f"traces in {options.out}, for ui.perfetto.dev")
    world.close()
    return 0


if __name__ == "__main__":
    leave(main())
