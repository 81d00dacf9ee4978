"""The row that a study recommends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.reporting.untrained import Untrained, best_untrained
from benchmarks.reporting.verdicts import MAIN, Finding, Result, Results
from benchmarks.settings import StudyFile


def measured(findings: Sequence[Finding]) -> list[Finding]:
    """The main comparisons that have a result."""
    return [f for f in findings if f.comparison.family == MAIN and f.tested]


@dataclass(frozen=True)
class Choice:
    """What a study recommends. Whatever names, marks or pictures the best network asks for it here."""

    row: str
    finding: Finding | None  # the comparison behind it; None if no main one has a result
    untrained: Untrained | None  # what the row's networks were before training, at best

    def stars(self, finding: Finding) -> list[bool]:
        """For each side of a comparison, True if it is the recommended row in the comparison behind it."""
        behind = (
            self.finding is not None and self.finding.comparison.name == finding.comparison.name
        )
        return [behind and row == self.row for row in finding.comparison.rows()]


def choose(study: StudyFile, findings: Sequence[Finding], results: Results) -> Choice:
    """The best row of those that are shown to help, or else of the losses alone, beside what comes nearest to it.

    That is the loss that the row gains most over, or the method that could gain most over the loss.
    """
    main = measured(findings)
    gains = {f.comparison.rows()[0]: f.difference.mean for f in main if f.is_gain}
    rows = list(gains) or [f.comparison.rows()[1] for f in main or findings]
    if gains and study.has_blocks():  # the means of different test sets cannot be compared
        row = max(gains, key=gains.__getitem__)
    else:
        row = max(rows, key=lambda row: mean_percent(results[row], study.primary))
    untrained = best_untrained(*results[row].values(), metric=study.primary)
    if gains:
        near = [f for f in main if f.is_gain and f.comparison.rows()[0] == row]
        return Choice(row, max(near, key=lambda f: f.difference.mean), untrained)
    near = [f for f in main if f.comparison.rows()[1] == row]
    return Choice(row, max(near, key=_most, default=None), untrained)


def _most(finding: Finding) -> float:
    """The largest gain that its interval allows, or its mean."""
    tested = finding.difference
    return tested.limits()[1] if tested.has_interval else tested.mean


def mean_percent(runs: Mapping[int, Result], metric: str) -> float:
    """In percent; 0 if no run has it."""
    values = [run["metrics"][metric] for run in runs.values() if metric in run["metrics"]]
    return 100 * float(np.mean(values or [0.0]))
