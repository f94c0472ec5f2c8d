"""What a run ran on: the facts about the machine in a log's header."""
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch

from data.errors import printable
from data.overlap import fingerprint
from data.shards import Manifest, ShardError

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESS_KEY = uuid4().hex        # Two machines may have the same host name and process number.

# Dense bf16 peak, FLOP/s, of devices whose name holds the key (vendor datasheets; first match). Others get no
# MFU.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
              "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "RTX 5090": 210e12}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device, FLOP/s, or None if it is not in the table."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name(device)), None)


def output_of(*command: str) -> str | None:
    """What a command prints, or None where there is no such command or it fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20,
                              check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# What nvidia-smi says of a GPU, and the name that a log gives it.
GPU_STATE = {"driver_version": "driver", "power.limit": "power_limit_w", "clocks.sm": "sm_mhz",
             "clocks.mem": "memory_mhz", "temperature.gpu": "celsius"}


def gpu_states(device: torch.device) -> list[dict[str, object]]:
    """Driver, power limit, clocks and temperature of the GPUs that this process sees; [] where unknown."""
    if device.type != "cuda":
        return []
    found = output_of("nvidia-smi", f"--query-gpu=uuid,{','.join(GPU_STATE)}",
                      "--format=csv,noheader,nounits")
    states = {}
    for uuid, *row in (line.split(", ") for line in (found or "").splitlines()):
        states[uuid] = {name: text if name == "driver" else number(text)
                        for name, text in zip(GPU_STATE.values(), row)}
    seen = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]
    return [states[uuid] for uuid in seen if uuid in states] or [*states.values()]


def number(text: str) -> float | None:
    """The number that nvidia-smi writes; None for its "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


def machine_facts(device: torch.device, world_size: int) -> dict[str, object]:
    """Host, process, devices, driver, versions and commit, as a log's header has them. None: not known."""
    gpus = gpu_states(device)
    dirty = output_of("git", "status", "--porcelain")
    return {"host": platform.node(), "process": os.getpid(), "process_key": PROCESS_KEY,
            "devices": [device_name(device)] * world_size, "driver": gpus[0]["driver"] if gpus else None,
            "gpus": gpus,
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "cuda": torch.version.cuda, "triton": version("triton"), "numpy": np.__version__,
                         "flash_attn": version("flash-attn-4")},
            "commit": output_of("git", "rev-parse", "HEAD"), "dirty": None if dirty is None else dirty != ""}


def ending_facts(device: torch.device, folder: str) -> dict[str, object]:
    """Fingerprints of the tokens, changed shards, and the state of the GPUs, as a log's summary has them.

    What cannot be read any more is left out: the training is done and shall not be lost. The rules refuse a
    record of such a run.
    """
    facts: dict[str, object] = {"gpus": gpu_states(device)}
    try:
        facts["changed_shards"] = changed = Manifest(Path(folder)).changed()
        if changed:
            warn(f"{', '.join(changed)} in {folder} changed since manifest.json was written")
        facts["data"] = {split: fingerprint(folder, split) for split in ("train", "val")}
    except (ShardError, OSError) as error:
        warn(f"the log does not say what text this was: {error}")
    return facts


def warn(text: str) -> None:
    print(printable(f"WARNING: {text}"), file=sys.stderr)
