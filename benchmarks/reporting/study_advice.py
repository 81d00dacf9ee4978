"""The first sentences on one's own images: how often the nearest is right, what to use, and what may help more."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.reporting.names import metric_name
from benchmarks.reporting.paired import Paired, assess
from benchmarks.reporting.study_answer import NEAREST, asked, verdicts_told
from benchmarks.reporting.study_choice import MANY, Choice, choose, measured
from benchmarks.reporting.untrained import untrained_of
from benchmarks.reporting.verdicts import Finding, Results, judge, percent
from benchmarks.settings.study_files import CONTROL, Comparison, StudyFile


class Base(NamedTuple):
    """The network that the recommended one stands beside, in every part of the page."""

    name: str
    score: float  # of 100 images
    difference: Paired | None  # of the training from the untrained network


def advice(
    study: StudyFile,
    findings: Sequence[Finding],
    results: Results,
    labels: Mapping[str, str],
    setup: Sequence[str] = (),
) -> list[str]:
    """Paragraphs for those whose images these are: how often the nearest one is right, and what to use.

    Args:
        study, findings: With names of methods in place of claims, see `neutral`.
        setup: Sentences on what else could help, on the network and the machine.
    """
    choice = choose(study, findings, results)
    runs = results.get(choice.row, {})
    known = [run["metrics"][NEAREST] for run in runs.values() if NEAREST in run["metrics"]]
    untrained = choice.row in study.untrained()
    if not known or not (choice.finding or untrained):
        return ["**Nothing is decided yet: no main comparison has a result.**", *setup]
    score, base, lost = percent(runs, NEAREST), _base(study, choice, results, labels), ""
    if not untrained and base and base.score > score:
        digits = 0 if round(base.score) > round(score) else 1
        lost = f"; without training, that of {base.score:.{digits}f}"
    shown = f"{score:.{1 if '.' in lost else 0}f} of 100 images of new classes"
    tested = "; ".join(asked(runs.values()))
    queries = f" ({tested})" if tested else ""
    lead = f"**For {shown}, the nearest image shows the same class{lost}{queries}.**"
    method = _method(study, choice, results, labels, base)
    beside = list[str]()
    if not untrained and choice.method is not None:
        beside += verdicts_told(study, findings, results)
        beside += _higher(study, measured(findings), choice.row, results, labels)
    elif choice.training is None:
        others = [row for row in study.untrained() if row != choice.row and results.get(row)]
        numbers = (f"{labels[row]}, {percent(results[row], NEAREST):.1f} of 100" for row in others)
        method += [f"Also measured: {'; '.join(numbers)}."] if others else []
    elif (change := choice.training.tested) is None or change.limits()[1] > 0:
        seeds = f", or more repeated trainings (`--seeds {MANY}`)," * choice.needs_seeds(study)
        method.append(f"Photographs of more classes{seeds} would show if training helps.")
    more = [f"What may help more: {line}" for line in setup[:1]]
    paragraphs = (" ".join(part) for part in (method, beside, more) if part)
    return [lead, *paragraphs, *setup[1:]]


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
    output, gains = choice.untrained.output, list[float]()
    for run in results[choice.row].values():
        before = untrained_of(run).get(output, {}).get(NEAREST)
        after = run["metrics"].get(NEAREST)
        if before is not None and after is not None:
            gains.append(100 * (after - before))
    tested = assess(gains) if len(gains) > 1 else None
    name = choice.untrained.name or "untrained network"
    return Base(name, 100 * choice.untrained.metrics[NEAREST], tested)


def _method(
    study: StudyFile, choice: Choice, results: Results, labels: Mapping[str, str], base: Base | None
) -> list[str]:
    """The recommended network beside its base, in images of 100."""
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
    decides = f"{training.tested.points()} points of {metric_name(study.primary)}"
    return [told, f"What decides is the change in finding all images of a class: {decides}."]


def _sure(tested: Paired | None) -> str:
    """The change, and how sure it is."""
    if tested is None:
        return ""
    trainings = f"{len(tested.differences)} repeated trainings"
    if not tested.has_interval:
        return f", by {tested.mean:+.1f}, the same in all {trainings}"
    low, high = tested.limits()
    sure = f"{low:+.1f} to {high:+.1f} with a confidence of 95 %, over {trainings}"
    return f", by {tested.mean:+.1f} ({sure})"


# -------------------------------------------------------------------------- what may help more


def _higher(
    study: StudyFile, main: Sequence[Finding], row: str, results: Results, labels: Mapping[str, str]
) -> list[str]:
    """A row whose mean is above that of the recommended one, if there is one."""
    rows = [other for finding in main for other in finding.comparison.rows()]
    means = {other: percent(results[other], study.primary) for other in rows}
    top, score = max(means, key=means.__getitem__), percent(results[row], study.primary)
    if means[top] <= score or study.has_blocks():
        return []
    return [
        f"But {labels[top]} has {means[top]:.1f} % {metric_name(study.primary)} here, and "
        f"{labels[row]} {score:.1f} %; no test shows that it is better."
    ]
