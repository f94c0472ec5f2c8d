"""The loader: order against a plain reference, each token at most once, ranks and timing, too little data."""
import re
import sys
import threading
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import write_documents

import train_gpt
from data import packing
from data.candidates import Importance, sample_candidates, sample_parts
from data.loader import AHEAD, Batch, Bounds, Loader, Room, StepShape, TextSettings
from data.packing import cut_documents, pack
from data.peek import KEEP_TAILS, SCHEDULES
from data.scoring import scored_text
from data.shards import ShardError, find_shards, open_shard, write_shard
from records.run.settings import change

CPU = torch.device("cpu")


def shapes(config) -> list[StepShape]:
    return [StepShape(step.batch_tokens, step.sequence_length, step.samples)
            for step in train_gpt.Schedule(config)]


def loader(config, rank=0, ranks=1, device=CPU) -> Loader:
    return Loader(TextSettings.of(config), shapes(config), rank, ranks, device)


def validation(config) -> list:
    return scored_text("val", TextSettings.of(config), config.val_tokens, config.val_chunk,
                       config.val_sequence_length).batches


def reference(config):
    """The micro-batches of a run, walking the shards token by token: lists of (tokens, targets, starts)."""
    stream, starts = [], []
    for path in find_shards(config.data_path, "train"):
        tokens = open_shard(path).tolist()
        starts += [len(stream) + i for i, t in enumerate(tokens) if t == 256]
        stream += tokens
    at = 0
    for step in shapes(config):
        for _ in range(config.micro_batches):
            tokens, targets, begins = [], [], []
            while len(tokens) < step.tokens // config.micro_batches:
                while stream[at % len(stream)] != 256:                   # drop the tail of what was cut
                    at += 1
                begins.append(len(tokens))
                for taken in range(step.sequence_length):
                    tokens.append(stream[at % len(stream)])
                    targets.append(stream[(at + 1) % len(stream)])
                    at += 1
                    full = len(tokens) == step.tokens // config.micro_batches
                    if full or stream[at % len(stream)] == 256:
                        break
            yield tokens, targets, begins


def test_order_is_that_of_the_reference(config):
    config = replace(config, keep_tails=False, epochs=3, steps=15)
    plan = loader(config)
    expected = reference(config)
    for index in range(len(plan.shapes)):
        for batch in plan.batches(index):
            tokens, targets, begins = next(expected)
            assert batch.tokens.tolist() == tokens and batch.targets.tolist() == targets
            ends = batch.cu_seqlens.tolist()
            assert ends[:len(begins)] == begins and set(ends[len(begins):]) == {len(tokens)}
            assert np.diff(ends).max() <= batch.max_length
            assert len(ends) == plan.most(plan.shapes[index]) + 1
    parts = [part for step in plan.plan.steps for spans in step for part, _, _, _ in spans]
    assert (np.diff(parts) < 0).any()                                    # a second epoch


@pytest.mark.parametrize("keep_tails", [False, True])
def test_each_token_at_most_once_an_epoch(tmp_path, config, keep_tails):
    """Every token of the training text is another number, so that a repetition would show."""
    tokens = np.arange(40_000, dtype=np.uint16)
    tokens[::97] = 49_999
    tokens[25_000] = 49_999
    for name, part in {"train_000000": tokens[:25_000], "train_000001": tokens[25_000:],
                       "val_000000": tokens[:100]}.items():
        write_shard(tmp_path / f"{name}.bin", part)
    plan = loader(replace(config, data_path=str(tmp_path), vocab_size=50_000, keep_tails=keep_tails))
    seen = torch.cat([batch.tokens for index in range(len(plan.shapes)) for batch in plan.batches(index)])
    content = seen[seen != 49_999]
    assert len(content.unique()) == len(content) > 8000 and plan.epochs < 1
    if keep_tails:                                                       # and none is left out
        assert seen.tolist() == tokens[:len(seen)].tolist()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_order_does_not_depend_on_ranks(config, ranks):
    """Nor on the seed, which decides the weights alone: the stream of tokens is fixed."""
    alone = loader(config)
    shares = [loader(replace(config, seed=10 + rank), rank, ranks) for rank in range(ranks)]
    for index in range(len(alone.shapes)):
        together = [batch for share in shares for batch in share.batches(index)]
        for a, b in zip(alone.batches(index), together, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors)) and a[-2:] == b[-2:]


