"""The report as one HTML file that loads nothing.

Each figure is a piece of HTML, empty if a run saved nothing to draw. Curves are inline SVG in the page's colours,
images are PNG inside the page.
"""

import base64
import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import uniform_filter1d

from benchmarks.records import Run, damage_named, replace_file
from benchmarks.reporting.comparison import compare, grouped
from benchmarks.reporting.templates import fill
from benchmarks.settings import dump

# Okabe and Ito's colours: colour-blind readers can distinguish them, on light and dark backgrounds.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

METHODS = {"horde": 3, "energy": 4, "ecaml": 4, "vem": 5, "jr": 2, "ensemble": 1, "abe": 1}
"""Words of labels, and the place of their method's colour; the base losses have the first one."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

INK = "#010203"  # placeholder for the page's text colour in a figure

POINTS = 75  # a line of twice as many or more is a moving mean

THUMBNAIL = 96  # largest side of a retrieved image, in pixels

Methods = dict[str, list[Run]]

Line = tuple[NDArray[np.floating], NDArray[np.floating]]  # steps (T,), values (seeds, T)

CURVES = {
    "Recall@1 on seen classes": ("evaluation", "seen_recall_at_1", "Recall@1"),
    "Recall@1 on unseen classes": ("evaluation", "unseen_recall_at_1", "Recall@1"),
    "Training loss": ("training", "loss", "training loss"),
}
"""For each figure: the table of the records, the column in it, and the name of the axis."""


def write_html(runs: Sequence[Run], path: Path, baseline: str | None = None) -> None:
    """Write the report; arguments and errors as in `compare`."""
    comparison = compare(runs, baseline)
    methods = {label: group.runs for label, group in grouped(runs).items() if group.runs}
    page = fill(
        Path(__file__).with_name("page.html"),
        title=" vs. ".join(methods),
        comparison=comparison,
        runs=runs,
        yaml=dump,
        curves=curves(methods),
        neighbours=neighbours(methods),
    )
    replace_file(path, page.encode())


def curves(methods: Methods) -> Markup:
    """Recall@1 on seen and on unseen classes, and the loss, over steps."""
    figures = Markup()
    for title, (table, column, ylabel) in CURVES.items():
        lines = {
            label: line
            for label, members in methods.items()
            if (line := over_steps([run.table(table) for run in members], column))
        }
        for label, (steps, values) in lines.items():
            stride = max(1, len(steps) // POINTS)
            lines[label] = steps[::stride], uniform_filter1d(values, stride)[:, ::stride]
        if lines:
            figure, axes = line_figure(methods, lines, ylabel)
            if table == "evaluation":
                axes.set_ylim(0, 1)
                axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
            figures += figure_html(figure, title)
    return figures or Markup("<p>No curves were recorded.</p>")


def over_steps(tables: Sequence[Mapping[str, list[float]]], column: str) -> Line | None:
    """Steps (T,) in the tables of all runs, and their values (runs, T); None if there are none."""
    if not all(column in t for t in tables):
        return None
    series = [dict(zip(t["step"], t[column], strict=True)) for t in tables]
    steps = sorted(set.intersection(*(set(s) for s in series)))
    if not steps:
        return None
    return np.array(steps), np.array([[s[i] for i in steps] for s in series])


def _looks(labels: Iterable[str]) -> dict[str, dict[str, str]]:
    """Colour and marker of each method, the same in all figures."""
    return {
        label: {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
        for label, place in placed(labels).items()
    }


def line_figure(
    methods: Iterable[str], lines: Mapping[str, Line], ylabel: str
) -> tuple[Figure, Axes]:
    """Draw the means over seeds with their names, and behind them the single seeds in light lines."""
    # 5 inches are a phone's width: its text stays readable there, and two stand side by side.
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("training step", color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(alpha=0.2, color=INK)
    axes.tick_params(colors=INK)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.spines[["top", "right"]].set_visible(False)
    looks = _looks(methods)
    for label, (steps, values) in lines.items():
        if len(values) > 1:
            axes.plot(steps, values.T, color=looks[label]["color"], alpha=0.3, linewidth=0.7)
        size = {"linewidth": 1.6, "markersize": 4, "markevery": max(1, len(steps) // 10)}
        # Not for mathematics, nor hidden from the key.
        name = re.sub("^_", "\N{ZERO WIDTH SPACE}_", label.replace("$", r"\$"))
        axes.plot(steps, values.mean(axis=0), label=name, **size, **looks[label])
    axes.set_xlim(0)
    return figure, axes


def placed(labels: Iterable[str]) -> dict[str, int]:
    """The place of each label's colour: its method's, so that reports agree, or else the first that is free.

    >>> placed(["triplet", "triplet + HORDE", "margin"])
    {'triplet': 0, 'triplet + HORDE': 3, 'margin': 1}
    """
    found: dict[str, int] = {}
    for label in labels:
        own = next((place for word, place in METHODS.items() if word in label.lower()), 0)
        found[label] = next(i for i in chain([own], count()) if i not in found.values())
    return found


def figure_html(figure: Figure, title: str) -> Markup:
    """The figure as inline SVG that takes the page's colours, its key below it, then the title."""
    handles, names = figure.axes[-1].get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + len(names) / 6)  # inches of a line of the key
    key = {"fontsize": 8, "frameon": False, "labelcolor": INK}
    figure.legend(handles, names, loc="outside lower center", **key)
    file = io.BytesIO()
    # The salt keeps element ids equal between reports; no metadata, no date and no links.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}), warnings.catch_warnings():
        # The browser has a font for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    drawn = file.getvalue().decode().replace(INK, "currentColor")
    return Markup(
        '<figure><svg role="img" aria-label="{}"{}<figcaption>{}</figcaption></figure>'
    ).format(title, Markup(drawn.partition("<svg")[2]), title)


