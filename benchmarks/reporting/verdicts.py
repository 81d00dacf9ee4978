"""The findings of a study: each comparison's tested difference, and the words that say what it means."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Any

import numpy as np

from benchmarks.reporting.names import metric_name
from benchmarks.reporting.paired import SIGNIFICANT, Paired, assess, holm
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.study_files import CONTROL, Comparison, StudyFile

Result = dict[str, Any]

Results = Mapping[str, Mapping[int, Result]]
"""{row: {seed: result}}"""


class Word(StrEnum):
    """The words for a finding.

    A limit without a percentage is adjusted: it passes a bound where Holm's adjusted p of this bound is below 5 %.
    Each bound has a correction of its own: Holm's for 0 says nothing about the margin.
    """

    HARMS = "harms"  # upper limit below 0
    WORTH = "worth having"  # lower limit above the margin
    HELPS = "helps"  # lower limit above 0
    DISAGREE = "the metrics disagree"  # one of these three, but the metric that must agree has another sign
    NEGLIGIBLE = "negligible"  # the 90 % interval lies within the margin on both sides of 0
    LESS = "by less than the margin"  # the same, of a difference that helps or harms
    EXCLUDED = "paper's size excluded"  # the upper 95 % limit lies below half of the paper's gain
    AS_GOOD = "as good"  # of `as_good`: one-sided lower limit above minus the margin
    WORSE = "worse than the margin"  # of `as_good`: one-sided upper limit below minus the margin
    NOISY = "too noisy"  # none of them, or fewer than five differences that are all equal
    DIVERGED = "diverged"


MAIN = "main"  # the family of the papers' main claims
PAPERS = "recall_at_1"  # the metric in which papers report their gains
SEEDS_ALONE = "seeds alone"  # an interval where only some runs stored the result of each test class


@dataclass(frozen=True)
class Finding:
    """A comparison's differences in percentage points, tested, and the words for them."""

    comparison: Comparison
    seeds: list[int]  # of the pairs
    tested: Paired | None  # None if a run diverged
    diverged: dict[str, list[int]]  # {row: seeds}
    words: tuple[str, ...]
    adjusted: float | None  # Holm's p; not corrected for a control, None if a run diverged
    secondary: Paired | None  # by the metric that must agree, if the comparison has none of its own
    registered: bool  # or else it is exploratory

    @property
    def difference(self) -> Paired:
        """The tested difference, of a comparison without a diverged run."""
        assert self.tested is not None
        return self.tested

    @property
    def is_gain(self) -> bool:
        """True if `better` is shown to help."""
        return bool({Word.HELPS, Word.WORTH} & {*self.words})


def judge(
    study: StudyFile, results: Results, *, registered: Mapping[str, bool] | None = None
) -> list[Finding]:
    """The findings on the comparisons that have all seeds, in the order of the file.

    Seeds beyond the first ones (`study.seeds.more`) count once all of them are there.

    Args:
        registered: For each comparison, False if it is exploratory; default: none is.

    Raises:
        ConfigError: if a run lacks the metric of a comparison, or its test classes are not those of the others.
    """
    findings = []
    for comparison in study.comparisons:
        common = set.intersection(*(set(results.get(row, {})) for row in comparison.all_rows()))
        if not (seeds := _seeds(study, common)):
            continue
        own = study.metric(comparison)
        metrics = (own, study.agrees if own == study.primary else None)
        lost: dict[str, list[int]] = {}
        for row, output in sides_of(comparison):
            bad = {s for s in seeds if has_diverged(results[row][s], output, filter(None, metrics))}
            if bad:
                lost[row] = sorted(bad.union(lost.get(row, [])))
        tested, second = (
            None if lost or metric is None else _assess(results, comparison, metric, seeds)
            for metric in metrics
        )
        known = registered is None or registered.get(comparison.name, False)
        findings.append(
            Finding(comparison, seeds, tested, lost, (Word.DIVERGED,), None, second, known)
        )
    margin = study.margin
    claims = _adjusted(study, findings, [_p_of_claim(finding, margin) for finding in findings])
    above = [2 * f.tested.p_above(margin) if f.tested else 1.0 for f in findings]
    margins = _adjusted(study, findings, above)
    return [
        replace(f, adjusted=p, words=_words(study, f, p, p_of_margin)) if f.tested else f
        for f, p, p_of_margin in zip(findings, claims, margins, strict=True)
    ]


def sides_of(comparison: Comparison) -> list[tuple[str, str]]:
    """The rows of all sides, each with its output."""
    sides = (side.partition(":") for side in comparison.sides())
    return [(row, output) for row, _, output in sides]


def outputs_of(result: Result) -> dict[str, Any]:
    """The metrics of each output: "" for the embedding, "curve" for the last point of its curves."""
    return {"": result["metrics"], "curve": result["curve"], **(result["outputs"] or {})}


def percent(runs: Mapping[int, Result], metric: str) -> float:
    """Mean over the runs that have the metric; 0 if none has."""
    measured = (run["metrics"].get(metric) for run in runs.values())
    values = [value for value in measured if value is not None]
    return 100 * float(np.mean(values or [0.0]))


def has_diverged(result: Result, output: str, metrics: Iterable[str]) -> bool:
    """True if a run has no metrics, or one of the given metrics of an output is not finite."""
    if not result["metrics"]:
        return True
    values = outputs_of(result).get(output, {})
    return not all(isfinite(values.get(metric, 0)) for metric in metrics)


