"""Sections of a page on one's own images: classes, confused pairs, and whether more photographs would help."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.records.results import Run
from benchmarks.reporting.curves import COLOURS, design, svg_of
from benchmarks.reporting.neighbours import pictures, saved_by
from benchmarks.reporting.table import Table, plain
from benchmarks.reporting.verdicts import Result

MOST = 50  # classes in the table

PAIRS, PICTURED, EACH = 10, 4, 2  # pairs of classes, those with pictures, and queries of each


Curve = list[tuple[int, list[float]]]
"""For each number of photographs per class, all of them last: Recall@1 in percent, of each draw."""

LEAST = 1.0  # point that is worth a word


class Section(NamedTuple):
    """A part of a page on one's own images."""

    title: str
    text: str
    table: Table
    pictures: str | bytes = ""  # HTML or an SVG file, for the page in HTML
    folded: bool = True  # behind the answer, where HTML folds it


def stored_by_class(runs: Mapping[int, Result]) -> list[Mapping[str, Sequence[int]]]:
    """Results by class of a row's runs; runs made by older code have none."""
    return [run["per_class"] for run in runs.values() if run.get("per_class")]


def by_class(runs: Mapping[int, Result], names: Sequence[str], label: str) -> list[Section]:
    """The classes of a row's tests, the worst first; nothing if the runs did not store them.

    Args:
        names: Of the classes of the test.
        label: The name of the row's method.
    """
    stored = stored_by_class(runs)
    if not stored or len(stored[0]["queries"]) != len(names):
        return []
    queries, right, precision = (
        np.mean([classes[key] for classes in stored], axis=0)
        for key in ("queries", "recall_at_1", "mean_average_precision_at_r")
    )
    order = sorted(np.flatnonzero(queries).tolist(), key=lambda k: (right[k], precision[k]))
    rows = [
        [
            plain(names[k]),
            f"{queries[k]:.0f}",
            f"{right[k] / 100:.1f}",
            f"{precision[k] / 100:.1f}",
        ]
        for k in order[:MOST]
    ]
    header = ["class", "queries", "right at rank 1 (%)", "MAP@R (%)"]
    fewer = f" These are the {MOST} worst of {len(order)}." if len(order) > MOST else ""
    means = f", means over {len(stored)} trainings" if len(stored) > 1 else ""
    text = f"With {label}{means}, the worst class first.{fewer}"
    return [Section("Class by class", text, Table(header, rows))]


def confused(run: Run, dataset: Glyphs | ImageSet, label: str) -> list[Section]:
    """The pairs of classes of which one was most often nearest to the other; nothing if there are none."""
    labels, names = dataset.labels.numpy(), [*map(plain, dataset.class_names)]
    queries, near, _ = saved = saved_by(run)
    own, nearest = labels[queries], labels[near[:, 0]]
    wrong = own != nearest
    counts = Counter(zip(own[wrong].tolist(), nearest[wrong].tolist(), strict=True))
    pairs = Counter[tuple[int, int]]()
    for (a, b), count in counts.items():
        pairs[min(a, b), max(a, b)] += count
    if not pairs:
        return []
    rows, pictured = [], dict[str, list[int]]()
    for (a, b), count in pairs.most_common(PAIRS):
        if counts[a, b] < counts[b, a]:
            a, b = b, a
        both = np.isin(own, (a, b))
        cells = f"{count} of {both.sum()}", f"{counts[a, b]}", f"{counts[b, a]}"
        rows.append([names[a], names[b], *cells])
        if len(pictured) < PICTURED:
            mixed = np.flatnonzero(wrong & both & np.isin(nearest, (a, b)))
            title = f"{dataset.class_names[a]} and {dataset.class_names[b]}"
            pictured[title] = mixed[:EACH].tolist()
    header = ["class", "and class", "confused", "first for second", "second for first"]
    text = (
        f"With {label}, in its first test: for {wrong.sum()} of {len(queries)} queries, the nearest image is of "
        "another class. The pairs of classes that were confused most often:"
    )
    shown = pictures(dataset, {label: saved}, pictured)
    return [Section("Classes that are confused", text, Table(header, rows, names=2), shown)]


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
