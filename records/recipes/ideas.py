"""Ideas that are not in the program: each changes it from outside, so that whole runs can try them.

    python -m records.recipes.ideas pinned_rows --preset corpus --steps 1400
    torchrun --standalone --nproc_per_node=2 -m records.recipes.ideas pinned_rows,four_scores --preset corpus

The first word names ideas, with commas between; the rest is train_gpt.py's command line. The log gives such a
run other sources than the program's, so that no record can be made of it. What came of them:
records/ideas.md.
"""
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

import train_gpt
from data.canonical import gpt2_never
from data.classes import gpt2_classes
from data.scoring import other_texts
from kernels.optimizer import Master, read_master, write_master
from records.run import log
from records.run.ending import EXPECTED, exit_status, leave
from records.run.settings import UserError
from records.run.sources import project_sources

Patch = Callable[[object, str, object], None]   # as setattr
PINNED_FROM = 0.3       # share of the steps
SHARED = "value tables", "head", "embedding"    # groups whose tokens share updates


@cache
def classes_on(device: torch.device) -> Tensor:
    """The class of each of GPT-2's tokens. The first call is no part of a graph, which could not copy it."""
    return torch.from_numpy(gpt2_classes()).to(device)


def hold(master: Master, pinned: Tensor, active: Tensor) -> None:
    """Give rows the norms `pinned` (matrices, rows, 1) again; unless `active` (0-dim), keep theirs there."""
    value = read_master(master)
    norm = value.norm(dim=-1, keepdim=True)
    # A warm-up has active steps before any norm was kept.
    target = torch.where((active > 0) & (pinned > 0), pinned, norm)
    pinned.copy_(target)
    write_master(master, value * (target / norm.clamp_min(1e-12)))


def pinned_rows(patch: Patch) -> None:
    """Rows of NorMuon's matrices keep the norm that they have at 30% of the run, and decay no more.

    After Hyperball (arXiv 2606.16899).
    """
    class Pinned(train_gpt.NorMuon):
        def __init__(self, group: train_gpt.Group, *given):
            decay = torch.tensor(group.decay, device=group.params[0].device)
            super().__init__(replace(group, decay=decay), *given)
            self.decay, self.active = group.decay, torch.zeros_like(decay)
            self.pinned = decay.new_zeros(*self.weight.view(self.shape).shape[:2], 1)
            self.hold = torch.compile(hold) if decay.is_cuda and self.config.compile else hold

        def update(self, ops: train_gpt.Ops, finite: Tensor, lr: Tensor, momentum_beta: Tensor) -> None:
            self.group.decay.copy_((1 - self.active) * self.decay)
            super().update(ops, finite, lr, momentum_beta)
            halves = (x if x is None else x.view(self.shape) for x in (self.weight, self.mantissa_bits))
            self.hold(Master(*halves), self.pinned, self.active)

    taken = train_gpt.Trainer.step

    def step(self, now: train_gpt.Step, batches: list) -> Tensor:
        for shard in self.optimizer.shards.values():
            if isinstance(shard, Pinned):
                shard.active.fill_(now.index >= PINNED_FROM * self.config.steps)
        return taken(self, now, batches)

    patch(train_gpt, "NorMuon", Pinned)
    patch(train_gpt.Trainer, "step", step)


def shared_values(patch: Patch) -> None:
    """Tokens that differ in case, accents or a leading space have one row of each value embedding."""
    forward, attend = train_gpt.GPT.forward, train_gpt.GPT.attend

    def sorting_forward(self, batch: train_gpt.Batch, *given) -> tuple[Tensor, Tensor]:
        self.by_class = self.sort(classes_on(batch.tokens.device)[batch.tokens])
        return forward(self, batch, *given)

    def attend_by_class(self, i: int, stream, context: train_gpt.Context) -> Tensor:
        return attend(self, i, stream, context._replace(by_token=self.by_class))

    patch(train_gpt.GPT, "forward", sorting_forward)
    patch(train_gpt.GPT, "attend", attend_by_class)


