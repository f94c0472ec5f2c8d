"""What a run is counted to hold, against a measured run; and the settings that follow from a GPU's memory."""
import gzip
import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import nn

import train_gpt
from data.shards import write_shard
from kernels.ranks.world import World
from kernels.streams import recorded
from records.run import fit, memory
from records.run import notes as fit_notes
from records.run.ahead import hash_triton
from records.run.notes import Notes
from records.run.settings import UserError

pytest.importorskip("triton")
GPU = torch.device("cuda", 0)
TWO_GPUS = "2026-11-22_two-h200-long-table/runs/20261122-175825-two-h200-long.jsonl.gz"
ONE_GPU = "2026-11-25_one-h200-clean/runs/20261125-033651-one-h200.jsonl.gz"
ONE_AGAIN = "2026-11-27_one-h200/runs/20261127-094547-one-long.jsonl.gz"
TWO_AGAIN = "2026-11-27_two-h200/runs/20261127-033212-long.jsonl.gz"
SHARED = "2026-11-26_one-h200/runs/20261126-132326-one-h200.jsonl.gz"
# What the preset has no longer, and what it lacked before.
SEVEN_LAYERS = dict(micro_batches=2, softmax_tokens=16_384, extra_samples=0)
EIGHT_LAYERS = SEVEN_LAYERS | dict(layers=train_gpt.SPEEDRUN_LAYERS, micro_batches=4)
BEFORE = EIGHT_LAYERS | dict(shared_updates=False, softmax_tokens=0, canonical=False, val_fp8=True)


def sampled(*candidates: int) -> dict[tuple[int, int], int]:
    """By tokens and samples of a step of preset `corpus`."""
    preset = train_gpt.PRESETS["corpus"]
    steps = {(stage.batch_tokens, stage.softmax_samples): count
             for stage, count in zip(preset.stages, candidates)}
    return steps | {(preset.stages[-1].batch_tokens, preset.extra_samples): 19_456}


