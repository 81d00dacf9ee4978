"""The untrained network, which a training must beat: the best result that a run has measured of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Any

import numpy as np

from benchmarks.reporting.names import START, UNTRAINED, metric_name, row_name
from benchmarks.reporting.paired import Metrics

CHOSEN_BY = "mean_average_precision_at_r"

LEAST = 5e-5  # smaller differences are 0.00 points


@dataclass(frozen=True)
class Untrained:
    """The best untrained result of one or more runs of a method, and what training has added to it."""

    name: str  # of its row; "" of the whole network at its start
    metrics: Metrics  # means over runs
    gains: Metrics  # of the trained embeddings; negative where training lost
    output: str  # whose results these are, in `untrained_of`

    def lost(self, metric: str) -> str | None:
        """The metric by which training lost: this one, or else the one that is chosen by; None if by neither."""
        return next((m for m in (metric, CHOSEN_BY) if self.gains.get(m, 0) < -LEAST), None)

    def told(self, metric: str) -> str:
        """E.g. "training lost 12.00 points against the untrained network (77.00 %)"; "" if it did not lose."""
        if (by := self.lost(metric)) is None:
            return ""
        other = "" if by == metric else f" of {metric_name(by)}"
        which = self.name and f"{self.name}: "
        return (
            f"training lost {-100 * self.gains[by]:.2f} points{other} against the untrained network "
            f"({which}{100 * self.metrics[by]:.2f} %)"
        )


def best_untrained(*records: Mapping[str, Any], metric: str) -> Untrained | None:
    """The best untrained result by MAP@R of the records of a method's runs; None if none was measured or trained.

    A record has "metrics", those of the trained embeddings, and may have "before_training", those of the whole
    network at its start, and "outputs" whose names begin with "untrained_".

    Args:
        metric: What chooses where a record lacks MAP@R.
    """
    trained = [record for record in records if record.get("metrics") and record.get("steps") != 0]
    runs = [(record["metrics"], untrained_of(record)) for record in trained]
    known = []
    for name in dict.fromkeys(chain(*(measured for _, measured in runs))):
        pairs = [(trained, measured[name]) for trained, measured in runs if name in measured]
        after, metrics = map(_means, zip(*pairs, strict=True))
        gains = {m: after[m] - value for m, value in metrics.items() if m in after}
        shown = "" if name == START else row_name("", name, records[0].get("config"))
        known.append(Untrained(shown, metrics, gains, name))
    for by in (CHOSEN_BY, metric):
        if finite := [row for row in known if isfinite(row.metrics.get(by, np.nan))]:
            return max(finite, key=lambda row: row.metrics[by])
    return None


def untrained_of(record: Mapping[str, Any]) -> dict[str, Metrics]:
    """A record's results of untrained networks."""
    tested = {START: record.get(START), **(record.get("outputs") or {})}
    return {
        name: metrics
        for name, metrics in tested.items()
        if metrics and (name == START or name.startswith(UNTRAINED))
    }


def _means(rows: Sequence[Metrics]) -> Metrics:
    """Of the metrics that all rows have."""
    common = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: float(np.mean([row[name] for row in rows])) for name in common}
