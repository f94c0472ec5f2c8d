"""Settings sweeps: every combination of values with several seeds. The runs' own logs are the only state."""
import hashlib
import shlex
import sys
from itertools import product
from pathlib import Path

from data.errors import printable
from records.run.settings import split_values
from records.run.sources import hash_sources, project_sources
from records.tools.launch import launch, with_settings
from records.tools.logs import read_log
from records.tools.markdown import table
from records.tools.pool import (
    NOT_CONFIGURATION,
    configuration_differences,
    list_clashes,
    number_text,
    summarize,
)
from records.tools.schema import LOG_NAME, RecordError, Run, last_part
from records.tools.stats import welch


def parse_settings(texts: list[str]) -> dict[str, list[str]]:
    """["lr=0.02,0.023"] -> {"lr": ["0.02", "0.023"]}; commas inside brackets belong to a value."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name or not values:
            raise RecordError(f"--set {text!r}: expected a setting and its values, such as --set "
                              "lr=0.02,0.023,0.026")
        if name in settings or name in NOT_CONFIGURATION:
            raise RecordError(f"--set {name}: " + ("given twice" if name in settings
                                                   else "the sweep sets it itself"))
        settings[name] = split_values(values)
        if "" in settings[name]:
            raise RecordError(f"--set {text!r}: an empty value between its commas")
    return settings


def sweep(command: str, settings: dict[str, list[str]], seeds: int, runs: Path, name: str) -> list[dict]:
    """Run what is missing of all combinations × seeds 0 … `seeds` - 1; a result for each combination.

    The name of the runs ends in a hash of command and sources, so another command or other sources make
    another sweep. A combination gets no more seeds after the first one that diverges.
    """
    if seeds < 1:
        raise RecordError(f"--seeds {seeds}: at least one; three show a spread")
    name += "-" + hashlib.sha256((command + hash_sources(project_sources())).encode()).hexdigest()[:6]
    groups: list[tuple[dict[str, str], list[Run]]] = []
    for values in product(*settings.values()):
        combination, group = dict(zip(settings, values)), []
        for seed in range(seeds):
            added = {**combination, "seed": str(seed), "name": name}
            run = earlier_run(runs, name, added)
            if run:
                print(printable(f"{run.label}: done before, not repeated"), file=sys.stderr)
            group.append(run or launch(with_settings(command, added), runs))
            if group[-1].diverged:
                break
        groups.append((combination, group))
        require_same_base(groups[0][1][0], group, settings, name)
    first = next((group for _, group in groups if not group[-1].diverged), None)
    if first is None:
        raise RecordError(f"sweep {name}: every combination diverged; its runs in {runs} say at which step")
    return [result(combination, group, first) for combination, group in groups]


def earlier_run(runs: Path, name: str, added: dict[str, str]) -> Run | None:
    """The run of the sweep `name` that ended, finished or diverged, whose command ends in these settings."""
    words = shlex.split(with_settings("", added))
    for log in sorted(runs.glob(f"*-{name}*/{LOG_NAME}")):
        try:
            run = read_log(log)
        except RecordError as error:
            print(printable(f"passed over: {error}"), file=sys.stderr)
            continue
        ended, last_words = run.finished or run.diverged, run.header["command"][-len(words):]
        if ended and run.name == name and last_words == words:
            return run
    return None


def require_same_base(first: Run, group: list[Run], settings: dict[str, list[str]], name: str) -> None:
    """RecordError if runs differ in more than the swept settings: a resumed sweep is then two experiments."""
    for run in group:
        clashes = {key: pair for key, pair in configuration_differences(first, run).items()
                   if last_part(key) not in settings}
        if clashes:
            raise RecordError(f"sweep {name!r}: {first.label} and {run.label} differ in more than the swept "
                              f"settings: {list_clashes(clashes)}; give the changed sweep another --name")


def result(combination: dict[str, str], group: list[Run], first: list[Run]) -> dict:
    """A combination's statistics and, but for the first, its loss against the first's by Welch's test."""
    if group[-1].diverged:
        return {"settings": combination, "diverged": f"{group[-1].label}, {'; '.join(group[-1].warnings)}"}
    difference = None if group is first else welch([run.loss for run in first], [run.loss for run in group])
    return {"settings": combination, **summarize(group), "difference": difference and difference.difference,
            "p_difference": difference and difference.p}


def sweep_text(results: list[dict]) -> str:
    """The table of a sweep, best loss marked."""
    whole = [row for row in results if "diverged" not in row]
    best = min(row["loss"]["mean"] for row in whole)

    def cells(row: dict) -> list[str]:
        settings = " ".join(f"{key}={value}" for key, value in row["settings"].items())
        if "diverged" in row:
            return [settings, "-", "diverged ", *"-" * 6]
        loss = row["loss"]["mean"]
        return [settings, str(row["n"]), f"{loss:.4f}{'*' if loss == best else ' '}",
                number_text(row["loss"]["standard_deviation"], ".4f"), number_text(row["difference"], "+.4f"),
                number_text(row["p_difference"], ".2g"), number_text(row["p"], ".2g"),
                f"{row['time_s']['mean']:.3f}", row["class"]]

    target = number_text(whole[0]["target"], "g")
    head = ["settings", "n", "loss ", "sd", "- first", "p (- first)", f"p (< {target})", "time (s)",
            "n-gram table"]
    comparisons = len(whole) - 1
    lines = [table(head, list(map(cells, results))), "",
             "* lowest mean loss. p (- first): Welch's test against the first row with a loss, two-sided"
             + (f"; with {comparisons} comparisons, ask for p < {0.05 / comparisons:.2g}." if comparisons > 1
                else ".")]
    notes = {note for row in whole for note in row["notes"]}
    notes |= {row["diverged"] for row in results if "diverged" in row}
    return "\n".join(lines + [f"note: {note}" for note in sorted(notes)])
