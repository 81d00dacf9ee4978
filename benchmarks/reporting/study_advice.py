"""The first sentences of a study of one's own images: how good the network is, what to use, what may help more."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.reporting.names import metric_name
from benchmarks.reporting.paired import Paired, assess
from benchmarks.reporting.study_answer import MANY, asked, cost
from benchmarks.reporting.study_choice import Choice, choose, measured
from benchmarks.reporting.study_classes import stored_by_class
from benchmarks.reporting.untrained import untrained_of
from benchmarks.reporting.verdicts import Finding, Results, Word, judge, percent
from benchmarks.settings.study_files import CONTROL, Comparison, StudyFile

NEAREST = "recall_at_1"

IN_WORDS = {
    NEAREST: "in finding the nearest photograph of a class",
    "mean_average_precision_at_r": "in finding all photographs of a class",
}

LEAST_APART = 5.0  # points between small and large classes that are worth a sentence


class Base(NamedTuple):
    """The network that the recommended one stands beside, in every part of the page."""

    name: str
    score: float  # of 100 photographs
    difference: Paired | None  # of the training from the untrained network


def advice(
    study: StudyFile,
    findings: Sequence[Finding],
    results: Results,
    labels: Mapping[str, str],
    setup: Sequence[str] = (),
) -> list[str]:
    """Plain sentences: how often the nearest photograph is right, with which method, how sure, and what may help.

    Args:
        labels: The names of the rows' methods.
        setup: Sentences on the network and the machine, which come last.
    """
    choice = choose(study, findings, results)
    runs = results.get(choice.row, {})
    known = [run["metrics"][NEAREST] for run in runs.values() if NEAREST in run["metrics"]]
    if not known or not (choice.finding or choice.row in study.untrained()):
        return ["Nothing is decided yet: no main comparison has a result.", *setup]
    score, base = percent(runs, NEAREST), _base(study, choice, results, labels)
    lost = ""
    if choice.row not in study.untrained() and base and base.score > score:
        digits = 0 if round(base.score) > round(score) else 1
        lost = f"; without training, that of {base.score:.{digits}f}"
    tested = "; ".join(asked(runs.values()))
    shown = f"{score:.{1 if '.' in lost else 0}f} of 100 photographs of new classes"
    queries = f" ({tested})" if tested else ""
    told = [f"For {shown}, the nearest photograph shows the same class{lost}{queries}."]
    method, more = _method(study, choice, results, labels, base), list[str]()
    beside = list[str]()
    if choice.row in study.untrained():
        training = choice.training
        if training is None:
            method += _others_untrained(study, choice.row, results, labels)
        elif training.tested is None or training.tested.limits()[1] > 0:
            more = [_would_tell(study)]
    elif choice.method is not None:
        beside = _beside_loss(study, findings, choice, choice.method, results, labels)
        if _few(findings) and not choice.method.is_gain:
            more = [_would_tell(study)]
    more += [*_small_classes(study, choice, results), *_wider(study, choice, results), *setup[:1]]
    if more:
        more[0] = f"What may help more: {more[0]}"
    paragraphs = (" ".join(part) for part in (method, beside, more) if part)
    return [*told, *paragraphs, *setup[1:]]


def _few(findings: Sequence[Finding]) -> bool:
    """True if the data are too few to tell if any method helps."""
    clear = {Word.NEGLIGIBLE, Word.HARMS, Word.DISAGREE, Word.AS_GOOD, Word.WORSE}
    return not all(f.is_gain or clear & {*f.words} for f in measured(findings))


def _would_tell(study: StudyFile) -> str:
    more = f", or more trainings (`--seeds {MANY}`)" * (study.seeds.count < MANY)
    return f"More classes would tell{more}."


def _base(
    study: StudyFile, choice: Choice, results: Results, labels: Mapping[str, str]
) -> Base | None:
    """None if nothing has measured an untrained network, or nothing is trained yet."""
    if choice.training is not None:
        better, than = choice.training.comparison.rows()
        claim = Comparison(better, "", better, than, metric=NEAREST, family=CONTROL)
        tested = judge(replace(study, comparisons=[claim]), results)[0].tested
        other = than if choice.row == better else better
        return Base(labels[other], percent(results[other], NEAREST), tested)
    if choice.untrained is None or NEAREST not in choice.untrained.metrics:
        return None
    pairs = [
        (
            run["metrics"].get(NEAREST),
            untrained_of(run).get(choice.untrained.output, {}).get(NEAREST),
        )
        for run in results[choice.row].values()
    ]
    values = [100 * (after - before) for after, before in pairs if None not in (after, before)]
    name = choice.untrained.name or "untrained network"
    tested = assess(values) if len(values) > 1 else None
    return Base(name, 100 * choice.untrained.metrics[NEAREST], tested)


def _method(
    study: StudyFile, choice: Choice, results: Results, labels: Mapping[str, str], base: Base | None
) -> list[str]:
    """The recommended network beside its base, in photographs of 100."""
    label, training = labels[choice.row], choice.training
    score = percent(results[choice.row], NEAREST)
    if choice.row not in study.untrained():
        told = f"Recommended: {label}."
        if base is not None:
            verb = "raises" if base.score <= score else "lowers"
            change = f"from {base.score:.1f} of 100 ({base.name}) to {score:.1f}"
            told += f" Training {verb} that number {change}{_sure(base.difference)}."
    elif base is None:
        return [f"Best so far: {label}. Nothing is trained yet; trainings have to beat it."]
    else:
        change = f"changes that number from {score:.1f} of 100 to {base.score:.1f}"
        told = (
            f"Recommended: {label}. Train nothing: no training is shown to beat it. The best one, "
            f"{base.name}, {change}{_sure(base.difference)}."
        )
    if training is None or training.tested is None or study.primary == NEAREST:
        return [told]
    mean, limits = training.tested.mean, ""
    if training.tested.has_interval:
        limits = " ({:+.1f} to {:+.1f})".format(*training.tested.limits())
    return [
        told,
        f"What decides is the change {_in_words(study.primary)}: {mean:+.1f} points{limits}.",
    ]


def _sure(tested: Paired | None) -> str:
    """The change, and how sure it is."""
    if tested is None:
        return ""
    repeated = f"over {len(tested.differences)} repeated trainings"
    if not tested.has_interval:
        return f", by {tested.mean:+.1f}, the same in all {repeated.removeprefix('over ')}"
    low, high = tested.limits()
    return (
        f", by {tested.mean:+.1f} ({low:+.1f} to {high:+.1f} with a confidence of 95 %, {repeated})"
    )


def _in_words(metric: str) -> str:
    return IN_WORDS.get(metric, f"by {metric_name(metric)}")


def _others_untrained(
    study: StudyFile, row: str, results: Results, labels: Mapping[str, str]
) -> list[str]:
    others = [other for other in study.untrained() if other != row and results.get(other)]
    shown = "; ".join(
        f"{labels[other]}: {percent(results[other], NEAREST):.1f}" for other in others
    )
    return [f"Also measured, of 100: {shown}."] if shown else []


def _beside_loss(
    study: StudyFile,
    findings: Sequence[Finding],
    choice: Choice,
    finding: Finding,
    results: Results,
    labels: Mapping[str, str],
) -> list[str]:
    """The answer to the study's question: whether a method adds to a loss, and how much one could add."""
    main, row = measured(findings), choice.row
    better, than = finding.comparison.rows()
    tested, label = finding.difference, labels[row]
    words = _in_words(study.metric(finding.comparison))
    low, high = tested.limits() if tested.has_interval else (tested.mean, tested.mean)
    if finding.is_gain and row == better:
        spent = ""
        if ratio := cost(results, finding.comparison):
            about_same = 0.95 < ratio < 1.05
            spent = f", {'in about the same' if about_same else f'for {ratio:.2g} times the'} training time"
        gained = f"{tested.mean:.1f} points ({low:.1f} to {high:.1f})"
        told = [f"It is {gained} better than {labels[than]} alone, {words}{spent}."]
        points = f"{study.margin:g} point{'s' * (study.margin != 1)}"
        if Word.LESS in finding.words:
            told.append(f"This is a small gain, less than {points}.")
        elif Word.WORTH not in finding.words:
            told.append(
                f"The gain may be less than {points}, so that it is hardly worth a longer training."
            )
    else:
        why = "none of the methods is worth having here"
        if _few(findings):
            why = "there is too little data to tell if any of the methods helps"
        told = [f"Use {label} alone: {why}."]
        if tested.has_interval:
            gain = f"A gain of more than {max(high, 0.1):.1f} points" if high > 0 else "Any gain"
            even = f"even for {labels[better]}, which could gain the most over it {words}"
            told.append(f"{gain} is unlikely, {even} (95 % confidence).")
    means = {r: percent(results[r], study.primary) for f in main for r in f.comparison.rows()}
    top, score = max(means, key=means.__getitem__), percent(results[row], study.primary)
    if means[top] > score and not study.has_blocks():
        alone = "" if top in {f.comparison.rows()[0] for f in main} else " alone"
        told.append(
            f"But {labels[top]}{alone} has {means[top]:.1f} % here, and {label} {score:.1f} %, "
            f"{_in_words(study.primary)}; no test shows that it is better."
        )
    return told


