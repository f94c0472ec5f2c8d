"""The optimizer: NorMuon and Adam against plain references, exact master weights, any number of ranks, warm-up."""
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, environment

import train_gpt
from kernels.ngrams.row_gradients import RowGradients
from kernels.optimizer import master_weight
from kernels.optimizer.coefficients import polar_express
from kernels.optimizer.master_weight import store_master_weight
from kernels.optimizer.newton_schulz import newton_schulz_reference
from kernels.optimizer.row_adam import row_adam_reference

PLAIN = {f: f for f in (train_gpt.nesterov_momentum, newton_schulz_reference, train_gpt.neuron_update, train_gpt.adam_update)}


def orthogonalise(x):
    return newton_schulz_reference(x, polar_express(5), "frobenius")


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


def plain_normuon(p, grads, lr, betas, decay, cautious, neuron_norm):
    """NorMuon of one matrix, a row a neuron, a step at a time."""
    p, m, v = p.clone(), torch.zeros_like(p), torch.zeros(len(p))
    for g in grads:
        m = betas[0] * m + (1 - betas[0]) * g
        update = orthogonalise(((1 - betas[0]) * g + betas[0] * m)[None])[0]
        if neuron_norm:
            v = betas[1] * v + (1 - betas[1]) * update.pow(2).mean(1)
            scaled = update / v.sqrt()[:, None]
            update = scaled * update.norm() / scaled.norm()
        agree = (update * p > 0) if cautious else torch.ones_like(p)
        p = p - lr * (update + decay * p * agree)
    return p


def run_shard(group, config, grads, momentum=0.9, lr=0.7):
    """The product of a group's `Shard` after these gradients: its parameters."""
    shard = train_gpt.Shard(group, config, train_gpt.World())
    for step in grads:
        for p, g in zip(group.params, step):
            p.grad.copy_(g)
        with torch.no_grad():
            shard.update(PLAIN, torch.tensor(True), torch.tensor(lr), torch.tensor(momentum))
    return [p.detach() for p in group.params]


@pytest.mark.parametrize("betas", [(0.8, 0.95), (0.0, 0.95)])
@pytest.mark.parametrize("cautious", [True, False])
def test_adam_against_reference(config, cautious, betas):
    torch.manual_seed(0)
    config = replace(config, cautious=cautious)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (2, 2, 2))]
    before = [p.detach().clone() for p in params]
    grads = [[torch.randn_like(p) for p in params] for _ in range(4)]
    after = run_shard(train_gpt.Group("some", params, [0] * 3, "adam", 0.3, betas, 5.0, 0.02), config, grads)
    for i, p in enumerate(after):
        expected = plain_adam(before[i], [step[i] for step in grads], 0.7 * 0.3, betas, 0.7 * 0.02 * 5.0, cautious)
        torch.testing.assert_close(p, expected, atol=1e-5, rtol=1e-5)


def test_a_table_rarely_read_has_no_first_moment_and_no_lost_bits(config):
    """Its state is weights, their gradients and mean squares, and the count of updates."""
    table = torch.nn.Parameter(torch.randn(6, 16).bfloat16())
    shard = train_gpt.Shard(train_gpt.Group("table", [table], [0], "adam", 0.3, (0.0, 0.95), 5.0, 0.02), config, train_gpt.World())
    assert sum(x.nbytes for x in shard.state()) == 6 * 16 * (2 + 2 + 4) + 4