def test_order_does_not_depend_on_timing_or_a_restart(config):
    plan = loader(config)
    n = len(plan.shapes)
    fast = list(plan.prefetch(range(n)))
    slow, original = [], plan.batches
    plan.batches = lambda index: (time.sleep(0.01 * (index % 3)), original(index))[1]
    for batches in plan.prefetch(range(n)):
        time.sleep(0.005)
        slow.append(batches)
    # From the middle: a step's data is its number's.
    late = list(loader(config).prefetch(range(3, n)))
    for a, b in zip(fast[3:] + fast, late + slow, strict=True):
        assert all(torch.equal(x, y) for p, q in zip(a, b) for x, y in zip(p.tensors, q.tensors))


def test_a_micro_batch_with_more_sequences_than_its_bound_ends_early(config):
    """Nothing is lost: the next one begins where it ended. What is left of it is not scored."""
    narrow = {stage.batch_tokens: Bounds(2, 0) for stage in config.stages}
    config = replace(config, keep_tails=True)
    plan, seen = Loader(TextSettings.of(config), shapes(config), 0, 1, CPU, bounds=narrow), []
    for index, shape in enumerate(plan.shapes):
        for batch in plan.batches(index):
            scored = batch.targets >= 0
            assert (batch.cu_seqlens[:-1] < scored.sum()).sum() <= 2 and len(batch.tokens) == len(scored)
            assert len(batch.cu_seqlens) == plan.most(shape) + 1
            seen += batch.tokens[scored].tolist()
    whole = np.concatenate([open_shard(path) for path in find_shards(config.data_path, "train")])
    assert seen == whole[:len(seen)].tolist() and len(seen) < sum(shape.tokens for shape in plan.shapes)


def test_the_training_text_is_not_read_before_its_first_batch(config, monkeypatch):
    """Bounds, warm-up and the count of its tokens take the validation text and the shards' headers."""
    opened = []
    monkeypatch.setattr(packing, "document_starts", lambda tokens, start: opened.append(len(tokens)) or
                        np.flatnonzero(tokens == start))
    plan = loader(config)
    list(plan.rehearsal(plan.shapes).prefetch(range(len(plan.shapes))))
    validation = [len(open_shard(path)) for path in find_shards(config.data_path, "val")]
    assert set(opened) == set(validation)
    del opened[:]
    next(plan.prefetch(range(3)))
    assert opened and {len(open_shard(path)) for path in find_shards(config.data_path, "train")} >= {*opened}


def test_threads_wait_less_for_one_another_while_batches_are_made(config):
    sys.setswitchinterval(0.005)
    for _ in loader(config).prefetch(range(2)):
        assert sys.getswitchinterval() < 0.0005


def test_any_steps_in_any_order_can_be_prefetched(config):
    """As the warm-up does, with more of them than are made ahead."""
    plan, wanted = loader(config), [5, 0, 3, 3, 1, 4, 2, 0]
    for index, batches in zip(wanted, plan.prefetch(wanted), strict=True):
        for mine, batch in zip(batches, plan.batches(index), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine.tensors, batch.tensors))
    assert list(plan.prefetch([])) == []


@pytest.fixture
def sampled(tmp_path, config):
    """A vocabulary of 5,000: a micro-batch has 100 to 400 of them as targets, and a sample of 300 others."""
    rng = np.random.default_rng(2)
    tokens = (4999 ** rng.random(60_000)).astype(np.uint16)
    tokens[rng.choice(60_000, 800)] = 4999
    parts = {"train_000000": tokens[:40_000], "train_000001": tokens[40_000:],
             "val_000000": tokens[:9000].copy()}
    for name, part in parts.items():
        part[0] = 4999
        write_shard(tmp_path / f"{name}.bin", part)
    return change(config, data_path=str(tmp_path), vocab_size=5000, softmax_samples=(300,))


