"""Matplotlib figures as inline SVG in the colours of their page."""

import io
import warnings
from collections.abc import Iterable
from itertools import chain, count

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.console import printable

# Okabe and Ito's colours: colour-blind readers can distinguish them, on light and dark backgrounds.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

METHODS = {"horde": 3, "energy": 4, "ecaml": 4, "vem": 5, "jr": 2, "ensemble": 1, "abe": 1}
"""Words of labels, and the place of their method's colour; the base losses have the first one."""

MARKERS = ("o", "s", "^", "D", "v", "P")

INK = "#010203"  # placeholder for the page's text colour in a figure

LETTERS_PER_INCH = 15  # of a key

ROWS, ROW = 2, 1 / 6  # of a key that a figure has room for; it grows by inches for each further one


def _saved(figure: Figure, title: str) -> bytes:
    """SVG settings: the salt keeps element ids equal between reports; no metadata, no date and no links."""
    file = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}), warnings.catch_warnings():
        # The browser has a font for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        show_names(figure)
        figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    return file.getvalue()


def show_names(figure: Figure) -> None:
    """Make all texts of the figure `printable`, since SVG cannot hold others."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text(printable(text.get_text(), keep="\n"))


def plain(text: str) -> str:
    """Text that matplotlib takes neither for mathematics nor, with a leading underscore, for hidden in the
    key."""
    text = text.replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{text}" if text.startswith("_") else text


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


def new_figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    # 5 inches are a phone's width: its text stays readable there, and two stand side by side.
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.2, color=INK)
    return figure, axes


def figure_html(figure: Figure, title: str, caption: str) -> Markup:
    """The figure as inline SVG that takes the page's colours, its key below it, then title and caption."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(colors=INK)
        for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
            text.set_color(INK)
    handles, names = figure.axes[-1].get_legend_handles_labels()
    if names:
        letters = max(map(len, names)) + 6  # with the line and the gap
        columns = max(1, int(figure.get_figwidth() * LETTERS_PER_INCH) // letters)
        further = max(0, -(-len(names) // columns) - ROWS)
        figure.set_figheight(figure.get_figheight() + ROW * further)
        key = {"ncols": columns, "fontsize": 8, "frameon": False, "labelcolor": INK}
        figure.legend(handles, names, loc="outside lower center", **key)
    drawn = _saved(figure, title).decode().replace(INK, "currentColor")
    return Markup(
        '<figure><svg role="img" aria-label="{}"{}<figcaption><b>{}.</b> {}</figcaption></figure>'
    ).format(title, Markup(drawn.partition("<svg")[2]), title, caption)
