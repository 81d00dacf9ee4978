"""A paper's figure drawn from our runs; its recipes describe it under `figure`."""

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from benchmarks.records import replace_file
from benchmarks.reporting.comparison import metric_name
from benchmarks.reporting.drawing import COLOURS, MARKERS, placed, plain, show_names
from benchmarks.reporting.figures import over_steps
from benchmarks.reporting.paired import Estimate, estimate
from benchmarks.reporting.rows import Group, collect
from benchmarks.reporting.table import named
from benchmarks.settings import ConfigError, Panel, RecipeTable

WIDTH, HEIGHT = 4.2, 3.3  # inches of a panel

BANDS = "Bands: 95 % intervals over seeds; of a single run, over parts of the test set."

GAP = Estimate(float("nan"), None)

Points = dict[float, Estimate]


def save_figure(table: RecipeTable, folders: Sequence[Path], path: Path) -> None:
    """Draw a table's figure from runs of its unchanged recipes, under the papers' protocol.

    Raises:
        ConfigError: if the table has no figure, or the suffix is not supported.
        OSError: if the file cannot be written.
    """
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise ConfigError(f"--figure: {path}: expected a suffix of {', '.join(kinds)}")
    figure, file = draw_figure(table, folders), io.BytesIO()
    show_names(figure)
    figure.savefig(file, format=path.suffix[1:], dpi=150)
    replace_file(path, file.getvalue())


def draw_figure(table: RecipeTable, folders: Sequence[Path]) -> Figure:
    """The figure that `save_figure` saves."""
    if not table.figure:
        raise ConfigError(f"--figure: {table.name} describes no figure; leave it out")
    found = collect(table, folders)
    rows = {entry.name.rpartition("/")[2]: found.fresh(entry) for entry in table.entries}
    groups = {row: next((group for group in of if group.runs), None) for row, of in rows.items()}
    columns = min(3, len(table.figure))
    lines = -(-len(table.figure) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * lines), layout="constrained")
    every = figure.subplots(lines, columns, squeeze=False).flat
    notes: list[str] = []
    for (title, panel), axes in zip(table.figure.items(), every, strict=False):
        axes.set_title(plain(title), fontsize=10)
        _draw_lines(axes, panel, groups)
        notes = [BANDS] if axes.collections else notes
    for axes in every:
        axes.axis("off")
    figure.suptitle(plain(table.title), fontsize=11)
    shown = {row for panel in table.figure.values() for row in panel.rows()}
    missing = [row for row, group in groups.items() if group is None and row in shown]
    notes += [f"No run of: {', '.join(missing)}."] if missing else []
    lost = {
        row: sorted({run.seed for group in rows[row] for run in group.diverged}) for row in shown
    }
    told = [f"{row} ({named('seed', seeds)})" for row, seeds in sorted(lost.items()) if seeds]
    notes += [f"Diverged: {', '.join(told)}."] if told else []
    figure.supxlabel(plain(fill(" ".join(notes), int(14 * WIDTH * columns))), fontsize=8)
    return figure


def _draw_lines(axes: Axes, panel: Panel, groups: dict[str, Group | None]) -> None:
    names = [metric_name(metric.partition("seen_")[2] or metric) for metric in panel.metrics]
    several, ticks = len(panel.metrics) > 1, set()
    labels = {}
    for name in panel.lines:
        for metric, of in zip(panel.metrics, names, strict=True):
            parts = [name] * (len(panel.lines) > 1 or not several) + [of] * several
            labels[", ".join(parts)] = name, metric
    for label, place in placed(labels).items():
        name, metric = labels[label]
        line = panel.lines[name]
        _draw_line(axes, label, place, _points(panel, line, metric, groups))
        ticks |= set() if isinstance(line, str) else line.keys()
    axes.set(xlabel=plain(panel.x), ylabel="%" if several else f"{names[0]} (%)")
    if ticks:
        _place(axes, sorted(ticks))
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.21), "ncols": 3}  # covers no line
    axes.legend(fontsize=8, frameon=False, columnspacing=1, handlelength=1.5, **place)


def _points(
    panel: Panel, line: str | dict[float, str], metric: str, groups: dict[str, Group | None]
) -> Points:
    """The numbers of a line, with a `GAP` where there is none."""
    if not isinstance(line, str):
        of = {x: groups[row] for x, row in line.items()}
        found = {x: group and group.estimate(metric, panel.output) for x, group in of.items()}
        return {x: number or GAP for x, number in found.items()}
    group = groups[line]
    for records in ("oracle", "evaluation") if group else ():
        if curve := over_steps([run.table(records) for run in group.runs], metric):
            steps, values = curve
            numbers = map(estimate, values.T.tolist())
            return dict(zip(steps / panel.steps, numbers, strict=True))
    return {}


def _draw_line(axes: Axes, label: str, place: int, points: Points) -> None:
    """Draw a line, and a band if there are intervals."""
    look = {"color": COLOURS[place % 6], "marker": MARKERS[place % 6], "markersize": 4}
    x = sorted(points)
    mean = 100 * np.array([points[value].mean for value in x])
    half = 100 * np.array([points[value].half_width for value in x], dtype=float)  # None is nan
    axes.plot(x, mean, label=plain(label if points else f"{label} (no curve)"), **look)
    if np.isfinite(half).any():
        axes.fill_between(x, mean - half, mean + half, color=look["color"], alpha=0.2, linewidth=0)


def _place(axes: Axes, values: list[float]) -> None:
    """Set a tick for each value; if they span decades, the axis is logarithmic, with a place for 0."""
    positive = [value for value in values if value > 0]
    if values[0] >= 0 and len(positive) > 1 and positive[-1] > 10 * positive[0]:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.3)
        axes.minorticks_off()
    axes.set_xticks(values, [f"{value:g}" for value in values])