def test_candidates_hold_all_targets_and_a_sample_of_the_rest(sampled):
    config, plan, seen = sampled, loader(sampled), set()
    for index, step in enumerate(plan.shapes):
        for batch in plan.batches(index):
            if index >= config.steps:                                    # extra steps take all
                assert not len(batch.candidates)
                continue
            targets, [candidates] = batch.targets.unique(), batch.candidates
            assert candidates.dtype == torch.int32 and candidates.diff().gt(0).all()
            assert torch.isin(targets, candidates).all()
            assert 0 <= candidates[0] and candidates[-1] < config.padded_vocab == 5056
            assert len(candidates) == plan.candidates_of(step)           # one shape for the whole stage
            seen.update(set(candidates.tolist()) - set(targets.tolist()))
    assert len(seen) > 4000 and len(plan.candidates) == 3                # the samples differ
    # The validation text's batches, which the bounds come from, have 300 candidates beside the targets.
    most: dict[tuple[int, int], int] = {}
    rehearsal = plan.rehearsal([shape for shape in plan.shapes if shape.samples] * 20)
    for index, shape in enumerate(rehearsal.shapes):
        for batch in rehearsal.batches(index):
            key = shape.tokens, shape.samples
            most[key] = max(most.get(key, 0), len(batch.targets.unique()))
    assert all(most[n] + 300 <= count < most[n] + 300 + 256 + 64 and count % 256 == 0
               for n, count in plan.candidates.items())


def test_frequent_tokens_are_likelier_candidates(sampled):
    """Token t occurs about 1 / t of the time. Weights are those of the text's own frequencies."""
    plan, weights = loader(sampled), {}
    for batch in (batch for index in range(sampled.steps) for batch in plan.batches(index)):
        given = batch.weights.view(torch.float32)
        for token, weight in zip(batch.candidates[0].tolist(), given[0].tolist(), strict=True):
            weights.setdefault(token, []).append(weight)
        assert given[torch.isin(batch.candidates, batch.targets)].eq(1).all()
    rare, frequent = ([max(weights[t]) for t in weights if low <= t < 2 * low] for low in (2000, 200))
    assert 1.5 < np.mean(rare) / np.mean(frequent) < 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to bring them to")
