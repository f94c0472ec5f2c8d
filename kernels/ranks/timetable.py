"""Which collective of a training step starts where, and where it is waited for: communication as data.

A step's forward pass has stops: "embedding", "smear", "layer 0", "mlp 0", "layer 1", …, "head". Its
backward pass comes by them in reverse; "mlp 0" lies between layer 0's attention and its MLP. `timetable`
makes lists of transfers from the kind of step and from the rounds in which each group of parameters sends;
the rounds depend on the number of ranks. `Optimizer` in train_gpt.py works through the lists, and `python
train_gpt.py --timetable 4` prints them. tests/timetable.txt pins the lists for four ranks and the rounds for
1, 2, 4 and 8; a test compares them with what a step really sends.

A group is updated once all of its gradients have arrived. For value tables that is one layer before the end
of the backward pass. So the exchange of their features and their update run under layer 0's backward pass.

    weights     all_gather, started two layers before the forward pass needs them, under the layers between;
                an MLP's are needed where its layer begins and all of its weights are converted to FP8
    gradients   reduce_scatter, started once the backward pass has left the stop that uses the weights first
    small ones  one all_reduce after all of these, for scalars and gates, which every rank updates
    n-grams     two all_to_alls that the model itself sends: rows forward, their gradients backward
    features    with `--shared_updates` a reduce_scatter of gradients and an all_gather of updates, in the
                update of each group of tables of tokens, on a stream apart from the others
    text        with `--retrieval` one all_gather by the trainer, beside the backward pass, for counts
"""
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

# All groups that every rank updates have their gradients in one buffer, so one sum takes them.
SMALL = "small groups"
UPDATE = "update"  # the place after the backward pass


class Traffic(NamedTuple):
    """What a group of parameters asks of the ranks."""
    group: str
    rounds: list[str]  # the stop of each round; one collective makes a round; empty: the group sends nothing
    every_step: bool  # updated in every step, not only in those that update Adam's groups
    replicated: bool = False  # too small to share out: every rank makes the whole update


class Transfer(NamedTuple):
    """One collective: what it moves, where it starts and where it is waited for."""
    kind: str  # all_gather, reduce_scatter, all_reduce or all_to_all
    what: str  # a group, SMALL, or what the model itself sends
    round: int | None  # of the group's rounds; None: all of it
    start: str  # the stop that the forward pass comes to (gathers) or that the backward pass has left (sums)
    wait: str


class Update(NamedTuple):
    """The update of one group."""
    group: str
    behind: str  # the sums that it waits for
    start: str  # the stop that the backward pass has left


class Timetable(NamedTuple):
    """What one kind of step sends and updates, each list in the order of starting; the same on every rank."""
    gathers: list[Transfer]  # weights that the step before updated
    sums: list[Transfer]  # gradients
    updates: list[Update]
    model: list[Transfer]  # what the model sends by itself: rows of n-grams, and the loss


def due(queue: deque, passed: list[str]) -> Iterator:
    """Take from the front of `queue` what starts at one of the stops in `passed`."""
    while queue and queue[0].start in passed:
        yield queue.popleft()


def stops_of(layers: int) -> list[str]:
    """The stops of a forward pass, in order."""
    inside = (f"{part} {i}" for i in range(layers) for part in ("layer", "mlp"))
    return ["embedding", "smear", *inside, "head"]


def rounds_by_use(traffic: list[Traffic], stops: list[str], adam: bool) -> list[tuple]:
    """(place in `stops`, group, round) of all that is updated and shared out, by first use.

    `adam`: whether to include the groups that are not updated in every step.
    """
    uses = [(stops.index(stop), one.group, i) for one in traffic
            if (adam or one.every_step) and not one.replicated for i, stop in enumerate(one.rounds)]
    return sorted(uses, key=lambda use: use[0])


