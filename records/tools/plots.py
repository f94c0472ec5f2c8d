"""The pictures of runs: loss against time and tokens, step times, the schedule, the best times over dates.

Every figure takes groups, {legend: runs of one configuration}, and draws the mean of a group as a line and
the range of its runs as a band. Groups differ in colour, dash and marker, so that they can be told apart in
print as well.
"""
import io
import re
import textwrap
from collections.abc import Callable
from datetime import date
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.dates import DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FormatStrFormatter, MaxNLocator
from scipy import special

from data.errors import printable
from data.shards import whole_file
from records.tools.schedule import panels
from records.tools.schema import RecordError, Run
from records.tools.stats import SIGNIFICANCE, describe
from records.tools.svg import compact

plt.switch_backend("Agg")  # files only: no window, no display needed

Groups = dict[str, list[Run]]
# Okabe and Ito: safe for the colour-blind.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
DASHES = ["-", "--", "-.", ":"]
MARKERS = "osD^vPX"  # one more than colours, so that they meet in 42 ways
INK = "#1a1b1e"  # of text, axes and reference lines; in a page's SVG it becomes the page's own text colour
STYLE = {
    "figure.figsize": (4.4, 3.3),  # inches: a column of print, and text of a readable size on a phone
    "figure.constrained_layout.use": True, "savefig.dpi": 250,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 10,
    "legend.fontsize": 9, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "grid.color": INK, "grid.linewidth": 0.5, "lines.linewidth": 1.4, "lines.markersize": 4,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    # Text stays text, and the same runs give the same file.
    "svg.fonttype": "none", "svg.hashsalt": "records",
    "text.parse_math": False,  # A name with a "$" is a name.
}


def figures(groups: Groups) -> dict[str, Figure]:
    """File name -> figure, all that the groups' logs have data for."""
    groups = {printable(name): runs for name, runs in groups.items()}
    with plt.rc_context(STYLE):
        drawn = {"loss-time": loss_figure(groups, "time"), "loss-tokens": loss_figure(groups, "tokens"),
                 "final-loss": final_loss_figure(groups), "step-time": step_time_figure(groups),
                 "schedule": schedule_figure(groups)}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def having(groups: Groups, has: Callable[[Run], bool]) -> Groups:
    """The groups' runs that have what is to be drawn, without groups that have none."""
    kept = {name: [run for run in runs if has(run)] for name, runs in groups.items()}
    return {name: runs for name, runs in kept.items() if runs}


def legend_of(what: str, name: str, runs: list[Run], groups: Groups) -> str:
    """"baseline: validation, mean and range of 5 runs"; the only one of the `groups` needs no name."""
    count = f"mean and range of {len(runs)} runs" if len(runs) > 1 else "1 run"
    unfinished = sum(not run.finished for run in runs)
    return ((f"{name}: " if len(groups) > 1 else "") + f"{what}, {count}"
            + (f" ({unfinished} unfinished)" if unfinished else ""))


def legend_above(axes: plt.Axes) -> None:
    """The legend between title and axes, where it cannot cover a curve."""
    legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=1)
    for text in legend.get_texts():  # a line that is wider than the axes would make them smaller
        text.set_text(textwrap.fill(text.get_text(), 44))


def draw(axes: plt.Axes, index: int, curves: list[tuple[np.ndarray, ...]], label: str,
         marker: bool = True) -> None:
    """One group: the curves (steps, x, y) of its runs as a mean line and a range band, step by step.

    At steps that a run lacks, since it has ended or went on from a checkpoint, only the other runs count.
    """
    points = np.unique(np.concatenate([steps for steps, *_ in curves]))
    padded = np.full((2, len(curves), len(points)), np.nan)
    for run, (steps, x, y) in enumerate(curves):
        padded[:, run, np.searchsorted(points, steps)] = x, y
    x, y = np.nanmean(padded[0], axis=0), padded[1]
    color = COLORS[index % len(COLORS)]
    axes.plot(x, np.nanmean(y, axis=0), color=color, linestyle=DASHES[index % len(DASHES)], label=label,
              marker=MARKERS[index % len(MARKERS)] if marker else None)
    if len(curves) > 1:
        axes.fill_between(x, np.nanmin(y, axis=0), np.nanmax(y, axis=0), color=color, alpha=0.25, linewidth=0)


