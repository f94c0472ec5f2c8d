"""Where a step's time goes: `torchrun --standalone --nproc_per_node=4 -m records.profile --preset corpus` (or ./run.sh profile).

Runs every kind of step of the schedule as training does, writes a trace of one step of each (open it in ui.perfetto.dev) and
prints the milliseconds of each family of kernels on rank 0. Takes train_gpt.py's settings; `--out FOLDER` says where traces go.
"""
import argparse
import gzip
import json
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

import train_gpt
from data.loader import to_device
from data.shards import ShardError

# The family of a kernel is the first whose pattern its name has.
FAMILIES = {
    "communication": r"nccl|barrier_kernel|PtoP",
    "attention": r"flash|attention|attn|fmha",
    "orthogonalisation": r"symmetric_kernel|rescale_kernel",
    "loss": r"(loss|gradient)_kernel|log_softmax|nll_loss",
    "matmul": r"gemm|gemv|nvjet|cutlass|matmul|_mm_|product_kernel|splitk",
    "embedding": r"add_(blocks|crossing)|embedding|gather|scatter|index|sort|radix",
    "optimizer": r"lerp|row_adam",
    "elementwise": r"triton_|elementwise|reduce|heads_(backward_)?kernel|value_mix|residual|shared_rows|smear|row_norms|_scales_|"
                   r"scaled_kernel",
    "copies": r"^mem(cpy|set)|copy|transpose|quantize|fill",
}
Interval = tuple[float, float]      # begin and end, microseconds


def family(name: str) -> str:
    return next((key for key, pattern in FAMILIES.items() if re.search(pattern, name, re.I)), "other")


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, in order."""
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
    """Milliseconds on the GPU from a trace's events, by family. From the first kernel's begin to the last one's end:

    `communication hidden` runs while other kernels do, `communication exposed` does not, `idle` is when nothing runs. Families
    other than communication may overlap each other, and then add up to more than the wall.
    """
    intervals: dict[str, list[Interval]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            intervals.setdefault(family(event["name"]), []).append((event["ts"], event["ts"] + event["dur"]))
    if not intervals:
        return {}
    said = intervals.pop("communication", [])
    work = [interval for group in intervals.values() for interval in group]
    everything = union(said + work)
    exposed = length(said + work) - length(work)
    times = Counter({name: length(group) for name, group in intervals.items()})
    rows = dict(times.most_common()) | {"communication exposed": exposed, "communication hidden": length(said) - exposed}
    wall = everything[-1][1] - everything[0][0]
    return {name: us / 1e3 for name, us in (rows | {"idle": wall - length(everything), "wall": wall}).items()}


def table(columns: dict[str, dict[str, float]]) -> str:
    """Markdown: a row a family, a column a kind of step."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column if name not in ("idle", "wall"))) + ["idle", "wall"]
    lines = ["| ms | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    return "\n".join(lines + [f"| {name} | " + " | ".join(f"{column.get(name, 0):.2f}" for column in columns.values()) + " |" for name in names])


def profile_steps(trainer: train_gpt.Trainer, out: Path) -> dict[str, dict[str, float]]:
    """Trace the third step of each kind, after two untraced ones, and account for it; writes the traces on rank 0."""
    device, columns = trainer.world.device, {}
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    for i, step in enumerate(tqdm(trainer.schedule.kinds().values(), unit="kind", disable=trainer.world.rank > 0)):
        batches = [to_device(batch, device) for batch in trainer.loader.batches(step.index)]
        for _ in range(2):
            trainer.step(step, batches)
        trainer.world.barrier()
        with profile(activities=activities) as recorded:
            trainer.step(step, batches)
            if device.type == "cuda":
                torch.cuda.synchronize()
        if trainer.world.rank == 0:
            name = f"{i}-{step.batch_tokens}" + ("-tied" if step.tied else "") + ("-adam" if step.update_adam else "")
            path = out / f"{name}.json.gz"
            recorded.export_chrome_trace(str(path))
            with gzip.open(path) as file:
                columns[name] = account(json.load(file)["traceEvents"])
    return columns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("profile"), metavar="FOLDER", help="where traces go (default: profile)")
    options, settings = parser.parse_known_args()
    try:
        config = train_gpt.parse_config(settings)
        world = train_gpt.World()
        trainer = train_gpt.Trainer(config, world)
    except (train_gpt.UserError, ShardError) as error:
        print(f"records.profile: {error}", file=sys.stderr)
        return 2
    trainer.warm_up()
    options.out.mkdir(parents=True, exist_ok=True)
    columns = profile_steps(trainer, options.out)
    trainer.graphs.clear()              # or `close` waits for ever: a communicator lives as long as a graph that holds its collectives
    if world.rank == 0:
        print(table(columns) if any(columns.values()) else "no GPU: the traces show what the CPU did")
        print(f"traces in {options.out}, for ui.perfetto.dev")
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