@pytest.mark.parametrize("cautious, neuron_norm", [(True, True), (False, True), (True, False)])
def test_normuon_against_reference(config, cautious, neuron_norm):
    """A group of stacks of square matrices and one of tall ones, each matrix with its own rate."""
    torch.manual_seed(0)
    config = replace(config, cautious=cautious, neuron_norm=neuron_norm)
    for squares, length, rates in ((True, 32, [1.0, 1.0]), (True, 24, [1.0, 3.0]), (False, 32, [2.0, 4.0])):
        params = [torch.nn.Parameter(torch.randn(length, 8)) for _ in range(2)]
        before = [p.detach().clone() for p in params]
        grads = [[torch.randn_like(p) for p in params] for _ in range(3)]
        group = train_gpt.Group("bank", params, [0, 1], "normuon", 0.1, (0.0, 0.9), 3.0, 0.1, matrix_lr=rates, squares=squares)
        after = run_shard(group, config, grads)
        for i, p in enumerate(after):
            for rows in (range(0, length, 8) if squares else [0]):
                mine = slice(rows, rows + 8) if squares else slice(0, length)
                expected = plain_normuon(before[i][mine], [step[i][mine] for step in grads], 0.7 * 0.1 * rates[i], (0.9, 0.9),
                                         0.7 * 0.1 * 3.0, cautious, neuron_norm)
                torch.testing.assert_close(p[mine], expected, atol=2e-5, rtol=1e-4)


def test_orthogonalise_is_near_the_polar_factor():
    torch.manual_seed(0)
    for shape in ((2, 48, 48), (3, 128, 32)):
        x = torch.randn(shape) * torch.tensor([1e-6, 1.0, 1e6])[:shape[0], None, None]
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        error = (orthogonalise(x) - u @ v).norm(dim=(1, 2)) / (u @ v).norm(dim=(1, 2))
        assert error.max() < 0.2
    assert not orthogonalise(torch.zeros(1, 8, 8)).any()


def test_master_weight_is_exact():
    torch.manual_seed(0)
    master = torch.cat([torch.randn(1000), torch.randn(1000) * 1e-30, torch.tensor([0.0, -0.0, 1.0, -1.0])])
    weight, lost = torch.zeros(len(master), dtype=torch.bfloat16), torch.zeros(len(master), dtype=torch.int16)
    store_master_weight(weight, lost, master)
    assert torch.equal(master_weight(weight, lost).view(torch.int32), master.view(torch.int32))
    assert ((weight.float() - master).abs() <= master.abs() * 2 ** -7).all()


