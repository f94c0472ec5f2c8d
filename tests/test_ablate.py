"""The table of what settings cost: timed steps, settings to try, whole commands, two checkouts in turn."""
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, process, succeeded

import train_gpt
from kernels.ranks.collectives import RankError
from records.run.settings import UserError, change
from records.tools import ablate, against, apart
from records.tools.apart import Share
from records.tools.screen import design, effects

SMALL = ["--preset", "cpu", *TINY, "--micro_batches", "2", "--batch_tokens", "128,256,384", "--val_every",
         "0"]


def test_each_stage_is_timed_with_and_without_adam(config):
    for every in (1, 2, 3):
        pairs = ablate.pairs_of_stages(train_gpt.Schedule(replace(config, adam_every=every, steps=12)))
        assert [first.batch_tokens for first, _ in pairs] == [1024, 2048, 3072]
        for first, second in pairs:
            assert second.index == first.index + 1 and second.update_adam
            assert first.update_adam == (every == 1)
            assert first.windows == second.windows


def test_one_late_step_moves_no_row(config, monkeypatch):
    """Steps without Adam take 12 ms here, and those with it 15."""
    laps = iter([12.0, 15.0] * 5 + [12.0, 15.0, 15.5, 15.0] + [12.0, 15.0] * 3)
    clock = SimpleNamespace(start=lambda: None, stop=lambda: None,
                            lap=lambda: SimpleNamespace(ms=partial(next, laps)))
    monkeypatch.setattr(ablate, "Clock", lambda _: clock)
    monkeypatch.setattr(ablate, "pairs_of_stages", lambda _: [(SimpleNamespace(index=0),) * 2])
    loader, world = SimpleNamespace(batches=lambda _: []), SimpleNamespace(device=None, barrier=lambda: None)
    trainer = SimpleNamespace(world=world, schedule=None, loader=loader, step=lambda *_: None)
    assert ablate.measure(trainer, 20) == [13.5]


@pytest.mark.parametrize("every, steps, reason", [(3, 50, "Adam updates in every second step that is timed"),
                                                  (2, 1, "--repeat 1: half of the steps")])
def test_what_cannot_be_timed(config, every, steps, reason):
    with pytest.raises(UserError, match=reason):
        ablate.time_in_turn({"as given": replace(config, adam_every=every)}, None, steps, print)


def test_texts_that_some_run_lacks_have_no_column(config, monkeypatch):
    scores = iter([{"clean": 3.5, "fineweb": 3.7}, {"fineweb": 3.8}])
    monkeypatch.setattr(ablate, "trained", lambda *_: ablate.Result(3.2, 2.0, [1.0], next(scores)))
    text = ablate.train_in_turn({"as given": config, "score=none": config}, None, Share(), lambda _: None)
    assert "fineweb" in text and "clean" not in text


def test_settings_to_try():
    def tried(text, train=False):
        return ablate.vary(text, ["--preset", "cpu", "--steps", "9"], train)

    assert (tried("smear=false,muon_lr=0.5").smear, tried("smear=false,muon_lr=0.5").muon_lr) == (False, 0.5)
    both = tried("final_windows=(3,7),smear=false")
    assert (both.final_windows, both.smear, both.steps) == ((3, 7), False, 9)
    batches = [stage.batch_tokens for stage in tried("batch_tokens=(256,256,512)", train=True).stages]
    assert batches == [256, 256, 512]
    assert tried("fp8=(head,mlp)").fp8 == ("head", "mlp") and tried("fp8=none").fp8 == ()
    for given in (["--fp8", "head,attention"], ["--fp8=head,attention"]):       # It takes its place.
        assert ablate.vary("fp8=mlp", ["--preset", "cpu", *given, "--steps", "9"], False).fp8 == ("mlp",)
    for wrong, train in (("smaer=false", True), ("value_width=3", True), ("seed=1", True),
                         ("batch_tokens=(1024,)", False)):
        with pytest.raises(UserError, match=f"no setting '{wrong.split('=')[0]}' to change here"):
            tried(wrong, train)
    with pytest.raises(UserError, match="expected a name out of auto"):
        tried("attention=fast")


