"""The report as one HTML file that loads nothing.

Each figure is a piece of HTML, empty if a run saved nothing to draw. Curves are inline SVG in the page's colours,
images are PNG inside the page.
"""

import base64
import io
import re
import string
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
from matplotlib.text import Text
from numpy.typing import NDArray
from PIL import Image

from benchmarks.console import printable
from benchmarks.records import Run, damage_named, replace_file
from benchmarks.reporting.comparison import compare
from benchmarks.reporting.templates import fill
from benchmarks.settings import dump

# Okabe and Ito's colours: colour-blind readers can distinguish them, on light and dark backgrounds.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

METHODS = {"horde": 3, "energy": 4, "ecaml": 4, "vem": 5, "jr": 2, "ensemble": 1, "abe": 1}
"""Words of labels, and the place of their method's colour; the base losses have the first one."""

MARKERS = ("o", "s", "^", "D", "v", "P")

INK = "#010203"  # placeholder for the page's text colour in a figure

ROWS, ROW = 2, 1 / 6  # of a key that a figure has room for; it grows by inches for each further one

LOSS_POINTS = 75  # points of a loss curve, each the mean of a block of steps

THUMBNAIL = 96  # largest side of a retrieved image, in pixels

Methods = dict[str, list[Run]]

Line = tuple[NDArray[np.floating], NDArray[np.floating]]  # steps (T,), values (seeds, T)

Lines = dict[str, Line]


def write_html(runs: Sequence[Run], path: Path, baseline: str | None = None) -> None:
    """Write the report; arguments and errors as in `compare`."""
    comparison = compare(runs, baseline)
    methods = comparison.methods
    page = fill(
        Path(__file__).with_name("page.html"),
        comparison=comparison,
        runs=runs,
        yaml=dump,
        curves=curves(methods),
        neighbours=neighbours(methods),
    )
    replace_file(path, page.encode())


