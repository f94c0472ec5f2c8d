"""Notices a rank that no longer answers, so that nobody waits for it for ever.

A collective waits ten minutes for every rank (`PATIENCE` in collectives.py). A process that was killed is
noticed by the launcher. One that was stopped is not, nor a machine that is gone. So every rank tells a store
that it lives, once a second and by a thread of its own, and looks for the others.

A rank whose threads live while its program hangs goes unnoticed here: the others cannot tell it from one that
compiles. For that one they wait the ten minutes.
"""
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

SILENCE = 20.0      # seconds without a sign of life, after which a rank counts as lost


class Watchdog:
    """Ends this process if another rank is silent; `on_loss` is called with one line before.

    The store is the launcher's, at MASTER_ADDR and MASTER_PORT. A silent rank on this machine is killed,
    since a stopped process does not follow the launcher's wish to end.
    """

    def __init__(self, rank: int, size: int, silence: float = SILENCE):
        self.rank, self.size, self.silence = rank, size, silence
        self.on_loss: Callable[[str], None] = lambda reason: None
        self.ended = threading.Event()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=silence))
        self.store.set(f"process of {rank}", f"{socket.gethostname()} {os.getpid()}")
        self.store.set(f"beats of {rank}", "0")
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        """Count this rank's beats in the store, and notice whose beats stand still."""
        names = [f"beats of {rank}" for rank in range(self.size)]
        last, since, beats = [b""] * self.size, [time.monotonic()] * self.size, 0
        while not self.ended.wait(1.0):
            beats += 1
            asked = time.monotonic()
            try:
                self.store.set(names[self.rank], str(beats))
                found = self.store.multi_get(names)
            except RuntimeError:        # The launcher is gone, or some rank has not begun within the time.
                return
            now = time.monotonic()
            if now - asked > self.silence / 2:      # This process itself stood still: judge nobody by that.
                since = [now] * self.size
            for rank, beat in enumerate(found):
                if beat != last[rank] or beat == b"end":
                    last[rank], since[rank] = beat, now
                elif now - since[rank] > self.silence:
                    return self.lose(rank)

    def lose(self, rank: int) -> None:
        """End, because this rank is lost."""
        host, process = self.store.get(f"process of {rank}").decode().split()
        reason = (f"rank {rank} (process {process} on {host}) has not answered for {self.silence:.0f} s; it "
                  "was stopped, or its machine is gone")
        self.on_loss(reason)
        # Every rank notices. The first of those that are left says it.
        if self.rank == (1 if rank == 0 else 0):
            print(f"\ntrain_gpt.py: {reason}", file=sys.stderr, flush=True)
        if host == socket.gethostname():
            os.kill(int(process), signal.SIGKILL)
        os._exit(2)

    def close(self) -> None:
        """This rank ends as it should: the others need not miss it."""
        self.ended.set()
        self.thread.join()
        self.store.set(f"beats of {self.rank}", "end")