@pytest.fixture(scope="module", autouse=True)
def hopper(tmp_path_factory):
    """The program asks what device it is for, and is told of one, also where there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties",
                      lambda *_: SimpleNamespace(
                          shared_memory_per_block_optin=232_448, multi_processor_count=132))
        for name in ("flash_attn", "flash_attn.cute"):
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["flash_attn"].cute = sys.modules["flash_attn.cute"]
        yield


@pytest.fixture(scope="module")
def speedrun(tmp_path_factory) -> train_gpt.Config:
    """The preset, with a validation text that has as many different tokens as English has."""
    folder = tmp_path_factory.mktemp("text")
    tokens = np.random.default_rng(0).zipf(1.3, 60_000) % 50_257
    write_shard(folder / "val_000000.bin", tokens)
    return replace(train_gpt.SPEEDRUN, data_path=str(folder))


def fake_world(**values) -> SimpleNamespace:
    return SimpleNamespace(**dict(size=1, rank=0, device=GPU, least=lambda x: x, barrier=lambda: None,
                                  found={}) | values)


@pytest.fixture(scope="module")
def fitting(speedrun) -> fit.Fitting:
    return fit.Fitting(speedrun, fake_world(), 0, train_gpt)


@pytest.fixture
def fit_into(fitting, monkeypatch):
    """`fit` of the preset into so many bytes; everything is counted once for all tests."""
    def run(room: int, *given: str, config=None):
        monkeypatch.setattr(fit, "room_of", lambda _: room)
        monkeypatch.setattr(fit, "Fitting", lambda *_, **__: (setattr(fitting, "room", room), fitting)[1])
        world = fake_world()
        return fit.fit(config or fitting.config, given, world, train_gpt.Trainer), world.found["memory"]
    return run


@pytest.mark.parametrize(("log", "ranks", "candidates", "settings"), [
    (TWO_GPUS, 2, sampled(12_288, 14_336, 16_384),
     BEFORE | dict(ngram_classes=False, near_match=(), copy_channels=0, average_steps=0)),
    (ONE_GPU, 1, sampled(13_056, 15_872, 18_432), BEFORE),
    (SHARED, 1, sampled(13_056, 13_056, 13_312), EIGHT_LAYERS),
    (ONE_AGAIN, 1, sampled(13_056, 13_056, 13_312), SEVEN_LAYERS),
    (TWO_AGAIN, 2, sampled(13_056, 13_056, 13_312), SEVEN_LAYERS)])
def test_the_count_of_a_measured_run(log, ranks, candidates, settings):
    """Peaks in GiB: 96.65 on two H200s, 96.82 on one, 98.90 with shared updates. With 7 layers, 2
    micro-batches and attention of our own: 112.87 on one and 74.87 on two.
    """
    header, *_, summary = (json.loads(line) for line in gzip.open(ROOT / "records" / log, "rt"))
    preset = train_gpt.parse(["--preset", "corpus", "--data_path", "x"])[0]
    config = replace(preset, **settings, ngram_rows=header["config"]["ngram_rows"])
    same = "micro_batches", "val_chunk", "width"
    assert [header["config"][name] for name in same] == [getattr(config, name) for name in same]
    need = memory.count(train_gpt, config, ranks, GPU, ranks > 1, candidates,
                        [config.val_chunk])[config.val_chunk]
    # These runs gathered value rows, which are now read from their tables.
    tables = sum(layer.value_embedding for layer in config.layers)
    gathered = tables * 196_608 // config.micro_batches * config.heads * config.head_dim * 2
    assert need.allocated + gathered == pytest.approx(summary["peak_memory_bytes"], rel=0.02)


def test_a_copy_head_is_counted():
    """Its weights with gradient and state; in a step queries and keys, before and after their norm."""
    preset = replace(train_gpt.PRESETS["corpus"], micro_batches=2)
    configs = [replace(preset, copy_channels=channels) for channels in (0, 128)]
    candidates = sampled(12_288, 14_336, 16_384)
    without, with_it = (memory.count(train_gpt, config, 2, GPU, True, candidates, [65_536])[65_536]
                        for config in configs)
    assert 256 * 768 * 2 < with_it.held - without.held < 256 * 768 * 20
    assert 2 <= (with_it.step - without.step) / (98_304 * 256 * 2) < 2.1


def test_samples_of_parts_are_counted():
    """Three parts of a micro-batch have fewer candidates each, but more rows of the head together.

    All logits are there at a time. Their gradients in FP8 are kept twice, until the backward pass. Rows are
    there in bfloat16 and twice in FP8.
    """
    preset = replace(train_gpt.PRESETS["corpus"], micro_batches=4, extra_steps=0)   # whose samples are large
    whole, parts = (
        memory.count(train_gpt, replace(preset, softmax_tokens=share), 1, GPU, False, sampled(*candidates),
                     [65_536])[65_536]
        for share, candidates in ((0, (13_312, 15_872, 18_432)), (16_384, (13_312,) * 3)))
    less = 49_152 * (2 + 2) * (18_432 - 13_312) - 768 * (2 + 2) * (3 * 13_312 - 18_432)
    assert whole.step - parts.step == pytest.approx(less, rel=0.02)


def test_candidates_are_estimated_from_the_first_parts(tmp_path):
    """Of 8,192 tokens each: the first has 100 different ones, the second 2,000. A tenth more are expected."""
    text = np.concatenate([np.arange(8192) % 100, np.arange(8192) % 2000])
    write_shard(tmp_path / "val_000000.bin", text)
    config = replace(train_gpt.PRESETS["corpus"], data_path=str(tmp_path))
    found = fit.candidates(config, train_gpt.Schedule(config))
    assert found == {**dict.fromkeys(((65_536, 4096), (131_072, 4096), (196_608, 4096)), 6400),
                     (196_608, 16_384): 18_688}
    all_logits = replace(config, extra_samples=0)
    assert fit.candidates(all_logits, train_gpt.Schedule(all_logits))[196_608, 0] == 0


def test_a_checkpoints_copy_is_counted():
    """On an H200 a run without and with checkpoints reported 15.12 and 18.16 GB, at a validation's peak.

    The first one met the snapshot of the warm-up, which has gone by then now. In both the embedding also had
    weights of its own, with gradients, mantissa bits and two moments, of which a checkpoint has a copy.
    """
    numbers = 50_304 * 768
    words = ("--preset corpus --data_path x --ngram_rows 4194304 --micro_batches 16 --steps 57 "
             "--extra_steps 3 --ngram_classes false --near_match none --copy_channels 0 --average_steps 0 "
             "--shared_updates false --softmax_tokens 0 --canonical false --val_fp8 true "
             "--slow_share 0 --heads 6 --extra_samples 0")
    config = replace(train_gpt.parse(words.split())[0], layers=train_gpt.SPEEDRUN_LAYERS)
    candidates = sampled(10_240, 11_520, 12_544)
    configs = [replace(config, checkpoint=folder, checkpoint_every=20) for folder in ("", "x")]
    need, more = (memory.count(train_gpt, config, 1, GPU, False, candidates, [65_536])[65_536]
                  for config in configs)
    assert need.allocated + need.snapshot == pytest.approx(15.12e9 - 14 * numbers, rel=0.02)
    assert more.allocated == pytest.approx(18.16e9 - 28 * numbers, rel=0.02)


def test_what_lies_on_other_streams_is_counted(speedrun):
    """NorMuon holds a momentum and products of matrices. On one stream they lie in what a step has freed."""
    speedrun_steps = [(stage.batch_tokens, stage.softmax_samples) for stage in train_gpt.SPEEDRUN_STAGES]
    apart, together = (memory.count(train_gpt, replace(speedrun, overlap=overlap, micro_batches=64), 1, GPU,
                                    False, dict.fromkeys(speedrun_steps, 8448), [65_536])[65_536]
                       for overlap in (True, False))
    assert 16 * 3072 * 768 * 2 * 2 < apart.apart < 24 * 3072 * 768 * 2 * 8 and together.apart == 0
    assert apart.total(True) == together.total(True) + apart.apart


def test_smaller_gpus_get_smaller_settings(fit_into, fitting, capsys):
    given_up = []
    for room in (140e9, 78e9, 38e9, 15e9):
        choice, found = fit_into(int(room))
        assert found["allocated_bytes"] < found["needed_bytes"] <= room == found["room_bytes"]
        given_up.append(choice.micro_batches / choice.ngram_rows)
        said = capsys.readouterr().out
        line = f"memory: {found['needed_bytes'] / 1e9:.1f} of the {room / 1e9:.1f} GB of each GPU"
        assert said.startswith(line) and (said == line + "\n") == (choice == fitting.config)
        assert said.count("\n") == 1
        for name in ("micro_batches", "ngram_rows", "val_chunk"):
            value = getattr(choice, name)
            assert (f"--{name} {value} (" in said) == (value != getattr(fitting.config, name))
    assert given_up == sorted(given_up) and given_up[0] < given_up[-1]


def test_one_byte_less_than_needed_is_refused(fit_into, fitting):
    given = "micro_batches", "ngram_rows", "val_chunk"
    choice, found = fit_into(int(140e9), *given)
    needed = found["needed_bytes"]
    assert choice == fitting.config == fit_into(needed, *given)[0]
    with pytest.raises(UserError, match=rf"takes {needed / 1e9:.2f} GB of each GPU.*; use --") as error:
        fit_into(needed - 1, *given)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="none of its settings would"):
        fit_into(int(4e9))


def test_what_is_chosen_needs_as_much_when_it_is_given(fitting):
    """So that one byte less is refused, and not what a run has just chosen: 20 MiB were between the two."""
    fitting.room = int(24e9)
    choice, need = fitting.first(())
    given = fit.Fitting(choice, fake_world(), fitting.room, train_gpt).first(tuple(fit.COSTS))
    assert choice.val_chunk < fitting.config.val_chunk and given == (choice, need)


def test_each_rank_gets_a_micro_batch(speedrun, monkeypatch, capsys):
    """Where the setting was not given, and a line says so; else so many ranks are refused."""
    config = replace(speedrun, micro_batches=2)
    monkeypatch.setattr(fit, "room_of", lambda _: int(140e9))
    for ranks, said in ((1, False), (4, True)):
        assert fit.fit(config, (), fake_world(size=ranks), train_gpt.Trainer).micro_batches == max(2, ranks)
        assert ("--micro_batches 4 (which packs other batches" in capsys.readouterr().out) == said
    with pytest.raises(UserError, match="4 ranks do not divide the 2 micro-batches"):
        fit.fit(config, ("micro_batches",), fake_world(size=4), train_gpt.Trainer)


def test_a_start_finds_what_the_last_one_counted(speedrun, monkeypatch):
    """With another seed, too; but not with another width, nor where the program or the GPU is another one."""
    counts = []

    def count(program, config, ranks, device, copies, candidates, chunks, launch) -> dict[int, memory.Need]:
        counts.append(config)
        need = memory.Need(0, 0, 0, 0, 0, 10 ** 11 // config.micro_batches, 0, 1)
        return {chunk: need._replace(validation=chunk) for chunk in chunks}

    monkeypatch.setattr(fit, "count", count)
    monkeypatch.setattr(fit, "room_of", lambda _: int(5e9))

    def start(**settings) -> tuple:
        world, before = fake_world(), len(counts)
        choice = fit.fit(replace(speedrun, **settings), (), world, train_gpt.Trainer)
        return choice, world.found["memory"], len(counts) - before

    choice, memory_of, counted = start(steps=1000)
    assert counted > 1 and choice.micro_batches > speedrun.micro_batches
    others = dict(seed=3, name="again", runs=5, target=3.0, muon_lr=0.1, muon_decay=0.1, adam_lr=0.1,
                  adam_decay=0.1, value_lr=1.0, ngram_lr=1.0, cooldown=0.1, final_lr=0.1)
    assert others.keys() == {*fit.SIZELESS}
    assert start(steps=1000, **others) == (replace(choice, **others), memory_of, 0)
    assert start(steps=1000, width=640)[2]
    for owner, name, value in ((torch.cuda, "get_device_name", "NVIDIA H100"), (torch, "__version__", "2.0"),
                               (fit_notes, "project_sources", lambda: {"train_gpt.py": b"pass"})):
        with monkeypatch.context() as other:
            other.setattr(owner, name, value if callable(value) or owner is torch else lambda *_: value)
            assert start(steps=1000)[2] == counted


def test_triton_is_hashed_once():
    """By the thread. What asks for the hash later finds it."""
    from triton.runtime.cache import triton_key
    triton_key.cache_clear()
    hash_triton().join()
    assert triton_key() and triton_key.cache_info()[:2] == (1, 1)


def test_notes_that_cannot_be_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    first, later = Notes(GPU), Notes(GPU)
    first.add("how much?", [1, 2])
    assert later.find("how much?") is None      # Nothing is kept before all is done.
    first.keep()
    assert later.find("how much?") == [1, 2] and later.find("how many?") is None
    file, = tmp_path.glob("triton/*/*")
    for content in (b"[1, 2", b"\xff"):
        file.write_bytes(content)
        assert later.find("how much?") is None
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), ""):
        monkeypatch.setenv("TRITON_CACHE_DIR", folder)
        assert first.find("how much?") is None
        first.keep()


@pytest.mark.parametrize("given", fit.COSTS)
def test_what_is_given_stays_and_the_others_change(speedrun, given):
    tried = list(fit.choices(speedrun, (given,), 1))
    values = {name: {getattr(choice, name) for choice in tried} for name in fit.COSTS}
    assert values.pop(given) == {getattr(speedrun, given)}
    assert all(len(others) > 1 for others in values.values())


def test_the_preset_for_one_small_gpu_fits_as_it_is(fit_into, speedrun):
    """An RTX 4090 has 24,564 MiB by nvidia-smi, of which a context of CUDA takes half a GB."""
    config = replace(train_gpt.PRESETS["single"], data_path=speedrun.data_path)
    fitting = fit.Fitting(config, fake_world(), 24_564 * 2 ** 20 - 500_000_000 - fit.OUTSIDE, train_gpt)
    assert fitting.first(())[0] == config


def test_tools_get_what_fits_as_flags(fit_into, fitting, monkeypatch):
    """Behind the person's own settings, which stay."""
    argv = ["--data_path", fitting.config.data_path, "--micro_batches", "16"]
    monkeypatch.setattr(fit, "room_of", lambda _: int(22e9))
    monkeypatch.setattr(fit, "Fitting", lambda *_, **__: fitting)
    fitting.room, fitting.config = int(22e9), replace(fitting.config, micro_batches=16)
    flags = fit.fitted(argv, fake_world(), train_gpt)
    assert flags[:4] == argv and "--micro_batches" not in flags[4:]
    config = train_gpt.parse(flags)[0]
    assert config.micro_batches == 16 and config.ngram_rows < train_gpt.SPEEDRUN.ngram_rows
    assert fitting.need(config).total(True) <= int(22e9)


