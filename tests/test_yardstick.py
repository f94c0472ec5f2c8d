"""The two headline quantities, pinned from outside: the validation loss and the clock.

Each test names the faults that it is there to catch. They were tried one by one.
"""
import subprocess
import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, environment

import train_gpt
from data.loader import Loader
from data.shards import find_shards
from kernels.attention.flash import ATTENTION
from kernels.ranks.collectives import Collectives
from records.run import progress
from records.run.clock import Clock
from records.run.log import RunLog

CPU = torch.device("cpu")


# The loss

def test_the_validation_loss_against_a_scorer_of_our_own(config, trainer, monkeypatch):
    """Tokens from the raw file, documents cut here, softcap and log-softmax in float64 of what the head sees.

    Faults: a sum divided by 1.01 times the tokens; tokens left out, scored twice or shifted; another softcap.
    """
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
        z = states[chunk][place:place + end - first].double() @ head.T
        log_p = (23 / (1 + torch.exp(-(z + 5) / 7.5))).log_softmax(-1)
        expected.append(-log_p[torch.arange(end - first), torch.from_numpy(words[first + 1:end + 1])])
        place += end - first
    expected = torch.cat(expected)
    assert len(expected) == config.val_tokens
    assert ours == pytest.approx(expected.mean().item(), rel=1e-5)


def test_no_later_token_changes_an_earlier_loss(config):
    """By whole steps of the compiled model where there is a GPU. Fault: attention without `causal`."""
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    config = replace(config, compile=device.type == "cuda", attention="auto")
    model = train_gpt.GPT(config, device, Collectives(1))
    step = train_gpt.Schedule(config).validation(config.steps)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    tokens, targets = (torch.randint(97, 123, (256,), dtype=torch.int32, device=device) for _ in range(2))
    tokens[0] = 256
    cu_seqlens = torch.tensor([0, 256], dtype=torch.int32, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)

    def loss_before(place: int) -> float:
        """Of the tokens before `place`. Their targets stay what they are, whatever the tokens are."""
        wanted = targets.clone()
        wanted[place:] = -1
        with torch.no_grad():
            return model(train_gpt.Batch(tokens, wanted, cu_seqlens, none, 256), step)[1].item()

    for place in (40, 200):
        kept = loss_before(place)
        tokens[place:] = torch.randint(97, 123, (256 - place,), dtype=torch.int32, device=device)
        assert loss_before(place) == pytest.approx(kept, abs=1e-6)
        tokens[place - 1] = 96
        assert loss_before(place) != kept


