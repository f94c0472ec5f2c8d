"""The clock of a run: when it starts, what it counts, the time of each step."""
import gc
import time

import pytest
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
    clock, before = Clock(torch.device("cpu")), []
    with clock.running(lambda: before.append(time.time())):      # after the garbage collection
        time.sleep(0.05)
        first, second = clock.lap(), clock.lap()
        with clock.paused():
            time.sleep(0.3)
        third = clock.lap()
        with clock.paused():
            time.sleep(0.1)
    assert 0.05 <= clock.seconds < 0.25
    assert first.ready() and first.ms() >= 50 and second.ms() < 45 and third.ms() < 200
    assert before[0] <= clock.began <= before[0] + 0.2 and 0.4 <= clock.paused_s < 0.6
    assert clock.ended - clock.began - clock.paused_s == pytest.approx(clock.seconds, abs=0.02)
