"""The schedule of a run, as its log tells it: learning rate, batch, windows and momentum over the steps."""
import numpy as np

from records.tools.schema import Run

# Axis title with its unit, {legend: value after each step (steps,)}.
Panel = tuple[str, dict[str, np.ndarray]]


def panels(run: Run) -> tuple[list[Panel], str]:
    """What to draw over the run's steps, and a sentence that says what is left out and why, if anything."""
    if run.foreign:
        return [], "a foreign log tells nothing of its schedule"
    if not len(run.steps["step"]):
        return [], "no step yet"
    drawn = [("learning rate (×)", {"learning-rate multiplier": run.steps["lr"]}),
             ("batch (tokens)", {"tokens a step": run.batch_tokens})]
    if np.isnan(run.steps["momentum"]).any():
        return drawn, "windows and momentum left out: this log is of a time when they were not logged"
    names = ("short attention window", "long attention window")
    return [*drawn, ("window (blocks)", dict(zip(names, run.steps["windows"].T, strict=True))),
            ("momentum", {"momentum": run.steps["momentum"]})], ""
