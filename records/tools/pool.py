"""Which runs may be pooled, where two runs differ, and the statistics of a sample as data and as text."""
import math
import os
from collections import Counter
from dataclasses import asdict

from records.tools.classes import table_class
from records.tools.schema import NUMBER, RecordError, Run, differences, flatten, is_a, last_part
from records.tools.stats import SIGNIFICANCE, describe, more_runs, p_below, verdict

# Settings in which runs of one configuration may differ.
NOT_CONFIGURATION = frozenset({"seed", "name", "runs"})

# By how much figures of ./run.sh doctor may differ without being shown.
SAME_FIGURE = 0.05

NO_SEEDS = "foreign logs carry no seed: that their seeds are distinct cannot be checked"


def require_sample(runs: list[Run], what: str = "the runs") -> None:
    """RecordError unless the runs are finished and finite, of one configuration, and of distinct seeds."""
    for run in runs:
        if not run.finished:
            raise RecordError(f"{run.label}: {'; '.join(run.warnings)}. Statistics take finished runs: leave "
                              "it out")
        if not math.isfinite(run.loss):
            raise RecordError(f"{run.label}: its loss is {run.loss}: the run diverged, and a mean would hide "
                              "that")
        if "resumed" in run.header:
            raise RecordError(f"{run.label} went on from a checkpoint, so its clock has counted only the "
                              "rest; leave it out")
    require_one_configuration(runs, what)
    origins = [origin(run) for run in runs]
    repeated = {key: [run.label for run in runs if origin(run) == key] for key, n in Counter(origins).items()
                if n > 1}
    if repeated:
        listed = "; ".join(f"{key}: {', '.join(labels)}" for key, labels in repeated.items())
        raise RecordError(f"{what} repeat seeds, which makes the spread look smaller than it is ({listed}); "
                          "leave out all but one of each")


def origin(run: Run) -> str:
    """What no two runs of a sample may share: the seed, or the curve of a foreign log, which has no seed."""
    if run.seed is not None:
        return f"seed {run.seed}"
    return "equal numbers " + ", ".join(f"{loss:g} at {time_s:g} s" for loss, time_s in
                                        zip(run.validations["loss"][-2:], run.validations["time_s"][-2:]))


def require_one_configuration(runs: list[Run], what: str) -> None:
    for run in runs[1:]:
        clashes = configuration_differences(runs[0], run)
        if clashes:
            raise RecordError(f"{what} mix configurations: {runs[0].label} and {run.label} differ in "
                              f"{list_clashes(clashes)}; give those of one, by a pattern such as "
                              "\"records/runs/*-name\"")


def configuration_differences(a: Run, b: Run) -> dict[str, tuple]:
    """Setting -> (in a, in b) where two runs differ, seed and name aside; "sources" where their code does.

    Between a foreign log and ours only fields that both have are compared, and the form is a difference. The
    fingerprints of the data and of other texts count only where both logs have them: the first logs had none,
    and an unfinished log has none yet.
    """
    ignored = frozenset(key for key in flatten(a.header["config"]) if last_part(key) in NOT_CONFIGURATION)
    fields = ("preset", "world_size", "attention", "fp8", "target", "sources")
    found = (differences(a.header["config"], b.header["config"], ignored)
             | differences({key: a.header.get(key) for key in fields},
                           {key: b.header.get(key) for key in fields}))
    data = differences(*({"data": (run.summary or {}).get("data", {}), "texts": run.texts} for run in (a, b)))
    found |= {key: pair for key, pair in data.items() if None not in pair}
    if a.foreign == b.foreign:
        return found
    both = {key: pair for key, pair in found.items() if None not in pair}
    return both | {"form of the log": tuple("foreign" if run.foreign else "ours" for run in (a, b))}


def environment_differences(a: Run, b: Run) -> dict[str, tuple]:
    """Key -> (in a, in b) where machine, driver or versions differ. A foreign log may leave some unknown."""
    said = [{"machine": devices_text(run.header["devices"]), "driver": run.header["driver"],
             "versions": run.header["versions"]} for run in (a, b)]
    found = differences(*said)
    return {key: pair for key, pair in found.items() if None not in pair or not (a.foreign or b.foreign)}


