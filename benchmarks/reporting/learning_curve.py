"""Would more photographs help? A section of a study's page, with its figure."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from benchmarks.reporting.curves import COLOURS, design, svg_of
from benchmarks.reporting.study_classes import Section
from benchmarks.reporting.table import Table

Curve = Sequence[tuple[int, Sequence[float]]]
"""For each number of photographs per class, all of them last: Recall@1 in percent, of each draw."""

LEAST = 1.0  # point that is worth a word


def more_photographs(curve: Curve, label: str) -> list[Section]:
    """The section; nothing for classes of too few photographs.

    Args:
        label: The name of the network that was measured.
    """
    if len(curve) < 2:
        return []
    rows = [
        [f"{number}", f"{np.mean(right):.1f}", f"{_error(right):.1f}" if len(right) > 1 else ""]
        for number, right in curve
    ]
    header = ["photographs per class", "nearest one right, of 100", "standard error"]
    text = (
        f"{sentence(curve)} Measured with the {label}: so many photographs of each class are drawn at random, of "
        "classes to train and to test on alike, and the network is fitted and tested on these alone. The standard "
        "error is that of the draws; other classes would vary more."
    )
    return [Section("Would more photographs help?", text, Table(header, rows), figure(curve))]


def sentence(curve: Curve) -> str:
    """The last doubling, and what it says of the next one."""
    (half, before), (most, after) = curve[-2:]
    gain = np.mean(after) - np.mean(before)
    shares = f"right for {np.mean(before):.0f} of 100; with {most}, for {np.mean(after):.0f}"
    told = f"With {half} photographs per class, the nearest one was {shares}"
    if gain < LEAST:
        return f"{told}: more photographs per class would hardly help."
    sure = "will probably" if gain > 2 * _error(before) else "may"
    return f"{told}: more photographs per class {sure} help."


def _error(right: Sequence[float]) -> float:
    return float(np.std(right, ddof=1) / len(right) ** 0.5) if len(right) > 1 else 0.0


def figure(curve: Curve) -> bytes:
    """The curve in SVG; the number of photographs doubles from mark to mark."""
    numbers = [number for number, _ in curve]
    with design():
        drawn = Figure(figsize=(4.6, 2.8), layout="constrained")
        panel = drawn.subplots()
        means = [np.mean(right) for _, right in curve]
        errors = [2 * _error(right) for _, right in curve]
        panel.errorbar(numbers, means, errors, marker="o", capsize=3, color=COLOURS[0])
        panel.set_xscale("log", base=2)
        panel.set_xticks(numbers, [f"{number}" for number in numbers])
        panel.minorticks_off()
        panel.set(xlabel="photographs per class", title="Nearest photograph right, of 100")
        return svg_of(drawn, "Nearest photograph right, by photographs per class").encode()
