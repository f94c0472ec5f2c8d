"""What a record has to show beyond true numbers: three texts, all runs of a process, seeds that chose
nothing, a second full run.

Records of schema 2 were made before these rules. They keep their numbers and were scored on one text.
"""
from records.tools.pool import configuration_differences, list_clashes
from records.tools.schema import Run, differences
from records.tools.stats import SIGNIFICANCE, TARGET

# The corpus's training text repeats passages of its validation text, which flatters n-gram tables. So a
# record on it must also reach on `clean` what the public script of record 89 reaches; `fineweb` has no limit.
CORPUS, LIMITS = "corpus", {"clean": 3.570}
# What the log of every run on the corpus must say of target and texts. Hashes of tokens identify a text.
CORPUS_RUN = {
    "target": TARGET, "val_tokens": 10_485_760,
    "data": {"train": "5f3fdc280cae0d6a8b4ffa8af97bda64267e41cacec4be3fb6d241b231064dfb",
             "val": "7fd844a4e6de57b7d2839deef33bd50c4fca587c67466e648f434d92a6345ca6"},
    "texts": {"clean": {"tokens": 4_194_304,
                        "sha256": "1bc71059c42d86d96c279bd3bed69a506a95aeaf7719533efdb071e84a04afba"},
              "fineweb": {"tokens": 561_000,
                          "sha256": "28d6d5616a7f936a451e5fb47d7cb02779b0858a20c4476e3c8b57f03ab50892"}},
}
LEAST_RUNS = 5
SAME_LOSS, SAME_TIME = 3, 0.03      # a second full run: standard deviations of the loss, share of the time
# Without these a log's times, its process and its data cannot be held against anything.
ORIGIN, STAMPS = ("host", "process"), ("began", "ended", "paused_s")


def check_rules(data: dict, runs: list[Run], second: Run | None) -> list[str]:
    """The rules that a record breaks. `data`: its record.json, as the logs give it."""
    problems = []
    every = [*runs, *filter(None, [second])]
    for run in every:
        if silent := [name for name in (*ORIGIN, *STAMPS, "data") if name not in run.header | run.summary]:
            problems.append(f"{run.label} does not say {', '.join(silent)}")
    if any(run.header["dirty"] is not False for run in every):
        problems.append("its runs had changes or new files that are not in their commit (git status "
                        "--short); commit first, then run")
    if both := sorted({run.seed for run in every} & set(data["chosen_with"])):
        problems.append(f"seeds {both} chose a setting or the number of steps; they prove nothing")
    problems += check_left_out(every)
    if any(map(is_corpus, every)):
        problems += check_texts(data) + [
            f"{run.label} differs from the rules of the corpus in {list_clashes(clashes)}"
            for run in every if (clashes := corpus_differences(run))]
        if len(runs) < LEAST_RUNS:
            problems.append(f"{len(runs)} runs; a record on the corpus has at least {LEAST_RUNS}")
        if second is None:
            problems.append("no second full run; give the log of one more, with a new seed, as --second")
    return problems + (check_second(data, runs, second) if second else [])


def is_corpus(run: Run) -> bool:
    """Whether it trained on the corpus, whatever its preset is called."""
    trained_on = run.summary.get("data", {}).get("train")
    return run.header["preset"] == CORPUS or trained_on == CORPUS_RUN["data"]["train"]


def corpus_differences(run: Run) -> dict[str, tuple]:
    """Where the log of a run on the corpus differs from CORPUS_RUN: key -> (in CORPUS_RUN, in the log)."""
    said = {"target": run.header["target"], "val_tokens": run.header["config"].get("val_tokens"),
            "data": run.summary.get("data", {}),
            "texts": {name: run.texts.get(name, {}) for name in CORPUS_RUN["texts"]}}
    return differences(CORPUS_RUN, said)


def check_left_out(runs: list[Run]) -> list[str]:
    """Processes of which a run is missing. The seeds of a process are consecutive, one for each run."""
    problems = []
    for process in dict.fromkeys(map(origin, runs)):
        ours = [run for run in runs if origin(run) == process]
        seeds, count = sorted(run.seed for run in ours), ours[0].header["config"].get("runs", 1)
        if seeds != [seeds[0] + i for i in range(len(seeds))] or len(seeds) != count:
            problems.append(f"{ours[0].label}: its process made {count} runs, and here are those of seeds "
                            f"{seeds}; a record leaves none out")
    return problems


def check_texts(data: dict) -> list[str]:
    """The limits of losses on the corpus's three texts."""
    problems, scores = [], data["scores"]
    if data["p_value"] is None or data["p_value"] >= SIGNIFICANCE:
        problems.append(f"not shown to be below {data['target']}: p = {data['p_value']}, not below "
                        f"{SIGNIFICANCE:g}")
    if missing := [name for name in CORPUS_RUN["texts"] if name not in scores]:
        problems.append(f"not scored on {' and '.join(missing)}; the folders belong beside the shards")
    problems += [f"mean loss on {name} is {scores[name]:.4f}, above {limit:.3f}"
                 for name, limit in LIMITS.items() if scores.get(name, 0.0) > limit]
    return problems


def check_target(data: dict) -> list[str]:
    """Whether the mean loss reaches the target that the runs were after."""
    if data["target"] is None or data["mean_loss"] <= data["target"]:
        return []
    return [f"mean loss {data['mean_loss']:.4f} is above the target {data['target']:g}"]


def check_second(data: dict, runs: list[Run], second: Run) -> list[str]:
    """Whether a second full run agrees: its configuration, a process and a seed of its own, loss and time."""
    problems = []
    if clashes := configuration_differences(runs[0], second):
        problems.append(f"the second full run differs in {list_clashes(clashes)}")
    if second.seed in data["seeds"] or origin(second) in map(origin, runs):
        problems.append("the second full run needs a process and a seed of its own")
    apart = abs(second.loss - data["mean_loss"])
    if apart > SAME_LOSS * (data["standard_deviation_loss"] or 0.0):
        problems.append(f"the second full run ends at {second.loss:.4f}, more than {SAME_LOSS} standard "
                        f"deviations from the mean, {data['mean_loss']:.4f}")
    if abs(second.time_s / data["mean_time_s"] - 1) > SAME_TIME:
        problems.append(f"the second full run takes {second.time_s:.2f} s, more than {SAME_TIME:.0%} from "
                        f"the mean, {data['mean_time_s']:.2f} s; was the machine the same, and idle?")
    return problems


def origin(run: Run) -> tuple:
    """The process of a run: its key, or in older logs host and process number, which may repeat."""
    return run.header.get("process_key") or (run.header.get("host"), run.header.get("process"))
