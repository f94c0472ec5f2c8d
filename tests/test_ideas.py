"""Ideas that change the program from outside: each does what it says, and its runs make no record."""
import numpy as np
import pytest
import torch
from conftest import command

import train_gpt
from records.recipes import ideas
from records.run import log
from records.run.settings import UserError, change
from records.run.sources import hash_sources, project_sources


@pytest.fixture
def pairs(monkeypatch):
    """Of the byte vocabulary's 320 rows 2n and 2n + 1 are one class."""
    monkeypatch.setattr(ideas, "gpt2_classes", lambda: (np.arange(257) // 2 * 2).astype(np.int32))
    ideas.classes_on.cache_clear()
    yield
    ideas.classes_on.cache_clear()


def make_trainer(config: train_gpt.Config) -> train_gpt.Trainer:
    return train_gpt.Trainer(config, train_gpt.World())


def test_pinned_rows_keep_their_norm(config, monkeypatch):
    """From 30% of the steps on, also behind a warm-up, which has steps of that part first."""
    ideas.apply(["pinned_rows"], monkeypatch.setattr)
    trainer = make_trainer(change(config, steps=10, extra_steps=2))
    trainer.warm_up()
    norms = []
    for step in trainer.schedule:
        trainer.step(step, trainer.loader.batches(step.index))
        norms.append(torch.stack([matrix.float().norm(dim=1) for matrix in trainer.model.bank[:2]]))
    assert not torch.allclose(norms[1], norms[2], rtol=1e-4)
    for later in norms[4:]:
        torch.testing.assert_close(later, norms[3], rtol=1e-5 if trainer.model.dtype.itemsize == 4 else 1e-2,
                                   atol=0)
    shard = trainer.optimizer.shards["mlp"]
    assert shard.group.decay.item() == 0 < shard.decay


def test_values_of_a_class_are_shared(config, pairs, monkeypatch):
    """No odd row of the value embeddings is read, and all tokens of a class train the even one."""
    ideas.apply(["shared_values"], monkeypatch.setattr)
    trainer = make_trainer(config)
    trainer.model.value_gates.data.fill_(1.0)
    for matrix in trainer.model.bank:
        matrix.data.normal_(std=0.05)
    [batch, *_] = trainer.loader.batches(0)
    trainer.model(batch, trainer.schedule.at(0))[0].backward()
    read = trainer.model.value_tables[0].grad.any(1).nonzero().flatten()
    assert read.tolist() == (batch.tokens // 2 * 2).unique().tolist()


def test_a_class_moves_together(config, pairs, monkeypatch):
    """A row without a gradient moves by half an update where the other row of its class has one."""
    ideas.apply(["shared_updates"], monkeypatch.setattr)
    trainer = make_trainer(change(config, cautious=False, adam_decay=0.0))
    shard = trainer.optimizer.shards["head"]
    before = shard.weight.clone().view(320, -1)
    shard.grad.view(320, -1)[10] = 1.0
    shard.grad.view(320, -1)[300] = 1.0
    one = torch.ones((), device=shard.weight.device)
    shard.update(trainer.optimizer.ops, one.bool(), one, one)
    moved = (shard.weight.view(320, -1) - before)[:, 0].tolist()
    assert moved[11] == pytest.approx(moved[10] / 2, rel=1e-4) and moved[300] == pytest.approx(moved[10])
    assert moved[12] == moved[13] == moved[301] == 0 != moved[10]
    assert len(trainer.optimizer.shards["embedding"].state()) == len(shard.state())


def test_four_scores(config, monkeypatch):
    """With a mask of the tokens from 256 on, and in FP8 where that is; the model stays as it was."""
    ideas.apply(["four_scores"], monkeypatch.setattr)
    never = torch.zeros(320, 40, dtype=torch.uint8)
    never[:, 32:] = 255             # tokens from 256 on
    monkeypatch.setattr(ideas, "gpt2_never", lambda rows, device: never.to(device))
    config = change(config, steps=2, extra_steps=1, epochs=9)
    trainer = make_trainer(config)
    report = train_gpt.train(trainer, log.RunLog("x", enabled=False), {"startup_s": 0.0})
    lines = [line for line in report.lines if line.startswith("canonical ")]
    assert [line.split(":")[0] for line in lines] == [
        f"canonical {mask}, val_fp8 {in_fp8}" for mask in (True, False) for in_fp8 in (True, False)]
    losses = [float(line.split("val ")[1]) for line in lines]
    assert losses[0] != losses[2] and trainer.model.never is None and trainer.model.config is config


def test_a_run_with_an_idea_has_other_sources(monkeypatch):
    """So that `records new` and `check` refuse it."""
    ideas.apply(["pinned_rows"], monkeypatch.setattr)
    assert hash_sources(log.project_sources()) != hash_sources(project_sources())


def test_unknown_ideas_are_refused():
    with pytest.raises(UserError, match="no idea 'x'; there are pinned_rows, shared_values, "):
        ideas.apply(["four_scores", "x"], None)
    done = command("x,y", "--preset", "cpu", program=ideas.main)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "records.recipes.ideas: no idea 'x'" in done.stderr
