"""Running training commands one after the other, and finding the runs that they made."""
import re
import shlex
import subprocess
import sys
from pathlib import Path

from records.tools.compare import compare
from records.tools.logs import read_log
from records.tools.schema import LOG_NAME, RecordError, Run


def launch(command: str, runs: Path) -> Run:
    """Run a shell command; returns the one run that it added to the folder `runs`, finished or diverged."""
    before = set(runs.glob(f"*/{LOG_NAME}"))
    print(f"$ {command}", file=sys.stderr, flush=True)
    # The command's output goes to stderr, since stdout is for this tool's own result.
    code = subprocess.run(command, shell=True, stdout=sys.stderr).returncode
    new = sorted(set(runs.glob(f"*/{LOG_NAME}")) - before)
    run = read_log(new[0]) if len(new) == 1 else None
    if run and run.diverged:
        return run
    if code:
        raise RecordError(f"the command above failed with exit code {code}; see its own message")
    if not run:
        found = ", ".join(log.parent.name for log in new) or "none"
        raise RecordError(f"the command above should add one run to {runs}, found {found}; does it log "
                          "there, and alone?")
    if not run.finished:
        raise RecordError(f"{run.label}: {'; '.join(run.warnings)}")
    return run


def with_settings(command: str, settings: dict[str, str]) -> str:
    """`command` with `--name value` for each setting. RecordError if the command sets one of them already, or
    if a name cannot be a setting's: a shell will read the command.
    """
    for name in settings:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise RecordError(f"{name!r} is no setting's name: letters, digits and '_' only")
        if re.search(rf"(^|\s)--{re.escape(name)}(\s|=|$)", command):
            raise RecordError(f"`{command}` sets --{name}, which is set here: leave it out")
    return " ".join([command, *(shlex.join([f"--{name}", value]) for name, value in settings.items())])


def alternate(commands: tuple[str, str], count: int, runs: Path, first_seed: int = 0) -> dict:
    """Run A B B A A B … until each has run `count` times, each pair with the next seed, and compare.

    Turning the order about cancels what drifts in time, such as the machine's temperature.
    """
    if count < 1:
        raise RecordError(f"-n {count}: each command has to run at least once; 5 is a good start")
    sides: tuple[list[Run], list[Run]] = ([], [])
    for i in range(count):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            run = launch(with_settings(commands[side], {"seed": str(first_seed + i)}), runs)
            if run.diverged:
                raise RecordError(f"{run.label}: {run.stopped}")
            sides[side].append(run)
    return compare(*sides, names=commands)
