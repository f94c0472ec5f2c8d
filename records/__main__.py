"""The command line: `python -m records COMMAND --help`."""
import argparse
import json
import shlex
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

missing = [name for name in ("scipy", "matplotlib") if find_spec(name) is None]
if missing:
    sys.exit(f"error: the record tools need {' and '.join(missing)}: pip install -r requirements.txt")

from data.errors import one_line_errors, printable
from records.tools import check, compare, launch, pool, record, stats, sweep, watch
from records.tools.logs import read_logs
from records.tools.schema import RecordError

# Matplotlib takes a second to import, so only the commands that draw import it.
LOGS = "logs, run folders, record folders or quoted patterns (\"records/runs/*-name\")"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m records",
                                  description="Runs and records: check, compare, show.")
    top.add_argument("--records", type=Path, default=record.RECORDS, metavar="FOLDER",
                     help="where record folders and runs/ are (default: this checkout's)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(function.__name__.removeprefix("run_"), help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    add_questions(command)
    add_actions(command)
    return top


def add_questions(command: Callable) -> None:
    """The commands that only read logs, and `ab`, which makes the logs that it reads."""
    sub = command(run_check,
                  "hold records against their own logs and commits; exit code 1 if one is not true")
    sub.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="record folders (default: all)")
    add_json(sub)
    sub = command(run_stats, "mean, spread and a t-test against the target, of one configuration's runs")
    sub.add_argument("logs", nargs="+", metavar="LOG", help=LOGS)
    sub.add_argument("--target", type=float,
                     help=f"nats/token (default: the logs' own; {stats.TARGET} for foreign ones)")
    add_json(sub)
    sub = command(run_compare,
                  "two configurations: Welch's test on loss and time, milliseconds of each stage")
    sub.add_argument("a", metavar="A", help=LOGS)
    sub.add_argument("b", metavar="B", help="as A; differences are B - A")
    add_json(sub)
    sub = command(run_ab,
                  "run two shell commands in turn (A B B A …), with one new seed for each pair, and compare")
    sub.add_argument("a", metavar="CMD_A", help="--seed is added to it")
    sub.add_argument("b", metavar="CMD_B")
    sub.add_argument("-n", type=int, default=5, help="runs of each (default: 5)")
    sub.add_argument("--first-seed", type=int, default=0, metavar="N",
                     help="seeds are N, N + 1, … (default: 0)")
    add_json(sub)
    sub = command(run_plot, "loss, step time and schedule as PNG and SVG; each LOG argument is one line with "
                            "its spread")
    sub.add_argument("logs", nargs="+", metavar="LOG", help=LOGS + "; prefix NAME= to name it in the legend")
    sub.add_argument("--out", type=Path, default=Path("plots"), metavar="FOLDER", help="default: plots")


def add_actions(command: Callable) -> None:
    """The commands that run something, follow a run, or write records and pages."""
    sub = command(run_report, "write index.html and refresh the README's tables")
    sub = command(run_watch, "follow a running log in the terminal")
    sub.add_argument("run", nargs="?", type=Path, help="a run's folder or log (default: the newest run)")
    sub.add_argument("--parent", type=Path, metavar="RECORD",
                     help="default: the fastest record of the run's preset")
    sub.add_argument("--every", type=float, default=1.0, metavar="SECONDS")
    sub.add_argument("--once", action="store_true", help="print the present state and end")
    sub = command(run_sweep,
                  "run all settings × seeds that this command and code have not run yet; print a table")
    sub.add_argument("--set", action="append", required=True, metavar="NAME=A,B,…",
                     help="repeatable: all combinations")
    sub.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 each (default: 3)")
    sub.add_argument("--name", help="of its runs (default: sweep-<settings>)")
    add_json(sub)
    sub.add_argument("run", nargs="+", metavar="-- COMMAND",
                     help="the training command; settings are added at its end")
    sub = command(run_new, "make a record of finished runs")
    sub.add_argument("logs", nargs="+", metavar="LOG", help=LOGS)
    sub.add_argument("--name", required=True, help="of the folder, after the date")
    sub.add_argument("--title", required=True)
    sub.add_argument("--contributors", nargs="+", default=[], metavar="WHO")
    sub.add_argument("--parent", metavar="RECORD", help="name of the record folder that this one builds on")
    sub.add_argument("--second", metavar="LOG", help="of one more full run, of another process and seed")
    sub.add_argument("--chosen-with", nargs="*", type=int, metavar="SEED",
                     help="seeds that chose a setting or the number of steps; none after it: no seed did "
                          "(the corpus's records have to say)")
    sub.add_argument("--changed", default="", metavar="TEXT",
                     help="what changed (or write it into its README.md)")
    sub.add_argument("--why", default="", metavar="TEXT", help="why it works")