def _small_classes(study: StudyFile, choice: Choice, results: Results) -> list[str]:
    """If classes of few photographs are found less often; nothing if all are of one size."""
    stored = stored_by_class(results[choice.row])
    if not stored or study.has_blocks():
        return []
    queries = np.array(stored[0]["queries"])
    right = np.mean([classes[NEAREST] for classes in stored], axis=0) / 100
    limit = int(np.median(queries[queries > 0])) if queries.any() else 0
    few, many = (queries > 0) & (queries < limit), queries >= max(limit, 1)
    if min(few.sum(), many.sum()) < 3:
        return []
    low, high = (np.average(right[kind], weights=queries[kind]) for kind in (few, many))
    if high - low < LEAST_APART:
        return []
    shares = f"{low:.0f} of 100 are right, of the others {high:.0f}"
    return [
        f"Of classes with fewer than {limit} photographs, {shares}: more photographs of a class may help."
    ]


def _wider(study: StudyFile, choice: Choice, results: Results) -> list[str]:
    """If all features of the untrained network are better than the few numbers of an embedding."""
    runs = results[choice.row]
    whole = percent(runs, NEAREST, "untrained_features")
    fewer = max(percent(runs, NEAREST, f"untrained_{kind}") for kind in ("pca", "whitened"))
    if not fewer or whole - fewer < study.margin:
        return []
    numbers = f"as few of its components as an embedding has numbers {fewer:.1f}"
    return [
        f"All features of the untrained network have {whole:.1f} of 100, {numbers}: wider embeddings may help "
        "(`--model.embedding_size=NUMBER`)."
    ]
