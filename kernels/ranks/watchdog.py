"""Notices a rank that no longer answers or goes on, so that nobody waits for it for ever.

A collective waits ten minutes for every rank (`PATIENCE` in collectives.py). The launcher notices a process
that was killed, but not a process that was stopped, a machine that is gone or a program that hangs. So a
thread of every rank tells a store once a second that the rank lives and how far its program has come, and
reads what the other ranks tell.

How far a program has come is a count of the steps and the waits for other ranks that it has begun. The counts
are the same on all ranks. If no rank's count moves, and some counts are lower than the others, then the ranks
with the lowest count hang, and the others wait for them. `Judge` finds hung ranks after a minute, but only if
they are inside a step of the timed run. Elsewhere one rank alone may take minutes: it compiles, reads a disk,
writes the log or a checkpoint, scores more slowly, or somebody holds its terminal. There a rank has nine
tenths of the ten minutes.

Three cases remain. If a GPU hangs and not the program, the counts may be equal. Then no rank is named, and
the collective's own limit ends the run. Or the counts differ, because the programs have queued different
amounts, and the rank that is named is only the one behind. A program that hangs and holds Python's lock stops
the watchdog's thread as well, and looks like a process that was stopped.
"""
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

SILENCE = 18.0      # seconds without a sign of life, after which a rank is lost; all end within 30 then
HANG = 60.0         # seconds without progress, after which a rank inside a step counts as hung
ROOT = f"{Path(__file__).resolve().parents[2]}/"


class Progress:
    """How far this process's program has come: it adds, and the watchdog's thread reads."""

    def __init__(self):
        self.count = 0              # steps and waits for other ranks that have begun
        self.in_step = False        # of the timed run


progress = Progress()               # the one of this process


def place() -> str:
    """Where the main thread stands: the innermost line of this project, or of all if none is."""
    stack = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in
             traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])]
    ours = [one for one in stack if one[0].startswith(ROOT) and "site-packages" not in one[0]]
    file, line, function = (ours or stack)[0]
    return f"{file.removeprefix(ROOT)}:{line} ({function})"


class Told(NamedTuple):
    """What a rank says of its program once a second."""
    count: int
    in_step: bool
    place: str = ""     # where the program stands, if it has stood there for long


class Judge:
    """Finds the ranks that hang. Times are in seconds, by any one clock."""

    def __init__(self, size: int, hang: float, patience: float, now: float):
        self.hang, self.patience = hang, patience       # how long nobody may go on, in a step and elsewhere
        self.told, self.moved = [Told(0, False)] * size, [now] * size       # by rank: last told, last moved
        self.looked, self.slowest = now, 0.0            # last look; longest pause in a step

    def hung(self, told: list[Told], now: float) -> list[int]:
        """The ranks for which all others wait, by what each rank says `now`."""
        for rank, (before, after) in enumerate(zip(self.told, told, strict=True)):
            if after.count != before.count:
                if before.in_step:
                    self.slowest = max(self.slowest, self.looked - self.moved[rank])
                self.moved[rank] = now
        self.told, self.looked = told, now
        counts = [one.count for one in told]
        behind = [rank for rank, count in enumerate(counts) if count == min(counts)]
        # A slow machine's steps may take minutes: a rank has ten times as long as one has needed before.
        in_step = all(told[rank].in_step for rank in behind)
        limit = min(self.patience, max(self.hang, 10 * self.slowest)) if in_step else self.patience
        return behind if len(behind) < len(told) and self.still(now) > limit else []

    def still(self, now: float) -> float:
        """For how long no rank has gone on."""
        return now - max(self.moved)


class Watchdog:
    """Ends this process if another rank is silent or hangs; before that, it calls `on_loss` with the reason.

    The store is the launcher's, at MASTER_ADDR and MASTER_PORT. A lost rank on this machine is killed, since
    a stopped process does not follow the launcher's wish to end. `patience` is that of collectives, seconds.
    """

    def __init__(self, rank: int, size: int, patience: float, silence: float = SILENCE, hang: float = HANG):
        self.rank, self.size, self.silence = rank, size, silence
        self.on_loss: Callable[[str], None] = lambda reason: None
        self.ended = threading.Event()
        self.judge = Judge(size, hang, 0.9 * patience, time.monotonic())
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=silence))
        self.store.set(f"process of {rank}", f"{socket.gethostname()} {os.getpid()}")
        self.beat(0)
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        self.thread.start()

    def beat(self, number: int) -> None:
        """Tell the others that this process lives, and how far its program has come."""
        stands = time.monotonic() - self.judge.moved[self.rank] > self.judge.hang / 2
        told = Told(progress.count, progress.in_step, place() if stands else "")
        self.store.set(f"beats of {self.rank}", json.dumps([number, *told]))

    def watch(self) -> None:
        """Count this rank's beats in the store, and notice whose beats or whose program stand still."""
        names = [f"beats of {rank}" for rank in range(self.size)]
        last, since, beats, looked = [b""] * self.size, [time.monotonic()] * self.size, 0, time.monotonic()
        while not self.ended.wait(1.0):
            beats += 1
            try:
                self.beat(beats)
                found = self.store.multi_get(names)
            except RuntimeError:        # The launcher is gone, or some rank has not begun within the time.
                return
            now = time.monotonic()
            # This process itself stood still, suspended perhaps with all others: judge nobody by that.
            if now - looked > self.silence / 2:
                since, self.judge.moved = [now] * self.size, [now] * self.size
            looked = now
            for rank, beat in enumerate(found):
                if beat != last[rank] or beat == b"end":
                    last[rank], since[rank] = beat, now
                elif now - since[rank] > self.silence:
                    return self.end([rank], "", f" has not answered for {self.silence:.0f} s; it was "
                                                "stopped, or its machine is gone")
            told = [before if beat == b"end" else Told(*json.loads(beat)[1:])       # The end is no progress.
                    for before, beat in zip(self.judge.told, found)]
            if hung := self.judge.hung(told, now):
                waited, places = self.judge.still(now), " and ".join(told[rank].place for rank in hung)
                return self.end(hung, f"waited {waited:.0f} s for ", f", which stands at {places}")

    def end(self, lost: list[int], before: str, after: str) -> None:
        """End, because these ranks are lost; their names stand between the two parts of the reason."""
        processes = [self.store.get(f"process of {rank}").decode().split() for rank in lost]
        names = " and ".join(f"rank {rank} (process {process} on {host})"
                             for rank, (host, process) in zip(lost, processes))
        reason = before + names + after
        try:
            # Every rank notices. The first of those that are left says it, before `on_loss` may fail.
            if self.rank == min({*range(self.size)}.difference(lost)):
                print(f"\ntrain_gpt.py: {reason}", file=sys.stderr, flush=True)
            self.on_loss(reason)
        except Exception as error:
            print(f"train_gpt.py: {error}", file=sys.stderr, flush=True)
        finally:
            # All notice within two seconds. Rank 0 ends first: it would take another's end for the reason.
            time.sleep(4 if self.rank else 2)
            for host, process in processes:
                if host == socket.gethostname():
                    with suppress(ProcessLookupError):      # Another rank has killed it already.
                        os.kill(int(process), signal.SIGKILL)
            os._exit(2)

    def close(self) -> None:
        """This rank ends as it should: the others need not miss it."""
        self.ended.set()
        self.thread.join()
        self.store.set(f"beats of {self.rank}", "end")