def test_whole_runs_take_turns_seed_by_seed_and_tell_what_they_show(config, monkeypatch):
    seen = []
    losses = {True: {3: 3.28, 4: 3.29}, False: {3: 3.30, 4: 3.31}}

    def trained(config, _):
        seen.append((config.seed, config.smear))
        return ablate.Result(losses[config.smear][config.seed], 2.0 + config.seed, [1.0, 2.0 + config.smear],
                             {})

    monkeypatch.setattr(ablate, "trained", trained)
    said, config = [], replace(config, seed=3, runs=2)
    variants = {"as given": config, "smear=false": replace(config, smear=False), "again": config}
    text = ablate.train_in_turn(variants, None, Share(), said.append)
    assert seen == [(seed, smear) for seed in (3, 4) for smear in (True, False, True)] and len(said) == 6
    assert said[3].startswith("again, seed 4")      # The order turns about.
    assert said[1] == "smear=false, seed 3: 3.3000 in 5.00 s; no other text"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    # Welch's test of 2 a side, each of a standard error of 0.005: a difference of 0.02 by t of 2 degrees of
    # freedom, 4.303 of which make 95%.
    assert rows[2] == ["as given", "2", "3.2850 ± 0.0071", "5.50", "1.0, 3.0", ""]
    assert rows[3][:5] == ["smear=false", "2", "3.3050 ± 0.0071", "5.50", "1.0, 2.0"]
    assert rows[3][5].startswith("+0.0200 nats/token (95%: -0.0104 to +0.0504), p = 0.11;")
    assert rows[4][5].startswith("+0.0000 nats/token (95%: -0.0304 to +0.0304), p = 1;")
    variants = {name: replace(config, runs=1) for name, config in variants.items()}
    single = ablate.train_in_turn(variants, None, Share(), said.append).splitlines()[3].split("|")
    assert [cell.strip() for cell in single[1:4]] == ["smear=false", "1", "3.3000"]
    assert "+0.0200 nats/token; no test" in single[6]


def test_a_check_tells_equal_losses_from_others(config, monkeypatch):
    config = change(config, micro_batches=2, batch_tokens=(128, 256, 256))
    equal = ablate.check(config, train_gpt.World(), 3, True)
    assert "3 losses of deterministic kernels differ by at most: eager twice 0.000000, eager" in equal
    assert not torch.are_deterministic_algorithms_enabled()
    runs = iter([[1.0, 2.0], [1.0, 2.0], [1.0, 2.5], [1.25, 2.0]])
    monkeypatch.setattr(ablate, "first_losses", lambda *_: next(runs))
    assert ("2 losses differ by at most: eager twice 0.000000, eager and graphs 0.500000 (first at 2) and "
            "0.500000 (first at 2), graphs twice 0.500000 (first at 1)") in ablate.check(config,
                                                                                         train_gpt.World(), 2,
                                                                                         False)


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
            if line.startswith("|")]


def test_the_command_prints_a_row_a_try_and_the_first_again(shards, monkeypatch, capsys):
    words = ["ablate", *SMALL, "--extra_steps", "0", "--data_path", str(shards), "--repeat", "2", "--try",
             "smear=false"]
    monkeypatch.setattr(sys, "argv", words)
    assert ablate.main() == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows[0] == ["ms a step", "128", "256", "384"]
    assert [row[0] for row in rows[2:]] == ["as given", "smear=false", "as given"]
    monkeypatch.setattr(sys, "argv", [*words, "--train", "--steps", "3", "--write_log", "false"])
    assert ablate.main() == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row[0] for row in rows[2:]] == ["as given", "smear=false"] and rows[0][2] == "loss"
    difference = float(rows[3][5].split()[0])
    assert float(rows[3][2]) - float(rows[2][2]) == pytest.approx(difference, abs=2e-4) and difference != 0
    assert all(float(ms) > 0 for row in rows[2:] for ms in row[4].split(", ")) and rows[2][4].count(",") == 2
    monkeypatch.setattr(sys, "argv", ["ablate", "--preset", "cpu", "--try", "nothing=1"])
    assert ablate.main() == 2 and "no setting 'nothing'" in capsys.readouterr().err


