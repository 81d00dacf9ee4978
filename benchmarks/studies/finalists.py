"""Which comparisons of a study are tested: all, or the best ones on validation classes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from benchmarks.reporting.study_page import Candidate, best
from benchmarks.settings.study_files import Comparison, StudyFile

Scores = Callable[[str], Sequence[Candidate]]
"""The candidates of a row with their scores on validation classes; none as long as one is missing."""


def finalists(study: StudyFile, tried: Scores) -> StudyFile | None:
    """The study with the comparisons that are tested; None as long as a score is missing.

    The best row wins for its comparison, and among comparisons of one base the best method does. Test classes have
    no part in it, so that only the tested comparisons are corrected for.
    """
    if study.choice.finalists is None:
        return study
    main = [comparison for comparison in study.comparisons if comparison.family == "main"]
    scores = {row: score_of(study, row, tried) for of in main for row in of.rows()}
    if None in scores.values():
        return None

    def rank(comparison: Comparison) -> tuple[float, float]:
        better, than = (scores[row] or 0.0 for row in comparison.rows())
        return max(better, than), better

    behind = sorted(main, key=rank, reverse=True)[study.choice.finalists :]
    return replace(study, comparisons=[of for of in study.comparisons if of not in behind])


def score_of(study: StudyFile, row: str, tried: Scores) -> float | None:
    """The score of a row's best candidate, -inf if all diverged or have no base left; None if one is missing."""
    for needed in study.needed([row]):
        candidates = tried(needed)
        if candidates and best(candidates) is None:
            return -inf
    leader = best(tried(row))
    return None if leader is None else leader.score
