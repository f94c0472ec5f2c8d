"""The optimizer: NorMuon and Adam against plain forms, exact master weights, any number of ranks, warm-up."""
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, process

import train_gpt
from kernels import attention, embedding, mlp, ngrams
from kernels import optimizer as updates
from kernels.optimizer.shared_updates import SHARES
from kernels.ranks.collectives import Collectives
from kernels.ranks.timetable import UPDATE
from kernels.ranks.world import RankError, hash_bits
from records.run import settings

REFERENCES = train_gpt.references()


@pytest.fixture
def config(config):
    """With every kind of step, in small ones."""
    return settings.change(config, micro_batches=2, batch_tokens=(128, 256, 256))


def orthogonalise(x):
    return updates.newton_schulz_reference(x, updates.polar_express(5), "frobenius")


def plain_adam(p, grads, lr, betas, decay, cautious):
    """Textbook Adam on a list of gradients; decay as a share of the weight, times lr."""
    p, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        update = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + 1e-10)
        agree = (update * p > 0) if cautious else torch.ones_like(p)
        p = p - lr * (update + decay * p * agree)
    return p


def plain_normuon(p, grads, lr, betas, decay, cautious, neuron_norm, slow):
    """NorMuon of one matrix, a row a neuron, a step at a time."""
    (slow_share, slow_beta), p, v = slow, p.clone(), torch.zeros(len(p))
    m = s = torch.zeros_like(p)
    for g in grads:
        m = betas[0] * m + (1 - betas[0]) * g
        s = slow_beta * s + (1 - slow_beta) * g
        past = (1 - slow_share) * m + slow_share * s
        update = orthogonalise(((1 - betas[0]) * g + betas[0] * past)[None])[0]
        if neuron_norm:
            v = betas[1] * v + (1 - betas[1]) * update.pow(2).mean(1)
            scaled = update / v.sqrt()[:, None]
            update = scaled * update.norm() / scaled.norm()
        agree = (update * p > 0) if cautious else torch.ones_like(p)
        p = p - lr * (update + decay * p * agree)
    return p


def update(shard, lr: float, momentum_beta: float, slow_share: float = 0.0) -> None:
    """One update from the gradients that stand in the shard's buffer."""
    finite, *numbers = map(torch.tensor, (True, lr, momentum_beta, slow_share))
    with torch.no_grad():
        shard.update(REFERENCES, finite, numbers[0], updates.Rates(*numbers[1:], shard.config.slow_beta))


def run_shard(group, config, grads, momentum=0.9, lr=0.7, slow_share=0.0):
    """A group's parameters after updates from these gradients."""
    shard = group.algorithm(group, config, train_gpt.World())
    for step in grads:
        for p, g in zip(group.params, step):
            p.grad.copy_(g)
        update(shard, lr, momentum, slow_share)
    return [p.detach() for p in group.params]


@pytest.mark.parametrize("betas", [(0.8, 0.95), (0.0, 0.95)])
@pytest.mark.parametrize("cautious", [True, False])
def test_adam_against_its_textbook(config, cautious, betas):
    torch.manual_seed(0)
    config = replace(config, cautious=cautious)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (2, 2, 2))]
    before = [p.detach().clone() for p in params]
    grads = [[torch.randn_like(p) for p in params] for _ in range(4)]
    group = train_gpt.Group("some", params, ["embedding"] * 3, 0.3, betas, 0.02 * 5.0, train_gpt.Adam)
    for i, p in enumerate(run_shard(group, config, grads)):
        mine = [step[i] for step in grads]
        expected = plain_adam(before[i], mine, 0.7 * 0.3, betas, 0.7 * 0.02 * 5.0, cautious)
        torch.testing.assert_close(p, expected, atol=1e-5, rtol=1e-5)