def doctor_differences(a: Run, b: Run) -> dict[str, tuple]:
    """Figure -> (in a, in b) where `--doctor true` found more than 5% between the runs' machines."""
    found = differences(*(run.header.get("doctor", {}) for run in (a, b)))
    return {key.removeprefix("figures."): pair for key, pair in found.items()
            if key.startswith("figures.") and all(is_a(value, NUMBER) for value in pair)
            and abs(pair[0] - pair[1]) > SAME_FIGURE * max(map(abs, pair))}


def devices_text(devices: list[str]) -> str | None:
    """"8 × NVIDIA H200", each kind of device once; None where none is known."""
    return ", ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices)) or None


def list_clashes(clashes: dict[str, tuple], most: int = 6) -> str:
    """"lr (0.02 / 0.03), …"; of long values, such as hashes, only where they begin to differ."""
    def pair(a: str, b: str) -> str:
        start = max(0, len(os.path.commonprefix([a, b])) - 12) if max(len(a), len(b)) > 40 else 0
        return " / ".join("…" * (start > 0) + (text[start:] if len(text) - start <= 40
                                               else text[start:start + 24] + "…")
                          for text in (a, b))

    listed = [f"{key} ({pair(str(a), str(b))})" for key, (a, b) in clashes.items()]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def summarize(runs: list[Run], target: float | None = None) -> dict:
    """The statistics of one configuration's runs, ready for JSON; RecordError if they may not be pooled."""
    require_sample(runs)
    if target is None:
        target = runs[0].header["target"]
    losses, times = [run.loss for run in runs], [run.time_s for run in runs]
    notes = [f"{run.label}: {warning}" for run in runs for warning in run.warnings]
    if any(run.seed is None for run in runs):
        notes.append(NO_SEEDS)
    machines = [environment_differences(runs[0], run) for run in runs[1:]]
    if any(machines):
        notes.append("the runs' environments differ, so their times are not comparable: "
                     + list_clashes(next(filter(None, machines))))
    return {"n": len(runs), "seeds": [run.seed for run in runs], "target": target, "losses": losses,
            "scores": mean_scores(runs), "class": table_class(runs[0].header),
            "times_s": times, "loss": asdict(describe(losses)), "time_s": asdict(describe(times)),
            "p": p_below(losses, target), "significance": SIGNIFICANCE,
            "more_runs": more_runs(losses, target), "verdict": verdict(losses, target), "notes": notes}


def common_texts(runs: list[Run]) -> list[str]:
    """The texts, beside the validation text, on which every run was scored."""
    return [name for name in runs[0].scores if all(name in run.scores for run in runs)]


def mean_scores(runs: list[Run]) -> dict[str, float]:
    """Mean loss, nats/token, on each of the texts on which every run was scored."""
    return {name: describe([run.scores[name] for run in runs]).mean for name in common_texts(runs)}


def scores_text(scores: dict[str, float]) -> str:
    """"clean 3.5612, fineweb 3.9142", or that there are none."""
    return ", ".join(f"{name} {loss:.4f}" for name, loss in scores.items()) or "no other text"


def number_text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def spread_text(sample: dict, digits: int, unit: str) -> str:
    """"mean 3.2791 nats/token, standard deviation 0.0013, standard error 0.0004", or that n = 1 has none."""
    mean = f"mean {sample['mean']:.{digits}f} {unit}"
    if sample["n"] == 1:
        return mean + ", no spread (n = 1)"
    return (f"{mean}, standard deviation {sample['standard_deviation']:.{digits}f}, "
            f"standard error {sample['standard_error']:.{digits}f}")


def summary_text(summary: dict) -> str:
    p = "no t-test"
    if summary["p"] is not None:
        p = f"p = {summary['p']:.2g} (one-sided t-test of \"the mean is above the target\")"
    seeds = ", ".join("?" if seed is None else str(seed) for seed in summary["seeds"])
    lines = [f"n        {summary['n']} (seeds {seeds})",
             f"class    {summary['class']}",
             f"loss     {spread_text(summary['loss'], 4, 'nats/token')}",
             f"time     {spread_text(summary['time_s'], 3, 's')}",
             f"scored   {scores_text(summary['scores'])}",
             f"target   {number_text(summary['target'], 'g')}: {p}",
             f"verdict  {summary['verdict']}"]
    return "\n".join(lines + [f"note     {note}" for note in summary["notes"]])
