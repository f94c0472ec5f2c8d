"""Whether this machine is in order, and why it is slow if it is not: one page in half a minute.

    ./run.sh doctor                             (torchrun … -m records.tools.doctor, a process for each GPU)

Each line begins with ok, slow or broken, and says by how much and what to do. A run with `--doctor true`
makes the same checks and logs their figures; `python -m records compare` shows where two machines differ.
"""
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from data.errors import tool_parser
from data.shards import open_regular
from kernels.attention import choose_attention
from kernels.ranks.collectives import Collectives, wait
from kernels.ranks.world import RankError, World
from records.run.machine import ROOT, device_name, gpu_states, number, output_of, peak_flops, version

OLDEST_TORCH = (2, 11)
# What is known to fail: package, version, the GPUs' major compute capability, and what to do.
FAULTY = (("triton", "3.7.1", 10, "it cannot compile newton_schulz for this GPU; train with --reference "
           "newton_schulz, or install torch 2.11.0 with Triton 3.6.0"),)
# bf16 FLOP that a multiprocessor does in a clock, by compute capability (vendor white papers; GeForce).
FLOP_A_CLOCK = {(8, 0): 2048, (8, 6): 512, (8, 9): 512, (9, 0): 4096, (10, 0): 8192, (12, 0): 512}


class Line(NamedTuple):
    """One finding. The figures, by name, go into a log."""
    verdict: str                # "ok", "slow" or "broken"
    text: str
    figures: dict[str, float] = {}


def rated(name: str, got: float, wanted: float | None, unit: str, advice: str) -> Line:
    """A rate beside `wanted`, the least rate of a machine in order, or None if that is not known."""
    figures = {f"{name}, {unit}": round(got, 3)}
    if wanted is None or got >= wanted:
        return Line("ok", f"{name}: {got:,.4g} {unit}", figures)
    return Line("slow", f"{name}: {got:,.4g} {unit}, {1 - got / wanted:.0%} less than the {wanted:,.4g} of a "
                        f"machine in order; {advice}", figures)


def required(name: str, ok: bool, text: str, advice: str, verdict: str = "broken", **figures: float) -> Line:
    return Line("ok" if ok else verdict, f"{name}: {text}" + ("" if ok else f"; {advice}"), figures)


def versions(world: World) -> Iterator[Line]:
    """torch and what it was built for; Triton of the version that torch asks for; which attention runs."""
    on_gpu = world.device.type == "cuda"
    built = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    yield required("torch", built >= OLDEST_TORCH, f"{torch.__version__}, Python {platform.python_version()}",
                   "pip install -r requirements.txt brings a newer one")
    if output_of("nvidia-smi", "-L") and not on_gpu:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        yield Line("broken", "there is a GPU, but torch sees none; " +
                   ("CUDA_VISIBLE_DEVICES hides it" if hidden else
                    "install torch's CUDA build, or a driver that is new enough for it"))
    wanted = [line.split(";")[0].split("==")[1].strip() for line in metadata.requires("torch") or ()
              if line.startswith("triton==")]
    if on_gpu:
        capability = torch.cuda.get_device_capability(world.device)
        drivers = {state["driver"] for state in gpu_states(world.device)}
        yield Line("ok", f"driver: {', '.join(drivers) or 'unknown'}, CUDA of torch: {torch.version.cuda}")
        found = version("triton")
        yield required("Triton", found in wanted or not wanted, str(found),
                       f"this torch asks for another: pip install triton=={' '.join(wanted)}")
        for package, faulty, major, advice in FAULTY:
            if version(package) == faulty and capability[0] == major:
                yield Line("broken", f"{package} {faulty}: {advice}")
        backend, note = choose_attention("auto", world.device)
        yield Line("slow" if note and capability >= (9, 0) else "ok",
                   f"attention: {backend} {note}")