# Many changes in few runs

@pytest.mark.parametrize("changes, runs", [(1, 8), (4, 8), (5, 12), (8, 12), (9, 20), (16, 20), (20, 24)])
def test_every_change_is_made_as_often_with_each_other_as_without(changes, runs):
    made = design(changes)
    assert made.shape == (runs, changes) and not made[-1].any()
    signs = np.where(made, 1, -1)
    assert np.array_equal(signs.T @ signs, runs * np.eye(changes)) and not signs.sum(0).any()


@pytest.mark.parametrize("changes", [0, 21])
def test_changes_that_no_design_has(changes):
    with pytest.raises(UserError, match=f"1 to 20 changes to --try, not {changes}"):
        design(changes)


def test_two_passes_free_the_effects_of_pairs():
    """The first two changes harm each other. After one pass that moves effects of others, after two none."""
    far = []
    for passes in (1, 2):
        made = design(8, passes)
        losses = 3.5 + 0.01 * (np.where(made[:, 0], 1, -1) * np.where(made[:, 1], 1, -1))
        far.append(abs(effects(made, losses)[0]).max())
    assert far[0] > 0.006 and far[1] == pytest.approx(0, abs=1e-12)
    assert np.array_equal(made[:12], ~made[12:])


def test_effects_are_those_of_least_squares_and_their_intervals_hold():
    made, true, rng = design(8), np.linspace(-0.004, 0.01, 8), np.random.default_rng(0)
    columns = np.hstack([np.ones((12, 1)), made])
    held = []
    for _ in range(2000):
        losses = 3.5 + made @ true + rng.normal(0, 0.003, 12)
        found, half = effects(made, losses)
        held += list(abs(found - true) < half)
    fitted, (rest,), *_ = np.linalg.lstsq(columns, losses)
    assert np.allclose(found, fitted[1:], atol=1e-12)
    # A coefficient's standard error, and 3.182 of those for 3 degrees of freedom.
    error = np.sqrt(rest / 3 * np.linalg.inv(columns.T @ columns)[1, 1])
    assert half == pytest.approx(3.1824 * error, rel=1e-4)
    assert np.mean(held) == pytest.approx(0.95, abs=0.01)


def test_whole_runs_screen_changes_together(config, monkeypatch):
    seen = []

    def trained(config, _):
        seen.append((config.seed, config.smear, config.cautious, config.steps))
        loss = 3.3 + 0.02 * (not config.smear) - 0.01 * (not config.cautious)
        return ablate.Result(loss, 10.0 - (not config.smear), [1.0], {"clean": loss + 0.3})

    monkeypatch.setattr(ablate, "trained", trained)
    argv, tries = ["--preset", "cpu", "--seed", "5", "--runs", "2"], ["smear=false", "cautious=false,steps=7"]
    said = []
    rows = rows_of(ablate.train_screened(tries, argv, None, Share(), said.append))
    assert [seed for seed, *_ in seen] == list(range(5, 21)) and len(said) == 16
    assert {(cautious, steps) for *_, cautious, steps in seen} == {(True, 120), (False, 7)}
    assert seen[7][1:] == (True, True, 120) and said[7].startswith("8 of 16, with no change: 3.3000 in")
    assert seen[15][1:] == (False, False, 7)        # The second pass makes what the first did not.
    assert rows[0] == ["16 runs", "loss ± 0.0000", "clean ± 0.0000", "s ± 0.00"]
    assert rows[2:] == [["no change, by the sums of effects", "3.3000", "3.6000", "10.00"],
                        ["smear=false", "+0.0200", "+0.0200", "-1.00"],
                        ["cautious=false,steps=7", "-0.0100", "-0.0100", "+0.00"]]
    with pytest.raises(UserError, match="more than one --try changes smear"):
        ablate.train_screened(["smear=false", "steps=7,smear=true"], argv, None, Share(), print)


