"""The first sentences of a study's page: which method helps, by how much, and what it costs."""

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.datasets.queries import queries_text
from benchmarks.reporting.names import metric_name
from benchmarks.reporting.study_choice import Choice, choose
from benchmarks.reporting.untrained_rows import beside_untrained, only_untrained, untrained_row
from benchmarks.reporting.verdicts import MAIN, PAPERS, Finding, Result, Results, Word, percent
from benchmarks.settings.study_files import Comparison, StudyFile

MANY = 10  # seeds, recommended where fewer leave the answer open


def has_papers(study: StudyFile) -> bool:
    """True if a comparison stands beside a paper's gain, which is by Recall@1."""
    return any(of.reported and study.metric(of) == PAPERS for of in study.comparisons)


def cost(results: Results, comparison: Comparison) -> float | None:
    """The time of a training step of `better`, as a multiple of that of `than`.

    None for an interaction, and if runs did not tell.
    """
    if comparison.beyond:
        return None
    better, than = (
        [run.get("images_per_second", 0.0) for run in results.get(row, {}).values()]
        for row in comparison.rows()
    )
    known = better and than and all([*better, *than])
    return float(np.median(than) / np.median(better)) if known else None


def asked(runs: Iterable[Result]) -> list[str]:
    """The queries of the tests in words, once for each test set; results of older code have none."""
    return sorted({queries_text(*run["queries"]) for run in runs if "queries" in run})


def answer(
    study: StudyFile, main: Sequence[Finding], results: Results, others: Sequence[Finding] = ()
) -> str:
    """Sentences that answer the question: what helps, and by how much; if nothing, how much could be missed.

    Args:
        main: The main comparisons; the others are mentioned if they alone show that a method helps.
    """
    tested = [f for f in main if f.tested and not f.comparison.as_good]
    equal = [f for f in main if f.tested and f.comparison.as_good]
    gains, harms = [f for f in tested if f.is_gain], [f for f in tested if Word.HARMS in f.words]
    one, of, verb = len(tested) == 1, f"of {len(tested)} comparisons", ("shows", "show")
    beside = [f for f in others if f.is_gain and f.comparison.method]
    papers, sentences = has_papers(study), list[str]()
    rows = {row: f"`{row}`" for row in study.rows}
    choice = choose(study, main, results) if main or untrained_row(study, results) else None
    if choice is not None:
        sentences += _lost(study, choice, results, rows[choice.row])
        if training := choice.training:
            told = beside_untrained(training)
            sentences.append(told if training.is_gain else f"**{told}**")
        elif choice.row in study.untrained():
            sentences.append(only_untrained(study, results))
    if gains and papers:
        which = "The comparison" if one else f"{len(gains)} {of}"
        sentences.append(f"**{which} {verb[len(gains) > 1]} a gain**: {_list(study, gains)}.")
    elif gains:
        gains.sort(key=lambda f: -f.difference.mean)
        sentences.append(f"**Yes: {'; '.join(_gain(study, f, results) for f in gains)}.**")
        if n := len(tested) - len(gains) - len(harms):
            sentences.append(f"{n} other comparison{'s' * (n > 1)} {verb[n > 1]} no gain.")
    elif tested:
        clear = {Word.NEGLIGIBLE, Word.HARMS, Word.DISAGREE}
        few = not papers and not all(clear & {*f.words} for f in tested)
        none = "No main comparison shows a gain." if beside else "No: no method helps."
        if papers:
            none = "The comparison shows no gain." if one else f"None {of} shows a gain."
        elif few:
            none = "The data are too few to tell if one helps."
        more = [_would_tell(study, tested)] if few else []
        sentences += [f"**{none}**", *_still_allowed(study, tested), *more]
        if beside and not papers:
            sentences.append(f"**Another one does**: {_list(study, beside)}.")
    elif not equal:
        why = "a run of each diverged" if main else "no main one is measured"
        sentences.append(f"No comparison is decided: {why}.")
    if harms:
        sentences.append(f"**{len(harms)} {verb[len(harms) > 1]} harm**: {_list(study, harms)}.")
    if equal:
        good = sum(Word.AS_GOOD in finding.words for finding in equal)
        sentences.append(f"{good} of {len(equal)} claims to be as good as another row hold.")
    if tested and choice is not None and not papers:
        sentences += _before(study, choice, results, rows[choice.row])
    return " ".join(sentences)


def _gain(study: StudyFile, finding: Finding, results: Results) -> str:
    comparison, told = finding.comparison, _list(study, [finding])
    after, before = (percent(results[row], study.primary) for row in comparison.rows())
    of_rows = comparison.rows() == [comparison.better, comparison.than]  # of embeddings
    if of_rows and not comparison.metric:
        told += f" (from {before:.2f} to {after:.2f} %)"
    ratio = cost(results, comparison)
    return told + ("" if ratio is None else f", at {ratio:.2f} times the time of a step")


def _would_tell(study: StudyFile, tested: Sequence[Finding]) -> str:
    """The seeds and classes that would narrow the widest interval."""
    widest = max((f.difference for f in tested), key=lambda one: one.half_width)
    if study.seeds.count >= MANY or not widest.has_interval:
        return "More classes to train and to test on would tell."
    return (
        f"More classes would tell, or more seeds: {MANY} of them (`--seeds {MANY}`) would make the widest interval "
        f"some ±{widest.expected(MANY):.1f} instead of ±{widest.half_width:.1f}."
    )


def _lost(study: StudyFile, choice: Choice, results: Results, name: str) -> list[str]:
    """What the recommended training lost against the untrained network; nothing if it did not lose."""
    if choice.untrained is None or (metric := choice.untrained.lost(study.primary)) is None:
        return []
    lost, score = choice.untrained.told(study.primary), percent(results[choice.row], metric)
    return [
        f"**{lost[0].upper()}{lost[1:]}: with {name}, {metric_name(metric)} is {score:.2f} %.**"
    ]


def _before(study: StudyFile, choice: Choice, results: Results, name: str) -> list[str]:
    """The network as it is, beside the recommended one; nothing if that lost, which is said at once."""
    untrained = choice.untrained
    if untrained is None or untrained.lost(study.primary) or study.primary not in untrained.metrics:
        return []
    which = (
        f"untrained network ({untrained.name})" if untrained.name else "network before any training"
    )
    before, after = (
        100 * untrained.metrics[study.primary],
        percent(results[choice.row], study.primary),
    )
    return [f"The {which} has {before:.2f} %, that of {name} {after:.2f} %."]


def _list(study: StudyFile, findings: Sequence[Finding]) -> str:
    return "; ".join(
        f"{_claim(study, f.comparison)}, {f.difference.points()} points of "
        f"{metric_name(study.metric(f.comparison))}"
        for f in findings
    )


def _claim(study: StudyFile, comparison: Comparison) -> str:
    """The claim, with the comparison's name if another main one has the same claim."""
    same = [of for of in study.comparisons if (of.family, of.claim) == (MAIN, comparison.claim)]
    return comparison.claim + f" ({comparison.name})" * (len(same) > 1)


def _still_allowed(study: StudyFile, tested: Sequence[Finding]) -> list[str]:
    known, told = [f for f in tested if f.difference.has_interval], []
    if known:
        best = max(known, key=lambda f: f.difference.limits()[1])
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
