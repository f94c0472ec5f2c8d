"""The schedule of a run: learning rate and batch from its log, windows and momentum from `train_gpt.Schedule`."""
import importlib
import json
from types import SimpleNamespace

import numpy as np

from records.schema import Run

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
    except ModuleNotFoundError as error:
        return drawn, f"windows and momentum left out: cannot import train_gpt.py for its schedule ({error})"
    except Exception as error:  # whatever the training script of another day raises, the log's own panels stand
        return drawn, f"windows and momentum left out: train_gpt's schedule cannot be used ({type(error).__name__}: {error})"
    lr, batch = [point.lr for point in points], [point.batch_tokens for point in points]
    if not (np.allclose(lr, run.steps["lr"], rtol=1e-3) and np.array_equal(batch, run.batch_tokens)):
        return drawn, "windows and momentum left out: train_gpt has another schedule now than this run logged"
    windows = np.array([point.windows for point in points], np.float64)
    names = ("short attention window", "long attention window")
    return [*drawn, ("window (blocks)", dict(zip(names, windows.T, strict=True))),
            ("momentum", {"momentum": np.array([point.momentum for point in points])})], ""


def planned_points(run: Run) -> list[SimpleNamespace]:
    """`Schedule(config).at(step)` for each logged step; `config` is the log's, with attributes for keys."""
    config = json.loads(json.dumps(run.header["config"]), object_hook=lambda settings: SimpleNamespace(**settings))
    schedule = importlib.import_module("train_gpt").Schedule(config)
    return [schedule.at(int(done) - 1) for done in run.steps["step"]]  # the log counts steps done, the schedule from 0