def working_folder() -> Path:
    folder = Path(os.environ.get("RUNS_PATH", ROOT / "records/runs"))
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def disk(_: World) -> Iterator[Line]:
    """Room for logs, the rate of writing, and that of reading shards, if there are any."""
    folder = working_folder()
    free = shutil.disk_usage(folder).free / 1e9
    yield required(f"disk of {folder}", free > 1, f"{free:.1f} GB free",
                   "logs need some; make room, or set RUNS_PATH to another disk", disk_free_gb=round(free, 1))
    data, begin = os.urandom(2 ** 24), time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    yield rated("disk, writing", len(data) / 1e6 / (time.perf_counter() - begin), 20, "MB/s",
                "set RUNS_PATH to a faster disk")
    places = [Path(os.environ.get("DATA_PATH") or "-"), *sorted((ROOT / "data/shards").glob("*"))]
    shards = [shard for place in places for shard in sorted(place.glob("*train_*.bin"))]
    if shards:
        begin = time.perf_counter()
        with open_regular(shards[0]) as file:
            size = len(file.read(2 ** 27))
        yield rated("shards, reading", size / 1e6 / (time.perf_counter() - begin), 100, "MB/s",
                    f"copy {shards[0].parent} to a local disk and set DATA_PATH")


def host(world: World) -> Iterator[Line]:
    """Cores for every rank, whether others use them, free memory, memory that processes share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    each = 3 if world.device.type == "cuda" else 1      # for a rank, its loader and its collectives
    yield required("host cores", cores >= each * here, f"{cores} for {here} processes",
                   f"batches come late with fewer than {each * here}; ask the scheduler for more", "slow",
                   host_cores=cores)
    begin, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begin < 0.3:
        pass
    share = (time.thread_time() - used) / (time.perf_counter() - begin)
    yield rated("a core's share for us", 100 * share, 90, "%", "other programs use it: see `top`")
    free = [int(line.split()[1]) / 1e6 for line in read("/proc/meminfo") if line.startswith("MemAvailable")]
    if free:
        yield required("host memory", free[0] > 2 * here, f"{free[0]:.1f} GB free",
                       f"{here} processes want 2 GB each", host_memory_free_gb=round(free[0], 1))
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free / 1e9
        yield required("/dev/shm", here == 1 or shared > 0.5, f"{shared:.2f} GB free",
                       "ranks exchange data there: docker run --shm-size 8g",
                       dev_shm_free_gb=round(shared, 2))


def start(_: World) -> Iterator[Line]:
    """The seconds until a program knows its model, once files are in memory."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "train_gpt.py", "--preset", "cpu", "--explain"], cwd=ROOT, check=True,
                   capture_output=True)
    seconds = time.perf_counter() - begin
    yield required("a start", seconds < 20, f"{seconds:.1f} s to import everything and lay out the model",
                   "put the environment on a local disk; keep bytecode, in a folder that PYTHONPYCACHEPREFIX "
                   "names and without PYTHONDONTWRITEBYTECODE", "slow", start_s=round(seconds, 2))


def read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def timed(device: torch.device, work: Callable[[], object], seconds: float = 0.5) -> float:
    """Seconds that `work` takes, the mean of as many as fit into `seconds`, after a first one."""
    finish = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    work()
    finish()
    begin, times = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(5):
            work()
        finish()
        times += 5
    return (time.perf_counter() - begin) / times


def matmuls(world: World) -> Iterator[Line]:
    """The rates of a matmul and of a copy, beside those of the processor's data sheet."""
    device, on_gpu = world.device, world.device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    peak = peak_of(device) if on_gpu else None
    rate = 2 * size ** 3 / timed(device, lambda: torch.mm(a, b), 2.0 if on_gpu else 0.3) / 1e12
    yield rated("matmul", rate, peak and 0.55 * peak / 1e12, "TFLOP/s",
                "see the clocks below: a power limit, heat, or another program on the GPU")
    source = torch.ones(2 ** 28 if on_gpu else 2 ** 24, dtype=torch.uint8, device=device)
    into, properties = torch.empty_like(source), on_gpu and torch.cuda.get_device_properties(device)
    clock, bus = (getattr(properties, name, None) for name in ("memory_clock_rate", "memory_bus_width"))
    wanted = 0.65 * 2 * clock * 1e3 * bus / 8 / 1e9 if clock and bus else None
    rate = 2 * len(source) / timed(device, lambda: into.copy_(source)) / 1e9
    yield rated("memory, reading and writing", rate, wanted, "GB/s", "another program may be using the GPU")