def loss_figure(groups: Groups, against: str) -> Figure | None:
    """Validation loss against timed seconds or tokens; of a single group the training loss as well."""
    key = "time_s" if against == "time" else "tokens"
    # The clock of a run that went on from a checkpoint has counted only the rest.
    shown = having(groups, lambda run: len(run.validations.get(key, [])) > 0 and not (
        against == "time" and "resumed" in run.header))
    if not shown:
        return None
    curves = {name: [(run.validations["step"], run.validations[key], run.validations["loss"])
                     for run in runs] for name, runs in shown.items()}
    figure, axes = plt.subplots()
    for index, name in enumerate(shown):
        draw(axes, index, curves[name], legend_of("validation", name, shown[name], groups))
    limits = [y[x > 0] for group in curves.values() for _, x, y in group]
    trained = [run for run in next(iter(shown.values())) if len(run.steps.get("loss", []))]
    if len(shown) == 1 and trained:
        width = 1 + len(trained[0].steps["loss"]) // 40
        training = [(run.steps["step"], run.step_time_s if against == "time" else run.steps["tokens"],
                     smooth(run.steps["loss"], width)) for run in trained]
        what = "training" + (f" (mean of {width} steps)" if width > 1 else "")
        draw(axes, 1, training, legend_of(what, *next(iter(shown.items())), groups), marker=False)
        limits += [y[len(y) // 8:] for *_, y in training]
    for target in targets_of(shown):
        draw_target(axes, target)
    limit_loss(axes, np.concatenate([*limits, targets_of(shown)]))
    axes.set_ylabel("loss (nats/token)")
    axes.set_xlabel("training time (s)" if against == "time" else "training tokens")
    if against == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.xaxis.set_major_locator(MaxNLocator(6))
    legend_above(axes)
    return figure


def targets_of(groups: Groups) -> list[float]:
    return sorted({run.header["target"] for runs in groups.values() for run in runs
                   if run.header.get("target")})


def draw_target(axes: plt.Axes, target: float) -> None:
    axes.axhline(target, color=INK, linewidth=1, linestyle=(0, (1, 2)), label=f"target {target:g}")


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the last `width` values, of fewer at the beginning."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    low = np.maximum(np.arange(len(values)) + 1 - width, 0)
    high = np.arange(len(values)) + 1
    return (total[high] - total[low]) / (high - low)


def limit_loss(axes: plt.Axes, values: np.ndarray) -> None:
    """Fit the axis to `values`, which leave out the untrained model's loss: it would flatten all the rest."""
    values = values[np.isfinite(values)]
    if len(values) and np.ptp(values):
        axes.set_ylim(values.min() - 0.06 * np.ptp(values), values.max() + 0.1 * np.ptp(values))


def final_loss_figure(groups: Groups) -> Figure | None:
    """The last losses of every finished run: a panel for the validation text, and one for each other text.

    None without two runs in a group: there is nothing to test.
    """
    shown = having(groups, lambda run: run.finished and np.isfinite(run.loss))
    if max(map(len, shown.values()), default=0) < 2:
        return None
    texts = list(dict.fromkeys(name for runs in shown.values() for run in runs for name in run.scores))
    figure, all_axes = plt.subplots(1 + len(texts), squeeze=False,
                                    figsize=(4.4, 0.5 + 2.8 * (1 + len(texts))))
    draw_last_losses(all_axes[0, 0], {name: [run.loss for run in runs] for name, runs in shown.items()},
                     "last validation loss (nats/token)", targets_of(shown))
    for axes, text in zip(all_axes[1:, 0], texts):
        scored = {name: [run.scores[text] for run in runs if text in run.scores]
                  for name, runs in shown.items()}
        draw_last_losses(axes, scored, f"loss on {printable(text)} (nats/token)", [])
    all_axes[-1, 0].set_xlabel("runs")
    return figure


def draw_last_losses(axes: plt.Axes, losses: dict[str, list[float]], label: str,
                     targets: list[float]) -> None:
    """A mark for each run, and each group's mean with its 95% interval, as a t-test has it."""
    drawn = [index for index, values in enumerate(losses.values()) if values]
    for index, values in enumerate(losses.values()):
        if index not in drawn:
            continue
        sample, color = describe(values), COLORS[index % len(COLORS)]
        axes.plot(np.full(len(values), float(index)), values, MARKERS[index % len(MARKERS)], color=color,
                  alpha=0.6, linestyle="", label="a run" if index == drawn[0] else None)
        if sample.standard_error:
            half = special.stdtrit(sample.n - 1, 0.975) * sample.standard_error
            axes.errorbar(index + 0.2, sample.mean, half, fmt="_", color=color, capsize=4, markersize=12,
                          label="mean and its 95% interval" if index == drawn[0] else None)
    low, high = axes.dataLim.intervaly
    for target in targets:
        if low - 2 * (high - low) < target < high + 2 * (high - low):
            draw_target(axes, target)
        else:  # the target would flatten the losses
            axes.plot([], [], " ", label=f"target {target:g}, {'below' if target < low else 'above'} the "
                                         "axis")
    axes.set_xlim(-0.6, len(losses) - 0.2)
    width = max(6, 36 // len(losses))  # letters that have room under a group
    names = [textwrap.fill(name, width) + "\n" if len(losses) > 1 else "" for name in losses]
    axes.set_xticks(range(len(losses)), [f"{name}n = {len(values)}"
                                         for name, values in zip(names, losses.values())])
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%.4f"))
    legend_above(axes)


def step_time_figure(groups: Groups) -> Figure | None:
    """Milliseconds of each step. What exceeds the axis is counted in the legend, never silently cut off."""
    shown = having(groups, lambda run: len(run.steps["ms"]) > 0)
    if not shown:
        return None
    everything = np.concatenate([run.steps["ms"] for runs in shown.values() for run in runs])
    top = 1.3 * np.quantile(everything, 0.98)
    figure, axes = plt.subplots()
    for index, (name, runs) in enumerate(shown.items()):
        label = legend_of("step time", name, runs, groups)
        curves = [(run.steps["step"], run.steps["step"], run.steps["ms"]) for run in runs]
        draw(axes, index, curves, label, marker=False)
    axes.set_ylim(0, top)
    above = everything[everything > top]
    if len(above):
        counted = "1 step" if len(above) == 1 else f"{len(above)} steps"
        axes.plot([], [], " ", label=f"{counted} above the axis, up to {above.max():.0f} ms")
    axes.set_ylabel("time of a step (ms)")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    legend_above(axes)
    return figure


def schedule_figure(groups: Groups) -> Figure | None:
    """Learning rate, batch, windows and momentum over the steps, of each group's first run."""
    shown = {name: panels(runs[0]) for name, runs in groups.items()}
    titles = list(dict.fromkeys(title for drawn, _ in shown.values() for title, _ in drawn))
    if not titles:
        return None
    figure, all_axes = plt.subplots(len(titles), sharex=True, squeeze=False,
                                    figsize=(4.4, 0.6 + 1.6 * len(titles)))
    for axes, title in zip(all_axes[:, 0], titles):
        count = 0
        for name, (drawn, _) in shown.items():
            for legend, values in dict(drawn).get(title, {}).items():
                label = legend if len(groups) == 1 else f"{name}: {legend}"
                axes.step(groups[name][0].steps["step"], values, where="mid", label=label,
                          color=COLORS[count % len(COLORS)], linestyle=DASHES[count % len(DASHES)])
                count += 1
        axes.set_ylabel(title)
        if axes.dataLim.y0 <= 0.5 * axes.dataLim.y1:  # momentum moves too little to be seen from zero
            axes.set_ylim(bottom=0)
        legend_above(axes)
        if "tokens" in title:
            axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    all_axes[-1, 0].set_xlabel("step")
    all_axes[-1, 0].xaxis.set_major_locator(MaxNLocator(7, integer=True))
    notes = dict.fromkeys(note for _, note in shown.values() if note)
    if notes:
        lines = [line for note in notes for line in textwrap.wrap(note, 64)]
        figure.text(0.02, -0.01, "\n".join(lines), va="top", fontsize=8)
    return figure


def progress_figure(series: dict[str, list[tuple[date, float, bool]]]) -> Figure:
    """The best time so far over dates. `series`: machine, preset, target -> records' (date, mean s, proven).

    A record is proven if the t-test shows its loss to be below the target. Proven records make the line; the
    others are hollow marks.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(4.4, max(3.3, 2.6 + 0.36 * len(series))))     # legend above
        for index, (name, points) in enumerate((printable(name), points) for name, points in series.items()):
            style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
            shown = sorted(point for point in points if point[2])
            if shown:
                best = np.minimum.accumulate([time_s for _, time_s, _ in shown])
                axes.step([day for day, _, _ in shown], best, where="post",
                          linestyle=DASHES[index % len(DASHES)], label=f"best: {name}", **style)
            unproven = [(day, time_s) for day, time_s, proven in points if not proven]
            if unproven:
                axes.plot(*zip(*unproven), linestyle="", fillstyle="none",
                          label=f"not proven (p ≥ {SIGNIFICANCE:g}): {name}", **style)
        axes.set_ylim(0, 1.1 * max(time_s for points in series.values() for _, time_s, _ in points))
        days = sorted(day for points in series.values() for day, _, _ in points)
        axes.set_xticks(list(dict.fromkeys([days[0], days[0] + (days[-1] - days[0]) / 2, days[-1]])))
        axes.xaxis.set_major_formatter(DateFormatter("%Y-%m-%d"))
        axes.set_ylabel("mean training time (s)")
        axes.set_xlabel("date")
        legend_above(axes)
    return figure


def save(drawn: dict[str, Figure], folder: Path) -> list[Path]:
    """Write each figure as PNG and SVG on white, for print; returns the files."""
    if not drawn:
        raise RecordError("nothing to plot: the logs hold neither a validation nor a step yet")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in drawn.items():
        for path, options in ((folder / f"{name}.png", {}),
                              (folder / f"{name}.svg", {"metadata": {"Date": None}})):
            with plt.rc_context(STYLE), whole_file(path) as file:
                figure.savefig(file, format=path.suffix[1:], bbox_inches="tight", **options)
            files.append(path)
        plt.close(figure)
    return files


def page_svg(figure: Figure, name: str) -> str:
    """The figure as SVG for a page: transparent, in the page's text colour, its ids beginning with `name`."""
    buffer = io.StringIO()
    with plt.rc_context(STYLE):
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    plt.close(figure)
    svg = compact(buffer.getvalue()).replace(INK, "currentColor")
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
