"""The clock of a run: when it starts, what it counts, the time of each step."""
import gc
import time

import torch

from records.run.clock import Clock


def test_the_clock_starts_when_every_rank_is_there():
    """It starts after the garbage collection, which takes each rank its own time, and counts no waiting."""
    clock, seen = Clock(torch.device("cpu")), []

    def barrier():
        seen.append((gc.isenabled(), clock.since))
        time.sleep(0.3)

    with clock.running(barrier):
        assert not gc.isenabled() and clock.since is not None
    assert seen == [(False, None)] and clock.seconds < 0.2 and gc.isenabled()


def test_a_pause_is_not_counted_and_laps_are():
    clock = Clock(torch.device("cpu"))
    with clock.running():
        time.sleep(0.05)
        first = clock.lap()
        with clock.paused():
            time.sleep(0.3)
        second = clock.lap()
    assert 0.05 <= clock.seconds < 0.25
    assert first.ready() and first.ms() >= 50 and second.ms() < 200
