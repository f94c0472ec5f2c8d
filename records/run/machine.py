"""What a run ran on: the facts about the machine in a log's header."""
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent

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


def machine_facts(device: torch.device, world_size: int) -> dict[str, object]:
    """Devices, driver, versions and commit, as a log's header has them. What cannot be found out is None."""
    driver = None
    if device.type == "cuda":
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
    dirty = output_of("git", "status", "--porcelain")
    return {"devices": [device_name(device)] * world_size, "driver": driver,
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "cuda": torch.version.cuda, "triton": version("triton"), "numpy": np.__version__,
                         "flash_attn": version("flash-attn-4")},
            "commit": output_of("git", "rev-parse", "HEAD"), "dirty": None if dirty is None else dirty != ""}
