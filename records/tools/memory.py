"""python -m records.tools.memory: the memory that whole runs counted beforehand, and that they took.

Each run gets a limit of memory and chooses its own settings. Then a second run is given these settings and a
limit one byte below their need; it must be refused at once. On GPUs only; a run takes a minute or so.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from data.errors import tool_parser
from records.run import LOG_NAME
from records.run.fit import COSTS, LIMIT
from records.run.machine import ROOT

FLAGS = "--steps 57 --extra_steps 3 --val_every 0 --momentum_warmup 30 --momentum_cooldown 5".split()


def train(ranks: int, flags: list[str], limit: str | None) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run train_gpt.py on `ranks` GPUs; returns the process, and its log's lines or []."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"RUNS_PATH": folder} | ({LIMIT: limit} if limit else {})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                   "train_gpt.py", *flags]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = [line for log in Path(folder).glob(f"*/{LOG_NAME}") for line in log.read_text().splitlines()]
    return done, [json.loads(line) for line in lines]


def measure(ranks: int, flags: list[str], limit: str | None) -> list[str]:
    """A row of the table: limit, settings, GB counted and measured, and whether a byte less was refused.

    "Counted" and "measured" are bytes of tensors. "Reserved" is what torch's allocator took for the tensors,
    with the idle memory between them; it must fit into "needed".
    """
    done, log = train(ranks, flags, limit)
    said = next((line for line in done.stderr.splitlines() if line.startswith("train_gpt.py: ")), "")
    if done.returncode or not log or log[-1]["kind"] != "summary":
        reason = said or next((line for line in done.stderr.splitlines() if "Error" in line), "it failed")
        return [limit or "-", reason[:100], *["-"] * 6]
    memory, config = log[0]["memory"], log[0]["config"]
    counted, measured = memory["allocated_bytes"], log[-1]["peak_memory_bytes"]
    chosen = [text for name in COSTS for text in (f"--{name}", str(config[name]))]
    less, _ = train(ranks, [*flags, *chosen], f"{(memory['needed_bytes'] - 1) / 1e9:.9f}")
    refused = less.returncode != 0 and f"takes {memory['needed_bytes'] / 1e9:.2f} GB" in less.stderr
    sizes = counted, measured, log[-1]["reserved_memory_bytes"], memory["needed_bytes"]
    gigabytes = [f"{x / 1e9:.2f}" for x in sizes]
    return [limit or "-", " ".join(chosen), *gigabytes, f"{counted / measured - 1:+.1%}",
            "yes" if refused else "NO"]


def main(argv: list[str] | None = None) -> int:
    parser = tool_parser("records.tools.memory", __doc__)
    parser.add_argument("--limits", default="16,24,40,48,80,none", help="GB of each GPU; none: what is free")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs")
    options, flags = parser.parse_known_args(argv)
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU")
    heads = ["limit, GB", "settings",
             "counted, GB", "measured, GB", "reserved, GB", "needed, GB", "off by", "a byte less refused"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    good = True
    for limit in options.limits.split(","):
        row = measure(options.ranks, [*FLAGS, *flags], None if limit == "none" else limit)
        print("| " + " | ".join(row) + " |", flush=True)
        good &= row[-1] == "yes"
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