def shared_updates(patch: Patch) -> None:
    """Half of a token's update of embedding, head and value embeddings is that of its class of tokens.

    A class differs in case, accents or a leading space alone. Its gradient is the sum of its tokens', and has
    moments of its own. On one rank only.
    """
    class Sharing(train_gpt.Adam):
        def __init__(self, group: train_gpt.Group, config: train_gpt.Config, world: train_gpt.World, *given):
            super().__init__(group, config, world, *given)
            self.rows, self.moments = None, []
            if group.name in SHARED:
                if world.size > 1:
                    raise UserError("shared_updates runs on one rank")
                vocabulary, width = group.params[0].shape
                self.rows = torch.arange(vocabulary, device=world.device)
                classes = classes_on(world.device)
                self.rows[:len(classes)] = classes
                self.moments = [torch.zeros_like(x) for x in (self.momentum, self.second, self.steps)]

        def update(self, ops: train_gpt.Ops, finite: Tensor, lr: Tensor, momentum_beta: Tensor) -> None:
            if self.rows is None:
                return super().update(ops, finite, lr, momentum_beta)
            # Of each table of the group the gradients (vocabulary, width).
            tables = self.grad.view(len(self.group.params), len(self.rows), -1)
            summed = torch.zeros_like(tables).index_add_(1, self.rows, tables)[:, self.rows].flatten()
            rule = self.group.rule(finite, lr / 2, self.config.cautious)
            master, own = Master(self.weight, self.mantissa_bits), (self.momentum, self.second, self.steps)
            for grad, moments in ((self.grad, own), (summed, self.moments)):
                ops.adam_update(master, grad, *moments, rule, self.group.betas)
            self.grads.zero_()

        def state(self) -> list[Tensor]:
            return [*super().state(), *self.moments]

    patch(train_gpt, "Adam", Sharing)


def four_scores(patch: Patch) -> None:
    """Score the trained model with and without `--canonical`, in bfloat16 and with `--val_fp8`."""
    train = train_gpt.train

    def train_and_score(trainer: train_gpt.Trainer, *given) -> train_gpt.Report:
        report, model, config = train(trainer, *given), trainer.model, trainer.config
        step, never = trainer.schedule.validation(len(trainer.schedule)), model.never
        texts = [*other_texts(trainer.text, config.score, *trainer.chunks)]
        for canonical in (True, False):
            for in_fp8 in (True, False):
                model.config = replace(config, val_fp8=in_fp8)
                model.never = gpt2_never(config.padded_vocab, model.device) if canonical else None
                losses = {"val": trainer.validate(step)} | {
                    text.name: trainer.validate(step, text) for text in texts}
                report.lines.append(f"canonical {canonical}, val_fp8 {in_fp8}: " + ", ".join(
                    f"{name} {loss:.4f}" for name, loss in losses.items()))
        model.config, model.never = config, never
        return report

    patch(train_gpt, "train", train_and_score)


IDEAS = {idea.__name__: idea for idea in (pinned_rows, shared_values, shared_updates, four_scores)}


def apply(names: list[str], patch: Patch) -> None:
    """Change the program by these ideas. UserError for one that is not there."""
    if unknown := [name for name in names if name not in IDEAS]:
        raise UserError(f"no idea {unknown[0]!r}; there are {', '.join(IDEAS)}")
    for name in names:
        IDEAS[name](patch)
    sources = project_sources() | {"ideas": ",".join(names).encode()}
    patch(log, "project_sources", lambda: sources)


def main() -> int:
    """As `train_gpt.main`, behind the names of ideas."""
    names, *words = sys.argv[1:] or [""]
    try:
        apply(names.split(","), setattr)
    except EXPECTED as error:
        return exit_status(error, 0, "records.recipes.ideas")
    return train_gpt.main(words)


if __name__ == "__main__":
    leave(main())
