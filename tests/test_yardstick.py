"""The two headline quantities, pinned from outside: the validation loss and the clock.

Each test names the faults that it is there to catch. They were tried one by one, in copies of the program.
N-grams of which the order does not count ("a b" = "b a") fail tests/kernels/test_ngram_table.py, a
gather that is waited for too late fails tests/test_timetable.py.
"""
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TINY, environment
from synthetic import write_run

import train_gpt
from data.shards import find_shards
from kernels import optimizer as updates
from kernels.attention.flash import ATTENTION
from kernels.ranks.collectives import Collectives
from kernels.sequence import Sequences
from records.tools.check import check_clock
from records.tools.logs import read_log

CPU = torch.device("cpu")


# The loss

def test_the_validation_loss_against_a_scorer_of_our_own(config, monkeypatch):
    """Tokens from the raw file, documents cut here, softcap and log-softmax in float64 of what the head sees.

    Faults: a sum divided by 1.01 times the tokens; tokens left out, scored twice or shifted; another softcap.
    """
    trainer = train_gpt.Trainer(replace(config, fp8=()), train_gpt.World())
    step = trainer.schedule.validation(len(trainer.schedule))
    for planned in list(trainer.schedule)[:2]:                          # Weights that are not the first ones.
        trainer.step(planned, trainer.loader.batches(planned.index))
    states, before_head = [], trainer.model.ops.before_head
    monkeypatch.setattr(trainer.model, "ops", trainer.model.ops._replace(
        before_head=lambda *words: states.append(before_head(*words)) or states[-1]))
    ours = trainer.validate(step)

    words = np.fromfile(find_shards(config.data_path, "val")[0], "<u2")[512:].astype(int)
    begins = [i for i in range(config.val_tokens) if words[i] == config.vocab_size - 1 or i == 0]
    longest = config.val_sequence_length
    documents = zip(begins, [*begins[1:], config.val_tokens])
    pieces = [(first, min(end, first + longest)) for begin, end in documents
              for first in range(begin, end, longest)]
    head, expected, chunk, place = trainer.model.head.double(), [], 0, 0
    for first, end in pieces:
        if place + end - first > config.val_chunk:
            chunk, place = chunk + 1, 0
        seen = states[chunk][0][place:place + end - first]
        z = (seen.double() @ head.T).to(seen.dtype).double()            # The model rounds its logits.
        log_p = (23 / (1 + torch.exp(-(z + 5) / 7.5))).log_softmax(-1)
        targets = torch.from_numpy(words[first + 1:end + 1]).to(z.device)
        expected.append(-log_p[torch.arange(end - first), targets])
        place += end - first
    expected = torch.cat(expected)
    assert len(expected) == config.val_tokens
    assert ours == pytest.approx(expected.mean().item(), rel=1e-5)


def test_no_later_token_changes_an_earlier_loss(config):
    """By the compiled model of the speedrun where there is a GPU. Fault: attention that sees later tokens."""
    device, n = CPU, 256
    if torch.cuda.is_available():
        device, n, config = torch.device("cuda"), 2048, replace(train_gpt.SPEEDRUN, ngram_rows=4096)
    model = train_gpt.GPT(config, device, Collectives(1))
    step = train_gpt.Schedule(config).validation(config.steps)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    whole = dict(dtype=torch.int32, device=device)
    tokens, targets = (torch.randint(97, 123, (n,), **whole) for _ in range(2))
    tokens[0] = config.document_start
    cu_seqlens, none = torch.tensor([0, n], **whole), torch.empty(0, **whole)

    def loss_before(place: int) -> float:
        """Of the tokens before `place`. Their targets stay what they are, whatever the tokens are."""
        wanted = targets.clone()
        wanted[place:] = -1
        with torch.no_grad():
            return model(train_gpt.Batch(tokens, wanted, cu_seqlens, none, none, none, n), step)[1].item()

    for place in (40, 200):
        kept = loss_before(place)
        tokens[place:] = torch.randint(97, 123, (n - place,), **whole)
        assert loss_before(place) == pytest.approx(kept, rel=1e-6)
        tokens[place - 1] = 96
        assert loss_before(place) != pytest.approx(kept, rel=1e-6)


