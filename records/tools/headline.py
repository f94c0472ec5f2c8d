"""The README's picture: our records' loss against time, beside what was measured of the public script.

    python -m records.tools.headline        writes loss-time-light.svg and -dark.svg into records/figures

A line is the training loss of a record's runs, averaged over all runs and over 41 steps. The runs were
validated at their ends alone, so the filled mark at the line's end is their mean validation loss. There are
no logs of the public script here; its validations stand in PUBLIC below.
"""
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from data.errors import tool_parser
from records.tools.plots import INK, STYLE, smooth
from records.tools.record import RECORDS, load
from records.tools.svg import compact

SHOWN = {"4 × H200": "2026-11-22_four-h200-copies", "2 × H200": "2026-11-28_two-h200-small-parts",
         "1 × H200": "2026-11-27_one-h200"}
# The public speedrun's script of record 89, 690 + 15 steps, on our corpus: (seconds, validation loss). It ran
# once on four GPUs, and on two GPUs once on each of two machines; of the runs on two only the ends are known.
# The conditions are in records/README.md.
PUBLIC = {"4 × H200": [[(18.7, 4.3273), (47.7, 3.4343), (80.2, 3.2709)]],
          "2 × H200": [[(150.9, 3.2795)], [(156.3, 3.2746)]]}
THEMES = {"light": (INK, ["#0072B2", "#D55E00", "#009E73"]),
          "dark": ("#e6edf3", ["#56B4E9", "#FF9E57", "#3FCFA2"])}
WINDOW = 41     # steps
EVERY = 8       # One step of so many is a point of the line.
LIMITS = (3.15, 4.6)


def draw_record(axes: Axes, name: str, color: str) -> None:
    """Mean training loss of a record's runs as a line, their mean validation loss as a mark."""
    runs = load(RECORDS / SHOWN[name]).runs
    seconds = np.mean([run.step_time_s for run in runs], axis=0)
    losses = np.mean([smooth(run.steps["loss"], WINDOW) for run in runs], axis=0)
    time_s, loss = (np.mean([getattr(run, what) for run in runs]) for what in ("time_s", "loss"))
    axes.plot(seconds[WINDOW::EVERY], losses[WINDOW::EVERY], color=color)
    axes.plot([time_s], [loss], "o", color=color, markersize=6, linestyle="-",
              label=f"this project, {name}, {len(runs)} runs: {time_s:.1f} s, {loss:.4f}")


def draw_public(axes: Axes, name: str, color: str) -> None:
    """The public script's validations as hollow marks, those of one run joined."""
    ends = " and ".join(f"{run[-1][0]:.1f} s, {run[-1][1]:.4f}" for run in PUBLIC[name])
    for i, run in enumerate(PUBLIC[name]):
        label = f"public script, {name}: {ends}" if i == 0 else None
        axes.plot(*zip(*run), "D", color=color, markersize=6, fillstyle="none", linestyle=":", label=label)


def draw(theme: str) -> Path:
    """Write the picture in the colours of `theme`; returns the file."""
    ink, colors = THEMES[theme]
    parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    with plt.rc_context(STYLE | dict.fromkeys(parts, ink) | {"figure.figsize": (7.6, 4.0)}):
        figure, axes = plt.subplots()
        axes.axhline(3.28, color=ink, linewidth=1, linestyle=(0, (1, 2)))
        axes.text(1, 3.29, "target: 3.28", va="bottom")
        for name, color in zip(SHOWN, colors):
            draw_record(axes, name, color)
        for name, color in zip(PUBLIC, colors):
            draw_public(axes, name, color)
        axes.set_ylim(*LIMITS)
        axes.set_xlim(0, 165)
        axes.set_xlabel("training time (s)")
        axes.set_ylabel("loss (nats/token)")
        axes.legend(loc="upper right")
        path = RECORDS / "figures" / f"loss-time-{theme}.svg"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
    path.write_text(compact(path.read_text("utf-8")), "utf-8")
    return path


if __name__ == "__main__":
    tool_parser("records.tools.headline", __doc__).parse_args()
    for name in THEMES:
        print(draw(name))