def test_tokens_with_a_feature_in_common_move_together(config, monkeypatch):
    """By a textbook: each row is a sum of its own and three of its features, with updates of their own."""
    torch.manual_seed(0)
    features = np.stack([np.arange(50) // 2, np.arange(50) // 5, np.zeros(50, int)], 1)
    monkeypatch.setattr(train_gpt, "gpt2_features", lambda: features)
    params = [torch.nn.Parameter(torch.randn(60, 16)) for _ in range(2)]
    before = [p.detach().clone() for p in params]
    grads = [[torch.randn_like(p) for p in params] for _ in range(4)]
    group = train_gpt.Group("some", params, ["embedding"] * 2, 0.3, (0.8, 0.95), 0.0, train_gpt.Adam)
    alone = run_shard(replace(group, params=[torch.nn.Parameter(x.clone()) for x in before]), config, grads)
    together = run_shard(replace(group, shared=True), config, grads)
    for i, p in enumerate(before):
        wanted = p + (1 - sum(SHARES)) * (alone[i] - p)
        for share, column in zip(SHARES, features.T):
            # Rows 50 to 59 are of no token: all of their update is their own.
            for rows in [*map(np.flatnonzero, column == np.unique(column)[:, None]), *range(50, 60)]:
                whole = [grad[i][rows].reshape(-1, 16).sum(0) for grad in grads]
                start = torch.zeros(16)
                wanted[rows] += share * plain_adam(start, whole, 0.7 * 0.3, (0.8, 0.95), 0.0, False)
        torch.testing.assert_close(together[i], wanted, atol=1e-5, rtol=1e-4)


def test_adam_keeps_its_state_from_what_is_not_finite():
    """So does Adam for the features that tokens share."""
    weight, first, second = torch.ones(3), torch.ones(3), torch.ones(3)
    steps, lr, decay = torch.tensor(4.0), torch.tensor(1.0), torch.tensor(0.0)
    rule = updates.Rule(torch.tensor(False), lr, decay, True)
    grad = torch.full((3,), torch.nan)
    updates.adam_update_reference(
        updates.Master(weight, None), grad, first, second, steps, rule, (0.9, 0.99))
    assert steps == 4 and (weight == 1).all() and first.isfinite().all() and second.isfinite().all()
    updates.feature_update_reference(grad, first, second, steps, rule.finite, (0.9, 0.99))
    assert first.isfinite().all() and second.isfinite().all()


@pytest.mark.parametrize("height, length, rates", [(8, 32, [1.0, 1.0]), (8, 24, [1.0, 3.0]),
                                                   (6, 24, [1.0, 3.0]), (0, 32, [2.0, 4.0])])
@pytest.mark.parametrize("cautious, neuron_norm, slow_share",
                         [(True, True, 0.0), (False, True, 0.3), (True, False, 0.3)])
def test_normuon_against_its_textbook(config, cautious, neuron_norm, slow_share, height, length, rates):
    """Groups of stacks of square and of wide matrices and one of tall ones, each matrix with its own rate."""
    torch.manual_seed(0)
    config = replace(config, cautious=cautious, neuron_norm=neuron_norm, slow_share=slow_share,
                     slow_beta=0.75)
    params = [torch.nn.Parameter(torch.randn(length, 8)) for _ in range(2)]
    before = [p.detach().clone() for p in params]
    grads = [[torch.randn_like(p) for p in params] for _ in range(3)]
    group = train_gpt.Group("bank", params, ["layer 0", "layer 1"], 0.1, (0.0, 0.9), 0.1 * 3.0,
                            train_gpt.NorMuon, matrix_lr=rates, height=height)
    for i, p in enumerate(run_shard(group, config, grads, slow_share=slow_share)):
        for row in range(0, length, height or length):
            one = slice(row, row + (height or length))
            mine = [step[i][one] for step in grads]
            expected = plain_normuon(before[i][one], mine, 0.7 * 0.1 * rates[i], (0.9, 0.9), 0.7 * 0.1 * 3.0,
                                     cautious, neuron_norm, (slow_share, 0.75))
            torch.testing.assert_close(p[one], expected, atol=2e-5, rtol=1e-4)


def test_bf16_weights_follow_float32_exactly(config):
    """A bf16 group and a float32 group with the same master and gradients stay the same to the last bit."""
    torch.manual_seed(0)
    start, grads = torch.randn(50).bfloat16(), [torch.randn(50).bfloat16() for _ in range(20)]
    wide, narrow = (torch.nn.Parameter(start.to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    group = train_gpt.Group("some", [wide], ["embedding"], 1e-3, (0.8, 0.95), 0.0, train_gpt.Adam)
    run_shard(group, config, [[g.float()] for g in grads])
    shard = train_gpt.Adam(replace(group, params=[narrow]), config, train_gpt.World())
    for g in grads:
        narrow.grad.copy_(g)
        update(shard, 0.7, 0.9)
    master = updates.Master(shard.own_weights, shard.mantissa_bits)
    assert torch.equal(updates.read_master(master)[:50], wide.detach())


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("matrices", [1, 7, 8, 9, 19])
def test_shards_cover_every_matrix_once(config, ranks, matrices):
    """Together the ranks update what one rank does, with padding if need be; one matrix a rank a round."""
    torch.manual_seed(0)
    start, grads = ([torch.randn(12, 4) for _ in range(matrices)] for _ in range(2))
    stops = [f"layer {i}" for i in range(matrices)]

    def updated(world) -> list[torch.Tensor]:
        """What each round's all-gather takes from this rank."""
        params = [torch.nn.Parameter(p.clone()) for p in start]
        group = train_gpt.Group("bank", params, stops, 0.1, (0.0, 0.9), 0.1, train_gpt.NorMuon,
                                matrix_lr=[1.0 + i for i in range(matrices)],
                                height=4 * (matrices % 2 == 0))
        shard = train_gpt.NorMuon(group, config, world)
        for p, g in zip(params, grads):
            p.grad.copy_(g)
        for (whole, own), (_, stop, _) in zip(shard.places, group.rounds(world.size), strict=True):
            assert whole.stop - whole.start == world.size and own.stop - own.start == 1
            assert stop == stops[whole.start]
            shard.own_grads[own].copy_(shard.all_grads[whole].chunk(world.size)[world.rank])
        update(shard, 1.0, 0.9)
        return [shard.own_weights[own] for _, own in shard.places]

    whole = torch.cat(updated(SimpleNamespace(rank=0, size=1)))
    worlds = [SimpleNamespace(rank=rank, size=ranks, collectives=Collectives(ranks)) for rank in range(ranks)]
    gathered = torch.cat([part for one in zip(*map(updated, worlds)) for part in one])
    torch.testing.assert_close(gathered[:matrices], whole, atol=1e-5, rtol=1e-5)
    assert not gathered[matrices:].any()


@pytest.fixture(scope="module")
def ranks_results(shards, tmp_path_factory):
    """What 1, 2, 4 and 8 gloo ranks hold after each of 6 steps of the same 8 micro-batches.

    By the number of ranks, the rank, and whether collectives run under computation. The steps are of every
    kind. Queries and keys are narrower than values, so that the matrices of attention and of the MLPs have
    different shapes.
    """
    out = tmp_path_factory.mktemp("ranks")
    flags = ["--preset", "cpu", *TINY, "--qk_dim", "16", "--ngram_rows", "512", "--batch_tokens",
             "256,384,512", "--steps", "5", "--extra_steps", "1", "--data_path", str(shards)]
    result = process(sys.executable, "tests/rank_worker.py", str(out), "6", *flags)
    assert result.returncode == 0, result.stderr + "".join(path.read_text() for path in out.glob("*.txt"))
    return {(ranks, rank, overlap): result for ranks in (1, 2, 4, 8) for rank in range(ranks)
            for overlap, result in torch.load(out / f"{ranks}-{rank}.pt").items()}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_make_the_update_of_one_process(ranks_results, ranks):
    alone, together = ranks_results[1, 0, True], ranks_results[ranks, 0, True]
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert together["validation"] == pytest.approx(alone["validation"], rel=1e-4)
    for name, expected in alone["parameters"][0].items():   # After one update rounding has not yet grown.
        found = together["parameters"][0][name]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=name)
    for step in range(6):
        for name, expected in alone["parameters"][step].items():
            distance = (together["parameters"][step][name] - expected).norm()
            assert distance / expected.norm().clamp(min=1e-6) < 1e-2, (step, name)


@pytest.mark.parametrize("ranks, overlap", [(2, True), (4, True), (8, True), (4, False)])
def test_all_ranks_hold_the_same_parameters(ranks_results, ranks, overlap):
    first = ranks_results[ranks, 0, overlap]["parameters"]
    for rank in range(1, ranks):
        for mine, theirs in zip(first, ranks_results[ranks, rank, overlap]["parameters"], strict=True):
            assert mine.keys() == theirs.keys() and len(mine["ngrams.table"]) == 512
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_overlapped_collectives_change_no_bit(ranks_results, ranks):
    """Of losses and weights after every step: sums start in the backward pass, gathers end in the forward."""
    overlapped, simple = (ranks_results[ranks, 0, overlap] for overlap in (True, False))
    assert overlapped["losses"] == simple["losses"] and overlapped["validation"] == simple["validation"]
    for a, b in zip(overlapped["parameters"], simple["parameters"], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_check_of_ranks_finds_a_flipped_bit(trainer):
    """Here the other two ranks have the same weights, until one has other ones of the MLPs."""
    class Three(Collectives):
        def all_gathered(self, hashes: torch.Tensor) -> torch.Tensor:
            return torch.cat([good, hashes, good])

    optimizer, good = trainer.optimizer, None
    trainer.world.collectives = Three(3)
    groups = [shard for shard in optimizer.shards.values() if isinstance(shard, train_gpt.Shard)]
    good = torch.stack([hash_bits(shard.all_weights) for shard in groups])[None]
    optimizer.check_ranks()
    bits = optimizer.shards["mlp"].all_weights.view(torch.int32)
    bits[3, 5, 7] ^= 1 << 9
    with pytest.raises(RankError, match="group .mlp. of rank 1 differ from those of the other"):
        optimizer.check_ranks()


@pytest.mark.parametrize("x", [torch.randn(5), torch.randn(3, 7).bfloat16(), torch.zeros(64, 2)])
def test_a_hash_changes_with_every_bit(x):
    """And with the order of words."""
    seen = {hash_bits(x).item()}
    for place in range(8 * x.numel() * x.itemsize):
        flipped = x.clone()
        flipped.view(-1).view(torch.uint8)[place // 8] ^= 1 << place % 8
        seen.add(hash_bits(flipped).item())
    assert len(seen) == 8 * x.numel() * x.itemsize + 1
    words = torch.arange(4)
    assert hash_bits(words) != hash_bits(words.flip(0))


def test_a_hash_in_pieces_is_that_of_the_whole(monkeypatch):
    x = torch.randn(1001).bfloat16()
    whole = hash_bits(x)
    for piece in (1, 7, 250):
        monkeypatch.setattr("kernels.ranks.world.PIECE", piece)
        assert hash_bits(x) == whole


def everything(trainer) -> list[torch.Tensor]:
    optimizer = trainer.optimizer
    return [*(x for shard in optimizer.shards.values() for x in state_of(shard)), optimizer.finite.clone()]


def state_of(shard) -> list[torch.Tensor]:
    """All that a step changes. Rows that have a gradient are in their own order: a GPU lists them in any."""
    if isinstance(shard, train_gpt.RowAdam) and isinstance(shard.table.gradients, ngrams.RowGradients):
        gradients = shard.table.gradients
        others = [x for x in shard.state() if not any(x is y for y in gradients)]
        rows, order = gradients.rows[1:1 + gradients.count].sort()
        listed = rows, gradients.grads[1 + order], gradients.place.nonzero()
        return [*(x.clone() for x in others), *listed, gradients.grads[1 + len(rows):].any()]
    return [x.clone() for x in shard.state()]


def test_warm_up_leaves_no_trace(config):
    """The first steps after it are those without it, bit for bit: losses, weights, the optimizer's state."""
    results = []
    for warm in (False, True):
        trainer = train_gpt.Trainer(config, train_gpt.World())
        random = torch.get_rng_state()
        if warm:
            trainer.rehearse()
        assert torch.equal(random, torch.get_rng_state())
        losses = [trainer.step(s, trainer.loader.batches(s.index)).item() for s in list(trainer.schedule)[:3]]
        results.append((losses, everything(trainer)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_a_warm_up_that_was_not_finite_does_not_stop_the_run(trainer):
    snapshot = updates.snapshot(trainer.optimizer.state())
    trainer.optimizer.finite &= torch.tensor(False)
    updates.restore(trainer.optimizer.state(), snapshot)
    assert trainer.optimizer.finite


def test_after_a_loss_that_is_not_finite_no_step_changes_a_weight(trainer):
    before, finite = [p.detach().clone() for p in trainer.model.bank], trainer.model.scalars.detach().clone()
    trainer.model.scalars.data.fill_(torch.nan)
    for i in range(2):
        loss = trainer.step(trainer.schedule.at(i), trainer.loader.batches(i))
        assert loss.isfinite() == (i == 1) and not trainer.optimizer.finite
        trainer.model.scalars.data.copy_(finite)
    assert all(map(torch.equal, trainer.model.bank, before))


def test_a_step_hands_its_numbers_to_every_update(trainer, monkeypatch):
    step, seen = trainer.schedule.at(5), []
    for shard in trainer.optimizer.shards.values():
        monkeypatch.setattr(shard, "update", lambda ops, *given: seen.append(given))
    loss = trainer.step(step, trainer.loader.batches(5))
    assert 5 < loss < 6         # nats a token, of an untrained model
    assert step.lr != 1 and len(seen) == len(trainer.optimizer.shards)
    for finite, lr, rates in seen:
        assert finite and lr.item() == pytest.approx(step.lr)
        assert [x.item() for x in rates[:2]] == pytest.approx([step.momentum, step.slow_share])


def test_warm_up_visits_every_kind(trainer, monkeypatch):
    seen = set()
    monkeypatch.setattr(train_gpt.Trainer, "step", lambda self, step, batches: seen.add(step.kind))
    trainer.config, scored, score = replace(trainer.config, val_every=1), [], trainer.model.score
    points = 2 * trainer.validation_points()        # Each kind twice; it is warmed up once.
    monkeypatch.setattr(trainer, "validation_points", lambda: points)
    monkeypatch.setattr(trainer.model, "score", lambda batch, step: (scored.append(step), score(batch, step)))
    trainer.rehearse()
    assert seen == {step.kind for step in trainer.schedule} and len(seen) > 6
    wanted = [trainer.schedule.validation(steps).kind for steps in points]
    kinds = [step.kind for step in scored]
    assert {*kinds} == {*wanted} and len(kinds) == len({*kinds}) < len(wanted)


def test_adam_takes_the_gradients_of_two_steps(trainer):
    head = trainer.optimizer.shards["head"]
    before, mlp = head.all_weights.clone(), trainer.optimizer.shards["mlp"].all_weights.clone()
    trainer.step(trainer.schedule.at(0), trainer.loader.batches(0))
    assert torch.equal(before, head.all_weights) and head.all_grads.any()
    assert not torch.equal(mlp, trainer.optimizer.shards["mlp"].all_weights)
    trainer.step(trainer.schedule.at(1), trainer.loader.batches(1))
    assert not torch.equal(before, head.all_weights) and not head.all_grads.any()


def test_the_row_update_takes_the_rows_of_two_steps(config, monkeypatch):
    """As its reference does, which looks at the gradients of all rows.

    After a warm-up that ends between listing and updating, it does the same to the bit.
    """
    config, results = settings.change(config, batch_tokens=(128, 128, 128)), []
    choose, kernels = train_gpt.choose_ops, {"lookup": embedding.lookup, "row_adam": updates.row_adam}
    for by_row, warm in ((False, False), (True, False), (True, True)):
        changes = kernels if by_row else {"row_adam": updates.row_adam_reference}

        def chosen(*args, changes=changes):
            ops, parts = choose(*args)
            return ops._replace(**changes), parts

        monkeypatch.setattr(train_gpt, "choose_ops", chosen)
        trainer = train_gpt.Trainer(config, train_gpt.World())
        shard = trainer.optimizer.shards["n-gram table"]
        snapshot = updates.snapshot(trainer.optimizer.state())
        gradients = shard.table.gradients
        assert isinstance(gradients, ngrams.RowGradients) == by_row
        if warm:
            trainer.step(trainer.schedule.at(2), trainer.loader.batches(2))
            assert gradients.count
            updates.restore(trainer.optimizer.state(), snapshot)
        assert not by_row or not (gradients.count or gradients.place.any() or gradients.grads.any())
        for step in map(trainer.schedule.at, range(4)):
            trainer.step(step, trainer.loader.batches(step.index))
            if by_row:                      # And every row that is listed has a gradient.
                listed = (gradients.place > 0).sum()
                assert bool(listed) != step.update_adam
                assert gradients.count == listed == gradients.grads.any(1).sum()
        results.append(state_of(shard))
    assert all(torch.equal(kernel, warmed) for kernel, warmed in zip(*results[1:], strict=True))
    (reference, *_), (kernel, *_), _ = results              # the weights
    limit = 1e-3 if kernel.device.type == "cpu" else 5e-2
    assert (kernel - reference).norm() <= limit * reference.norm() > 0


def test_a_non_finite_loss_changes_no_weight(trainer):
    trainer.step(trainer.schedule.at(0), trainer.loader.batches(0))
    names = [name for name, _ in trainer.model.named_parameters()]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    step = trainer.schedule.at(1)
    for p in trainer.model.parameters():
        by_row = p is trainer.model.ngrams.table and trainer.model.ngrams.row_gradients
        (by_row.grads if by_row else p.grad).fill_(torch.nan)
    for loss in (torch.tensor(torch.nan), torch.tensor(1.0)):   # The steps already under way as well.
        trainer.optimizer.begin(step)
        trainer.optimizer.finite &= loss.isfinite().to(trainer.world.device)
        trainer.optimizer.step()
        after = zip(names, trainer.model.parameters(), before, strict=True)
        assert [name for name, p, old in after if not torch.equal(p, old)] == []


def test_validation_does_not_depend_on_the_chunk(config):
    losses = []
    for chunk in (256, 512, 4096):
        trainer = train_gpt.Trainer(replace(config, val_chunk=chunk), train_gpt.World())
        losses.append(trainer.validate(trainer.schedule.validation(0)))
    in_bf16 = torch.cuda.is_available()
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5 if in_bf16 else 1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_step_is_the_eager_one(config):
    """After warm-up both give the same losses, as nearly as two eager runs do. Every kind is replayed."""
    runs = []
    for capture in (False, False, True):
        trainer = train_gpt.Trainer(replace(config, capture=capture, compile=False), train_gpt.World())
        trainer.rehearse()
        assert set(trainer.graphs) == ({step.kind for step in trainer.schedule.kinds()} if capture else set())
        runs.append([trainer.step(s, trainer.loader.batches(s.index)).item() for s in trainer.schedule])
    spread = max(abs(a - b) for a, b in zip(runs[0], runs[1]))
    assert max(abs(a - b) for a, b in zip(runs[0], runs[2])) <= 2 * spread


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPUs have no streams")
def test_runs_of_a_process_have_the_same_streams(config):
    """With new ones a run could record its graphs on what another part takes for a stream beside it.

    Which of torch's 32 they are depends on what else this process has made, and is not looked at.
    """
    world, found = train_gpt.World(), []
    for _ in range(2):
        trainer = train_gpt.Trainer(config, world)
        trainer.rehearse()
        streams = trainer.optimizer.streams | {"": trainer.optimizer.loss_stream}
        found.append({name: stream.cuda_stream for name, stream in streams.items()})
    assert found[0] == found[1] and len(found[0]) == 1 + len(trainer.optimizer.shards)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs, and what waits for them, need a GPU")
def test_timed_steps_neither_wait_for_the_gpu_nor_allocate_from_it(config):
    trainer = train_gpt.Trainer(replace(config, capture=True), train_gpt.World())
    trainer.rehearse()
    steps = list(trainer.schedule)
    ahead = trainer.loader.prefetch(range(len(steps)))      # Room for batches is made off the clock.
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batches in zip(steps, ahead):
            trainer.step(step, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


SUMMED = {"all logits": (1, 0), "sampled": (5, 64)}
IN_FP8 = {"qkv": attention.qkv_fp8, "share_values": ngrams.share_values, "norm_fork": mlp.norm_fork_fp8,
          "feed_forward": mlp.feed_forward_fp8, "mlp_input": mlp.mlp_input_fp8}
KERNELS = {"references": {}, "lookup": {"lookup": embedding.lookup}, "FP8": IN_FP8}


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("kernels, case", [*product(("references", "lookup"), SUMMED),
                                           ("FP8", "all logits")])
def test_gradients_are_complete_when_their_sum_starts(config, monkeypatch, kernels, case):
    """What a reduce-scatter gets, in the middle of the backward pass, is what stands there at its end."""
    index, samples = SUMMED[case]
    trainer = train_gpt.Trainer(settings.change(
        config, batch_tokens=(128, 128, 128), softmax_samples=(samples,)), train_gpt.World())
    model, optimizer = trainer.model, trainer.optimizer
    model.ops = model.ops._replace(**KERNELS[kernels])
    model.fp8 = ("attention", "mlp") if kernels == "FP8" else model.fp8
    step, given, stops = trainer.schedule.at(index), {}, []
    start = optimizer.gradients_complete
    monkeypatch.setattr(optimizer, "gradients_complete", lambda stop: stops.append(stop) or start(stop))
    monkeypatch.setattr(train_gpt.Collectives, "reduce_scatter", lambda self, shard, whole:
                        given.update({whole.data_ptr(): (whole, whole.clone(), stops[-1])}))
    for algorithm in (train_gpt.Adam, train_gpt.NorMuon):       # They would clear the gradients.
        monkeypatch.setattr(algorithm, "update", lambda *_: None)
    trainer.step(step, trainer.loader.batches(index))
    checked = []
    for name, shard in optimizer.shards.items():
        for whole, _ in () if shard.group.replicated else getattr(shard, "places", ()):
            now, early, stop = given[shard.all_grads[whole].data_ptr()]
            assert torch.equal(now, early), (name, stop)
            checked.append((name, stop))
    layers = [f"layer {i}" for i in range(len(config.layers))]
    mlps = [f"mlp {i}" for i in range(len(config.layers))]
    passed = [stop for pair in zip(layers, mlps) for stop in pair]
    assert stops == ["head", *passed[::-1], UPDATE] and step.update_adam
    assert {stop for name, stop in checked if name == "mlp"} == set(mlps)
    assert ("head", UPDATE) in checked
    valued = {layers[i] for i in model.value_index}
    assert {stop for name, stop in checked if name == "value tables"} == valued