def test_a_model_of_fp8_is_scored_in_bfloat16_if_that_is_wanted(config, trainer):
    """Operations in FP8 stand in for the others, which are asked for the score alone."""
    class AskedInFP8(Exception):
        pass

    def refuse(*_, **__):
        raise AskedInFP8

    def score(model: train_gpt.GPT) -> float:
        return model.score(trainer.validation.batches[0], trainer.schedule.validation(0)).item()

    wanted = score(trainer.model)
    for name in ("norm_fork", "qkv", "mlp_input", "feed_forward"):
        for val_fp8 in (True, False):
            model = train_gpt.GPT(replace(config, val_fp8=val_fp8), CPU, Collectives(1))
            model.ops, model.fp8 = model.ops._replace(**{name: refuse}), ("head",)
            if val_fp8:
                with pytest.raises(AskedInFP8):
                    score(model)
            else:
                assert score(model) == wanted
                assert model.fp8 == ("head",) and getattr(model.ops, name) is refuse


@pytest.mark.parametrize("backend, deterministic", [("flash4", True), ("flash4", False), ("varlen", False)])
def test_what_the_attention_libraries_are_asked_for(monkeypatch, backend, deterministic):
    """Faults: a window that is one too long, no `causal`, keys of other sequences than the queries'.

    And FlashAttention-4 that is deterministic where torch is not, or the other way round.
    """
    asked = {}

    def attend(q, k, v, *positional, **named):
        asked.update(named, positional=positional)
        return v

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    interface = SimpleNamespace(flash_attn_varlen_func=attend, interface=None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", interface)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    x, cu_seqlens = torch.randn(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    ATTENTION[backend](x, x, x, Sequences.of(cu_seqlens, 4, 4), 2, 0.1)
    # (2, 0): two tokens before a query and none behind it, which is what the plain form takes a window for.
    assert asked["window_size"] == (2, 0)
    if backend == "flash4":
        assert asked["causal"] is True and asked["softmax_scale"] == 0.1
        assert asked["cu_seqlens_q"] is asked["cu_seqlens_k"] is cu_seqlens
        assert asked["max_seqlen_q"] == asked["max_seqlen_k"] == 4 and asked["deterministic"] is deterministic
    else:
        assert asked["scale"] == 0.1 and asked["positional"] == (cu_seqlens, cu_seqlens, 4, 4)


# The clock

RANK = """
import sys, time
import train_gpt
from data import loader

def stamp(owner, name, seconds=0.0):
    function = getattr(owner, name)
    def call(*words):
        begin = time.time()
        time.sleep(seconds)
        result = function(*words)
        sys.stdout.write(f"stamp {name} {begin} {time.time()}\\n")
        return result
    setattr(owner, name, call)

train_gpt.Trainer.warm_up = lambda self: None
stamp(train_gpt, "train", float(sys.argv[1]))
stamp(train_gpt.World, "barrier")
stamp(train_gpt.Loader, "batches")
stamp(loader.Plan, "of")
stamp(train_gpt.Trainer, "step", 0.25)
stamp(train_gpt.Optimizer, "gather", 0.25)
stamp(train_gpt.Trainer, "validate", 0.5)
sys.exit(train_gpt.main(sys.argv[2:]))
"""


class Span(NamedTuple):
    """Of one call: seconds since the epoch, by the system's time."""
    begin: float
    end: float


@pytest.fixture(scope="module")
def timed(shards, tmp_path_factory) -> tuple[list[dict[str, list[Span]]], dict[str, list[dict]]]:
    """A run of two ranks, of which the second comes late: for each rank its calls, and the log by kind.

    Every call takes a known time at least, so that a slow machine blurs nothing.
    """
    folder = tmp_path_factory.mktemp("runs")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=timedelta(seconds=60))
    variables = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
                     TORCHELASTIC_USE_AGENT_STORE="True", RUNS_PATH=str(folder))
    words = ["--preset", "cpu", *TINY, "--steps", "5", "--extra_steps", "1", "--val_every", "4",
             "--micro_batches", "2", "--batch_tokens", "128,256,384", "--data_path", str(shards)]
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(1.5 * rank), *words], cwd=ROOT, text=True,
                              env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **variables),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
    stamps, log = [defaultdict(list), defaultdict(list)], defaultdict(list)
    try:
        for rank, calls in zip(ranks, stamps):
            output, errors = rank.communicate(timeout=180)
            assert rank.returncode == 0, errors
            for line in output.splitlines():
                if line.startswith("stamp"):
                    _, name, *times = line.split()
                    calls[name].append(Span(*map(float, times)))
    finally:
        for rank in ranks:
            rank.kill()
    for line in next(folder.glob("*/log.jsonl")).read_text().splitlines():
        log[json.loads(line)["kind"]].append(json.loads(line))
    return stamps, log


