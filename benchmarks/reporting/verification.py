"""Verification in words and a table: how well, and from which similarity on, two images are called the same."""

from collections.abc import Mapping
from typing import Any

from benchmarks.reporting.paired import Estimate, percent
from benchmarks.reporting.rows import Group
from benchmarks.reporting.table import Table


def verified(groups: Mapping[str, Group]) -> list[str | Table]:
    """A single run's thresholds, or a row per method with means over seeds; nothing if it was not measured."""
    runs = [run for group in groups.values() for run in group.runs]
    found = {run.folder: run.info["verification"] for run in runs if run.info.get("verification")}
    if not found:
        return []
    if len(runs) == 1:
        return _thresholds(*found.values())
    rates = [row["false_accepts"] for row in next(iter(found.values()))["rates"]]
    rows = []
    for label, group in groups.items():
        of_seeds = [found[run.folder] for run in group.runs if run.folder in found]
        accepts = [
            [
                row["true_accepts"]
                for one in of_seeds
                for row in one["rates"]
                if row["false_accepts"] == rate
            ]
            for rate in rates
        ]
        cells = [percent([v for v in values if v is not None]) for values in accepts]
        if of_seeds:
            rows.append([label, percent([one["area"] for one in of_seeds]), *cells])
    names = [f"pairs of one class found at {share(rate)} false (%)" for rate in rates]
    told = "Are two test images of one class? Told by their similarity:"
    return [told, Table(["method", "area under the ROC (%)", *names], rows)]


def _thresholds(found: Mapping[str, Any]) -> list[str | Table]:
    area = Estimate(found["area"], found["area_half_width"]).percent()
    rows, notes = [], []
    for row in found["rates"]:
        threshold, width = row["threshold"], row["threshold_half_width"]
        cell = "–" if threshold is None else f"{threshold:.3f}"
        accepts = row["true_accepts"]
        accepted = (
            "–" if accepts is None else Estimate(accepts, row["true_accepts_half_width"]).percent()
        )
        rows.append(
            [
                share(row["false_accepts"]),
                cell if width is None else f"{cell} ± {width:.3f}",
                accepted,
            ]
        )
        if "needs" in row:
            notes.append(
                f"For {share(row['false_accepts'])} false accepts, the test has {found['other_pairs']:,} pairs of "
                f"two classes, and needs {row['needs']:,}."
            )
    header = [
        "pairs of two classes called the same",
        "similarity from",
        "pairs of one class found (%)",
    ]
    told = (
        f"Are two test images of one class? Their cosine similarity tells, with an area under the ROC of {area} %. "
        "From these similarities on, two images are called the same:"
    )
    if found["area_half_width"] is not None:
        notes.insert(
            0, "± in this table is half of the 95 % interval over test classes, by a jackknife."
        )
    return [told, Table(header, rows), *notes]


def share(rate: float) -> str:
    """A share in percent.

    >>> share(0.0001)
    '0.01 %'
    """
    return f"{100 * rate:.6g} %"
