"""The first sentences of a study's page: which method helps, by how much, how sure that is, and what it costs."""

from collections.abc import Iterable, Sequence
from math import ceil

import numpy as np

from benchmarks.datasets.queries import queries_text
from benchmarks.reporting.names import metric_name
from benchmarks.reporting.study_choice import MANY, Choice, choose
from benchmarks.reporting.verdicts import MAIN, PAPERS, Finding, Result, Results, Word, percent
from benchmarks.settings.study_files import CONTROL, Comparison, StudyFile

NEAREST = "recall_at_1"  # the metric of the sentences for everybody


def has_papers(study: StudyFile) -> bool:
    """True if a comparison stands beside a paper's gain, which is by Recall@1."""
    return any(c.reported and study.metric(c) == PAPERS for c in study.comparisons)


def cost(results: Results, comparison: Comparison) -> float | None:
    """The time of a step of `better` by that of `than`; None for an interaction, and if runs did not tell."""
    if comparison.beyond:
        return None
    better, than = (
        [run.get("images_per_second", 0.0) for run in results.get(row, {}).values()]
        for row in comparison.rows()
    )
    known = better and than and all([*better, *than])
    return float(np.median(than) / np.median(better)) if known else None


def every_run(results: Results) -> list[Result]:
    """The runs; one that stands for all seeds of its row counts once."""
    rows = ({id(run): run for run in seeds.values()} for seeds in results.values())
    return [run for row in rows for run in row.values()]


def duration(seconds: float) -> str:
    """In hours, or in minutes."""
    hours = seconds / 3600
    return f"{hours:.1f} hours" if hours > 1 else f"{ceil(60 * hours)} min"


def asked(runs: Iterable[Result]) -> list[str]:
    """The queries of the tests in words, once for each test set; results of older code have none."""
    return sorted({queries_text(*run["queries"]) for run in runs if "queries" in run})


def answer(study: StudyFile, findings: Sequence[Finding], results: Results) -> str:
    """The answer to a published study's question, in the names of its rows."""
    main = [finding for finding in findings if finding.comparison.family == MAIN]
    sentences, choice = list[str](), None
    if main:
        choice = choose(study, findings, results)
        sentences += _lost(study, choice, results)
    sentences += verdicts_told(study, findings, results)
    if choice is not None and not has_papers(study) and any(_tested(main)):
        sentences += _before(study, choice, results)
    return " ".join(sentences)


# ----------------------------------------------------------------------------- the comparisons


def _tested(main: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in main if finding.tested and not finding.comparison.as_good]


def verdicts_told(study: StudyFile, findings: Sequence[Finding], results: Results) -> list[str]:
    """Sentences on the main comparisons: what helps, and by how much; if nothing, how much could be missed.

    The others are mentioned if they alone show that a method helps.
    """
    main = [finding for finding in findings if finding.comparison.family == MAIN]
    tested, papers = _tested(main), has_papers(study)
    equal = [finding for finding in main if finding.tested and finding.comparison.as_good]
    gains = [finding for finding in tested if finding.is_gain]
    harms = [finding for finding in tested if Word.HARMS in finding.words]
    single, counted, verb = len(tested) == 1, f"of {len(tested)} comparisons", ("shows", "show")
    gained = (f for f in findings if f.is_gain and f.comparison.method)
    beside = [f for f in gained if f.comparison.family not in (MAIN, CONTROL)]
    sentences = list[str]()
    if gains and papers:
        which = "The comparison" if single else f"{len(gains)} {counted}"
        sentences.append(f"**{which} {verb[len(gains) > 1]} a gain**: {_list(study, gains)}.")
    elif gains:
        gains.sort(key=lambda finding: -finding.difference.mean)
        told = "; ".join(_gain(study, finding, results) for finding in gains)
        sentences.append(f"**Yes: {told}.**")
        if n := len(tested) - len(gains) - len(harms):
            sentences.append(f"{n} other comparison{'s' * (n > 1)} {verb[n > 1]} no gain.")
    elif tested:
        clear = {Word.NEGLIGIBLE, Word.HARMS, Word.DISAGREE}
        few = not papers and not all(clear & {*finding.words} for finding in tested)
        none = "No main comparison shows a gain." if beside else "No: no method helps."
        if papers:
            none = "The comparison shows no gain." if single else f"None {counted} shows a gain."
        elif few:
            none = "The data are too few to tell if one helps."
        more = [would_tell(study, tested)] if few else []
        sentences += [f"**{none}**", *_still_allowed(study, tested), *more]
        if beside and not papers:
            sentences.append(f"**Another one does**: {_list(study, beside)}.")
    elif not equal:
        why = "a run of each diverged" if main else "no main one is measured"
        sentences.append(f"No comparison is decided: {why}.")
    if harms:
        told = "; ".join(
            f'{_points(study, harm)} for "{_claim(study, harm.comparison)}"' for harm in harms
        )
        sentences.append(f"**{len(harms)} {verb[len(harms) > 1]} harm**: {told}.")
    if equal:
        good = sum(Word.AS_GOOD in finding.words for finding in equal)
        sentences.append(f"{good} of {len(equal)} claims to be as good as another row hold.")
    return sentences