def start_of(calls: dict[str, list[Span]]) -> float:
    """When the rank had met the others, before its first step."""
    return max(barrier.end for barrier in calls["barrier"] if barrier.end <= calls["step"][0].begin)


def test_ranks_begin_together_and_read_nothing_before(timed):
    """Faults: ranks that do not wait for each other; batches made, or planned, before the clock starts."""
    stamps, _ = timed
    assert stamps[1]["train"][0].begin + 1.5 <= start_of(stamps[0])
    for calls in stamps:
        assert start_of(calls) == pytest.approx(start_of(stamps[0]), abs=1.0)
        assert min(call.begin for call in (*calls["batches"], *calls["of"])) >= start_of(calls)


def test_the_clock_against_the_systems_time(timed):
    """All from the start to the last validation counts, but for validations.

    Faults: the clock paused in every second step; started after the first; clock and laps both counting 90%;
    the gather before a validation left off the clock.
    """
    stamps, log = timed
    calls, (summary,) = stamps[0], log["summary"]
    assert [len(calls["step"]), len(calls["validate"])] == [6, 2]
    wall = -start_of(calls)
    for validate, line in zip(calls["validate"], log["validation"], strict=True):
        gathers = [gather for gather in calls["gather"] if gather.end <= validate.begin]
        last_step = max(step.end for step in calls["step"] if step.end <= validate.begin)
        assert gathers and gathers[-1].begin >= last_step
        assert line["time_s"] == pytest.approx(wall + validate.begin, rel=0.07)
        wall -= validate.end - validate.begin
    wall += calls["validate"][-1].end
    assert wall > 8 * 0.25 and summary["time_s"] == pytest.approx(wall, rel=0.07)
    assert summary["ended"] - summary["began"] - summary["paused_s"] == pytest.approx(wall, rel=0.07)
    laps = [line["ms"] / 1000 for line in log["step"]]
    assert all(lap > 0.97 * (step.end - step.begin) for lap, step in zip(laps, calls["step"], strict=True))
    assert sum(laps) < summary["time_s"]


@pytest.mark.parametrize("share", [1.0, 0.9])
@pytest.mark.parametrize("laps_too", [False, True])
def test_a_record_with_a_slow_clock_is_refused(tmp_path, share, laps_too):
    """Fault: a check that allows half the time, by the laps or by the system's time."""
    run = read_log(write_run(tmp_path))
    run.summary |= {"began": 1000.0, "ended": 1005.0 + run.summary["time_s"], "paused_s": 5.0}
    for times in (run.validations, run.summary, *([{"time_s": run.steps["ms"]}] if laps_too else [])):
        times["time_s"] *= share
    run.summary["tokens_per_s"] /= share
    problems = check_clock(run)
    assert any("the system's time" in problem for problem in problems) == (share < 1)
    assert any("ran outside the clock" in problem for problem in problems) == (share < 1 and not laps_too)
    assert bool(problems) == (share < 1)


# What a warm-up puts back

def test_a_snapshot_holds_the_bits(trainer):
    """Fault: a snapshot without the mantissa bits."""
    optimizer = trainer.optimizer
    shards = [shard for shard in optimizer.shards.values() if isinstance(shard, train_gpt.Shard)]
    for shard in shards:
        shard.mantissa_bits = torch.ones_like(shard.own_weights, dtype=torch.int16)
    kept = updates.snapshot(optimizer.state())
    for shard in shards:
        shard.mantissa_bits.zero_()
    updates.restore(optimizer.state(), kept)
    assert all(shard.mantissa_bits.all() for shard in shards)
