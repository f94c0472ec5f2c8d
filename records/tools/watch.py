"""Following a running log in the terminal: its curve, its pace, and how far it is from the parent record."""
import shutil
import time
from pathlib import Path

import numpy as np

from data.errors import printable
from records.tools.classes import table_class
from records.tools.logs import find_logs, read_log
from records.tools.record import Record, load_all, runs_folder
from records.tools.schema import LOG_NAME, RecordError, Run

SILENT_S = 60  # without a new line in the log: worth a remark
RECENT = 20  # steps that make up "the present pace"
BARS = " ▁▂▃▄▅▆▇█"


def newest_run(runs: Path) -> Path:
    """The log of the run that began last in the folder `runs`."""
    logs = sorted(runs.glob(f"*/{LOG_NAME}"))
    if not logs:
        raise RecordError(f"{runs}: no runs yet; start one, or name the run to watch")
    return logs[-1]


def parent_of(run: Run, root: Path) -> Record | None:
    """The fastest record of the same preset and class, by the newest rules: what this run has to beat."""
    def kind(header: dict) -> tuple:
        return header["preset"], table_class(header)

    records = [record for record in load_all(root) if kind(record.runs[0].header) == kind(run.header)]
    return min(records, key=lambda record: (-record.data["schema"], record.data["mean_time_s"]), default=None)


def at_time(runs: list[Run], time_s: float) -> float | None:
    """Mean validation loss of `runs` at `time_s` on the clock, interpolated; None outside validations."""
    curves = [(run.validations["time_s"], run.validations["loss"]) for run in runs]
    if any(not len(times) or not times[0] <= time_s <= times[-1] for times, _ in curves):
        return None
    return float(np.mean([np.interp(time_s, *curve) for curve in curves]))


def curve(losses: np.ndarray, width: int, height: int) -> list[str]:
    """The losses as columns of blocks (`height` lines), each column the mean of its share of the steps."""
    parts = np.array([part.mean() for part in np.array_split(losses, min(width, len(losses)))])
    low, high = float(parts.min()), float(parts.max())
    eighths = np.round((parts - low) / max(high - low, 1e-12) * (8 * height - 1)).astype(int) + 1
    rows = ["".join(BARS[int(np.clip(level - 8 * row, 0, 8))] for level in eighths)
            for row in reversed(range(height))]
    labels = [f"{high:7.4f} "] + [" " * 8] * (height - 2) + [f"{low:7.4f} "]
    return [label + row for label, row in zip(labels, rows)]


def picture(run: Run, parent: Record | None, width: int = 80, height: int = 10) -> str:
    """What there is to say about a run now, as lines of text."""
    done, planned = int(run.steps["step"][-1]) if len(run.steps["step"]) else 0, run.planned_steps
    lines = [f"{run.label} (n-gram table: {table_class(run.header)}): step {done} of {planned or '?'}"
             + ", finished" * run.finished]
    lines += [f"  {warning}" for warning in run.warnings if not warning.startswith("not finished")]
    if not done:
        return "\n".join([*lines, "  no step yet: compiling and warming up"])
    if "loss" in run.steps and np.isfinite(run.steps["loss"]).all():
        lines += ["training loss (nats/token)", *curve(run.steps["loss"], width - 8, height)]
    elif "loss" in run.steps:
        lines.append("the loss is not finite since step "
                     f"{run.steps['step'][~np.isfinite(run.steps['loss'])][0]}")
    recent = run.steps["ms"][-RECENT:]
    pace = f"{recent.mean():.1f} ms a step"
    if run.batch_tokens is not None:
        pace += f", {run.batch_tokens[-RECENT:].sum() / recent.sum() * 1000:,.0f} tokens/s"
    if planned and not run.finished:
        left_s = max(planned - done, 0) * recent.mean() / 1000
        pace += f", {left_s:.0f} s left at the pace of the last {len(recent)} steps"
    return "\n".join([*lines, f"clock {run.step_time_s[-1]:.1f} s; {pace}", *standing(run, parent)])


def standing(run: Run, parent: Record | None) -> list[str]:
    """The last validation against the target, and against the parent record at the same time on the clock."""
    if not len(run.validations["loss"]):
        return ["no validation yet"]
    loss, time_s = float(run.validations["loss"][-1]), float(run.validations["time_s"][-1])
    line = f"validation loss {loss:.4f} at {time_s:.1f} s (step {run.validations['step'][-1]})"
    target = run.header.get("target")
    if target is not None:
        line += f", {loss - target:+.4f} from the target {target:g}"
    if parent is None:
        return [line, "no record of this preset and class to compare with"]
    if "resumed" in run.header:
        return [line, "it went on from a checkpoint, so its clock cannot be compared with a record's"]
    then = at_time(parent.runs, time_s)
    if then is None:
        return [line, f"{parent.name} has no loss at {time_s:.1f} s: it took "
                      f"{parent.data['mean_time_s']:.1f} s in all"]
    versus = f"{parent.name} had {then:.4f} at this time"
    if target is not None:
        versus += f" ({then - target:+.4f} from the target)"
    return [line, f"{versus}: this run is {abs(loss - then):.4f} {'ahead' if loss <= then else 'behind'}"]


def watch(place: Path | None, root: Path, parent: Record | None, every_s: float = 1.0,
          once: bool = False) -> None:
    """Print the picture of a run again and again until it has ended."""
    log = find_logs(place)[-1] if place else newest_run(runs_folder(root))
    run = read_log(log)
    parent = parent or parent_of(run, root)
    while True:
        size = shutil.get_terminal_size()
        silent_s = time.time() - log.stat().st_mtime
        text = picture(run, parent, width=max(24, size.columns), height=max(3, min(12, size.lines - 8)))
        if not (run.finished or run.stopped) and silent_s > SILENT_S:
            text += f"\nnothing was logged for {silent_s:.0f} s: the run compiles, validates, or has died"
        text = printable(text)
        print(text if once else f"\x1b[2J\x1b[H{text}", flush=True)  # clear the screen, cursor to its corner
        if once or run.finished or run.stopped:
            return
        time.sleep(every_s)
        run = read_log(log)
