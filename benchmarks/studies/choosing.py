"""Decisions by the scores on validation classes: values to try next, rows to leave out, comparisons to test."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from benchmarks.reporting.study_tables import Candidate, best
from benchmarks.settings.study_files import Comparison, StudyFile

Scores = Callable[[str], Sequence[Candidate]]
"""The candidates of a row with their scores; none as long as one is missing."""

Choose = Mapping[str, Sequence[float]]
"""The values of each setting, in order."""

Bounds = dict[str, tuple[int, int]]
"""For each setting, the range of its values that is tried: the first index, and the one after the last."""


def first_bounds(choose: Choose, first: int | None) -> Bounds:
    """So many values from the middle of each list; default: all."""
    bounds = {}
    for name, values in choose.items():
        low = max(0, (len(values) - (first or len(values))) // 2)
        bounds[name] = low, min(len(values), low + (first or len(values)))
    return bounds


def widened(choose: Choose, bounds: Bounds, leader: Candidate | None) -> Bounds:
    """One more value beyond the best one if that lies at the edge, or on both sides if all diverged."""
    wider = {}
    for name, values in choose.items():
        low, high = bounds[name]
        at = None if leader is None else values.index(leader.values[name])
        lower = low > 0 and at in (None, low)
        higher = high < len(values) and (at is None or (at == high - 1 and not lower))
        wider[name] = low - lower, high + higher
    return wider


def left_out(study: StudyFile, row: str, tried: Scores) -> bool | None:
    """True if a row takes the settings of another that is `choice.behind` the best; None if a score is missing."""
    limit, takes = study.choice.behind, study.needed(study.rows[row].takes)
    if limit is None or not takes:
        return False
    bases = [name for name, about in study.rows.items() if about.choose and not about.takes]
    scores = {base: score_of(study, base, tried) for base in bases}
    if None in scores.values():
        return None
    known = {base: score or 0.0 for base, score in scores.items()}
    return any(known.get(base, inf) < max(known.values()) - limit / 100 for base in takes)


def score_of(study: StudyFile, row: str, tried: Scores) -> float | None:
    """The score of a row's best candidate, -inf if it is left out or all diverged; None if one is missing."""
    if left_out(study, row, tried):
        return -inf
    for needed in study.needed([row]):
        candidates = tried(needed)
        if candidates and best(candidates) is None:
            return -inf
    leader = best(tried(row))
    return None if leader is None else leader.score


def finalists(study: StudyFile, tried: Scores) -> StudyFile | None:
    """The study with the comparisons that are tested; None as long as a score is missing.

    The best row wins for its comparison, and among comparisons of one base the best method does. Test classes have
    no part in it, so that only the tested comparisons are corrected for.
    """
    if study.choice.finalists is None:
        return study
    main = [comparison for comparison in study.comparisons if comparison.family == "main"]
    scores = {row: score_of(study, row, tried) for pair in main for row in pair.rows()}
    if None in scores.values():
        return None

    def rank(comparison: Comparison) -> tuple[float, float]:
        better, than = (scores[row] or 0.0 for row in comparison.rows())
        return max(better, than), better

    behind = sorted(main, key=rank, reverse=True)[study.choice.finalists :]
    return replace(study, comparisons=[each for each in study.comparisons if each not in behind])
