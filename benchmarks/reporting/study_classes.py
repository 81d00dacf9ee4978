"""Which classes a recommended network finds, and which it takes for each other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.records.results import Run
from benchmarks.reporting.neighbours import pictures, saved_by
from benchmarks.reporting.table import Table, plain
from benchmarks.reporting.verdicts import Result

MOST = 50  # classes in the table

PAIRS, PICTURED, EACH = 10, 4, 2  # pairs of classes, those with pictures, and queries of each


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