def test_the_command_screens(shards, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ablate", *SMALL, "--data_path", str(shards), "--screen", "--write_log",
                                      "false", "--try", "smear=false", "--try", "batch_tokens=128"])
    monkeypatch.setattr(ablate, "trained", lambda config, _: ablate.Result(
        3 + config.smear + config.stages[2].batch_tokens / 128, 1.0, [1.0], {}))
    assert ablate.main() == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row[:2] for row in rows[2:]] == [["no change, by the sums of effects", "7.0000"],
                                             ["smear=false", "-1.0000"], ["batch_tokens=128", "-2.0000"]]


# Ranks apart

def test_ranks_apart_share_runs_out():
    work = list(range(5))
    assert [Share(rank, 2).of(work) for rank in (0, 1)] == [[0, 2, 4], [1, 3]]
    assert Share().of(work) == work == Share().collected(work)


@pytest.mark.parametrize("visible, seen, gpu", [(None, 2, "1"), ("4,6", 2, "6"), ("", 0, ""),
                                                (None, 0, None)])
def test_a_rank_apart_is_the_only_one_on_its_gpu(monkeypatch, visible, seen, gpu):
    environment = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
                       MASTER_ADDR="localhost", MASTER_PORT="1")
    given = {} if visible is None else {apart.GPUS: visible}
    monkeypatch.setattr(os, "environ", environment | given)
    monkeypatch.setattr(apart, "rendezvous", lambda *_, **__: iter([("the store", 3, 4)]))
    monkeypatch.setattr(torch.cuda, "device_count",
                        lambda: seen if os.environ.get(apart.GPUS) == visible else 1)
    assert apart.separate() == apart.Share(3, 4, "the store")
    assert os.environ.get(apart.GPUS) == gpu and train_gpt.launched() == (0, 1, 0)


@pytest.mark.parametrize("counts, reason", [((1, 1), "2 or more processes on a machine with 1 GPUs"),
                                            ((2, 2, 2), "CUDA_VISIBLE_DEVICES=1 came too late")])
def test_a_rank_apart_needs_a_gpu_of_its_own(monkeypatch, counts, reason):
    monkeypatch.setattr(os, "environ", dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="localhost",
                                            MASTER_PORT="1"))
    monkeypatch.setattr(apart, "rendezvous", lambda *_, **__: iter([(None, 1, 2)]))
    monkeypatch.setattr(torch.cuda, "device_count", partial(next, iter(counts)))
    with pytest.raises(RankError, match=reason):
        apart.separate()


def test_ranks_apart_exchange_results():
    """Two ranks as threads, by a real store; a third never comes."""
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor() as threads:
        shares = [apart.Share(rank, 2, store) for rank in (0, 1)]
        found = list(threads.map(lambda share: share.collected(share.of(list("abcde"))), shares))
    assert found == [list("abcde")] * 2
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RankError, match="another rank sent no results"):
        apart.Share(0, 3, store).collected([])


def test_gpus_with_room_for_different_settings_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ablate", "--preset", "cpu", "--train", "--apart"])
    monkeypatch.setattr(ablate, "separate", lambda: SimpleNamespace(
        rank=0, gathered=lambda _, mine: [mine, [*mine, "--ngram_rows", "7"]]))
    assert ablate.main() == 2
    assert "room for different settings" in (said := capsys.readouterr().err) and "--ngram_rows 7" in said