def test_batches_come_to_a_gpu_unharmed(sampled):
    """Also where it lags behind the thread, which writes new ones where old ones are still to be read."""
    plan, copies = loader(sampled, device=torch.device("cuda")), []

    def prepare(batch: Batch) -> Batch:
        return batch._replace(rows=batch.tokens + 1)

    for batches in plan.prefetch(range(len(plan.shapes)), prepare):
        assert all(x.is_cuda and x.data_ptr() % 128 == 0
                   for batch in batches for x in batch.tensors if len(x))
        torch.cuda._sleep(20_000_000)                                    # 10 ms
        copies.append([[x.clone() for x in batch.tensors] for batch in batches])
    for index, batches in enumerate(copies):
        for mine, batch in zip(batches, plan.batches(index), strict=True):
            batch = prepare(batch)
            assert all(torch.equal(x.cpu(), y) for x, y in zip(mine, batch.tensors, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to bring them to")
def test_batches_wait_for_who_had_their_memory_before(config):
    """As the last steps of a loader that is gone: a step that lags would read what the next loader brings."""
    size, stream = 1 << 18, torch.cuda.Stream()
    before = torch.full((size,), 7, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)                                     # half a second
    seen, place = before.clone(), before.data_ptr()
    del before
    room = Room(size, torch.device("cuda"))
    assert room.there.data_ptr() == place
    room.bring(loader(config).batches(0), stream, lambda batch: batch)
    room.ready.synchronize()
    assert (seen == 7).all()


@pytest.mark.parametrize("ranks", [2, 8])
def test_candidates_depend_on_the_seed_and_the_step_alone(sampled, ranks):
    config, alone, index = sampled, loader(sampled), 5
    ahead = list(alone.prefetch([4, 5, 6]))[1]                           # after another step, by the thread
    shares = [batch for rank in range(ranks) for batch in loader(config, rank, ranks).batches(index)]
    other = loader(replace(config, seed=config.seed + 1)).batches(index)
    for a, b, c, d in zip(alone.batches(index), ahead, shares, other, strict=True):
        assert torch.equal(a.candidates, b.candidates) and torch.equal(a.candidates, c.candidates)
        assert torch.equal(a.tokens, d.tokens) and not torch.equal(a.candidates, d.candidates)
    for i, batch in enumerate(alone.batches(index)):        # a draw of its own for each micro-batch
        generator, [candidates], [weights] = (
            np.random.default_rng([config.seed, index, i]), batch.candidates, batch.weights.numpy())
        importance = alone.importance.of(batch.tokens.numpy())
        drawn = sample_candidates(batch.targets.numpy(), len(candidates), importance, generator)
        assert candidates.tolist() == drawn[0].tolist() and np.array_equal(weights.view(np.float32), drawn[1])


def test_candidates_of_a_small_vocabulary_are_all_and_off_means_none(config):
    plan = loader(change(config, softmax_samples=(10_000,)))
    assert set(plan.candidates.values()) == {320}
    assert torch.equal(plan.batches(0)[0].candidates, torch.arange(320, dtype=torch.int32)[None])
    off = loader(config)
    assert not off.candidates and not off.batches(0)[0].candidates.numel()
    assert not any(batch.candidates.numel() for batch in validation(change(config, softmax_samples=(10,))))


def test_every_stage_draws_its_own_number_of_candidates(sampled):
    plan = loader(change(sampled, softmax_samples=(0, 300, 812)))
    tokens = [stage.batch_tokens for stage in sampled.stages]
    drawn = {shape.tokens: plan.candidates_of(shape) for shape in plan.shapes if shape.samples}
    assert [*drawn] == tokens[1:] and {shape.samples for shape in plan.shapes} == {0, 300, 812}
    alike = loader(sampled).candidates
    assert drawn[tokens[1]] == alike[tokens[1], 300] and drawn[tokens[2]] == alike[tokens[2], 300] + 512
    for index, shape in enumerate(plan.shapes):
        shapes = {tuple(batch.candidates.shape) for batch in plan.batches(index)}
        assert shapes == {(1, plan.candidates_of(shape)) if shape.samples else (0,)}


def test_stages_of_equal_batches_may_sample_differently(sampled):
    alike = change(sampled, batch_tokens=(512,), sequence_length=(128,), softmax_samples=(300, 300, 812))
    plan = loader(alike)
    assert {shape.tokens for shape in plan.shapes} == {512}
    less, more = (plan.candidates_of(StepShape(512, 128, samples)) for samples in (300, 812))
    assert more == less + 512 and plan.candidates == {(512, 300): less, (512, 812): more}


def test_parts_that_no_step_needs_are_not_waited_for(config, monkeypatch):
    plan, opened = loader(config), []
    text, last = plan.plan.text, len(plan.plan.text) - 1

    def open_slowly(part: int, really=text.open):
        opened.append(part)
        time.sleep(0.2)
        return really(min(part, last))
    monkeypatch.setattr(text, "open", open_slowly)
    monkeypatch.setattr(type(text), "__len__", lambda _: 50)
    batches = plan.prefetch(range(3))
    next(batches)
    begin = time.perf_counter()
    batches.close()
    assert time.perf_counter() - begin < 5 and 1 <= len(opened) < 40


def test_parts_of_a_micro_batch_have_samples_of_their_own(sampled):
    """Each with all of its own targets, and fewer candidates than the whole would have."""
    whole, plan = loader(sampled), loader(replace(sampled, softmax_tokens=64))
    for index, shape in enumerate(plan.shapes[:sampled.steps]):
        count = shape.tokens // sampled.micro_batches // 64
        for one, batch in zip(whole.batches(index), plan.batches(index), strict=True):
            assert torch.equal(one.tokens, batch.tokens) and len(batch.candidates) == count
            assert batch.candidates.shape[1] == plan.candidates_of(shape) <= whole.candidates_of(shape)
            for targets, candidates in zip(batch.targets.chunk(count), batch.candidates, strict=True):
                assert torch.isin(targets, candidates).all() and candidates.diff().gt(0).all()
    last = plan.shapes[sampled.steps - 1]
    assert plan.candidates_of(last) < whole.candidates_of(last)


@pytest.mark.parametrize("n, share, parts", [
    (49_152, 0, 1), (49_152, 16_384, 3), (49_152, 49_152, 1), (49_152, 65_536, 1), (40_960, 16_384, 2),
    (80_000, 16_384, 4), (100, 10, 1), (96, 16, 6), (112, 20, 1)])
def test_sample_parts(n, share, parts):
    """As many as give each at least `share` tokens, but a multiple of 16 of them."""
    assert sample_parts(n, share) == parts


def test_followers_of_a_parts_tokens_are_important():
    """In 45 of 50 places 2 follows 1, and 3 in the others. 40 follows 5, but is common and no follower."""
    text = np.array([1, 2] * 45 + [1, 3] * 5 + [5] + [40] * 400_000, np.uint16)
    importance = Importance(text, 64)
    without, given = (importance.of(np.full(64, token)) for token in (0, 1))
    assert (without > 0).all() and without.argmax() == 40
    assert np.array_equal(importance.of(np.full(64, 5)), without)
    assert np.flatnonzero(given != without).tolist() == [2, 3]
    shares = np.array([45, 5]) / (50 + 4)
    np.testing.assert_allclose(given[2:4] ** 2 - without[2:4] ** 2, 64 * shares ** 2)
    frequencies = np.array([4, 54, 400_004]) / (400_101 + 64 * 4)
    np.testing.assert_allclose(without[[0, 1, 40]] ** 2, 0.015 * 64 * frequencies)


def test_followers_are_those_of_all_pairs():
    """Pairs that are left out before they are sorted are none that would be kept, to the bit."""
    rng, vocabulary = np.random.default_rng(3), 50_257
    text = (vocabulary ** rng.random(400_000)).astype(np.int64) - 1
    for at in np.flatnonzero(rng.random(len(text) - 1) < 0.3) + 1:              # from 0.5 to 17%
        text[at] = (31 * text[at - 1] + rng.integers(6) * rng.integers(6)) % vocabulary
    importance = Importance(text.astype(np.uint16), vocabulary)
    counts = np.bincount(text, minlength=vocabulary) + 4.0
    pairs, times = np.unique(text[:-1] * vocabulary + text[1:], return_counts=True)
    first, second = np.divmod(pairs, vocabulary)
    share = times / counts[first]
    kept = (share >= 0.05) & (counts[second] / counts.sum() < 1 / 4000)
    assert 10_000 < kept.sum() < len(kept) / 2
    assert np.array_equal(importance.frequency, counts / counts.sum())
    assert np.array_equal(importance.first, first[kept]) and np.array_equal(importance.second, second[kept])
    assert np.array_equal(importance.squares, share[kept] ** 2)


def test_sample_candidates():
    """By importance; each weight is one over how often a token is drawn. Too many targets are refused."""
    generator, targets, drawn = np.random.default_rng(0), np.array([7, 0, -1, 7], np.int32), np.zeros(50)
    importance = np.where(np.arange(50) % 5 == 1, 20.0, np.arange(50) % 2 + 1.0)
    share = np.where(importance == 20, 1.0, importance)         # ten tokens are certain
    rest = (importance < 20) & ~np.isin(np.arange(50), targets)
    share[rest] *= 4 / share[rest].sum()
    share[[0, 7]] = 1.0
    for _ in range(4000):
        candidates, weights = sample_candidates(targets, 16, importance, generator)
        assert len(candidates) == 16 and (np.diff(candidates) > 0).all()
        assert candidates.dtype == np.int32 and np.allclose(weights, 1 / share[candidates])
        drawn[candidates] += 1
    assert (drawn[share == 1] == 4000).all() and abs(drawn / 4000 - share).max() < 0.03
    assert sample_candidates(targets, 50, importance, generator)[1].tolist() == [1.0] * 50
    assert [x.tolist() for x in sample_candidates(targets, 2, importance, generator)] == [[0, 7], [1.0, 1.0]]
    with pytest.raises(ShardError, match="2 different targets in a part with 1 candidates"):
        sample_candidates(targets, 1, importance, generator)


def test_parts_are_read_once_by_a_thread_that_runs_ahead(config, monkeypatch):
    plan, opened = loader(config), []

    def start_slowly(*words, really=packing.document_starts):
        opened.append(threading.current_thread().name)
        time.sleep(0.1)
        return really(*words)
    monkeypatch.setattr(packing, "document_starts", start_slowly)
    assert len(list(plan.prefetch(range(len(plan.shapes))))) == len(plan.shapes)
    assert 1 <= len(opened) <= len(plan.plan.text) and threading.main_thread().name not in opened
    assert len({part for step in plan.plan.steps for spans in step for part, _, _, _ in spans}) > 1


def test_nobody_waits_for_parts_behind_his_own(config, monkeypatch):
    """A thread that reads ahead gives the lock back for a moment only."""
    text = loader(config).plan.text
    text.parts, found = text.parts[:1] * 200, threading.Event()

    def read(shard, first):
        found.set()
        sum(range(200_000))     # some 5 ms, with the interpreter's lock
        return np.zeros(1, np.uint16), np.zeros(1, int)
    monkeypatch.setattr(text, "read", read)
    ahead = threading.Thread(target=lambda: [text.open(part) for part in range(len(text))])
    ahead.start()
    found.wait()
    for part in range(0, 100, 10):
        text.open(part)
        assert len(text.opened) < part + 80
    ahead.join()
    assert len(text.opened) == 200


def test_steps_are_planned_early_as_far_as_text_is_there(config, monkeypatch):
    monkeypatch.setattr(packing, "PART", 4096)
    plan = loader(replace(config, keep_tails=True, steps=20)).plan
    plan.of(5)
    assert len(plan.text) > 6 and len(plan.text.opened) <= plan.part + 1 and 6 <= len(plan.steps) < 12
    for part in range(len(plan.text)):
        plan.text.open(part)
    plan.of(5)
    assert len(plan.steps) == 2 * 5 + AHEAD + 1


def test_pairs_are_counted_while_the_first_part_is_read(sampled, monkeypatch):
    plan, counted, original = loader(sampled), threading.Event(), packing.document_starts
    monkeypatch.setattr("data.loader.Importance", lambda *words: counted.set() or Importance(*words))
    monkeypatch.setattr(packing, "document_starts", lambda *words: counted.wait(5) and original(*words))
    assert len(next(plan.prefetch(range(1)))) == sampled.micro_batches


def test_an_error_in_the_thread_reaches_the_step(config):
    plan = loader(config)
    plan.batches = lambda index: 1 / 0
    with pytest.raises(ZeroDivisionError):
        next(plan.prefetch(range(3)))


def test_validation_scores_every_token_once(config):
    text = open_shard(find_shards(config.data_path, "val")[0])
    for chunk in (256, 777, 4096):
        scored, starts = [], 0
        for batch in validation(replace(config, val_chunk=chunk)):
            assert len(batch.tokens) == chunk
            assert np.diff(batch.cu_seqlens).max() <= config.val_sequence_length
            scored.append(batch.targets[batch.targets >= 0])
            begins = torch.isin(torch.arange(chunk), batch.cu_seqlens)
            assert begins[batch.tokens == config.document_start].all()      # Documents never see each other.
            starts += int((batch.tokens == config.document_start).sum())
        assert starts == (text[:config.val_tokens] == config.document_start).sum()
        assert torch.cat(scored).tolist() == text[1:config.val_tokens + 1].tolist()


@pytest.mark.parametrize("keep_tails", [False, True])
@pytest.mark.parametrize("steps", [11, 15, 24])
def test_text_that_is_read_again_is_marked_before(tmp_path, config, keep_tails, steps):
    """Every token of the training text is another number, so that later steps with it can be found."""
    tokens = np.arange(20_000, dtype=np.uint16)
    tokens[::97] = 49_999
    for name, part in (("train_000000", tokens), ("val_000000", tokens[:5000])):
        write_shard(tmp_path / f"{name}.bin", part)
    config = replace(config, data_path=str(tmp_path), vocab_size=50_000, keep_tails=keep_tails, steps=steps)
    plan = loader(replace(config, epochs=4))
    batches = [plan.batches(index) for index in range(len(plan.shapes))]
    read = [torch.cat([batch.tokens for batch in step]) for step in batches]
    again = [bool(torch.isin(mine[mine < 20_000], torch.cat([mine[:0], *read[i + 1:]])).any())
             for i, mine in enumerate(read)]
    marked = [{batch.read_again for batch in step} for step in batches]
    assert all(len(each) == 1 for each in marked)
    assert sum(again) <= sum(map(any, marked)) <= sum(again) + 2
    assert all(any(said) for said, is_read in zip(marked, again) if is_read)
    assert again[0] and not again[-1]
    assert not any(loader(replace(config, steps=6)).read_again)
    assert not any(plan.rehearsal(plan.shapes).read_again)


def test_too_few_tokens(tmp_path, config):
    write_documents(tmp_path, {"train_000000": [100] * 60, "val_000000": [100] * 30})
    config = replace(config, data_path=str(tmp_path))
    message = r"1 training shards with 6,000 tokens last for 3 of 8 steps; add shards"
    with pytest.raises(ShardError, match=message) as error:
        loader(config)
    assert re.search(r"--epochs 5 or lower --steps to about 22% of what it is", str(error.value))
    assert 2 < loader(replace(config, epochs=5)).epochs < 5
    write_documents(tmp_path, {"train_000000": [10]})
    with pytest.raises(ShardError, match="last for 0 of 8 steps; .*--epochs 1844 "):
        loader(config)
    # What cuts will drop is known from the validation text. Without it 3 epochs would seem enough, and the
    # run would end before its time.
    write_documents(tmp_path, {"train_000000": [600] * 20, "val_000000": [600] * 5})
    trained = sum(step.tokens for step in shapes(config))
    assert 12_000 < trained < 3 * 12_000
    with pytest.raises(ShardError, match="of 8 steps if documents are as long as in validation; .*--epochs"):
        loader(replace(config, epochs=3))
    enough = loader(replace(config, epochs=20))
    assert 3 * 1.05 < enough.epochs < 20 and len(enough.plan.of(7)) == config.micro_batches
    assert loader(replace(config, epochs=3, keep_tails=True)).epochs == trained / 12_000
    with pytest.raises(ShardError, match="3,000 validation tokens, to score 9,000 .* at most 2999 "):
        validation(replace(config, val_tokens=9000))
    with pytest.raises(ValueError, match="sequences of 256 tokens in chunks of 255"):
        validation(replace(config, val_chunk=255))


@pytest.mark.parametrize("preset", train_gpt.PRESETS)
def test_peek_knows_the_schedules(preset):
    config, wanted = train_gpt.PRESETS[preset], {}
    for step in shapes(config):
        wanted[step.sequence_length] = wanted.get(step.sequence_length, 0) + step.tokens
    assert SCHEDULES[config.document_start][preset] == pytest.approx(wanted, rel=0.005)
    assert (preset in KEEP_TAILS) == config.keep_tails


def test_cut_documents():
    starts = np.array([2, 10, 11, 40])
    assert [x.tolist() for x in cut_documents(starts, 47, 8, False)] == [[2, 10, 11, 40], [10, 11, 19, 47]]
    assert [x.tolist() for x in cut_documents(starts, 47, 8, True)] == [[2, 10, 11, 19, 27, 35, 40],
                                                                        [10, 11, 19, 27, 35, 40, 47]]
    assert not any(len(x) for keep in (False, True) for x in cut_documents(starts[:0], 47, 8, keep))


def test_pack_refuses_more_sequences_than_its_bound():
    text = np.arange(20)
    assert pack([(text, 0, 5), (text, 9, 5)], 12, 3, 5, 256)[2].tolist() == [0, 5, 10, 12]
    with pytest.raises(ValueError, match="3 sequences in a batch that may hold 2"):
        pack([(text, 0, 5), (text, 9, 5)], 12, 2, 5, 256)


def test_a_million_documents_in_bounded_memory(tmp_path, config):
    """The plan and the batches take far less memory than a Python object for each document would."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(97, 123, 8_000_000).astype(np.uint16)
    tokens[rng.choice(np.arange(1, len(tokens)), 999_999, replace=False)] = 256
    tokens[0] = 256
    write_shard(tmp_path / "train_000000.bin", tokens)
    write_shard(tmp_path / "val_000000.bin", tokens[:100_000])
    tracemalloc.start()
    begin = time.time()
    plan = loader(replace(config, data_path=str(tmp_path), keep_tails=False))
    list(plan.prefetch(range(len(plan.shapes))))
    peak, seconds = tracemalloc.get_traced_memory()[1], time.time() - begin
    tracemalloc.stop()
    text = plan.plan.text
    assert sum(len(text.open(part)[1]) for part in range(len(text))) == 1_000_000
    assert peak < 100e6 and seconds < 20
