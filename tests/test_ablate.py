"""The table of what settings cost: which steps are timed, settings to try, and the whole command; the clock."""
import gc
import sys
import time
from dataclasses import replace

import pytest
import torch

import train_gpt
from records import ablate
from records.clock import Clock


def test_each_stage_is_timed_with_and_without_adam(config):
    for every in (1, 2, 3):
        pairs = ablate.stages(train_gpt.Schedule(replace(config, adam_every=every, steps=12)))
        assert [first.batch_tokens for first, _ in pairs] == list(config.batch_tokens)
        for first, second in pairs:
            assert second.index == first.index + 1 and second.update_adam and first.update_adam == (every == 1)
            assert first.windows == second.windows and first.tied == second.tied


def test_settings_to_try(config):
    assert ablate.changes("smear=false,muon_lr=0.5", config, train=False) == {"smear": False, "muon_lr": 0.5}
    assert ablate.changes("final_windows=(3,7),smear=false", config, train=False) == {"final_windows": (3, 7), "smear": False}
    assert ablate.changes("batch_tokens=(256,256,512)", config, train=True) == {"batch_tokens": (256, 256, 512)}
    for wrong, train in (("smaer=false", True), ("heads=3", True), ("seed=1", True), ("batch_tokens=(1024,)", False)):
        with pytest.raises(train_gpt.UserError, match=f"no setting '{wrong.split('=')[0]}' to change here"):
            ablate.changes(wrong, config, train)
    with pytest.raises(train_gpt.UserError, match="choose auto"):
        ablate.changes("attention=fast", config, train=False)


def test_whole_runs_take_turns_seed_by_seed_and_tell_what_they_show(config, monkeypatch):
    seen = []
    losses = {True: {3: 3.28, 4: 3.29}, False: {3: 3.30, 4: 3.31}}

    def trained(config, _):
        seen.append((config.seed, config.smear))
        return ablate.Result(losses[config.smear][config.seed], 2.0 + config.seed, [1.0, 2.0 + config.smear])

    monkeypatch.setattr(ablate, "trained", trained)
    said, variants = [], {"as given": {}, "smear=false": {"smear": False}, "again": {}}
    text = ablate.train_in_turn(variants, replace(config, seed=3, runs=2), None, said.append)
    assert seen == [(seed, smear) for seed in (3, 4) for smear in (True, False, True)] and len(said) == 6
    assert said[1] == "smear=false, seed 3: 3.3000 in 5.00 s"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    # Welch's test of 2 a side, each of a standard error of 0.005: a difference of 0.02 by t of 2 degrees of freedom, 4.303 of which make 95%
    assert rows[2] == ["as given", "2", "3.2850 ± 0.0071", "5.50", "1.0, 3.0", ""]
    assert rows[3][:5] == ["smear=false", "2", "3.3050 ± 0.0071", "5.50", "1.0, 2.0"]
    assert rows[3][5].startswith("+0.0200 nats/token (95%: -0.0104 to +0.0504), p = 0.11;")
    assert rows[4][5].startswith("+0.0000 nats/token (95%: -0.0304 to +0.0304), p = 1;")
    single = ablate.train_in_turn(variants, replace(config, seed=3), None, said.append).splitlines()[3].split("|")
    assert [cell.strip() for cell in single[1:4]] == ["smear=false", "1", "3.3000"] and "+0.0200 nats/token; no test" in single[6]


def test_a_check_tells_equal_losses_from_others(config, monkeypatch):
    config = replace(config, micro_batches=2, batch_tokens=(256, 512, 512))
    assert "3 losses of deterministic kernels differ by at most: eager twice 0.000000, eager" in ablate.check(config, train_gpt.World(), 3, True)
    assert not torch.are_deterministic_algorithms_enabled()
    runs = iter([[1.0, 2.0], [1.0, 2.0], [1.0, 2.5], [1.25, 2.0]])
    monkeypatch.setattr(ablate, "losses", lambda *_: next(runs))
    assert ("2 losses differ by at most: eager twice 0.000000, eager and graphs 0.500000 (first at 2) and 0.500000 (first at 2), "
            "graphs twice 0.500000 (first at 1)") in ablate.check(config, train_gpt.World(), 2, False)


def test_the_command_prints_a_row_a_try_and_the_first_again(shards, monkeypatch, capsys):
    from conftest import TINY
    monkeypatch.setattr(sys, "argv", ["ablate", "--preset", "cpu", *TINY, "--data_path", str(shards), "--micro_batches", "2", "--batch_tokens",
                                      "256,512,768", "--val_every", "0", "--repeat", "2", "--try", "smear=false"])
    assert ablate.main() == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[0] == "ms a step" and rows[2:] == ["as given", "smear=false", "as given"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--train", "--write_log", "false"])
    assert ablate.main() == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["as given", "smear=false"] and rows[0][2] == "loss"
    difference = float(rows[3][5].split()[0])
    assert float(rows[3][2]) - float(rows[2][2]) == pytest.approx(difference, abs=2e-4) and difference != 0
    assert all(float(ms) > 0 for row in rows[2:] for ms in row[4].split(", ")) and rows[2][4].count(",") == 2
    monkeypatch.setattr(sys, "argv", ["ablate", "--preset", "cpu", "--try", "nothing=1"])
    assert ablate.main() == 2 and "no setting 'nothing'" in capsys.readouterr().err


def test_the_clock_starts_when_every_rank_is_there():
    """Behind the garbage collection, which takes each its own time; what waiting takes does not count."""
    clock, seen = Clock(torch.device("cpu")), []

    def barrier():
        seen.append((gc.isenabled(), clock.since))
        time.sleep(0.3)

    with clock.running(barrier):
        assert not gc.isenabled() and clock.since is not None
    assert seen == [(False, None)] and clock.seconds < 0.2 and gc.isenabled()