def test_the_command_trains_apart(shards):
    """Three runs on two ranks: each is a run of one rank, and the table has all of them."""
    tool = ["records.tools.ablate", "--train", "--apart", "--try", "smear=false", "--try", "backout=false"]
    launcher = "-m torch.distributed.run --standalone --nproc_per_node=2 -m".split()
    done = succeeded(process(sys.executable, *launcher, *tool, *SMALL, "--data_path", str(shards), "--steps",
                             "3", "--write_log", "false"))
    rows = rows_of(done.stdout)
    assert [row[:2] for row in rows[2:]] == [[name, "1"] for name in ("as given", *tool[4::2])]
    assert len({row[2] for row in rows[2:]}) == 3
    for name, _, loss, *_ in rows[2:]:
        assert f"{name}, seed 0: {loss} in" in done.stdout


def test_only_whole_runs_are_shared_out(monkeypatch, capsys):
    for wrong in ([], ["--train", "--check", "2"]):
        monkeypatch.setattr(sys, "argv", ["ablate", "--preset", "cpu", "--apart", *wrong])
        assert ablate.main() == 2 and "--apart shares out whole runs" in capsys.readouterr().err


# Two checkouts

def test_another_checkout_is_timed_by_its_own_tool(shards, tmp_path):
    """The other one is a copy whose tool lies where older checkouts have it, and whose steps are slower."""
    other = tmp_path / "other"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "shards", "tests", "20*", "runs")
    shutil.copytree(ROOT, other, ignore=ignored)
    (other / "records/tools/ablate.py").rename(other / "records/ablate.py")
    clock = other / "records/run/clock.py"
    slower = "    def ms(self):\n        return 9000.0\n\n    def real_ms(self)"
    clock.write_text(clock.read_text().replace("    def ms(self)", slower))
    timed = against.time_checkout(other, [*SMALL, "--extra_steps", "0", "--data_path", str(shards)], 2)
    assert timed.ms == {"128": 9000.0, "256": 9000.0, "384": 9000.0} and timed.startup_s > 0


def test_checkouts_take_turns(tmp_path, monkeypatch, capsys):
    seen = []

    def time_checkout(folder, settings, steps):
        seen.append((folder, settings, steps))
        return against.Timed({"256": 10.0 + (folder == ROOT)}, None, 3.0)

    monkeypatch.setattr(against, "time_checkout", time_checkout)
    monkeypatch.setattr(sys, "argv", ["ablate", "--preset", "cpu", "--against", str(tmp_path), "--repeat",
                                      "7"])
    assert ablate.main() == 0
    assert seen == [(tmp_path, ["--preset", "cpu"], 7), (ROOT, ["--preset", "cpu"], 7)] * 2
    rows = rows_of(capsys.readouterr().out)
    assert rows[0] == ["ms a step", "256", "peak GiB", "started in s"]
    assert [row[0] for row in rows[2:]] == ["other", "this", "other", "this", "this - other"]
    assert rows[2] == ["other", "10.00", "n/a", "3.0"] and rows[6] == ["this - other", "+10.0%", "n/a",
                                                                       "+0.0%"]


def test_a_comparison_of_checkouts_averages_both_turns():
    a = [against.Timed({"256": 10.0}, 2.0, 30.0), against.Timed({"256": 30.0}, 2.0, 50.0)]
    b = [against.Timed({"256": 22.0}, 1.0, 20.0), against.Timed({"256": 22.0}, 1.0, 20.0)]
    assert against.difference_cells(a, b) == ["+10.0%", "-50.0%", "-50.0%"]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ablate", "--preset", "cpu", "--against", str(tmp_path)])
    assert ablate.main() == 2 and "no checkout of this project" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--train"])
    assert ablate.main() == 2 and "leave out --try, --train, --screen and --check" in capsys.readouterr().err


def test_the_output_of_a_turn():
    text = "as given 1.0\n| ms a step | 256 | 512 |\n| --- | --: | --: |\n| as given | 1.5 | 2.5 |\n"
    timed = against.read_output(text + '{"gib": null, "startup_s": 3.5}\n')
    assert timed == against.Timed({"256": 1.5, "512": 2.5}, None, 3.5)
    with pytest.raises(UserError, match="no table of milliseconds"):
        against.read_output("nothing\n")
