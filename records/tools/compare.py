"""Two configurations side by side: loss, time and step times, and what their numbers of runs can show."""
from dataclasses import asdict

import numpy as np

from records.tools.classes import table_class
from records.tools.markdown import table
from records.tools.pool import (
    NO_SEEDS,
    SAME_FIGURE,
    common_texts,
    configuration_differences,
    doctor_differences,
    environment_differences,
    list_clashes,
    require_sample,
    spread_text,
)
from records.tools.schema import RecordError, Run
from records.tools.stats import describe, welch


def compare(a: list[Run], b: list[Run], names: tuple[str, str] = ("A", "B")) -> dict:
    """B against A, ready for JSON; differences are B - A. RecordError where runs may not be pooled."""
    result = {"names": list(names), "classes": [table_class(runs[0].header) for runs in (a, b)], "notes": []}
    for name, runs in zip(names, (a, b)):
        require_sample(runs, name)
    both = [run.label for run in a if run.sha256 in {other.sha256 for other in b}]
    if both:
        raise RecordError(f"{', '.join(sorted(both))}: on both sides; compare takes two samples")
    for key, values in {"loss": lambda run: run.loss, "time_s": lambda run: run.time_s}.items():
        losses = [[values(run) for run in runs] for runs in (a, b)]
        result[key] = {"a": asdict(describe(losses[0])), "b": asdict(describe(losses[1])),
                       **asdict(welch(*losses))}
    result["scores"] = {name: asdict(welch(*([run.scores[name] for run in runs] for runs in (a, b))))
                        for name in common_texts([*a, *b])}
    result["stages"] = stage_rows(a, b)
    result["configuration"] = configuration_differences(a[0], b[0])
    result["doctor"] = doctor_differences(a[0], b[0])
    environment = next(filter(None, (environment_differences(a[0], run) for run in [*a[1:], *b])), {})
    if environment:
        result["notes"].append("machine, driver or versions differ, so the times are not comparable: "
                               + list_clashes(environment))
    if any(run.seed is None for run in [*a, *b]):
        result["notes"].append(NO_SEEDS)
    if any(run.foreign for run in [*a, *b]) and not all(run.foreign for run in [*a, *b]):
        result["notes"].append("a foreign log does not name its data: see that both sides were scored on the "
                               "same tokens")
    return result


def stage_rows(a: list[Run], b: list[Run]) -> list[dict]:
    """The median milliseconds of a step in each stretch of equal batch, averaged over a side's runs."""
    sides = [median_stages(a), median_stages(b)]
    # If the stretches differ, as with a foreign log, only all steps together can be compared.
    if len(sides[0]) != len(sides[1]):
        sides = [{"all steps": float(np.mean([np.median(run.steps["ms"]) for run in runs]))}
                 for runs in (a, b)]
    return [{"a_stage": stage_a, "b_stage": stage_b, "a_ms": ms_a, "b_ms": ms_b}
            for (stage_a, ms_a), (stage_b, ms_b) in zip(sides[0].items(), sides[1].items())]


def median_stages(runs: list[Run]) -> dict[str, float]:
    medians: dict[str, list[float]] = {}
    for run in runs:
        for position, (name, ms) in enumerate(run.stages(), 1):
            medians.setdefault(f"{position}: {name}", []).append(float(np.median(ms)))
    return {name: float(np.mean(values)) for name, values in medians.items()}


def difference_text(part: dict, digits: int, unit: str) -> str:
    """"-0.0012 nats/token (95%: -0.0020 to -0.0004), p = 0.003; …", or that there is no test."""
    text = f"{part['difference']:+.{digits}f} {unit}"
    if part["p"] is None:
        return text + "; no test: each side needs two runs and some spread"
    return (f"{text} (95%: {part['low']:+.{digits}f} to {part['high']:+.{digits}f}), p = {part['p']:.2g}; "
            f"the smallest that these n show in four of five tries: {part['smallest']:.{digits}f}")


def compare_text(result: dict) -> str:
    named = [f"{side} = {name} (class: {one})"
             for side, name, one in zip("AB", result["names"], result["classes"])]
    lines = [*named, "differences are B - A, by Welch's t-test (two-sided)", ""]
    for key, title, digits, unit in (("loss", "loss", 4, "nats/token"), ("time_s", "time", 3, "s")):
        part = result[key]
        lines += [f"{title}  A  n = {part['a']['n']}, {spread_text(part['a'], digits, unit)}",
                  f"      B  n = {part['b']['n']}, {spread_text(part['b'], digits, unit)}",
                  f"      B - A  {difference_text(part, digits, unit)}"]
    lines += [f"{name}  B - A  {difference_text(part, 4, 'nats/token')}"
              for name, part in result["scores"].items()]
    rows = [[row["a_stage"] if row["a_stage"] == row["b_stage"] else f"{row['a_stage']} / {row['b_stage']}",
             f"{row['a_ms']:.2f}", f"{row['b_ms']:.2f}", f"{100 * (row['b_ms'] / row['a_ms'] - 1):+.1f}%"]
            for row in result["stages"]]
    lines += ["", table(["stage (median step, ms)", "A", "B", "B - A"], rows), ""]
    clashes = result["configuration"]
    lines.append(f"configuration: {list_clashes(clashes, most=12) if clashes else 'the same on both sides'}")
    if result["doctor"]:
        lines.append(f"figures of --doctor true that differ by more than {SAME_FIGURE:.0%}: "
                     + list_clashes(result["doctor"], most=12))
    return "\n".join(lines + [f"WARNING: {note}" for note in result["notes"]])
