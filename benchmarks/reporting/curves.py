"""Curves over the steps of a training: SVG whose colours follow the reader's theme, also as an image in a page."""

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from textwrap import fill

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter1d

from benchmarks.console import printable

# Okabe and Ito's colours: colour-blind readers can distinguish them, on light and dark backgrounds.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

DASHES = ("-", "--", "-.", ":")  # a line shows through those of the next one

POINTS = 75  # a line of twice as many or more is a moving mean

INK = "#010203"  # placeholder for the colour of text and axes

STYLE = """
svg { color-scheme: light dark; color: #1f2328; }
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; filter: brightness(1.3); } }
"""

DESIGN = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **{"font.size": 12, "axes.titlelocation": "left", "axes.grid": True, "grid.alpha": 0.2},
    **{"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "curves"},
}

CURVES = {
    "Recall@1 (%) on training classes": ("evaluation", "seen_recall_at_1", 100),
    "Recall@1 (%) on new classes": ("evaluation", "unseen_recall_at_1", 100),
    "Training loss": ("training", "loss", 1),
}
"""For each panel: the table of the records, the column in it, and its factor."""

Line = tuple[NDArray[np.floating], NDArray[np.floating]]  # steps (T,), values (runs, T)


def over_steps(
    tables: Sequence[Mapping[str, list[float]]], column: str, factor: float
) -> Line | None:
    """The steps that the tables of all runs have, and their values; None if there are none."""
    if not all(column in table for table in tables):
        return None
    series = [dict(zip(table["step"], table[column], strict=True)) for table in tables]
    steps = np.array(sorted(set.intersection(*map(set, series))))
    values = factor * np.array([[of[step] for step in steps] for of in series])
    stride = max(1, len(steps) // POINTS)
    return (steps[::stride], uniform_filter1d(values, stride)[:, ::stride]) if len(steps) else None


def curves_svg(labels: Iterable[str], panels: Mapping[str, Mapping[str, Line]]) -> bytes:
    """Draw the means over runs, and behind them the single runs in light lines; panels stand below each other.

    Args:
        labels: Of all lines, in the order of their colours, which are then the same in several figures.
        panels: {title: {label: line}}.
    """
    looks = {
        label: {"color": colour, "linestyle": dash}
        for label, colour, dash in zip(labels, cycle(COLOURS), cycle(DASHES), strict=False)
    }
    key: dict[str, Line2D] = {}
    with rc_context(DESIGN), warnings.catch_warnings():
        # The browser has a font for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(layout="constrained")
        axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for panel, (title, lines) in zip(axes, panels.items(), strict=True):
            panel.set_title(title)
            for label, (steps, values) in lines.items():
                if len(values) > 1:
                    panel.plot(steps, values.T, alpha=0.3, linewidth=0.7, **looks[label])
                [key[label]] = panel.plot(steps, values.mean(axis=0), **looks[label])
        panel.set(xlabel="training step", xlim=(0, None))
        panel.xaxis.set_major_formatter("{x:,g}")
        names = [fill(printable(label), 40) for label in key]
        figure.legend(key.values(), names, loc="outside upper left")
        rows = sum(name.count("\n") + 1 for name in names)
        figure.set_size_inches(4.6, 0.4 + 2.6 * len(panels) + 0.28 * rows)  # a phone shows its text
        file, metadata = io.BytesIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    drawn = file.getvalue().decode().partition("<svg")[2].replace(INK, "currentColor")
    drawn = drawn.replace("</style>", f"{STYLE}</style>", 1)
    return f'<svg role="img" aria-label="{", ".join(panels)}"{drawn}'.encode()
