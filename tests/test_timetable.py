"""The timetable of collectives: pinned as text for four ranks, and compared with a step.

It is a function of the groups' rounds, and these are pinned for 1, 2, 4 and 8 ranks.
"""
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, command, succeeded

import train_gpt
from kernels.ranks import collectives
from kernels.ranks.timetable import SMALL, UPDATE, Traffic, stops_of, timetable, timetable_text
from records.run.explain import tables_text

GOLDEN = ROOT / "tests" / "timetable.txt"
# (the step before updated Adam's groups, this one does)
KINDS = {"Adam's gradients accumulate": (True, False), "Adam updates": (False, True)}


def traffic_of(config: train_gpt.Config, ranks: int) -> list[Traffic]:
    model = train_gpt.GPT(config, torch.device("meta"), collectives.Collectives(ranks))
    return [group.traffic(ranks) for group in train_gpt.parameter_groups(model, config)]


def test_timetable_of_the_speedrun_is_the_pinned_one():
    """tests/timetable.txt; to pin a change that is meant, write what this test prints there."""
    config, rounds = train_gpt.SPEEDRUN, {}
    for ranks in (1, 2, 4, 8):
        for one in traffic_of(config, ranks):
            kind = "every step" if one.every_step else "Adam's steps"
            kind += ", replicated" * one.replicated
            rounds.setdefault(f"{one.group:16} {kind}: {', '.join(one.rounds) or 'none'}", []).append(ranks)
    lines = ["The stops of each group's rounds", ""]
    lines += [f"ranks {', '.join(map(str, ranks)):10}  {text}" for text, ranks in rounds.items()]
    traffic = traffic_of(config, 4)
    for name, kind in KINDS.items():
        text = timetable_text(timetable(traffic, len(config.layers), *kind), len(config.layers))
        lines += ["", f"{name}, 4 ranks", "", *text.splitlines()]
    found = "\n".join(lines) + "\n"
    print(found)
    assert found == GOLDEN.read_text()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_everything_that_is_updated_is_summed_and_gathered_once(ranks, kind, overlap):
    adam_updated, update_adam = kind
    traffic = traffic_of(train_gpt.SPEEDRUN, ranks)
    table = timetable(traffic, len(train_gpt.SPEEDRUN.layers), *kind, overlap=overlap)

    def rounds(adam: bool) -> set:
        return {(one.group, i) for one in traffic for i in range(len(one.rounds))
                if not one.replicated and (adam or one.every_step)}

    sums = [transfer for transfer in table.sums if transfer.what != SMALL]
    for transfers, adam in ((table.gathers, adam_updated), (sums, update_adam)):
        found = [(transfer.what, transfer.round) for transfer in transfers]
        assert len(found) == len(set(found)) and set(found) == rounds(adam)
    assert [t.what for t in table.sums].count(SMALL) == update_adam
    updated = {one.group for one in traffic if update_adam or one.every_step}
    assert len(table.updates) == len(updated) and {update.group for update in table.updates} == updated
    stops = [UPDATE, *stops_of(len(train_gpt.SPEEDRUN.layers))][::-1]
    starts = [stops.index(update.start) for update in table.updates]
    assert starts == sorted(starts)
    for update, start in zip(table.updates, starts):        # behind all of its sums, and at once
        own = [stops.index(transfer.start) for transfer in table.sums if transfer.what == update.behind]
        assert start == max(own, default=stops.index(UPDATE))
        assert update.behind in (update.group, SMALL)
    if not overlap:
        assert {t.start for t in table.gathers} == {"embedding"}
        assert {t.start for t in [*table.sums, *table.updates]} == {UPDATE}


class Sent:
    """A collective under way, in a log of what was started and waited for."""

    def __init__(self, log: list, name: tuple):
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(("wait", *self.name))