def pooled(study: StudyFile, findings: Sequence[Finding]) -> dict[str, Paired | None]:
    """For each method with two or more main comparisons: the mean over them, for each seed, and its interval.

    Comparisons by a metric of their own are left out, and so are methods of which a row is compared with two
    others: it would count twice. None if a run diverged.
    """
    main = [f for f in findings if f.comparison.family == MAIN and not f.comparison.as_good]
    by_primary = [f for f in main if study.metric(f.comparison) == study.primary]
    pools: dict[str, Paired | None] = {}
    for method, members in by_method(by_primary).items():
        common = sorted(set.intersection(*(set(finding.seeds) for finding in members)))
        twice = len({finding.comparison.better for finding in members}) < len(members)
        if not method or twice or len(members) < 2 or len(common) < 2:
            continue
        by_seed = [
            dict(zip(f.seeds, f.tested.differences, strict=True)) for f in members if f.tested
        ]
        pools[method] = None
        if len(by_seed) == len(members):
            pools[method] = assess([float(np.mean([d[s] for d in by_seed])) for s in common])
    return pools


def name_of_claim(study: StudyFile, comparison: Comparison) -> str:
    """The claim, its name that stays on one line, and its metric if that is another than the study's."""
    metric, claim = study.metric(comparison), comparison.claim
    name = f" ({comparison.name}".replace(" ", "\N{NO-BREAK SPACE}")
    about = f", {metric_name(metric)}" if metric != study.primary else ""
    return f"{claim[:1].upper()}{claim[1:]}{name}{about})"


def by_method(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """The findings by the method of a main comparison, or else by family, in the order of their first ones."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        comparison = finding.comparison
        group = comparison.method if comparison.family == MAIN else comparison.family
        groups.setdefault(group, []).append(finding)
    return groups


def _seeds(study: StudyFile, common: Collection[int]) -> list[int]:
    """The seeds that count: a look at fewer would allow stopping at a pleasant result."""
    first, count = study.seeds.first, study.seeds.count
    for wanted in (range(first, first + count + study.seeds.more), range(first, first + count)):
        if set(wanted) <= set(common):
            return list(wanted)
    return []


def _assess(results: Results, comparison: Comparison, metric: str, seeds: Sequence[int]) -> Paired:
    """Test the differences by seed and, of vectors whose runs stored them, by test class."""
    place, sides = f"comparisons.{comparison.name}", sides_of(comparison)
    try:
        measured = [
            [100 * float(outputs_of(results[row][seed])[output][metric]) for seed in seeds]
            for row, output in sides
        ]
    except KeyError as error:
        raise ConfigError(
            f"{place}: no run has measured {metric} of {', '.join(comparison.sides())}"
        ) from error
    signs = np.array([1, -1, -1, 1])[: len(sides)]
    values = (signs @ np.array(measured)).tolist()
    every = []  # what each run stored of its test classes
    for row, output in sides:
        stored = [results[row][seed].get("per_class", {}) for seed in seeds]
        if output:
            by_output = [results[row][seed].get("per_class_of_outputs", {}) for seed in seeds]
            stored = [classes.get(output, {}) for classes in by_output]
            if not any(stored):  # curves, and runs that stored embeddings' classes alone
                return assess(values)
        every += stored
    if any(metric not in stored for stored in every):
        return replace(assess(values), over=SEEDS_ALONE if any(every) else "seeds")
    queries, *others = (stored["queries"] for stored in every)
    if any(other != queries for other in others):
        raise ConfigError(
            f"{place}: its runs were tested on different classes; measure them on the same data"
        )
    shape = (len(sides), len(seeds), len(queries))
    by_class = np.tensordot(signs, np.reshape([stored[metric] for stored in every], shape), axes=1)
    return assess(values, by_class / 100, queries)  # in percent


def _p_of_claim(finding: Finding, margin: float) -> float:
    """Two-sided; of `as_good` the smaller of the one-sided p for it and against it, since one of these is true."""
    if finding.tested is None:
        return 1.0
    above = finding.tested.p_above(-margin)
    return min(above, 1 - above) if finding.comparison.as_good else finding.tested.p


def _adjusted(study: StudyFile, findings: Sequence[Finding], p: Sequence[float]) -> list[float]:
    """The p of findings, by Holm's method for all comparisons of a family in the file; of controls as it is.

    Comparisons that are not measured yet, or diverged, have a p of 1.
    """
    corrected = [min(1.0, value) for value in p]
    families = Counter(comparison.family for comparison in study.comparisons)
    for family in families.keys() - {CONTROL}:
        places = [i for i, f in enumerate(findings) if f.comparison.family == family]
        adjusted = holm([corrected[i] for i in places], families[family])
        for i, value in zip(places, adjusted, strict=True):
            corrected[i] = value
    return corrected


def _words(study: StudyFile, finding: Finding, p: float, p_of_margin: float) -> tuple[str, ...]:
    comparison, tested = finding.comparison, finding.difference
    margin, shown = study.margin, p < SIGNIFICANT
    if comparison.as_good:
        return (Word.NOISY if not shown else Word.AS_GOOD if tested.mean > -margin else Word.WORSE,)
    words = []
    if shown:
        gain = Word.WORTH if p_of_margin < SIGNIFICANT else Word.HELPS
        words.append(gain if tested.mean > 0 else Word.HARMS)
        if finding.secondary and finding.secondary.mean * tested.mean <= 0:
            words = [Word.DISAGREE]
    low, high = tested.limits(0.1)
    if -margin < low and high < margin:
        words.append(Word.LESS if words and Word.DISAGREE not in words else Word.NEGLIGIBLE)
    by_metric = {study.agrees: finding.secondary, study.metric(comparison): tested}
    reported, measured = comparison.reported_gain() or 0.0, by_metric.get(PAPERS)
    if reported > 0 and measured and measured.limits()[1] < reported / 2:
        words.append(Word.EXCLUDED)
    return tuple(words) or (Word.NOISY,)