def test_bf16_weights_follow_float32_exactly(config):
    """A bf16 group and a float32 group with the same master and gradients stay the same to the last bit."""
    torch.manual_seed(0)
    start, grads = torch.randn(50).bfloat16(), [torch.randn(50).bfloat16() for _ in range(20)]
    wide, narrow = (torch.nn.Parameter(start.to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    group = train_gpt.Group("some", [wide], [0], "adam", 1e-3, (0.8, 0.95), 0.0, 1e-3)
    run_shard(group, config, [[g.float()] for g in grads])
    shard = train_gpt.Shard(replace(group, params=[narrow]), config, train_gpt.World())
    for g in grads:
        narrow.grad.copy_(g)
        with torch.no_grad():
            shard.update(PLAIN, torch.tensor(True), torch.tensor(0.7), torch.tensor(0.9))
    assert torch.equal(master_weight(shard.weight, shard.mantissa_bits)[:50], wide.detach())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_long_table_takes_the_bytes_that_are_asked_of_the_machine(config, ranks):
    """What grows with the rows, of what a rank holds of the table."""
    rows, config = 4096, replace(config, head_dim=64, ngram_block=16)
    table = torch.nn.Parameter(torch.zeros(rows, 64 // ranks, dtype=torch.bfloat16))
    shard = train_gpt.TableShard(train_gpt.Group("table", [table], [], "row adam", 1.0, (0.0, 0.9), 0.0, 1.0), config, by_row=True)
    assert sum(x.nbytes for x in shard.state() if len(x.shape) and len(x) == rows) == rows * train_gpt.table_row_bytes(config, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("matrices", [1, 7, 8, 9, 19])
def test_shards_cover_every_matrix_once(config, ranks, matrices):
    """Padding for any count on any number of ranks: together the ranks update what one rank does. One matrix a rank a round."""
    torch.manual_seed(0)
    start, grads = ([torch.randn(12, 4) for _ in range(matrices)] for _ in range(2))

    def updated(world) -> list[torch.Tensor]:
        """What each round's all-gather takes from this rank."""
        params = [torch.nn.Parameter(p.clone()) for p in start]
        group = train_gpt.Group("bank", params, list(range(matrices)), "normuon", 0.1, (0.0, 0.9), 1.0, 0.1,
                                matrix_lr=[1.0 + i for i in range(matrices)], squares=matrices % 2 == 0)
        shard = train_gpt.Shard(group, config, world)
        for p, g in zip(params, grads):
            p.grad.copy_(g)
        for layer, whole, own in shard.rounds:
            assert whole.stop - whole.start == world.size and own.stop - own.start == 1 and layer == whole.start
            shard.grad[own].copy_(shard.grads[whole].chunk(world.size)[world.rank])
        with torch.no_grad():
            shard.update(PLAIN, torch.tensor(True), torch.tensor(1.0), torch.tensor(0.9))
        return [shard.weight[own] for _, _, own in shard.rounds]

    whole = torch.cat(updated(SimpleNamespace(rank=0, size=1)))
    speaking = train_gpt.Collectives(ranks)
    parts = zip(*(updated(SimpleNamespace(rank=rank, size=ranks, collectives=speaking)) for rank in range(ranks)))
    gathered = torch.cat([part for round in parts for part in round])
    torch.testing.assert_close(gathered[:matrices], whole, atol=1e-5, rtol=1e-5)
    assert not gathered[matrices:].any()


@pytest.fixture(scope="module")
def ranks_results(shards, tmp_path_factory):
    """What 1, 2, 4 and 8 gloo ranks hold after each of 20 steps of the same 8 micro-batches: every kind of step, the untying too.

    With queries and keys narrower than values, so that attention's matrices and the MLPs' have different shapes, and value
    embeddings without a first moment.
    By the number of ranks, the rank, and whether the collectives overlap with the computation.
    """
    out = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, "tests/rank_worker.py", str(out), "20", "--preset", "cpu", *TINY, "--steps", "18", "--epochs", "9",
                    "--qk_dim", "16", "--ngram_rows", "512", "--value_beta1", "0.0", "--data_path", str(shards)],
                   cwd=ROOT, env=environment(), check=True, timeout=480, capture_output=True)
    return {(ranks, rank, overlap): result for ranks in (1, 2, 4, 8) for rank in range(ranks)
            for overlap, result in torch.load(out / f"{ranks}-{rank}.pt").items()}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_make_the_update_of_one_process(ranks_results, ranks):
    alone, together = ranks_results[1, 0, True], ranks_results[ranks, 0, True]
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert together["validation"] == pytest.approx(alone["validation"], rel=1e-4)
    for name, expected in alone["parameters"][0].items():              # one update: rounding has not yet grown
        torch.testing.assert_close(together["parameters"][0][name], expected, atol=1e-5, rtol=1e-4, msg=name)
    for step in range(8):
        for name, expected in alone["parameters"][step].items():
            difference = (together["parameters"][step][name] - expected).norm() / expected.norm().clamp(min=1e-6)
            assert difference < 1e-2, (step, name)


@pytest.mark.parametrize("ranks, overlap", [(2, True), (4, True), (8, True), (4, False)])
def test_all_ranks_hold_the_same_parameters(ranks_results, ranks, overlap):
    for rank in range(1, ranks):
        for mine, theirs in zip(ranks_results[ranks, 0, overlap]["parameters"], ranks_results[ranks, rank, overlap]["parameters"]):
            assert mine.keys() - theirs.keys() == {"ngram_table"} and all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_overlapped_collectives_change_no_bit(ranks_results, ranks):
    """Losses and weights of every step, after sums started in the backward pass and gathers waited for in the forward pass."""
    overlapped, simple = (ranks_results[ranks, 0, overlap] for overlap in (True, False))
    assert overlapped["losses"] == simple["losses"] and overlapped["validation"] == simple["validation"]
    for a, b in zip(overlapped["parameters"], simple["parameters"], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_check_of_ranks_finds_a_difference(trainer, monkeypatch):
    trainer.optimizer.check_ranks()
    monkeypatch.setattr(train_gpt.World, "broadcast", lambda self, x: x + (x.numel() > 1000))
    with pytest.raises(train_gpt.UserError, match="bytes of the weights of group 'attention' differ from rank 0's"):
        trainer.optimizer.check_ranks()


@pytest.mark.parametrize("tied, adam", [(True, True), (False, True), (False, False)])
def test_exchanges_follow_the_layers(trainer, tied, adam):
    """Gathers come in the order of use, sums behind the layer that is the last to add to a gradient."""
    optimizer, last = trainer.optimizer, len(trainer.config.layers)
    layers = {(shard.group.name, round.whole.start): layer for layer, shard, round in optimizer.exchanges(tied, adam)}
    names = {name for name, _ in layers}
    assert names == {"attention", "mlp"} | ({"head", "value tables"} | (set() if tied else {"embedding"}) if adam else set())
    assert [layers["mlp", 2 * i + k] for i in range(last) for k in (0, 1)] == [i for i in range(last) for _ in (0, 1)]
    assert [layers["attention", i] for i in range(last)] == list(range(last))
    if adam:
        assert layers["head", 0] == (-1 if tied else last)


def everything(trainer) -> list[torch.Tensor]:
    return [x for shard in trainer.optimizer.shards.values() for x in state_of(shard)] + [trainer.optimizer.finite.clone()]


def state_of(shard) -> list[torch.Tensor]:
    """All that a step changes; rows that have a gradient are listed in their order, for on a GPU they come in any."""
    gradients = getattr(shard, "gradients", None)
    if not isinstance(gradients, RowGradients):
        return [x.clone() for x in shard.state()]
    others = [x for x in shard.state() if not any(x is y for y in gradients)]
    rows, order = gradients.rows[1:1 + gradients.count].sort()
    return [*(x.clone() for x in others), rows, gradients.grads[1 + order], gradients.place.nonzero(), gradients.grads[1 + len(rows):].any()]


def test_warm_up_leaves_no_trace(config):
    """The first steps after warm-up equal those without it, bit for bit: losses, weights and the optimizer's whole state."""
    results = []
    for warm in (False, True):
        trainer = train_gpt.Trainer(config, train_gpt.World())
        random = torch.get_rng_state()
        if warm:
            trainer.warm_up()
        assert torch.equal(random, torch.get_rng_state())
        losses = [trainer.step(s, trainer.loader.batches(s.index)).item() for s in list(trainer.schedule)[:3]]
        results.append((losses, everything(trainer)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_warm_up_visits_every_kind(trainer, monkeypatch):
    seen = set()
    monkeypatch.setattr(train_gpt.Trainer, "step", lambda self, step, batches: seen.add(step.kind))
    trainer.warm_up()
    assert seen == {step.kind for step in trainer.schedule} and len(seen) > 6


def test_untying_carries_weights_and_state_over(trainer):
    shards, optimizer = trainer.optimizer.shards, trainer.optimizer
    steps = list(trainer.schedule)
    for step in steps[:4]:
        assert step.tied
        trainer.step(step, trainer.loader.batches(step.index))
    assert not torch.equal(shards["embedding"].weights, shards["head"].weights)      # tied: it waits
    optimizer.untie()
    for mine, theirs in zip(shards["embedding"].state(), shards["head"].state(), strict=True):
        assert torch.equal(mine, theirs)
    for step in steps[4:6]:
        assert not step.tied
        trainer.step(step, trainer.loader.batches(step.index))
    assert not torch.equal(shards["embedding"].weights, shards["head"].weights)      # on its own


def test_adam_takes_the_gradients_of_two_steps(trainer):
    head = trainer.optimizer.shards["head"]
    before, mlp = head.weights.clone(), trainer.optimizer.shards["mlp"].weights.clone()
    trainer.step(trainer.schedule.at(0), trainer.loader.batches(0))
    assert torch.equal(before, head.weights) and head.grads.any()
    assert not torch.equal(mlp, trainer.optimizer.shards["mlp"].weights)
    trainer.step(trainer.schedule.at(1), trainer.loader.batches(1))
    assert not torch.equal(before, head.weights) and not head.grads.any()


def test_the_row_update_takes_the_rows_of_two_steps(config, monkeypatch):
    """As its twin does, which looks at the gradients of all; and after a warm-up that ends between listing and updating the same to the bit."""
    config, results, plain = replace(config, micro_batches=2, batch_tokens=(256, 256, 256)), [], train_gpt.compiled
    kernels = {train_gpt.embedding_reference: train_gpt.embedding} | train_gpt.KERNELS["fused_row_update"]
    for by_row, warm in ((False, False), (True, False), (True, True)):
        replaced = kernels if by_row else {row_adam_reference: row_adam_reference}
        monkeypatch.setattr(train_gpt, "compiled", lambda *args: {f: replaced.get(f, g) for f, g in plain(*args).items()})
        trainer = train_gpt.Trainer(config, train_gpt.World())
        shard, snapshot = trainer.optimizer.shards["n-gram table"], trainer.optimizer.snapshot()
        if warm:
            trainer.step(trainer.schedule.at(2), trainer.loader.batches(2))
            assert shard.gradients.count
            trainer.optimizer.restore(snapshot)
        assert not by_row or not (shard.gradients.count or shard.gradients.place.any() or shard.gradients.grads.any())
        for step in map(trainer.schedule.at, range(4)):
            trainer.step(step, trainer.loader.batches(step.index))
            if by_row:                                                   # and every row that is listed has a gradient
                listed = (shard.gradients.place > 0).sum()
                assert bool(listed) != step.update_adam and shard.gradients.count == listed == shard.gradients.grads.any(1).sum()
        results.append(state_of(shard))
    assert all(torch.equal(kernel, warmed) for kernel, warmed in zip(*results[1:], strict=True))
    (twin, *_), (kernel, *_), _ = results                                # the weights
    assert (kernel - twin).norm() <= (1e-3 if kernel.device.type == "cpu" else 5e-2) * twin.norm() > 0


def test_two_runs_with_one_seed_give_the_same_losses(config):
    config, runs = replace(config, micro_batches=2, batch_tokens=(256, 512, 512)), []
    for seed in (3, 3, 4):
        trainer = train_gpt.Trainer(replace(config, seed=seed), train_gpt.World())
        runs.append([trainer.step(s, trainer.loader.batches(s.index)).item() for s in trainer.schedule])
    assert runs[0] == runs[1] != runs[2]


def test_a_non_finite_loss_changes_no_weight(trainer):
    trainer.step(trainer.schedule.at(0), trainer.loader.batches(0))
    names = [name for name, _ in trainer.model.named_parameters()]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    step = trainer.schedule.at(1)
    for p in trainer.model.parameters():
        (p.row_gradients.grads if p.grad is None else p.grad).fill_(torch.nan)
    for loss in (torch.tensor(torch.nan), torch.tensor(1.0)):            # the steps that are already under way as well
        trainer.optimizer.begin(step)
        trainer.optimizer.check_finite(loss)
        trainer.optimizer.step(step)
        assert [n for n, p, q in zip(names, trainer.model.parameters(), before) if not torch.equal(p, q)] == []


def test_validation_does_not_depend_on_the_chunk(config):
    losses = []
    for chunk in (256, 512, 4096):
        trainer = train_gpt.Trainer(replace(config, val_chunk=chunk), train_gpt.World())
        losses.append(trainer.validate(trainer.schedule.validation(0)))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5 if torch.cuda.is_available() else 1e-6)     # bf16 there


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_step_is_the_eager_one(config):
    """After warm-up both give the same losses, as nearly as two eager runs do; every kind of step is replayed, none is left out."""
    runs = []
    for capture in (False, False, True):
        trainer = train_gpt.Trainer(replace(config, capture=capture, compile=False), train_gpt.World())
        trainer.warm_up()
        assert set(trainer.graphs) == (set(trainer.schedule.kinds()) if capture else set())
        runs.append([trainer.step(s, trainer.loader.batches(s.index)).item() for s in trainer.schedule])
    spread = max(abs(a - b) for a, b in zip(runs[0], runs[1]))
    assert max(abs(a - b) for a, b in zip(runs[0], runs[2])) <= 2 * spread


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPUs have no streams")
def test_runs_of_a_process_have_the_same_streams(config):
    """Or one of them records its graphs on what another part takes for a stream beside: then nothing of it is."""
    # Which of 32 they are hangs on what else this process has made, so that says nothing here of the one that records.
    world, found = train_gpt.World(), []
    for _ in range(2):
        trainer = train_gpt.Trainer(config, world)
        trainer.warm_up()
        found.append({name: stream.cuda_stream for name, stream in trainer.optimizer.streams.items()} | {"": trainer.optimizer.judging.cuda_stream})
    assert found[0] == found[1] and len(found[0]) == 1 + len(trainer.optimizer.shards)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs, and what waits for them, need a GPU")
def test_timed_steps_neither_wait_for_the_gpu_nor_allocate_from_it(config):
    trainer = train_gpt.Trainer(replace(config, capture=True), train_gpt.World())
    trainer.warm_up()
    steps = list(trainer.schedule)
    ahead = trainer.loader.prefetch(range(len(steps)))                   # room for batches is made before the clock starts
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batches in zip(steps, ahead):
            trainer.step(step, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


SUMMED = [(1, 0), (5, 0), (5, 64)]                                      # step, samples of the softmax


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("setting, index, samples", [*(("", *case) for case in SUMMED), *(("fused_embedding", *case) for case in SUMMED),
                                                     ("fused_residual", 1, 0)])
def test_gradients_are_complete_when_their_sum_starts(config, monkeypatch, setting, index, samples):
    """Tied and not: what a reduce-scatter is given, in the middle of the backward pass, is what stands there at its end."""
    trainer = train_gpt.Trainer(replace(config, micro_batches=2, batch_tokens=(256, 256, 256), softmax_samples=samples), train_gpt.World())
    trainer.model.part |= train_gpt.KERNELS.get(setting, {})
    step, given, layers = trainer.schedule.at(index), {}, []
    start = trainer.optimizer.gradients_complete
    monkeypatch.setattr(trainer.optimizer, "gradients_complete", lambda layer: layers.append(layer) or start(layer))
    monkeypatch.setattr(train_gpt.Collectives, "reduce_scatter", lambda self, shard, whole:
                        given.update({whole.data_ptr(): (whole, whole.clone(), layers[-1])}))
    checked = []

    def compare(shard, *_):
        for round in shard.rounds:
            if not shard.group.replicated:
                whole, early, layer = given[shard.grads[round.whole].data_ptr()]
                assert torch.equal(whole, early), (shard.group.name, round.layer)
                checked.append((shard.group.name, layer))

    monkeypatch.setattr(train_gpt.Shard, "update", compare)
    trainer.step(step, trainer.loader.batches(index))
    last = len(config.layers)
    assert layers == [*range(last, -1, -1), -1] and step.update_adam
    assert {layer for name, layer in checked if name == "mlp"} == set(range(last))
    assert ("head", -1 if step.tied else last) in checked
    assert {layer for name, layer in checked if name == "value tables"} == set(trainer.model.value_index)