@pytest.fixture
def sending(config, monkeypatch):
    """A trainer that takes itself for rank 0 of 2, and the log of what it sends and the stops it passes."""
    log: list[tuple] = []

    def start(kind: str):
        def collective(out, source=None, **_):
            given = out if source is None else source
            if kind == "all_gather":
                out.copy_(torch.cat([source] * 2))
            elif kind == "reduce_scatter":
                out.copy_(source.chunk(2)[0])
            elif kind == "all_to_all":
                out.copy_(source)
            log.append(("start", kind, given.data_ptr()))
            return Sent(log, (kind, given.data_ptr()))
        return collective

    monkeypatch.setattr(collectives, "ALL_GATHER", start("all_gather"))
    monkeypatch.setattr(collectives, "REDUCE_SCATTER", start("reduce_scatter"))
    monkeypatch.setattr(collectives.dist, "all_reduce", start("all_reduce"))
    monkeypatch.setattr(collectives.dist, "all_to_all_single", start("all_to_all"))
    world = SimpleNamespace(
        rank=0, size=2, device=torch.device("cpu"), memory=float("inf"), barrier=lambda: None,
        collectives=collectives.Collectives(2), choose_collectives=lambda copies: None,
        be_deterministic=lambda on: None)
    trainer = train_gpt.Trainer(replace(config, ngram_rows=512), world)
    return trainer, log


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is sent does not depend on the device")
@pytest.mark.parametrize("index", [0, 1, 4, 5])
def test_a_step_sends_what_its_timetable_says(sending, index, monkeypatch):
    """Collective by collective: what, in which order, at which stop it starts, and where it is waited for."""
    trainer, log = sending
    optimizer, step = trainer.optimizer, trainer.schedule.at(index)
    gathered, summed = {}, {optimizer.small_grads.data_ptr(): (SMALL, None)}
    for name, shard in optimizer.shards.items():
        for i, (whole, own) in enumerate(getattr(shard, "places", ()) if not shard.group.replicated else ()):
            gathered[shard.own_weights[own].data_ptr()] = summed[shard.all_grads[whole].data_ptr()] = name, i
    record_stops(monkeypatch, optimizer, log)
    trainer.step(step, trainer.loader.batches(index))

    kind = step.adam_updated, step.update_adam
    table = timetable(optimizer.traffic, len(trainer.config.layers), *kind)
    found = started(log, gathered, "reach", "all_gather")
    assert found == [(t.what, t.round, t.start) for t in table.gathers]
    found = started(log, summed, "left", "reduce_scatter", "all_reduce")
    assert found == [(t.what, t.round, t.start) for t in table.sums]
    updated, places = [], [i for i, entry in enumerate(log) if entry[0] == "update"]
    for place in places:
        stop = [entry[1] for entry in log[:place] if entry[0] == "left"][-1]
        updated.append((log[place][1], stop))
        behind = next(update.behind for update in table.updates if update.group == log[place][1])
        arrived = {entry[2] for entry in log[:place] if entry[0] == "wait"}
        assert {pointer for pointer, name in summed.items() if name[0] == behind} <= arrived
    assert updated == [(update.group, update.start) for update in table.updates]
    waits = [entry for entry in log if entry[0] in ("reach", "wait")]
    pointers = {name: pointer for pointer, name in gathered.items()}
    for transfer in table.gathers:
        pointer = pointers[transfer.what, transfer.round]
        before = waits[:waits.index(("wait", "all_gather", pointer))]
        assert [entry[1] for entry in before if entry[0] == "reach"][-1] == transfer.wait
    for transfer in table.sums:
        assert all(("wait", transfer.kind, pointer) in log for pointer, name in summed.items()
                   if name == (transfer.what, transfer.round))
    names = gathered | summed
    of_the_model = [entry[1] for entry in log if entry[0] == "start" and entry[2] not in names]
    micro_batches = trainer.config.micro_batches // 2
    once = ["all_gather", "all_to_all"]
    assert of_the_model == (once + ["all_to_all"]) * (micro_batches - 1) + once + ["all_reduce", "all_to_all"]


def log_and_call(log: list, name: str, update, *given) -> None:
    log.append(("update", name))
    update(*given)


def record_stops(monkeypatch, optimizer: train_gpt.Optimizer, log: list) -> None:
    """Enter into the log what stop the forward pass comes to and the backward pass has left, and updates."""
    needed, complete = optimizer.weights_needed, optimizer.gradients_complete

    def weights_needed(stop: str) -> None:
        log.append(("reach", stop))
        needed(stop)

    def gradients_complete(stop: str) -> None:
        log.append(("left", stop))
        complete(stop)

    monkeypatch.setattr(optimizer, "weights_needed", weights_needed)
    monkeypatch.setattr(optimizer, "gradients_complete", gradients_complete)
    for name, shard in optimizer.shards.items():
        monkeypatch.setattr(shard, "update", partial(log_and_call, log, name, shard.update))


def started(log: list[tuple], names: dict, stops: str, *kinds: str) -> list[tuple]:
    """(what, round, stop) of the optimizer's collectives of these kinds, in the order of starting."""
    found, stop = [], None
    for entry in log:
        if entry[0] == stops:
            stop = entry[1]
        elif entry[0] == "start" and entry[1] in kinds and entry[2] in names:
            found.append((*names[entry[2]], stop))
    return found


def test_the_command_line_prints_the_timetable_of_every_kind_of_step():
    result = succeeded(command("--preset", "cpu", "--timetable", "2"))
    kinds = train_gpt.Schedule(train_gpt.PRESETS["cpu"]).kinds()
    assert result.stdout.count("\nSteps from ") == len(kinds)
    assert "reduce_scatter value tables" in result.stdout and "all_reduce small groups" in result.stdout


def test_explain_prints_the_rates_of_every_group():
    lines = succeeded(command("--preset", "cpu", "--explain")).stdout.splitlines()
    assert lines[0].split()[:2] == ["group", "algorithm"] and len(lines) == 11
    [row] = [line for line in lines if line.startswith("value tables")]
    assert "1.2" in row and "0.75, 0.99" in row             # 150 times 0.008


def test_the_text_that_retrieval_gathers_is_listed():
    """A trainer sends it behind the updates of every step; here it starts and is waited for."""
    for retrieval in (), (3,):
        config = replace(train_gpt.PRESETS["corpus"], retrieval=retrieval)
        model = train_gpt.GPT(config, torch.device("meta"), collectives.Collectives(1))
        groups = train_gpt.parameter_groups(model, config)
        text = tables_text(groups, train_gpt.Schedule(config), 2)
        assert text.count("all_gather text of the step") == 2 * text.count("Steps from") * len(retrieval)


def test_what_shared_updates_send_is_listed():
    """Of the head and the value tables whenever Adam updates."""
    config = replace(train_gpt.PRESETS["corpus"], shared_updates=True)
    model = train_gpt.GPT(config, torch.device("meta"), collectives.Collectives(1))
    groups, schedule = train_gpt.parameter_groups(model, config), train_gpt.Schedule(config)
    text = tables_text(groups, schedule, 4)
    kinds = [step for step in schedule.kinds() if step.update_adam]
    for group in ("head", "value tables"):
        for kind in ("reduce_scatter", "all_gather"):   # A line says where they start, one where they arrive.
            assert text.count(f"{kind} features of {group}") == 2 * len(kinds)