@pytest.mark.parametrize("backend", ["flash4", "varlen"])
def test_what_the_attention_libraries_are_asked_for(monkeypatch, backend):
    """Faults: a window that is one too long, no `causal`, keys of other sequences than the queries'."""
    asked = {}

    def attend(q, k, v, *positional, **named):
        asked.update(named, positional=positional)
        return v

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    interface = SimpleNamespace(flash_attn_varlen_func=attend, interface=None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", interface)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    x, cu_seqlens = torch.randn(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    ATTENTION[backend](x, x, x, cu_seqlens, 4, 2, 0.1)
    # (2, 0): two tokens before a query and none behind it, which is what the plain form takes a window for.
    assert asked["window_size"] == (2, 0)
    if backend == "flash4":
        assert asked["causal"] is True and asked["softmax_scale"] == 0.1
        assert asked["cu_seqlens_q"] is asked["cu_seqlens_k"] is cu_seqlens
        assert asked["max_seqlen_q"] == asked["max_seqlen_k"] == 4
    else:
        assert asked["scale"] == 0.1 and asked["positional"] == (cu_seqlens, cu_seqlens, 4, 4)


# The clock

SLOW = """
import sys, time
import train_gpt
step, validate, final = train_gpt.Trainer.step, train_gpt.Trainer.validate, train_gpt.Optimizer.gather

def slow(name, function, seconds):
    def call(self, *words):
        print(name, flush=True)
        time.sleep(seconds)
        return function(self, *words)
    return call

train_gpt.Trainer.warm_up = lambda self: None
train_gpt.Trainer.step = slow("step", step, 0.3)
train_gpt.Trainer.validate = slow("validate", validate, 0.7)
sys.exit(train_gpt.main(sys.argv[1:]))
"""


def test_the_clock_against_this_process_own(shards, tmp_path):
    """A run in another process says when a step or a validation begins; each lasts a known time at least.

    Faults: the clock paused in every second step; begun after the first step; clock and laps both counting
    90%; validation on it.
    """
    words = ["--preset", "cpu", *TINY, "--data_path", str(shards), "--steps", "5", "--val_every", "4"]
    run = subprocess.Popen([sys.executable, "-c", SLOW, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                           env=environment(RUNS_PATH=str(tmp_path)))
    stamps = []
    for line in run.stdout:
        stamps.append((line.strip(), time.perf_counter()))
        if line.startswith("validation loss"):
            logged = float(line.split(" s (")[0].split()[-1])
    assert run.wait() == 0
    kinds = [name for name, _ in stamps if name in ("step", "validate")]
    assert kinds == ["step"] * 4 + ["validate"] + ["step"] * 3 + ["validate"]
    at = [time_s for name, time_s in stamps if name in ("step", "validate")]
    timed = at[8] - at[0] - (at[5] - at[4])                             # without the first validation
    assert logged == pytest.approx(timed, rel=0.04, abs=0.06) and timed > 7 * 0.3


class Quiet(RunLog):
    """A log that keeps its lines."""

    def __init__(self):
        super().__init__("none", enabled=False)
        self.lines = []

    def write(self, kind: str, **values) -> None:
        self.lines.append(kind)


def test_what_is_on_the_clock_and_in_which_order(config, monkeypatch):
    """Faults: ranks that do not begin together; batches made before the clock; the last gather off it."""
    trainer, events = train_gpt.Trainer(config, train_gpt.World()), []

    def watch(owner, name: str, event: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *words: events.append(event) or function(*words))

    trainer.warm_up()
    watch(train_gpt.World, "barrier", "barrier")
    watch(Clock, "start", "start")
    watch(Clock, "stop", "stop")
    watch(Loader, "batches", "batch")
    watch(train_gpt.Optimizer, "gather", "gather")
    monkeypatch.setattr(progress, "tqdm", lambda **_: SimpleNamespace(
        set_postfix=lambda **_: None, update=lambda: None, close=lambda: None))
    train_gpt.train(trainer, Quiet(), {"startup_s": 0.0, "compile_s": 0.0})
    assert events[:2] == ["barrier", "start"] and "batch" in events[2:]
    points = [i for i, event in enumerate(events) if event == "stop"]
    # Each pause comes right after a gather on the clock; the validation gathers for itself.
    before = [[event for event in events[:i] if event != "batch"][-1] for i in points]
    assert before[:-1] == ["gather"] * 3


# What a warm-up puts back

def test_a_snapshot_holds_the_tie_and_the_bits(trainer):
    """Faults: `restore` forgets that head and embedding are tied; a snapshot without the mantissa bits."""
    optimizer = trainer.optimizer
    kept = optimizer.snapshot()
    optimizer.untie()
    optimizer.restore(kept)
    assert optimizer.tied
    shards = [shard for shard in optimizer.shards.values() if isinstance(shard, train_gpt.Shard)]
    for shard in shards:
        shard.mantissa_bits = torch.ones_like(shard.weight, dtype=torch.int16)
    kept = optimizer.snapshot()
    for shard in shards:
        shard.mantissa_bits.zero_()
    optimizer.restore(kept)
    assert all(shard.mantissa_bits.all() for shard in shards)


def test_a_gather_has_ended_before_its_layer_reads(trainer, monkeypatch):
    """Fault: a gather is waited for one layer late."""
    optimizer, events = trainer.optimizer, []
    optimizer.begin(trainer.schedule.at(2))
    wanted = {(transfer.what, transfer.round): transfer.wait for transfer in optimizer.to_gather}
    monkeypatch.setattr(optimizer, "start_gather", lambda transfer: SimpleNamespace(
        wait=lambda: events.append((transfer.what, transfer.round))))
    for stop in optimizer.stops:
        optimizer.weights_needed(stop)
        assert {name for name, layer in wanted.items() if layer == stop} <= set(events), stop
    assert len(events) == len(wanted) > 8
