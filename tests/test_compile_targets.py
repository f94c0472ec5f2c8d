"""Every Triton kernel, compiled for GPUs that are not here, with the shared memory it asks for.

What a model would launch on such a GPU comes from the count of its memory (records/run/memory.py), which runs
the model without kernels. Compiling for a GPU needs none. As a program this compiles all kernels:

    python tests/test_compile_targets.py 80 89 90 100 120
"""
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Bytes of shared memory that a block may have (CUDA C++ programming guide, technical specifications).
SHARED = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
HOPPER = 90
# What a usual run of the tests compiles: a small kernel, and the one that takes most, where there is least.
SAMPLE = {HOPPER: "hash_kernel", 120: "symmetric_kernel"}
# LLVM in Triton 3.7.1 ends the process by an assertion; forms of 4 warps compile, and all in Triton 3.6.0.
# With 3.7.1 a B200 wants `--reference newton_schulz`.
BROKEN = {(100, "symmetric_kernel")}


def launches(capability: int) -> list[tuple]:
    """(kernel, arguments, options) of what preset `speedrun` launches on a GPU of this capability."""
    import torch

    import train_gpt
    from records.run import memory
    found = []

    def take(kernel, grid):
        return lambda *args, **options: found.append((kernel, args, options))

    fake = {"get_device_capability": lambda *_: divmod(capability, 10), "is_available": lambda: True,
            "get_device_properties": lambda *_: SimpleNamespace(
                multi_processor_count=132, shared_memory_per_block_optin=SHARED[capability])}
    config = train_gpt.parse(["--preset", "speedrun", "--data_path", "x", "--ngram_rows", "8388608",
                              "--copy_channels", "128", "--near_match", "1,2,4,8", "--canonical", "true",
                              "--attention_gates", "true", "--states", "4096"])[0]
    config = replace(config, layers=train_gpt.CPU_LAYERS)           # They have everything.
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["flash_attn"].cute = sys.modules["flash_attn.cute"]
    with mock.patch.multiple(torch.cuda, **fake):
        sampled = {(stage.batch_tokens, stage.softmax_samples): 16_384 for stage in config.stages}
        memory.count(train_gpt, config, 1, torch.device("cuda", 0), False, sampled, [config.val_chunk], take)
    return found


def compile_for(capability: int, beginning: str) -> dict[str, int | str]:
    """The most shared memory of each kernel's forms, of those whose names begin so; or one error.

    They are compiled as a start does it (records/run/ahead.py).
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from records.run import ahead
    def imported() -> bool:
        return any(name.startswith("torch._dynamo") for name in sys.modules)

    target, launchers, before = GPUTarget("cuda", capability, 32), [], imported()
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: capability,
        get_current_stream=lambda _: 0, launcher_cls=lambda *of: launchers.append(of)))
    with ahead.compiling() as launch:
        made = [(kernel.__name__, launch(kernel, (1,))(*args, **options))
                for kernel, args, options in launches(capability)
                if kernel.__name__.startswith(beginning) and (capability, kernel.__name__) not in BROKEN]
    assert before or not imported() or capability != HOPPER, "a start on a Hopper imported torch.compile: 3 s"
    shared: dict[str, int] = {}
    for name, kernel in made:
        try:
            shared[name] = max(shared.get(name, 0), kernel.result().metadata.shared)
        except Exception as error:              # a compiler's errors are of many classes
            return {name: f"{type(error).__name__}: {error}"}
    forms = len({id(kernel) for _, kernel in made})
    assert len(launchers) == forms, f"{len(launchers)} launchers of {forms} forms of kernels"
    return shared


def test_kernels_compile_and_fit():
    """In a process of its own, for here Triton may be an interpreter. COMPILE_ALL=1 takes two minutes."""
    pytest.importorskip("triton")
    from kernels.mlp.relu_squared import SHARED_BYTES
    everything = os.environ.get("COMPILE_ALL") == "1"
    wanted = dict.fromkeys(SHARED, "") if everything else SAMPLE
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = [f"{capability}:{beginning}" for capability, beginning in wanted.items()]
    done = subprocess.run([sys.executable, __file__, *arguments], cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    for capability, line in zip(wanted, done.stdout.splitlines(), strict=True):
        shared = json.loads(line)
        assert len(shared) == 1 or everything and len(shared) > 15
        errors = {name: found for name, found in shared.items() if isinstance(found, str)}
        assert not errors and max(shared.values()) <= SHARED[capability], (capability, shared)
        assert shared.get("product_kernel", 0) <= SHARED_BYTES      # by which the program chooses it


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for text in sys.argv[1:]:
        architecture, _, beginning = text.partition(":")
        print(json.dumps(compile_for(int(architecture), beginning)), flush=True)
