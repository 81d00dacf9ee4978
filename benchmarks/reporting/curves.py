"""Curves over the steps of a training: SVG whose colours follow the reader's theme, also as an image in a page."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.ndimage import uniform_filter1d

from benchmarks.console.printing import printable

# Okabe and Ito's colours: colour-blind readers can distinguish them, on light and dark backgrounds.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

DASHES = ("-", "--", "-.", (0, (8, 2)))  # a line shows through those of the next one

POINTS = 75  # a line of twice as many or more is a moving mean

INK = "#010203"  # placeholder for the colour of text and axes

STYLE = """
svg { color-scheme: light dark; color: #1f2328; }
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important; }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; filter: brightness(1.3); } }
"""

DESIGN: dict[Any, object] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **{"font.size": 12, "axes.titlelocation": "left", "axes.grid": True, "grid.alpha": 0.2},
    **{"lines.linewidth": 1.8, "text.parse_math": False},
    **{"svg.fonttype": "none", "svg.hashsalt": "curves", "font.family": "DejaVu Sans"},
}
"""Drawn twice, a figure has the same bytes."""

RECALLS = {
    "Recall@1 (%) on training classes": "seen_recall_at_1",
    "Recall@1 (%) on new classes": "unseen_recall_at_1",
}

COSINES = {
    f"Cosines, {pairs}, {classes}": f"{seen}_{kind}_class_cosine"
    for seen, classes in (("seen", "training classes"), ("unseen", "new classes"))
    for kind, pairs in (("same", "same class"), ("other", "two classes"))
}

RANKS = {
    f"Effective rank of {kind}, {classes}": f"{seen}_{kind}_rank"
    for seen, classes in (("seen", "training classes"), ("unseen", "new classes"))
    for kind in ("features", "embeddings")
}

Columns = Mapping[str, Sequence[float]]  # of a table with the column "step"


@contextmanager
def design() -> Iterator[None]:
    """Figures made and written inside look alike."""
    with rc_context(DESIGN), warnings.catch_warnings():
        # The browser has a font for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def svg_of(figure: Figure, title: str) -> str:
    """A figure as SVG, inside `design`; a title without characters that HTML marks."""
    file, metadata = io.BytesIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    drawn = file.getvalue().decode().partition("<svg")[2].replace(INK, "currentColor")
    drawn = drawn.replace("</style>", f"{STYLE}</style>", 1)
    return f'<svg role="img" aria-label="{title}"{drawn}'


def curves_svg(
    tables: Mapping[str, Sequence[Columns]], panels: Mapping[str, str], *, singles: bool
) -> str:
    """Draw the means over the runs of each label, in panels below each other; empty if there are none.

    Args:
        tables: {label: the tables of its runs}; colours follow its order, also of labels without a line.
        panels: {title: column of the tables}.
        singles: Draw the single runs, too, in light lines.
    """
    looks = {
        label: {"color": colour, "linestyle": dash}
        for label, colour, dash in zip(tables, cycle(COLOURS), cycle(DASHES), strict=False)
    }
    lines = {
        title: {label: line for label in tables if (line := over_steps(tables[label], column))}
        for title, column in panels.items()
    }
    lines = {title: by_label for title, by_label in lines.items() if by_label}
    if not lines:
        return ""
    key: dict[str, Line2D] = {}
    with design():
        figure = Figure(layout="constrained")
        axes = figure.subplots(len(lines), sharex=True, squeeze=False)[:, 0]
        for panel, (title, by_label) in zip(axes, lines.items(), strict=True):
            panel.set_title(title)
            for label, (steps, values) in by_label.items():
                values = values * (100 if "%" in title else 1)
                if singles and len(values) > 1:
                    panel.plot(steps, values.T, alpha=0.3, linewidth=0.7, **looks[label])
                point = "o" if len(steps) == 1 else None
                mean = values.mean(axis=0)
                [key[label]] = panel.plot(steps, mean, marker=point, **looks[label])
        panel.set(xlabel="training step", xlim=(0, None))
        panel.xaxis.set_major_formatter("{x:,g}")
        names = [fill(printable(label), 40) for label in key]
        figure.legend(key.values(), names, loc="outside upper left")
        rows = sum(name.count("\n") + 1 for name in names)
        figure.set_size_inches(4.6, 0.4 + 2.6 * len(lines) + 0.28 * rows)  # a phone shows its text
        return svg_of(figure, ", ".join(lines))


def over_steps(tables: Sequence[Columns], column: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The steps (T,) that the tables of all runs have, and the values (runs, T); None if there are none."""
    if not all(column in table for table in tables):
        return None
    series = [dict(zip(table["step"], table[column], strict=True)) for table in tables]
    steps = np.array(sorted(set.intersection(*map(set, series))))
    values = np.array([[run[step] for step in steps] for run in series])
    stride = max(1, len(steps) // POINTS)
    return (steps[::stride], uniform_filter1d(values, stride)[:, ::stride]) if len(steps) else None
