"""The figures of the report: each function gives a piece of HTML, or nothing where a run saved nothing to draw.

Curves stand as inline SVG that takes the page's colours, images as PNG inside the page.
"""

import base64
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from benchmarks.records import Run, damage_named, read_json, read_table
from benchmarks.reporting import pictures
from benchmarks.reporting.drawing import COLOURS, MARKERS, figure_html, new_figure, plain
from benchmarks.reporting.table import Table
from benchmarks.reporting.templates import fill

LOSS_POINTS = 75  # points of a loss curve, each the mean of a block of steps

GRIDS = Path(__file__).with_name("grids.html")

Methods = dict[str, list[Run]]

Floats = NDArray[np.floating]

Lines = dict[str, tuple[Floats, Floats]]  # label -> steps (T,), values (seeds, T)


def curves(methods: Methods) -> Markup:
    """Recall@1 on seen and on unseen classes and the loss over steps."""
    figures = [*_recall_figures(methods), _loss_figure(methods)]
    return Markup('<div class="figures">{}</div>').format(Markup().join(figures))


def _loss_figure(methods: Methods) -> Markup:
    lines = _curves(methods, "training", "loss")
    if not lines:
        return Markup("<p>No loss was recorded.</p>")
    rows = max(len(steps) for steps, _ in lines.values())
    for label, (steps, values) in lines.items():
        blocks = min(LOSS_POINTS, len(steps))
        means = [
            np.array([block.mean(axis=-1) for block in np.array_split(of, blocks, axis=-1)]).T
            for of in (steps, values)
        ]
        lines[label] = means[0], means[1]
    figure, _ = _line_figure(methods, lines, "training loss")
    caption = (
        f"Each point is the mean of {-(-rows // min(LOSS_POINTS, rows))} logged steps. The losses of "
        f"different methods are not on one scale.{_seeds(values for _, values in lines.values())}"
    )
    return figure_html(figure, "Training loss", caption)


KINDS = {
    "seen": "Some of the classes that are trained on; as in ECAML's Figure 2, on one scale with the unseen ones.",
    "unseen": "Classes that the network never saw; where they are fewer than the table's, the values are higher.",
}

USE = {
    "test": " These are test classes: only to look at, never used for selection.",
    "validation": " These are validation classes: settings may be chosen on them.",
    "fair": " These are validation classes, which chose the weights that were tested.",
}


def _recall_figures(methods: Methods) -> list[Markup]:
    """Seen and unseen classes on one scale, as in ECAML's Figure 2."""
    found = {kind: _curves(methods, "evaluation", f"{kind}_recall_at_1") for kind in KINDS}
    every = [values.max() for lines in found.values() for _, values in lines.values()]
    if not every:
        return [Markup("<p>Recall@1 was not recorded while training.</p>")]
    info = next(iter(methods.values()))[0].info
    use = USE["fair" if info.get("protocol") == "fair" else info["data"]["split"]]
    figures = []
    for kind, lines in found.items():
        if lines:
            percents = {label: (steps, 100 * values) for label, (steps, values) in lines.items()}
            figure, axes = _line_figure(methods, percents, "Recall@1 (%)")
            axes.set_ylim(0, max(1, 105 * max(every)))
            caption = KINDS[kind] + (use if kind == "unseen" else "")
            caption += _seeds(values for _, values in lines.values())
            figures.append(figure_html(figure, f"Recall@1 on {kind} classes", caption))
    return figures


def _curves(methods: Methods, table: str, column: str) -> Lines:
    """A line for each label with such a column."""
    found = {label: over_steps(members, table, column) for label, members in methods.items()}
    return {label: line for label, line in found.items() if line}


def over_steps(runs: list[Run], table: str, column: str) -> tuple[Floats, Floats] | None:
    """Steps (T,) that all runs logged and their values (runs, T); None where there are none."""
    tables = [read_table(run.file(f"records/{table}.csv").parent, table) for run in runs]
    if not all(column in t for t in tables):
        return None
    series = [dict(zip(t["step"], t[column], strict=True)) for t in tables]
    steps = sorted(set.intersection(*(set(s) for s in series)))
    if not steps:
        return None
    return np.array(steps), np.array([[s[i] for i in steps] for s in series])