def timetable(traffic: list[Traffic], layers: int, adam_updated: bool, update_adam: bool,
              overlap: bool = True) -> Timetable:
    """The transfers of a step of a model with so many layers.

    adam_updated and update_adam say whether the step before, and this one, update the groups that not every
    step updates. Without `overlap` all gathers come before the first stop and all sums after the backward
    pass.
    """
    stops = stops_of(layers)
    at_start = [stop for stop in stops if not stop.startswith("mlp")]   # where weights are needed
    first_used = [one._replace(rounds=[stop.replace("mlp", "layer") for stop in one.rounds])
                  for one in traffic]
    gathers = []
    for use, group, i in rounds_by_use(first_used, at_start, adam_updated):
        start, needed = (at_start[max(use - 2, 0)], at_start[use]) if overlap else (stops[0], stops[0])
        gathers.append(Transfer("all_gather", group, i, start, needed))
    early, late = [], []
    for use, group, i in reversed(rounds_by_use(traffic, stops, update_adam)):
        # Gradients of what the embedding uses are complete only when the whole backward pass is.
        under_way = overlap and use > stops.index("embedding")
        (early if under_way else late).append(
            Transfer("reduce_scatter", group, i, stops[use] if under_way else UPDATE, UPDATE))
    small = [one.group for one in traffic if one.replicated and update_adam]
    if small:
        late.append(Transfer("all_reduce", SMALL, None, UPDATE, UPDATE))
    tables = [one.group for one in traffic if not one.rounds]
    updated = [one for one in traffic if one.every_step or update_adam]
    return Timetable(gathers, early + late, updates_of(updated, early + late), of_the_model(bool(tables)))


def of_the_model(has_ngrams: bool) -> list[Transfer]:
    """What the model sends by itself, in the order of starting."""
    loss = [Transfer("all_reduce", "loss", None, "head", UPDATE)]
    if not has_ngrams:
        return loss
    return [Transfer("all_gather", "row numbers of n-grams", None, "embedding", "embedding"),
            Transfer("all_to_all", "rows of n-grams", None, "embedding", "layer 0"), *loss,
            Transfer("all_to_all", "gradients of n-grams", None, "layer 0", "embedding")]


def updates_of(traffic: list[Traffic], sums: list[Transfer]) -> list[Update]:
    """These groups' updates, in the order in which their last sums start, and so arrive.

    A group without sums is complete when the backward pass is, and then comes first.
    """
    last = {transfer.what: place for place, transfer in enumerate(sums)}
    found = []
    for one in traffic:
        behind = SMALL if one.replicated else one.group
        place = last.get(behind, -1)
        found.append((place, Update(one.group, behind, UPDATE if place < 0 else sums[place].start)))
    return [update for _, update in sorted(found, key=lambda pair: (pair[1].start == UPDATE, pair[0]))]


def timetable_text(table: Timetable, layers: int) -> str:
    """The timetable as a person reads it: a line for each stop at which something starts or is waited for."""
    stops = stops_of(layers)
    returning = [t for t in table.model if t.what.startswith("gradients")]
    forward = [*table.gathers, *(t for t in table.model if t not in returning)]
    phases = [("forward", stops, forward), ("backward", stops[::-1], [*returning, *table.sums]),
              ("update", [UPDATE], [*table.sums, *table.model])]
    lines = []
    for phase, places, transfers in phases:
        for stop in places:
            for verb in ("start", "wait"):
                found = [t for t in transfers if getattr(t, verb) == stop]
                if found:
                    lines.append(f"{phase:9} {stop:10} {verb:6} {named(found)}")
    starts = dict.fromkeys(update.start for update in table.updates)
    for place in starts:
        groups = ", ".join(update.group for update in table.updates if update.start == place)
        lines.append(f"{'update':9} {'behind ' * (place != UPDATE)}{place:10} {groups}")
    return "\n".join(lines)


def named(transfers: list[Transfer]) -> str:
    """The transfers in words, those of one group together with the numbers of their rounds."""
    rounds: dict[str, list[str]] = {}
    for transfer in transfers:
        numbers = rounds.setdefault(f"{transfer.kind} {transfer.what}", [])
        numbers += [] if transfer.round is None else [str(transfer.round)]
    return "; ".join(" ".join([name, *numbers]) for name, numbers in rounds.items())
