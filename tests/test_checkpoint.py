"""Runs that stop and go on: bit for bit on as many ranks, with the same mathematics on others."""
import json
import shutil
import signal
import sys
import threading
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_worker import MOMENTS
from conftest import ROOT, TINY, process
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
from kernels import ngrams
from kernels import optimizer as updates
from kernels.ranks.collectives import Collectives
from records.run import checkpoint
from records.run.log import LogError
from records.run.settings import UserError
from records.tools.check import check_clock
from records.tools.logs import read_log

SHORTER = [*TINY, "--batch_tokens", "128,256,384", "--micro_batches", "4", "--val_every", "0",
           "--average_steps", "4", "--average_every", "1", "--slow_share", "0.4"]


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    """The folder in which `checkpoint_worker` has run."""
    out = tmp_path_factory.mktemp("checkpoints")
    result = process(sys.executable, "tests/checkpoint_worker.py", str(out), "--preset", "cpu", *SHORTER,
                     "--data_path", str(shards))
    errors = "".join(path.read_text() for path in out.glob("errors-*.txt"))
    assert result.returncode == 0, result.stderr + errors
    return out


def log_of(runs, name: str):
    [path] = runs.glob(f"2*-{name}/log.jsonl")
    return read_log(path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_bit_for_bit_as_if_it_had_never_stopped(runs, ranks):
    for rank in range(ranks):
        found = torch.load(runs / f"{ranks}-{rank}.pt")
        losses, state = found.pop(0)
        assert found.keys() == {*MOMENTS}
        for first, (rest, its_state) in found.items():
            assert rest == losses[first:]
            assert all(torch.equal(*pair) for pair in zip(its_state, state, strict=True)), (rank, first)


def test_a_killed_run_goes_on_from_the_checkpoint_before(runs):
    """It ended while it wrote the one of step 4."""
    assert (runs / "kill/step-0000004.part/rank0-00001.safetensors").exists()
    whole, rest = log_of(runs, "whole"), log_of(runs, "on-1")
    assert rest.header["resumed"] == {"checkpoint": "step-0000003", "step": 3, "ranks": 1}
    assert rest.steps["loss"].tolist() == whole.steps["loss"][3:].tolist() and rest.loss == whole.loss
    assert rest.steps["step"][0] == 4 and rest.steps["tokens"].tolist() == whole.steps["tokens"][3:].tolist()
    assert "resumed" not in whole.header and not check_clock(whole)
    tokens = rest.steps["tokens"][-1] - whole.steps["tokens"][2]
    assert rest.summary["tokens_per_s"] == pytest.approx(tokens / rest.summary["time_s"], rel=1e-3)
    assert "went on from a checkpoint" in check_clock(rest)[0]
    cards = [(run.path.parent / "model/README.md").read_text() for run in (whole, rest)]
    assert ["s since step 3, where it went on from a checkpoint |" in card for card in cards] == [False, True]


def test_a_signal_to_one_rank_stops_all_behind_a_checkpoint(runs):
    stopped = log_of(runs, "on-2")
    assert stopped.stopped.startswith("stopped by a signal after step 5; go on with --resume ")
    assert "train_gpt.py: stopped by a signal after step 5" in (runs / "errors-0.txt").read_text()
    *_, line, _ = map(json.loads, stopped.path.open())
    assert line["kind"] == "checkpoint" and line["step"] == 5 and line["bytes"] > 1e5
    files = sorted(path.name for path in (runs / "stop/step-0000005").iterdir())
    assert files == ["index.json", "rank0-00001.safetensors", "rank1-00001.safetensors"]


def test_one_two_and_four_ranks_go_on_from_each_other(runs):
    """1 to the third step, 2 to the fifth, 4 to the end; the first began between two steps of one update."""
    whole, on_2, on_4 = (log_of(runs, name) for name in ("whole", "on-2", "on-4"))
    assert [run.header["resumed"]["ranks"] for run in (on_2, on_4)] == [1, 2]
    losses = [*on_2.steps["loss"], *on_4.steps["loss"]]
    assert losses == pytest.approx(whole.steps["loss"][3:].tolist(), rel=1e-4)
    assert on_4.loss == pytest.approx(whole.loss, rel=1e-4)


# ---- The state itself, without a run

GROUPS = (("matrices", train_gpt.NorMuon, [(8, 4)] * 5, {"matrix_lr": [1.0] * 5}),
          ("tables", train_gpt.Adam, [(7, 5), (64, 3)], {}),
          ("tokens", train_gpt.Adam, [(60, 32), (60, 32)], {"shared": True}),
          ("scalars", train_gpt.Adam, [(3,)], {"replicated": True}))


@pytest.fixture(autouse=True)
def few_features(monkeypatch):
    """Of 50 tokens, as the tables here are not of GPT-2's."""
    monkeypatch.setattr(train_gpt, "gpt2_features", lambda: np.arange(150).reshape(50, 3) // 5)


def made_up_trainer(rank: int, ranks: int, dtype: torch.dtype, listed: bool, fill: bool) -> SimpleNamespace:
    """What `copy_state` and `restore` need of a trainer: groups of every kind, with random or empty state."""
    torch.manual_seed(0)
    config, shards = replace(train_gpt.PRESETS["cpu"], adam_every=2, slow_share=0.4), {}
    world = SimpleNamespace(rank=rank, size=ranks, collectives=Collectives(ranks), device=torch.device("cpu"))
    for name, algorithm, shapes, more in GROUPS:
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        group = train_gpt.Group(name, params, ["layer 0"] * len(params), 1.0, (0.9, 0.9), 0.0, algorithm,
                                **more)
        shards[name] = algorithm(group, config, world)
    averaged = [updates.Averaged(shards[name].own_weights, None, 5.0) for name in ("matrices", "tables")]
    averages = updates.Averages(averaged, 20, 5, 1, 0.5, 4)
    for shard in shards.values() if fill else ():
        for x in (*checkpoint.buffers(shard, averages).values(), shard.steps,
                  *checkpoint.feature_moments(shard)):
            x.copy_(torch.randint(-999, 999, x.shape))
        if isinstance(shard, train_gpt.Adam):
            shard.all_grads.copy_(torch.randint(-9, 9, shard.all_grads.shape))
    table = made_up_table(rank, ranks, dtype, listed, fill)
    shards["rows"] = SimpleNamespace(table=table, group=SimpleNamespace(betas=(0.0, 0.99)))
    optimizer = SimpleNamespace(shards=shards, finite=torch.tensor(True), averages=averages)
    return SimpleNamespace(optimizer=optimizer, world=world, config=config,
                           schedule=train_gpt.Schedule(config),
                           model=SimpleNamespace(guesses=SimpleNamespace(index=None)))


def made_up_table(rank: int, ranks: int, dtype: torch.dtype, listed: bool, fill: bool) -> ngrams.TableState:
    """This rank's columns of 50 rows of 16, of which 17 were updated and 9 have a gradient."""
    weight, grads, second = (torch.zeros(50, width, dtype=of) for width, of in
                             ((16, dtype), (16, dtype), (4, torch.float32)))
    updated, pending, last = torch.arange(0, 50, 3), torch.randperm(50)[:9], torch.zeros(50)
    if fill:
        weight[updated], second[updated] = torch.randn(17, 16).to(dtype), torch.rand(17, 4)
        last[updated], grads[pending] = 3.0, torch.randn(9, 16).to(dtype)
    weight, grads, second = (x.chunk(ranks, 1)[rank].contiguous() for x in (weight, grads, second))
    if listed:
        rows = ngrams.no_gradients(weight, 20)
        if fill:
            rows.grads[ngrams.enlist_reference(pending.int(), rows).long()] = grads[pending]
        grads = rows
    return ngrams.TableState(weight, grads, second, last, torch.tensor(7.0 * fill), torch.tensor(True))


def pieces_of(trainers, monkeypatch):
    """A checkpoint of these ranks that was never on a disk."""
    tensors = {}
    for trainer in trainers:
        tensors |= checkpoint.copy_state(trainer, 3).tensors
    monkeypatch.setattr(checkpoint, "read_tensors", lambda path: tensors)
    index = {"step": 3, "ranks": len(trainers), "files": {"all": 0}}
    return tensors, checkpoint.Found(ROOT, index)


@pytest.mark.parametrize("dtype, listed", [(torch.float32, False), (torch.bfloat16, True)])
def test_state_survives_other_numbers_of_ranks(monkeypatch, dtype, listed):
    """From 1 rank to 2, 4 and 1 again: every bit of it, mantissas and gradients included."""
    monkeypatch.setattr(checkpoint, "PART", 20)
    trainers = [made_up_trainer(0, 1, dtype, listed, fill=True)]
    first, found = pieces_of(trainers, monkeypatch)
    assert first["tables/0/average@0"].any() and "scalars/0/average@0" not in first
    for ranks in (2, 4, 1):
        trainers = [made_up_trainer(rank, ranks, dtype, listed, fill=False) for rank in range(ranks)]
        for trainer in trainers:
            assert checkpoint.restore(trainer, found) == 3
        tensors, found = pieces_of(trainers, monkeypatch)
    assert tensors.keys() == first.keys()
    for name, x in first.items():
        if "pending" not in name:
            assert torch.equal(tensors[name], x), name
    orders = [x["rows/pending rows of rank 0"].argsort() for x in (first, tensors)]
    for field in ("rows", "grads"):
        name = f"rows/pending {field} of rank 0"
        assert torch.equal(first[name][orders[0]], tensors[name][orders[1]])
    if listed:
        table = trainers[0].optimizer.shards["rows"].table.gradients
        rows = table.rows[1:1 + table.count]
        assert torch.equal(table.place[rows.long()], torch.arange(1, 10).int())


def test_columns_that_were_moved_at_different_times_are_brought_to_one(monkeypatch):
    """A rank whose columns had no gradient has not noted an update. Joined, their mean squares shrink."""
    trainers = [made_up_trainer(rank, 2, torch.float32, False, fill=True) for rank in range(2)]
    before = [trainer.optimizer.shards["rows"].table for trainer in trainers]
    before[1].last[3] = 1.0
    _, found = pieces_of(trainers, monkeypatch)
    joined = made_up_trainer(0, 1, torch.float32, False, fill=False)
    checkpoint.restore(joined, found)
    table = joined.optimizer.shards["rows"].table
    assert table.last[3] == 3.0 and torch.equal(table.second[:, :2], before[0].second)
    torch.testing.assert_close(table.second[3, 2:], before[1].second[3] * 0.99 ** 2)
    assert torch.equal(table.second[6, 2:], before[1].second[6])


# ---- What is refused

@pytest.mark.parametrize("edit, flags, said", [
    ("truncate", [], "rank0-00001.safetensors: truncated or missing; resume from another one"),
    ("foreign", [], "index.json: not of a readable-speedrun-checkpoint; another program wrote it"),
    ("newer", [], "index.json: version 2 of readable-speedrun-checkpoint, this program reads up to 1"),
    ("remove", [], "holds no checkpoint"),
    ("", ["--seed", "5"], "its --seed was 0, here it is 5; give the same settings"),
    ("older", ["--extra_samples", "8"], "its --extra_samples was 0, here it is 8; give the same settings"),
    ("", ["--lr_scale", "1,1,2"], "its stages were others; give the same settings"),
    ("", ["--runs", "2"], "take one run at a time"),
    ("", ["--checkpoint", "{kept}", "--checkpoint_every", "3"], "holds step-0000007, which is further; go"),
    ("", ["--checkpoint_every", "3"], "give a folder and a number of steps"),
])
def test_a_bad_checkpoint_is_refused_in_one_line(runs, shards, tmp_path, edit, flags, said):
    folder = shutil.copytree(runs / "kept-1/step-0000003", tmp_path / "step-0000003")
    index = folder / "index.json"
    if edit == "truncate":
        file = folder / "rank0-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-9])
    elif edit == "remove":
        index.unlink()
    elif edit:
        old, new = {"foreign": ("readable", "other"), "newer": ('"version": 1', '"version": 2'),
                    "older": ('"extra_samples": 0,', "")}[edit]
        assert old in (text := index.read_text())
        index.write_text(text.replace(old, new))
    flags = [*SHORTER, "--data_path", str(shards), "--resume", str(tmp_path),
             *(word.format(kept=runs / "kept-1") for word in flags)]
    with pytest.raises(UserError) as error:
        checkpoint.find(train_gpt.parse(["--preset", "cpu", *flags])[0])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_may_change_when_a_run_goes_on(runs, shards):
    """Settings that say nothing of what a step computes; and all of them are settings."""
    assert {f.name for f in fields(train_gpt.Config)} > checkpoint.FREE
    flags = ["--preset", "cpu", *SHORTER, "--data_path", str(shards), "--resume", str(runs / "kept-1"),
             "--doctor", "true", "--deterministic", "true", "--val_tokens", "512", "--save="]
    assert checkpoint.find(train_gpt.parse(flags)[0]).step == 7


def test_one_command_begins_and_goes_on(runs, config, tmp_path):
    """As a job that is started again needs. Without `--resume` the folder of another run is not taken."""
    config = replace(config, checkpoint=str(tmp_path), checkpoint_every=1)
    assert checkpoint.find(config) is None
    assert checkpoint.find(replace(config, resume=f"{tmp_path}/")) is None
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.find(replace(config, resume=str(tmp_path / "other")))
    shutil.copytree(runs / "kept-1/step-0000003", tmp_path / "step-0000003")
    with pytest.raises(UserError, match="holds step-0000003, which is further; go on from it with --resume"):
        checkpoint.find(config)
    config = train_gpt.parse(["--preset", "cpu", *SHORTER, "--checkpoint", str(tmp_path), "--resume",
                              str(tmp_path), "--checkpoint_on_stop", "true"])[0]
    assert checkpoint.find(config).step == 3


class Nothing(TorchDispatchMode):
    """No operation of torch happens inside."""

    def __torch_dispatch__(self, function, *_):
        pytest.fail(f"{function} ran")


def test_without_a_folder_there_is_nothing(config):
    """No operation, no thread, no handler of signals, and no word to other ranks: there is no `world`."""
    trainer = SimpleNamespace(config=config, world=None, schedule=range(8))
    before = threading.active_count(), *map(signal.getsignal, (signal.SIGTERM, signal.SIGINT))
    with Nothing(), checkpoint.Keeper(trainer, None) as keeper:
        for steps_done in range(1, 9):
            keeper.after(steps_done)
        during = threading.active_count(), *map(signal.getsignal, (signal.SIGTERM, signal.SIGINT))
    assert during == before


@pytest.mark.parametrize("pending", [False, True])
def test_what_a_copy_takes_of_the_device_is_known_before(config, pending):
    """All that `copy_state` makes, but for rows of the table, which go to the host, and single numbers."""
    config = replace(config, checkpoint="x", checkpoint_every=3 if pending else 2, average_steps=2)
    trainer = train_gpt.Trainer(config, train_gpt.World())
    tensors = checkpoint.copy_state(trainer, config.checkpoint_every).tensors
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for name, x in tensors.items()
                if not name.startswith("n-gram table")}
    counted = checkpoint.copied_bytes(trainer.model, trainer.optimizer, config)
    assert counted == pytest.approx(sum(storages.values()), rel=0.02)
    assert checkpoint.copied_bytes(trainer.model, trainer.optimizer, replace(config, checkpoint="")) == 0


def test_only_the_newest_two_are_kept(tmp_path, config, monkeypatch):
    config = replace(config, checkpoint=str(tmp_path), checkpoint_every=1)
    trainer = made_up_trainer(0, 1, torch.float32, False, fill=True)
    trainer.config, trainer.world.barrier = config, lambda: None
    (tmp_path / "step-0000009.part").mkdir()
    for name in ("step-0000004.old", "step-1.part", "step-by-step"):        # not ours
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").touch()
    with checkpoint.Keeper(trainer, train_gpt.RunLog("", False)) as keeper:
        for steps_done in range(1, 5):
            keeper.after(steps_done)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-0000003", "step-0000004", "step-0000004.old", "step-1.part", "step-by-step"]
    for bad in (trainer.optimizer.finite, next(iter(trainer.optimizer.shards.values())).own_weights):
        kept = bad.clone()
        bad.fill_(torch.nan if bad.is_floating_point() else False)
        with pytest.raises(LogError, match="not whole: .* a loss or a weight is not finite"):
            with keeper:
                keeper.after(5)
        bad.copy_(kept)
    monkeypatch.setattr(checkpoint.TensorFiles, "flush", lambda _: open("/dev/full", "w").write("x" * 99999))
    with pytest.raises(LogError, match="the disk is full"):
        with keeper:
            keeper.after(6)
    # A run that a signal stopped does not advise to go on from what could not be written.
    trainer.config = keeper.config = replace(config, checkpoint_on_stop=True)
    with pytest.raises(LogError, match="the disk is full"):
        with keeper:
            keeper.stopped = True
            keeper.after(7)
    assert checkpoint.find(replace(config, resume=str(tmp_path))).step == 4