def _seeds(values: Iterable[Floats]) -> str:
    several = any(len(of) > 1 for of in values)
    return " Strong: means over seeds; light: single seeds." if several else ""


def _style(methods: Methods, label: str) -> tuple[str, str]:
    """Colour and marker, the same in all figures."""
    place = list(methods).index(label)
    return COLOURS[place % len(COLOURS)], MARKERS[(place + place // len(COLOURS)) % len(MARKERS)]


def _line_figure(methods: Methods, lines: Lines, ylabel: str) -> tuple[Figure, Axes]:
    """The means over seeds with their names, and the single seeds behind them in light lines."""
    figure, axes = new_figure("training step", ylabel)
    for label, (steps, values) in lines.items():
        colour, marker = _style(methods, label)
        if len(values) > 1:
            axes.plot(steps, values.T, color=colour, alpha=0.3, linewidth=0.7)
        look = {"color": colour, "linewidth": 1.6, "marker": marker, "markersize": 4}
        every = max(1, len(steps) // 10)
        axes.plot(steps, values.mean(axis=0), markevery=every, label=plain(label), **look)
    return figure, axes


# ------------------------------------------------------------------------- features and confusions


STARS = {"means": "a  means of all features", "thinned": "b  means of a sixth"}


def saved_pictures(run: Run) -> dict[str, str]:
    """The pictures that a run saved: its pieces of HTML by section.

    Raises:
        ValueError: naming a file that cannot be drawn.
    """
    pieces = {}
    for section, (draw, file) in SECTIONS.items():
        with damage_named(run.file(file)):
            pieces[section] = draw(run)
    return pieces


def deep_features(run: Run) -> str:
    """t-SNE of deep features with their means over all positions and over a sixth, as in HORDE's Figure 1."""
    found = pictures.saved(run.folder / "features.npz")
    places = pictures.places_of_features(found)
    if not places:
        return ""
    figure = Figure(figsize=(7.6, 4.1), layout="constrained")
    for axes, (stars, title) in zip(figure.subplots(1, 2), STARS.items(), strict=True):
        pictures.draw_features(axes, found, places, stars)
        axes.set_title(title, fontsize=10)
    shown = len(found["features"]) // len(found["labels"])
    caption = (
        f"Seed {run.seed}: {len(found['labels'])} images of {len(found['class_names'])} training classes, as in "
        f"HORDE's Figure 1. Points: {shown} of the {found['positions']} deep features of each image. Stars: their "
        f"means over all, and over {found['thinned_positions']} of them, on the same map. t-SNE keeps neighbours, "
        "not distances."
    )
    title = f"Deep features and their means: {run.label}"
    return figure_html(figure, title, caption, broad=True)


def confusion(run: Run) -> str:
    """Which classes are taken for which others: the worst pairs."""
    path = run.folder / "confusion.json"
    if not path.exists():
        return ""
    found = read_json(path)
    title = Markup("<h3>{} <small>seed {}</small></h3>").format(run.label, run.seed)
    if not found["pairs"]:
        return title + Markup("<p>Every nearest neighbour is of the query's class.</p>")
    rows = [
        [
            f"{pair['class']} → {pair['taken_for']}",
            f"{pair['count']} of {pair['queries']}",
            f"{100 * pair['count'] / pair['queries']:.0f}",
        ]
        for pair in found["pairs"]
    ]
    header = ["class of the query → of its nearest neighbour", "queries", "share (%)"]
    return title + Table(header, rows).html()


# --------------------------------------------------------------------------------------- neighbours


def retrieval_grids(run: Run) -> str:
    """Queries and neighbours of one run, in groups."""
    saved, groups = pictures.saved(run.folder / "retrieval.npz"), {}
    for row, group in enumerate(saved["query_groups"].tolist() if saved else []):
        groups.setdefault(group, []).append(row)
    return fill(GRIDS, run=run, saved=saved, groups=groups, png=_png)


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((pictures.THUMBNAIL, pictures.THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


SECTIONS = {
    "features": (deep_features, "features.npz"),
    "confused": (confusion, "confusion.json"),
    "grids": (retrieval_grids, "retrieval.npz"),
}