def curves(methods: Methods) -> Markup:
    """Recall@1 on seen and on unseen classes, the loss and its terms over steps."""
    figures = [*_recall_figures(methods), _loss_figure(methods), *_term_figures(methods)]
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
    figure, _ = line_figure(methods, lines, "training loss")
    several = -(-rows // min(LOSS_POINTS, rows))
    told = f"the mean of {several} logged steps" if several > 1 else "one logged step"
    caption = f"Each point is {told}. The losses of different methods are not on one scale.{_seeds(lines)}"
    return figure_html(figure, "Training loss", caption)


def _term_figures(methods: Methods) -> list[Markup]:
    """Curves of the weighted terms, for each loss that is a sum."""
    figures = []
    for label, members in methods.items():
        tables = [run.table("terms") for run in members]
        lines = {name: line for name in list(tables[0])[1:] if (line := over_steps(tables, name))}
        if lines:
            figure, axes = line_figure(dict.fromkeys(lines, members), lines, "weighted term")
            means = [abs(values.mean()) for _, values in lines.values()]
            caption = f"What {label} adds up, with its weights."
            if max(means) > 10 * min(means):
                axes.set_yscale("symlog", linthresh=1e-3)
                caption += " The scale is logarithmic above 0.001."
            figures.append(figure_html(figure, f"Terms of the loss: {label}", caption))
    return figures


USE = {
    "test": "These are test classes: for inspection only, never used for selection.",
    "validation": "These are validation classes: settings may be chosen on them.",
    "fair": "These are validation classes, which chose the weights that were tested.",
}


def _recall_figures(methods: Methods) -> list[Markup]:
    """Curves of seen and unseen classes on one scale, as in ECAML's Figure 2."""
    found = {
        kind: _curves(methods, "evaluation", f"{kind}_recall_at_1", 100)
        for kind in ("seen", "unseen")
    }
    every = [values.max() for lines in found.values() for _, values in lines.values()]
    if not every:
        return [Markup("<p>Recall@1 was not recorded while training.</p>")]
    runs, counts = [*chain(*methods.values())], set()
    for run in runs:
        with damage_named(run.folder / "run.json"):
            counts.add(int(run.info["config"]["evaluation"]["curve_classes"]))
    on = f"up to {' or '.join(f'{count:,}' for count in sorted(counts))}"
    data, is_fair = runs[0].info["data"], runs[0].info.get("protocol") == "fair"
    captions = {
        "seen": "These are trained on. As in ECAML's Figure 2, both curves have one scale.",
        "unseen": f"The table has {data['test_classes']:,}: fewer classes give higher values. "
        + USE["fair" if is_fair else data["split"]],
    }
    figures = []
    for kind, lines in found.items():
        if lines:
            figure, axes = line_figure(methods, lines, "Recall@1 (%)")
            axes.set_ylim(0, max(1, 1.05 * max(every)))
            title, caption = f"Recall@1 on {on} {kind} classes", captions[kind] + _seeds(lines)
            figures.append(figure_html(figure, title, caption))
    return figures


def _curves(methods: Methods, table: str, column: str, scale: float = 1) -> Lines:
    """A line for each label that has such a column."""
    lines = {}
    for label, members in methods.items():
        if found := over_steps([run.table(table) for run in members], column):
            lines[label] = found[0], scale * found[1]
    return lines


def over_steps(tables: Sequence[Mapping[str, list[float]]], column: str) -> Line | None:
    """Steps (T,) in the tables of all runs, and their values (runs, T); None if there are none."""
    if not all(column in t for t in tables):
        return None
    series = [dict(zip(t["step"], t[column], strict=True)) for t in tables]
    steps = sorted(set.intersection(*(set(s) for s in series)))
    if not steps:
        return None
    return np.array(steps), np.array([[s[i] for i in steps] for s in series])


def _seeds(lines: Lines) -> str:
    several = any(len(values) > 1 for _, values in lines.values())
    return " Strong: means over seeds; light: single seeds." if several else ""


def _looks(methods: Methods) -> dict[str, dict[str, str]]:
    """Colour and marker of each method, the same in all figures."""
    return {
        label: {
            "color": COLOURS[place % len(COLOURS)],
            "marker": MARKERS[(place + place // len(COLOURS)) % len(MARKERS)],
        }
        for label, place in placed(methods).items()
    }


def line_figure(methods: Methods, lines: Lines, ylabel: str) -> tuple[Figure, Axes]:
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


def figure_html(figure: Figure, title: str, caption: str) -> Markup:
    """The figure as inline SVG that takes the page's colours, its key below it, then title and caption."""
    handles, names = figure.axes[-1].get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + ROW * max(0, len(names) - ROWS))
    key = {"fontsize": 8, "frameon": False, "labelcolor": INK}
    figure.legend(handles, names, loc="outside lower center", **key)
    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text(), keep="\n"))  # SVG holds no others
    file = io.BytesIO()
    # The salt keeps element ids equal between reports; no metadata, no date and no links.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}), warnings.catch_warnings():
        # The browser has a font for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    drawn = file.getvalue().decode().replace(INK, "currentColor")
    return Markup(
        '<figure><svg role="img" aria-label="{}"{}<figcaption><b>{}.</b> {}</figcaption></figure>'
    ).format(title, Markup(drawn.partition("<svg")[2]), title, caption)


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
                title = SPREAD if group == "evenly spread" else f"{group} queries of {label}"
                query = row, str(found["query_names"][row])
                answer = _answer(found, row) | {"method": label}
                sections.setdefault(title, {}).setdefault(query, []).append(answer)
    names = chain(string.ascii_uppercase, count(27))
    looks = {label: (next(names), look["color"]) for label, look in _looks(methods).items()}
    template = Path(__file__).with_name("neighbours.html")
    return fill(template, sections=sections, spread=SPREAD, looks=looks)


SPREAD = "Evenly spread over the test set"


def _answer(found: Mapping[str, NDArray[Any]], row: int) -> dict[str, Any]:
    """A query and its neighbours, as pictures with texts."""
    of, name, precision = (found[f"query_{key}"][row] for key in ("labels", "names", "precision"))
    about = f", average precision {100 * precision:.1f} %" if np.isfinite(precision) else ""
    columns = (found[f"neighbour_{key}"][row] for key in ("labels", "names", "images"))
    return {
        "query": (_png(found["query_images"][row]), f"query: {_shown(name)}, class {of}{about}"),
        "neighbours": [
            (_png(image), f"neighbour {i}: {_shown(neighbour)}, class {label}", bool(label == of))
            for i, (label, neighbour, image) in enumerate(zip(*columns, strict=True), start=1)
        ],
    }


def _shown(name: object) -> str:
    """A name, without the character of a class of Glyphs that looks like damage."""
    return str(name).replace("\N{REPLACEMENT CHARACTER}", "(replacement)")


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
