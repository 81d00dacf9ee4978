"""Verification in words and a table: how well, and from which similarity on, two images are called the same."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from benchmarks.reporting.paired import Estimate, percent, plus_minus
from benchmarks.reporting.rows import Group, tested
from benchmarks.reporting.table import Table


def verified(groups: Mapping[str, Group]) -> list[str | Table]:
    """A single run's thresholds, or a row per method with means over seeds; nothing if it was not measured."""
    found = tested(groups, "verification")
    if not found:
        return []
    first = next(iter(found.values()))[0]
    if sum(len(group.runs) for group in groups.values()) == 1:
        return _thresholds(first)
    rates, rows = [row["false_accepts"] for row in first["rates"]], []
    for label, entries in found.items():
        cells = [percent([entry["area"] for entry in entries])]
        every = [*chain(*(entry["rates"] for entry in entries))]
        for rate in rates:
            accepts = [row["true_accepts"] for row in every if row["false_accepts"] == rate]
            cells.append(percent(accepts))
        rows.append([label, *cells])
    names = [f"pairs of one class found at {share(rate)} false (%)" for rate in rates]
    told = "Are two given test images of one class? Told by their similarity:"
    return [told, Table(["method", "area under the ROC (%)", *names], rows)]


def _thresholds(found: Mapping[str, Any]) -> list[str | Table]:
    area = Estimate(found["area"], found["area_half_width"]).percent()
    over_classes = "± in this table is half of the 95 % interval over test classes, by a jackknife."
    rows, notes = [], [over_classes] if found["area_half_width"] is not None else []
    for row in found["rates"]:
        rate, accepted = share(row["false_accepts"]), "–"
        if row["true_accepts"] is not None:
            accepted = Estimate(row["true_accepts"], row["true_accepts_half_width"]).percent()
        rows.append([rate, plus_minus(row["threshold"], row["threshold_half_width"], 3), accepted])
        if "needs" in row:
            notes.append(
                f"For {rate} false accepts, the test has {found['other_pairs']:,} pairs of two classes, and needs "
                f"{row['needs']:,}."
            )
    one, other = "pairs of two classes called the same", "pairs of one class found (%)"
    told = (
        f"Are two given test images of one class? Their cosine similarity tells, with an area under the ROC of "
        f"{area} %. From these similarities on, two images are called the same; not for a search, whose nearest "
        "image is the best of many pairs:"
    )
    return [told, Table([one, "similarity from", other], rows), *notes]


def share(rate: float) -> str:
    """A share in percent.

    >>> share(0.0001)
    '0.01 %'
    """
    return f"{100 * rate:.6g} %"