# --------------------------------------------------------------------------------------- neighbours


def neighbours(methods: Methods) -> str:
    """Queries, each with the nearest neighbours that every method found for it.

    Raises:
        ValueError: naming a file that cannot be drawn.
    """
    sections: dict[str, dict[tuple[int, str], list[dict[str, Any]]]] = {}
    for label, members in methods.items():
        path = members[0].file("retrieval.npz")
        if not path.exists():
            continue
        with damage_named(path), np.load(path) as arrays:
            found = dict(arrays)
            for row, group in enumerate(found["query_groups"].tolist()):
                # All methods share these queries; the others differ between methods.
                title = group if group == "evenly spread" else f"{group} queries of {label}"
                query = row, str(found["query_names"][row])
                answer = _answer(found, row) | {"method": label}
                sections.setdefault(title, {}).setdefault(query, []).append(answer)
    looks = [(label, look["color"]) for label, look in _looks(methods).items()]
    numbered = {label: (number, colour) for number, (label, colour) in enumerate(looks, start=1)}
    return fill(Path(__file__).with_name("neighbours.html"), sections=sections, looks=numbered)


def _answer(found: Mapping[str, NDArray[Any]], row: int) -> dict[str, Any]:
    """A query and its neighbours, as pictures with texts."""
    of, name, precision = (found[f"query_{key}"][row] for key in ("labels", "names", "precision"))
    about = f", average precision {100 * precision:.1f} %" if np.isfinite(precision) else ""
    columns = (found[f"neighbour_{key}"][row] for key in ("labels", "names", "images"))
    return {
        "query": (_png(found["query_images"][row]), f"query: {name}, class {of}{about}"),
        "neighbours": [
            (_png(image), f"neighbour {i}: {neighbour}, class {label}", bool(label == of))
            for i, (label, neighbour, image) in enumerate(zip(*columns, strict=True), start=1)
        ],
    }


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
