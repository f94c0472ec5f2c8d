"""The clock of a run: what is timed, and how."""
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Lap(NamedTuple):
    """One step on the clock: its beginning and end, CUDA events on a GPU, seconds without one."""
    begin: object
    end: object

    def ready(self) -> bool:
        """Whether the device has reached the end of the step."""
        return isinstance(self.end, float) or self.end.query()

    def ms(self) -> float:
        """The milliseconds of the step, once the lap is ready."""
        if isinstance(self.end, float):
            return (self.end - self.begin) * 1e3
        return self.begin.elapsed_time(self.end)


class Clock:
    """The timed region: every training step and all it needs, without validation.

    A lap is one step. Laps are CUDA events on a GPU, so that they do not stall it, and seconds without one.
    The clock also keeps the system's time at its first start and its last stop, and by the same time how long
    pauses took. With these a reader of the log can check the clock against another one.
    """

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.since, self.last_mark = device, 0.0, None, None
        self.began = self.ended = math.nan          # seconds since the epoch
        self.paused_s = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def mark(self) -> object:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        if math.isnan(self.began):
            self.began = time.time()
        self.since, self.last_mark = self.now(), self.mark()

    def stop(self) -> None:
        self.seconds, self.since = self.elapsed(), None
        self.ended = time.time()

    def elapsed(self) -> float:
        """Timed seconds so far. Waits for the GPU."""
        return self.seconds + (self.now() - self.since if self.since is not None else 0.0)

    def lap(self) -> Lap:
        lap = Lap(self.last_mark, self.mark())
        self.last_mark = lap.end
        return lap

    @contextmanager
    def running(self, barrier: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Time the block, without garbage collection: a collection stalls a step by up to half a second.

        `barrier` returns once every rank is here. Without it the first step would wait for the slowest rank.
        """
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            barrier()
            self.start()
            yield
            self.stop()
        finally:
            gc.enable()
            gc.unfreeze()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        yield
        self.paused_s += time.time() - self.ended
        self.start()
