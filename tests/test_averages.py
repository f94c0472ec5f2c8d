"""Averages of the weights: against plain forms, on the clock's side of the last step, and off by default."""
from dataclasses import replace

import torch

import train_gpt
from kernels.optimizer import Averaged, Averages
from records.run.settings import change


def test_averages_against_a_plain_form():
    """They begin with the weights, follow every second step, and rows of the mixture keep their norms."""
    torch.manual_seed(0)
    weight, bits = torch.randn(4, 6, 8), torch.ones(4, 6, 8, dtype=torch.int16)
    averages = Averages([Averaged(weight, bits, 10 / 9)], total=20, last=9, every=2, share=0.7, width=8)
    averages.state[0].fill_(torch.nan)              # as a warm-up could leave it
    expected = None
    for index in range(20):
        before = weight + 0.1 * torch.randn_like(weight)
        weight.copy_(before)
        if index >= 11 and (index - 11) % 2 == 0:
            expected = before if expected is None else 0.8 * expected + 0.2 * before
        averages.after(index)
        assert torch.equal(weight, before) == (index < 19) and bits.all() == (index < 19)
    mixed = 0.3 * before + 0.7 * expected
    mixed *= before.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(weight, mixed)


def test_without_averages_nothing_is_kept_and_nothing_changes():
    weight = torch.ones(2, 8)
    averages = Averages([Averaged(weight, None, 1.0)], total=3, last=0, every=1, share=0.7, width=8)
    for index in range(3):
        averages.after(index)
    assert averages.state == [] and (weight == 1).all()


def test_averages_of_more_steps_than_there_are_are_of_all():
    weight = torch.ones(2, 8)
    averages = Averages([Averaged(weight, None, 1.0)], total=2, last=9, every=1, share=0.5, width=8)
    averages.after(0)
    assert torch.equal(averages.state[0], weight)


def test_a_run_ends_with_the_mixture(config):
    """All steps are the same; after the last one the groups with a time constant have other weights."""
    ends, config = [], change(config, micro_batches=2, batch_tokens=(128, 256, 256))
    for steps in (0, 64):
        trainer = train_gpt.Trainer(replace(config, average_steps=steps, average_every=1), train_gpt.World())
        losses = [trainer.step(step, trainer.loader.batches(step.index)).item() for step in trainer.schedule]
        shards = trainer.optimizer.shards.items()
        ends.append((losses, {name: shard.own_weights.clone() for name, shard in shards
                              if not isinstance(shard, train_gpt.RowAdam)}))
    (plain, weights), (averaged, mixed) = ends
    assert plain == averaged
    changed = {name for name, weight in weights.items() if not torch.equal(weight, mixed[name])}
    assert changed == {"QKV", "O", "mlp", "head"}


def test_the_warm_up_leaves_no_average(config):
    """A checkpoint before the averages begin would keep what it has left, and fail at a NaN."""
    config = change(config, micro_batches=2, batch_tokens=(128, 256, 256), average_steps=2)
    trainer = train_gpt.Trainer(config, train_gpt.World())
    trainer.rehearse()
    assert trainer.optimizer.averages.state and not any(x.any() for x in trainer.optimizer.averages.state)