def test_a_limit_from_the_environment(monkeypatch):
    fractions = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(100e9), int(141e9)))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda x, _: fractions.append(x))
    monkeypatch.delenv(fit.LIMIT, raising=False)
    assert fit.room_of(fake_world()) == int(100e9) - fit.OUTSIDE
    for text, room in (("23.999999999", 23_999_999_999), ("140", int(100e9) - fit.OUTSIDE)):
        monkeypatch.setenv(fit.LIMIT, text)
        assert fit.room_of(fake_world()) == room
    assert fractions == [23_999_999_999 / 141e9, 140 / 141]
    monkeypatch.setenv(fit.LIMIT, "lots")
    with pytest.raises(UserError, match="GPU_MEMORY_LIMIT_GB=lots: expected a number"):
        fit.room_of(fake_world())


def test_counted_bytes():
    """What a compiled function makes on its way counts for nothing, unless a matmul made it."""
    counter, mib = memory.Counter(), 2 ** 20
    with counter:
        x = torch.empty(512, 512, device="meta", requires_grad=True)            # 1 MiB
        a, b = x * 2, x + 1
        assert (counter.live, counter.peak) == (3 * mib, 3 * mib)
        del a, b
        assert counter.restart() == mib
        y = (x.sin().cos().exp() + 1).sum()     # The backward pass needs the sine and the exponential.
        assert (counter.live, counter.peak) == (3 * mib + 512, 4 * mib + 512)
        del y
        counter.restart()
        y = counter.compiled(lambda x: (x.sin().cos().exp() @ x).sin())(x)
        assert counter.live == counter.peak == 3 * mib                          # the product, and the result
        y.backward(torch.empty_like(y))
        assert x.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_share_one_piece_of_memory():
    """Graphs of larger and larger tensors take what the largest needs, and not the sum."""
    sizes, pool, graphs = (400 * 2 ** 20, 600 * 2 ** 20, 800 * 2 ** 20), None, []
    torch.cuda.reset_peak_memory_stats()
    torch.empty(sizes[-1], dtype=torch.uint8, device="cuda")        # as the largest step holds at most
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for size in sizes:
        with recorded(pool) as graph:
            torch.empty(size, dtype=torch.uint8, device="cuda").zero_()
        graphs.append(graph)
        pool = graph.pool()
    taken = torch.cuda.memory_reserved() - before
    assert sizes[-1] < taken < 1.05 * sizes[-1] + 2 ** 27 < sum(sizes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_gives_the_memory_of_its_graphs_back():
    """Also where cuBLAS has worked in it."""
    world = SimpleNamespace(device=torch.device("cuda", torch.cuda.current_device()))
    torch.mm(*torch.ones(2, 16, 16, device="cuda"))     # cuBLAS cannot start inside a graph.
    World.release(world)
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    with recorded() as graph:
        x = torch.ones(1024, 1024, device="cuda")
        torch.mm(x, x)
    assert torch.cuda.memory_reserved() > before
    del graph, x
    World.release(world)
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counted_against_the_allocator():
    """A stack of layers in plain PyTorch: the same peak by counting and by torch's allocator."""
    def peak(device: str, read) -> int:
        layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device=device) for _ in range(8)))
        layers(torch.empty(16_384, 1024, device=device)).sum().backward()
        return read()

    counter = memory.Counter()
    with counter:
        counted = peak("meta", lambda: counter.peak)
    for _ in range(2):      # At first cuBLAS takes what it works in, 65 MiB for two threads, and keeps it.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        measured = peak("cuda", torch.cuda.max_memory_allocated) - before
    assert counted == pytest.approx(measured, rel=0.1)


def test_a_hopper_compiles_nothing_but_kernels(monkeypatch):
    """torch.compile takes seconds of every start. Preset `corpus` trains and is scored without it."""
    monkeypatch.setattr(memory.Counter, "compiled", lambda *_, **__: pytest.fail("torch.compile was called"))
    candidates = sampled(13_056, 13_056, 13_312)
    memory.count(train_gpt, train_gpt.PRESETS["corpus"], 1, GPU, False, candidates, [65_536])
