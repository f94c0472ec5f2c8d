"""What the tests share: a tiny configuration with every part of the big model, token shards, launchers."""
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"         # of what tests start: threads that outnumber the cores spin
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)     # Programs that tests start do little but import.
# A background job ignores Ctrl-C, and so would the programs that it tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"    # Triton reads this on import: kernels then run on the CPU.

import interpreter  # noqa: E402

import train_gpt  # noqa: E402
from data.shards import write_shard  # noqa: E402
from kernels.attention import qkv_kernels  # noqa: E402
from kernels.embedding import smearing  # noqa: E402
from kernels.fp8 import scales, weights  # noqa: E402
from kernels.mlp import head_input, residual_gradient, residual_norm  # noqa: E402
from kernels.ngrams import shared_gradient  # noqa: E402
from kernels.optimizer import adam, normuon  # noqa: E402

if not torch.cuda.is_available():
    interpreter.hasten()

LARGE_TILES = {
    qkv_kernels: {"CONFIGS": [(128, 8)], "FP8_CONFIGS": [(128, 8)] * 2},
    smearing: {"CONFIGS": [(128, 64, 8)], "BACKWARD_CONFIGS": [(32, 64, 8, 8)]},
    scales: {"CONFIGS": [(256, 8, 528)]}, weights: {"CONFIGS": [(256, 64, 4)]},
    shared_gradient: {"CONFIGS": [(8192, 8)]}, residual_gradient: {"CONFIGS": [(32, 1024, 8, 1)]},
    head_input: {"CONFIGS": [(32, 1024, 8, 1)]}, residual_norm: {"CONFIGS": [(64, 1024, 8)]},
    adam: {"CONFIGS": [(65_536, 8)]},
    normuon: {"CONFIGS": [(65_536, 8)], "NEURON_CONFIGS": [(64, 1024, 8)]}}
TINY = ("--width 64 --head_dim 32 --qk_dim 32 --ngram_rows 1024 --micro_batches 8 --steps 6 --extra_steps 2 "
        "--batch_tokens 1024,2048,3072 --sequence_length 64,128,128 --window_block 16 "
        "--momentum_warmup 3 --momentum_cooldown 2 "
        "--val_tokens 1024 --val_every 3 --val_chunk 512 --val_sequence_length 256").split()

# Files that take longest, 25 to 110 s each. They come first.
SLOW = ("test_run", "test_model", "test_records", "test_watchdog", "test_use", "test_data", "test_optimizer",
        "test_readme", "test_memory", "test_checkpoint", "test_ablate", "test_bad_settings", "test_examples")


def write_documents(folder: Path, lengths: dict[str, list[int]], seed: int = 0) -> Path:
    """Shards by name: documents of these lengths, start token included, of random lowercase bytes."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in lengths.items():
        tokens = [np.concatenate([[256], rng.integers(97, 123, n - 1)]) for n in documents]
        write_shard(folder / f"{name}.bin", np.concatenate(tokens))
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    rng = np.random.default_rng(1)
    lengths = {f"train_{i:06d}": rng.integers(2, 300, 120).tolist() for i in range(3)}
    lengths["val_000000"] = rng.integers(2, 600, 30).tolist()
    return write_documents(tmp_path_factory.mktemp("shards"), lengths)


@pytest.fixture
def config(shards) -> train_gpt.Config:
    """On a GPU as well: small and plain, so that what is tested there does not wait for compilers."""
    flags = ["--preset", "cpu", *TINY, "--data_path", str(shards), "--write_log", "false"]
    config = train_gpt.parse(flags)[0]
    return replace(config, seed=3, attention="plain", compile=False, capture=torch.cuda.is_available())


def pytest_configure(config: pytest.Config) -> None:
    """Two processes share the files out in the order of `pytest_collection_modifyitems`.

    By itself xdist begins with the files of the most tests. Then a slow one of few tests may come last, while
    the other process has nothing left.
    """
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in SLOW)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Examples draw numbers when a file is imported: the same ones, whatever else is collected."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison(request):
    """For tests of kernels: one seed, and NaN in torch.empty, which shows what a kernel forgets to write."""
    if request.path.parent.name != "kernels":
        yield
        return
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True     # A trainer in another test unsets it.
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def large_tiles(monkeypatch) -> None:
    """For whole models in the interpreter, where a program takes the same time whatever its tile.

    The tests in tests/kernels run the tiles that a GPU uses.
    """
    if not torch.cuda.is_available():
        for module, configs in LARGE_TILES.items():
            for name, config in configs.items():
                monkeypatch.setattr(module, name, config)


@pytest.fixture
def trainer(config) -> train_gpt.Trainer:
    return train_gpt.Trainer(config, train_gpt.World())


def environment(**variables: str) -> dict[str, str]:
    """The environment of a tested command: a CPU, one thread a process, no folders of the tester."""
    personal = ("DATA_PATH", "RUNS_PATH", "DISABLE_FP8", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR",
                "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in personal}
    fixed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
             "PYTHON": sys.executable}
    return inherited | fixed | variables


def read_of_process(path: Path) -> bytes:
    """What is in a file of /proc, whose process may be another user's, or gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def left_in_memory(before: set[str]) -> list[str]:
    """Files in shared memory that were not there before, and that no living process has open or mapped.

    Other programs may run beside a test and use shared memory, too.
    """
    files = [file for file in Path("/dev/shm").iterdir() if file.name not in before]
    held = b"".join(map(read_of_process, Path("/proc").glob("[0-9]*/maps")))
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):         # Its process has ended meanwhile.
            held += os.fsencode(os.readlink(link)) + b"\n"
    return [file.name for file in files if os.fsencode(file) + b"\n" not in held and file.exists()]


def succeeded(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """The same, after a look at its exit status."""
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done


def process(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """The output, errors and exit status of a command in a process of its own."""
    return subprocess.run(words, cwd=cwd, env=environment(**variables), capture_output=True, text=True,
                          timeout=480)


def command(*words: str, program: Callable = train_gpt.main, **variables: str) -> subprocess.CompletedProcess:
    """What `python train_gpt.py` prints with these words, and its exit status; in this process, on its CPU.

    A process of its own would import torch for seconds. `program` may be another one than `train_gpt.main`.
    """
    out, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with (redirect_stdout(out), redirect_stderr(errors),
          mock.patch.object(sys, "argv", ["train_gpt.py", *words]),
          mock.patch.dict(os.environ, environment(**variables), clear=True),
          mock.patch.object(torch.cuda, "is_available", return_value=False)):
        try:
            status = program() or 0
        except SystemExit as end:
            status = end.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    texts = (stream.buffer.getvalue().decode() for stream in (out, errors))
    return subprocess.CompletedProcess(words, status, *texts)