def _list(study: StudyFile, findings: Sequence[Finding]) -> str:
    return "; ".join(f"{_claim(study, f.comparison)}, {_points(study, f)}" for f in findings)


def _points(study: StudyFile, finding: Finding) -> str:
    metric = metric_name(study.metric(finding.comparison))
    return f"{finding.difference.points()} points of {metric}"


def _claim(study: StudyFile, comparison: Comparison) -> str:
    """The claim, with the comparison's name if another main one has the same claim."""
    every = [(other.family, other.claim) for other in study.comparisons]
    return comparison.claim + f" ({comparison.name})" * (every.count((MAIN, comparison.claim)) > 1)


def _gain(study: StudyFile, finding: Finding, results: Results) -> str:
    comparison, told = finding.comparison, _list(study, [finding])
    after, before = (percent(results[row], study.primary) for row in comparison.rows())
    of_rows = comparison.rows() == [comparison.better, comparison.than]  # of embeddings
    if of_rows and not comparison.metric:
        told += f" (from {before:.2f} to {after:.2f} %)"
    return told


def would_tell(study: StudyFile, tested: Sequence[Finding]) -> str:
    """The seeds and classes that would tell, and how they would narrow the widest interval."""
    if study.seeds.count >= MANY:
        return "More classes to train and to test on would tell."
    told = f"More classes would tell, or more seeds (`--seeds {MANY}`)"
    known = [finding.difference for finding in tested if finding.difference.has_interval]
    if not known or len(known) < len(tested):
        return f"{told}."
    widest = max(known, key=lambda difference: difference.half_width)
    return (
        f"{told}: {MANY} of them would make the widest interval some ±{widest.expected(MANY):.1f} instead of "
        f"±{widest.half_width:.1f}."
    )


def _still_allowed(study: StudyFile, tested: Sequence[Finding]) -> list[str]:
    known = [finding for finding in tested if finding.difference.has_interval]
    told = list[str]()
    if known:
        best = max(known, key=lambda finding: finding.difference.limits()[1])
        limit, metric = best.difference.limits()[1], metric_name(study.metric(best.comparison))
        claimed = [f for f in tested if (f.comparison.reported_gain() or 0) > 0]
        excluded = sum(Word.EXCLUDED in finding.words for finding in claimed)
        of_papers = f", and half of the paper's gain is excluded in {excluded} of {len(claimed)}"
        told.append(
            f"The largest gain that a 95 % interval still allows is {max(0.0, limit):.2f} points of {metric} "
            f"({_claim(study, best.comparison)}){of_papers * bool(claimed)}."
        )
    if count := len(tested) - len(known):
        has = "have" if count > 1 else "has"
        told.append(f"{count} {has} fewer than five differences, all equal, and no interval.")
    return told


# ----------------------------------------------------------------- beside the untrained network


def _lost(study: StudyFile, choice: Choice, results: Results) -> list[str]:
    """How far the recommended training is behind the untrained network; empty if it is not."""
    if choice.untrained is None or (metric := choice.untrained.lost(study.primary)) is None:
        return []
    lost, score = choice.untrained.told(study.primary), percent(results[choice.row], metric)
    told = f"with `{choice.row}`, {metric_name(metric)} is {score:.2f} %"
    return [f"**{lost[0].upper()}{lost[1:]}: {told}.**"]


def _before(study: StudyFile, choice: Choice, results: Results) -> list[str]:
    """The network as it is, beside the recommended one; nothing if that lost, which is said at once."""
    untrained, metric = choice.untrained, study.primary
    if untrained is None or untrained.lost(metric) or metric not in untrained.metrics:
        return []
    name = untrained.name
    which = f"untrained network ({name})" if name else "network before any training"
    before, after = 100 * untrained.metrics[metric], percent(results[choice.row], metric)
    return [f"The {which} has {before:.2f} %, that of `{choice.row}` {after:.2f} %."]
