"""Settings sweeps: every combination of values, several seeds each, resumable; the runs' own logs are the only state."""
import shlex
import sys
from itertools import product
from pathlib import Path

from records.launch import launch, with_settings
from records.logs import read_log
from records.markdown import table
from records.pool import NOT_CONFIGURATION, configuration_differences, list_clashes, number_text, summarize
from records.schema import LOG_NAME, RecordError, Run, last_part
from records.stats import welch


def parse_settings(texts: list[str]) -> dict[str, list[str]]:
    """["lr=0.02,0.023"] -> {"lr": ["0.02", "0.023"]}; commas inside brackets belong to a value."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name or not values:
            raise RecordError(f"--set {text!r}: expected a setting and its values, such as --set lr=0.02,0.023,0.026")
        if name in settings or name in NOT_CONFIGURATION:
            raise RecordError(f"--set {name}: " + ("given twice" if name in settings else "the sweep sets it itself"))
        settings[name] = split_values(values)
    return settings


def split_values(text: str) -> list[str]:
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            values.append("")
        else:
            values[-1] += letter
    return values


def sweep(command: str, settings: dict[str, list[str]], seeds: int, runs: Path, name: str) -> list[dict]:
    """Run what is not there yet of all combinations × seeds 0 … `seeds` - 1; a result a combination, in order."""
    if seeds < 1:
        raise RecordError(f"--seeds {seeds}: at least one; three show a spread")
    groups = []
    for values in product(*settings.values()):
        combination = dict(zip(settings, values))
        group = []
        for seed in range(seeds):
            added = {**combination, "seed": str(seed), "name": name}
            run = finished_run(runs, name, added)
            if run:
                print(f"{run.label}: done before, not repeated", file=sys.stderr)
            group.append(run or launch(with_settings(command, added), runs))
        require_same_base(groups[0][1][0] if groups else group[0], group, settings, name)
        groups.append((combination, group))
    return [result(combination, group, groups[0][1]) for combination, group in groups]


def finished_run(runs: Path, name: str, added: dict[str, str]) -> Run | None:
    """The finished run of the sweep `name` whose command ends in the settings that the sweep would add, or None."""
    words = shlex.split(with_settings("", added))
    for log in sorted(runs.glob(f"*-{name}*/{LOG_NAME}")):
        try:
            run = read_log(log)
        except RecordError as error:
            print(f"passed over: {error}", file=sys.stderr)
            continue
        if run.finished and run.name == name and run.header["command"][-len(words):] == words:
            return run
    return None


def require_same_base(first: Run, group: list[Run], settings: dict[str, list[str]], name: str) -> None:
    """RecordError if runs differ in more than the swept settings: then a resumed sweep has become two experiments."""
    for run in group:
        clashes = {key: pair for key, pair in configuration_differences(first, run).items()
                   if last_part(key) not in settings}
        if clashes:
            raise RecordError(f"sweep {name!r}: {first.label} and {run.label} differ in more than the swept settings: "
                              f"{list_clashes(clashes)}; give the changed sweep another --name")


def result(combination: dict[str, str], group: list[Run], first: list[Run]) -> dict:
    """A combination's statistics and, unless it is the first, its loss against the first's by Welch's test."""
    difference = None if group is first else welch([run.loss for run in first], [run.loss for run in group])
    return {"settings": combination, **summarize(group), "difference": difference and difference.difference,
            "p_difference": difference and difference.p}


def sweep_text(results: list[dict]) -> str:
    """The table of a sweep, best loss marked."""
    best = min(row["loss"]["mean"] for row in results)

    rows = [[" ".join(f"{key}={value}" for key, value in row["settings"].items()), str(row["n"]),
             f"{row['loss']['mean']:.4f}{'*' if row['loss']['mean'] == best else ' '}",
             number_text(row["loss"]["standard_deviation"], ".4f"), number_text(row["difference"], "+.4f"),
             number_text(row["p_difference"], ".2g"), number_text(row["p"], ".2g"), f"{row['time_s']['mean']:.3f}"]
            for row in results]
    target = number_text(results[0]["target"], "g")
    head = ["settings", "n", "loss ", "sd", "- first", "p (- first)", f"p (< {target})", "time (s)"]
    comparisons = len(results) - 1
    lines = [table(head, rows), "", "* lowest mean loss. p (- first): Welch's test against the first row, two-sided"
             + (f"; with {comparisons} comparisons, ask for p < {0.05 / comparisons:.2g}." if comparisons > 1 else ".")]
    return "\n".join(lines + sorted({f"note: {note}" for row in results for note in row["notes"]}))