def add_json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print JSON instead of text")


def show(arguments: argparse.Namespace, data: object, text: str) -> None:
    print(json.dumps(data, indent=2) if arguments.json else printable(text))


def run_check(arguments: argparse.Namespace) -> int:
    folders = arguments.folders or record.folders(arguments.records)
    names, read = [folder.resolve().name for folder in folders], cache(record.load)
    results = {name if names.count(name) == 1 else str(folder): check.check(folder, read)
               for name, folder in zip(names, folders)}
    lines = [] if results else [f"{arguments.records}: no records yet"]
    for name, (problems, notes) in results.items():
        lines.append(f"{name}: {'ok' if not problems else 'NOT VALID'}")
        lines += [f"  problem: {problem}" for problem in problems] + [f"  note: {note}" for note in notes]
    show(arguments, {name: {"problems": problems, "notes": notes}
                     for name, (problems, notes) in results.items()},
         "\n".join(lines))
    return int(any(problems for problems, _ in results.values()))


def run_stats(arguments: argparse.Namespace) -> None:
    summary = pool.summarize(read_logs(arguments.logs), arguments.target)
    show(arguments, summary, pool.summary_text(summary))


def run_compare(arguments: argparse.Namespace) -> None:
    result = compare.compare(read_logs([arguments.a]), read_logs([arguments.b]), (arguments.a, arguments.b))
    show(arguments, result, compare.compare_text(result))


def run_ab(arguments: argparse.Namespace) -> None:
    result = launch.alternate((arguments.a, arguments.b), arguments.n, record.runs_folder(arguments.records),
                              arguments.first_seed)
    show(arguments, result, compare.compare_text(result))


def run_plot(arguments: argparse.Namespace) -> None:
    from records.tools import plots
    groups = {}
    for place in arguments.logs:
        name, equals, named = place.partition("=")
        if not equals or "/" in name or Path(place).exists():
            name, named = "", place
        runs = read_logs([named])
        name = name or (Path(place).stem if runs[0].foreign else runs[0].name)
        pool.require_one_configuration(runs, place)
        groups[place if name in groups else name] = runs
    for runs in groups.values():
        for run in runs:
            for warning in run.warnings:
                print(printable(f"{run.label}: {warning}"), file=sys.stderr)
    for path in plots.save(plots.figures(groups), arguments.out):
        print(printable(str(path)))


def run_report(arguments: argparse.Namespace) -> None:
    from records.tools import report
    page, notes = report.write(arguments.records)
    print(printable("\n".join([str(page), *notes])))


def run_watch(arguments: argparse.Namespace) -> None:
    parent = record.load(arguments.parent) if arguments.parent else None
    watch.watch(arguments.run, arguments.records, parent, arguments.every, arguments.once)


def run_sweep(arguments: argparse.Namespace) -> None:
    settings = sweep.parse_settings(arguments.set)
    name = arguments.name or "sweep-" + "-".join(settings)
    results = sweep.sweep(shlex.join(arguments.run), settings, arguments.seeds,
                          record.runs_folder(arguments.records), name)
    show(arguments, results, sweep.sweep_text(results))


def run_new(arguments: argparse.Namespace) -> None:
    written = {"title": arguments.title, "contributors": arguments.contributors, "parent": arguments.parent,
               "chosen_with": arguments.chosen_with}
    second = next(iter(read_logs([arguments.second])), None) if arguments.second else None
    folder = record.create(read_logs(arguments.logs), arguments.records, arguments.name, written,
                           arguments.changed, arguments.why, second)
    written = arguments.changed and arguments.why
    todo = "" if written else "write what changed and why it works into its README.md, then "
    print(printable(f"{folder}: made; next: {todo}`python -m records check`"))


def main() -> int:
    with one_line_errors(parser(), "records") as arguments:
        try:
            return arguments.function(arguments) or 0
        except RecordError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
