"""What a study recommends: a row that trains nothing, or the training that is shown to be better."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from benchmarks.reporting.untrained import Untrained, best_untrained
from benchmarks.reporting.verdicts import MAIN, Finding, Results, judge, percent
from benchmarks.settings.study_files import CONTROL, Comparison, StudyFile

MANY = 10  # seeds, recommended where fewer leave the answer open


@dataclass(frozen=True)
class Choice:
    """What a study recommends. Whatever names, marks or pictures the best network asks for it here."""

    row: str
    finding: (
        Finding | None
    )  # beside which row it stands everywhere; None if no main one has a result
    untrained: Untrained | None = None  # what the row's networks were before training, at best
    training: Finding | None = None  # the best training beside the best row that trains nothing
    method: Finding | None = None  # the main comparison that comes nearest to the recommended row

    def needs_seeds(self, study: StudyFile) -> bool:
        """True if more seeds would make the answer surer; they don't where it varies with the test classes."""
        if self.finding is None or study.seeds.count >= MANY:
            return False
        return self.finding.tested is None or self.finding.tested.over == "seeds"


def untrained_row(study: StudyFile, results: Results) -> str | None:
    """The best row that trains nothing; None without results of one, or if rows have different test classes."""
    rows = [] if study.has_blocks() else [row for row in study.untrained() if results.get(row)]
    return max(rows, key=lambda row: percent(results[row], study.primary), default=None)


def beyond_untrained(
    study: StudyFile, findings: Sequence[Finding], results: Results
) -> list[Finding]:
    """Each trained row of the main comparisons beside the best untrained one.

    As for controls, no p is corrected: one of them decides, beside the better of the untrained rows, and with three
    seeds hardly a gain would be left to see.
    """
    if (than := untrained_row(study, results)) is None:
        return []
    main = [comparison.rows() for comparison in study.comparisons if comparison.family == MAIN]
    rows = dict.fromkeys(row for row in chain(*main) if row not in study.untrained())
    claim = "training beats the untrained network"
    comparisons = [Comparison(row, claim, row, than, family=CONTROL) for row in rows]
    registered = {
        row: all(f.registered for f in findings if row in f.comparison.rows()) for row in rows
    }
    return judge(replace(study, comparisons=comparisons), results, registered=registered)


def measured(findings: Sequence[Finding]) -> list[Finding]:
    """The main comparisons that have a result."""
    return [f for f in findings if f.comparison.family == MAIN and f.tested]


def choose(study: StudyFile, findings: Sequence[Finding], results: Results) -> Choice:
    """The best row that trains nothing, unless a training is shown to beat it: then that, as in other studies.

    There it is the best row of those that are shown to help, or else of the losses alone, beside what comes nearest
    to it: the loss that the row gains most over, or the method that could gain most over the loss. An untrained row
    stands beside the training that comes nearest to it, of which there is none before the first comparison.

    Where rows train nothing, they are what a training is compared with, not the start of its own runs.
    """
    main, than = measured(findings), untrained_row(study, results)
    training = _beside(study, findings, results) if than and main else None
    if than is None:
        row = _best_training(study, findings, results)
        untrained = best_untrained(*results[row].values(), metric=study.primary)
    elif training is None or not training.is_gain:
        return Choice(than, training, training=training)
    else:
        row, untrained = training.comparison.better, None
    gains = [f for f in main if f.is_gain and f.comparison.rows()[0] == row]
    alone = [f for f in main if f.comparison.rows()[1] == row]
    method = max(gains, key=lambda f: f.difference.mean, default=None)
    method = method or max(alone, key=_most, default=None)
    return Choice(row, training or method, untrained, training, method)


def _best_training(study: StudyFile, findings: Sequence[Finding], results: Results) -> str:
    """The best of the rows that are shown to help, or else of the losses alone."""
    main = measured(findings)
    gains = {f.comparison.rows()[0]: f.difference.mean for f in main if f.is_gain}
    rows = list(gains) or [f.comparison.rows()[1] for f in main or findings]
    if gains and study.has_blocks():  # the means of different test sets cannot be compared
        return max(gains, key=gains.__getitem__)
    return max(rows, key=lambda row: percent(results[row], study.primary))


def _beside(study: StudyFile, findings: Sequence[Finding], results: Results) -> Finding | None:
    """The best training beside the best untrained row; if it is not shown to beat that, the one that gains most."""
    beside = beyond_untrained(study, findings, results)
    row = _best_training(study, findings, results)
    own = next((f for f in beside if f.comparison.better == row), None)
    if own is not None and own.is_gain:
        return own
    known = [f for f in beside if f.tested]
    return max(known, key=lambda f: (f.is_gain, f.difference.mean), default=own)


def _most(finding: Finding) -> float:
    """The largest gain that its interval allows, or its mean."""
    tested = finding.difference
    return tested.limits()[1] if tested.has_interval else tested.mean