def peak_of(device: torch.device) -> float | None:
    """Dense bf16 peak of a GPU, FLOP/s: by its data sheet, else by its multiprocessors and highest clock."""
    properties, [clock] = torch.cuda.get_device_properties(device), ask(device, "clocks.max.sm")
    a_clock = FLOP_A_CLOCK.get((properties.major, properties.minor))
    counted = a_clock * properties.multi_processor_count * clock * 1e6 if a_clock and clock else None
    return peak_flops(device) or counted


def ask(device: torch.device, *fields: str) -> list[float | None]:
    """Numbers that nvidia-smi knows of this GPU."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    line = output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i",
                     uuid)
    return [number(text) for text in line.split(",")] if line else [None] * len(fields)


def ask_under_load(device: torch.device, *fields: str) -> list[float | None]:
    """As `ask`, while the GPU multiplies until the answer comes."""
    a = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    timed(device, lambda: torch.mm(a, a))
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(ask, device, *fields)
        while not answer.done():
            timed(device, lambda: torch.mm(a, a), 0.05)
    return answer.result()


def gpu(world: World) -> Iterator[Line]:
    """Memory that is free, other users, and clocks, power and heat while the GPU works; pinned memory."""
    device = world.device
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    taken = (total - free - torch.cuda.memory_reserved(device)) / 1e9
    yield required("GPU memory", taken < 3, f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free",
                   f"{taken:.1f} GB are taken by other programs: see nvidia-smi", "slow",
                   gpu_memory_free_gb=round(free / 1e9, 1))
    time.sleep(1.5)                             # nvidia-smi looks back for up to a second
    [busy] = ask(device, "utilization.gpu")
    if busy is not None:
        yield required("other programs on the GPU", busy < 20,
                       f"it is busy {busy:.0f}% of the time without us", "end them: see nvidia-smi", "slow",
                       gpu_busy_percent=busy)
    clock, highest, heat, power, usual = ask_under_load(
        device, "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.limit", "power.default_limit")
    if clock and highest:
        yield rated("clock under load", clock, 0.65 * highest, "MHz", "see the power limit and the heat")
    if power and usual:
        yield rated("power limit", power, usual, "W", f"nvidia-smi -pl {usual:.0f}")
    if heat:
        yield required("heat under load", heat < 85, f"{heat:.0f} °C", "GPUs slow down; cool it", "slow",
                       gpu_celsius=heat)
    pinned = torch.empty(2 ** 27, dtype=torch.uint8, pin_memory=True)
    into = torch.empty_like(pinned, device=device)
    rate = len(pinned) / timed(device, lambda: into.copy_(pinned, non_blocking=True)) / 1e9
    yield rated("pinned host memory to the GPU", rate, 8, "GB/s",
                "the slot has few lanes, or the process runs on the other socket (numactl)")


def exchange(world: World) -> Iterator[Line]:
    """The rate of the ranks' collectives, by torch.distributed and by the kind that a run would choose."""
    if world.size == 1:
        return
    device, on_gpu = world.device, world.device.type == "cuda"
    world.choose_collectives(copies=True)
    size, repeats = 2 ** (27 if on_gpu else 22), 8
    finish = torch.cuda.synchronize if on_gpu else lambda: None
    plain = Collectives(world.size)
    for by in (plain, *[world.collectives] * (type(world.collectives) is not Collectives)):
        whole, part = (by.zeros(n, dtype=torch.bfloat16, device=device) for n in (size, size // world.size))
        for i in range(repeats + 2):            # the same number on all ranks; two come before the clock
            if i == 2:
                finish()
                world.barrier()
                begin = time.perf_counter()
            wait(by.reduce_scatter(part, whole))
            wait(by.all_gather(whole, part))
        finish()
        moved = 2 * whole.nbytes * (world.size - 1) / world.size * repeats
        name = dist.get_backend() if by is plain else type(by).__name__
        yield rated(f"sums and gathers of {world.size} ranks by {name}",
                    moved / (time.perf_counter() - begin) / 1e9, 20 if on_gpu else 0.05, "GB/s",
                    "see the pairs of GPUs; without NVLink all goes through the host")


def pairs(_: World) -> Iterator[Line]:
    """`copies` in a process of its own: its end frees the memory that it took on every GPU."""
    count = torch.cuda.device_count()
    if count > 1:
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            yield from other.submit(copies, count).result()


def copies(count: int) -> list[Line]:
    """Every pair of this host's `count` GPUs: peer access, and what a copy moves."""
    lines = []
    for i, j in ((i, j) for i in range(count) for j in range(count) if i != j):
        near, far = (torch.ones(2 ** 27, dtype=torch.uint8, device=f"cuda:{n}") for n in (i, j))
        rate = len(near) / timed(torch.device("cuda", i), lambda: far.copy_(near)) / 1e9
        line = rated(f"GPU {i} to {j}", rate, 100, "GB/s", "not by NVLink: collectives are slower")
        sees = torch.cuda.can_device_access_peer(i, j)
        lines.append(line if sees else
                     line._replace(verdict="slow", text=line.text + "; they do not see each other"))
    return lines


EVERYWHERE, ON_THE_FIRST = (gpu, matmuls, exchange), (versions, host, disk, start, pairs)


def look(world: World) -> list[Line]:
    """What all checks find. All ranks must call; the others wait while rank 0 makes its own checks."""
    lines = [line for check in (ON_THE_FIRST if world.rank == 0 else ()) for line in found(check, world)]
    world.barrier()
    own = [line for check in EVERYWHERE for line in found(check, world)]
    everyones: list[list[Line]] = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(everyones, own)
    for rank, given in enumerate(everyones):
        name = f"{rank}: " if world.size > 1 else ""
        lines += [Line(line.verdict, name + line.text,
                       {name + key: value for key, value in line.figures.items()}) for line in given]
    return lines


def found(check: Callable, world: World) -> list[Line]:
    """The lines of one check. One that cannot be made is a finding as well."""
    lines = []
    try:
        for line in check(world):
            lines.append(line)
    except (RuntimeError, OSError, RankError, subprocess.SubprocessError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        lines.append(Line("broken", f"{check.__name__} could not be tried: {reason}"))
    return lines


def figures(world: World) -> dict[str, object]:
    """For a run's log: every figure by its name, and the lines that are not ok."""
    lines = look(world)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"figures": {key: value for line in lines for key, value in line.figures.items()},
            "findings": [f"{line.verdict}: {line.text}" for line in lines if line.verdict != "ok"]}


def main() -> int:
    """Prints the page; the exit status is 1 if something is broken."""
    tool_parser("records.tools.doctor", __doc__).parse_args()
    begin = time.time()
    try:
        world = World()
    except (RankError, RuntimeError) as error:
        print(f"broken  the ranks cannot start: {str(error).splitlines()[0]}")
        return 1
    lines = look(world)
    if world.rank == 0:
        print(f"{world.size} x {device_name(world.device)}, looked at for {time.time() - begin:.0f} s")
        for line in lines:
            print(f"{line.verdict:7} {line.text}")
        counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in ("slow", "broken")}
        print("in order" if not any(counts.values()) else f"{counts['slow']} slow, {counts['broken']} broken")
    world.close()
    return int(any(line.verdict == "broken" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
