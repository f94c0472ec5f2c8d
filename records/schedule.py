"""The schedule of a run: learning rate and batch from its log, windows and momentum from its own program's `Schedule`."""
import json
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from records.schema import RecordError, Run

Panel = tuple[str, dict[str, np.ndarray]]  # axis title with its unit, {legend: value after each step (steps,)}


def panels(run: Run) -> tuple[list[Panel], str]:
    """What to draw over the run's steps, and a sentence that says what is left out and why ("" if nothing is)."""
    if run.foreign:
        return [], "a foreign log tells nothing of its schedule"
    if not len(run.steps["step"]):
        return [], "no step yet"
    drawn = [("learning rate (×)", {"learning-rate multiplier": run.steps["lr"]}),
             ("batch (tokens)", {"tokens a step": run.batch_tokens})]
    try:
        points = planned_points(run)
    except Exception as error:  # whatever a training script of another day raises, the log's own panels stand
        return drawn, f"windows and momentum left out: {type(error).__name__}: {error}"
    lr, batch = [point.lr for point in points], [point.batch_tokens for point in points]
    if not (np.allclose(lr, run.steps["lr"], rtol=1e-3) and np.array_equal(batch, run.batch_tokens)):
        return drawn, "windows and momentum left out: the schedule of the kept train_gpt.py is not the logged one"
    windows = np.array([point.windows for point in points], np.float64)
    names = ("short attention window", "long attention window")
    return [*drawn, ("window (blocks)", dict(zip(names, windows.T, strict=True))),
            ("momentum", {"momentum": np.array([point.momentum for point in points])})], ""


def planned_points(run: Run) -> list[SimpleNamespace]:
    """`Schedule(config).at(step)` for each logged step; `config` is the log's, with attributes for keys."""
    config = json.loads(json.dumps(run.header["config"]), object_hook=lambda settings: SimpleNamespace(**settings))
    schedule = program(kept_program(run)).Schedule(config)
    return [schedule.at(int(done) - 1) for done in run.steps["step"]]  # the log counts steps done, the schedule from 0


def kept_program(run: Run) -> Path:
    """The training script that the run ran, as kept beside the runs or in its record."""
    folder = run.path.resolve().parent.parent
    for sources in (folder / "sources" / run.header["sources"], folder.parent / "sources"):
        if (sources / "train_gpt.py").exists():
            return sources / "train_gpt.py"
    raise RecordError("the run's sources are not kept beside it")


@lru_cache
def program(path: Path) -> ModuleType:
    """The script as a module of its own name; packages that it imports are this checkout's. Leaves no cache behind."""
    module = ModuleType(f"program_{path.parent.parent.name}_{path.parent.name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses look for their module
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return module
