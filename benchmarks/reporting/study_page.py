"""The page of a study: the answer, the verdicts with their intervals, and what is behind them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.reporting.paired import estimate
from benchmarks.reporting.table import Table, count_of_seeds, named
from benchmarks.reporting.templates import fill
from benchmarks.reporting.verdicts import (
    AS_GOOD,
    DISAGREE,
    DIVERGED,
    EXCLUDED,
    HARMS,
    HELPS,
    MAIN,
    PAPERS,
    SEEDS_ALONE,
    WORTH,
    Finding,
    Results,
    grouped,
    has_diverged,
    name_of,
    name_of_claim,
    outputs_of,
    pooled,
    secondary_metric,
)
from benchmarks.settings import CONTROL, StudyFile

HEADER = ["comparison", "verdict", "difference", "paper's gain", "seeds"]

SHOWN = ("recall_at_1", "mean_average_precision_at_r", "seen_recall_at_1", "unseen_recall_at_1")
"""Metrics of the rows' table."""

MARKS = {"seeds and classes": " †", SEEDS_ALONE: " ‡"}
"""Marks of intervals that are not simply over seeds."""


@dataclass(frozen=True)
class Choices:
    """How the settings of a row were chosen.

    Args:
        settings: The chosen ones; None if there are none, or not yet.
        takes: The rows whose chosen settings it takes over.
        tried: Of each candidate: its values, the mean of the metric that chooses (None if a draw diverged), and the
            draws that diverged.
        budget: The number of candidates, with those of the rows that it takes over.
    """

    row: str
    settings: dict[str, Any] | None
    takes: list[str]
    tried: list[tuple[dict[str, float], float | None, list[int]]]
    budget: int


def study_page(
    study: StudyFile,
    findings: Sequence[Finding],
    results: Results,
    *,
    choices: Sequence[Choices],
    registration: str,
    figures: Mapping[str, str],
) -> str:
    """The page in Markdown.

    Args:
        results: {row: {seed: result}}.
        registration: A paragraph that says if the comparisons were registered beforehand.
        figures: The names of the files "main" and "mechanisms" beside the page; shown if they have a difference.
    """
    runs = [result for of in results.values() for result in of.values()]
    families = [MAIN, CONTROL]
    main, controls = ([f for f in findings if f.comparison.family == one] for one in families)
    others = [finding for finding in findings if finding.comparison.family not in families]
    chosen = [choice for choice in choices if choice.tried or choice.takes]
    tested = [finding.tested for finding in findings if finding.tested]
    drawn = {"main": main, "mechanisms": others}
    page = fill(
        Path(__file__).with_suffix(".md"),
        **{"study": study, "registration": registration, "name_of": name_of},
        figures={which: figures[which] for which, of in drawn.items() if any(f.tested for f in of)},
        answer=_answer(study, main),
        counts=_counts(findings),
        lacking=_lacking(study, findings, choices),
        alt="Paired differences with 95 % intervals",
        main=main and _verdicts(study, main),
        others=others and _verdicts(study, others),
        controls=controls and _verdicts(study, controls),
        over={one.over for one in tested},
        equal=not all(one.has_interval for one in tested),
        exploratory=not any(finding.registered for finding in findings),
        sides=_sides(study).markdown(),
        commits=", ".join(sorted({f"`{str(run['commit'])[:7]}`" for run in runs})),
        runs=len(runs),
        hours=f"{sum(run['wall_time_s'] for run in runs) / 3600:.1f}",
        dirty=any(run["dirty"] for run in runs),
        processors=_processors(findings, results),
        means=_means(results).markdown(),
        settings=chosen and _settings(study, chosen).markdown(),
        paths=sorted({path for row in study.rows.values() for path in row.choose}),
        short=_short,
    )
    return page.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


# ------------------------------------------------------------------------------------------ the answer


def _answer(study: StudyFile, main: Sequence[Finding]) -> str:
    """Sentences that answer the question: how many help, and by how much; if none, how much could be missed."""
    tested = [f for f in main if f.tested and not f.comparison.as_good]
    equal = [f for f in main if f.tested and f.comparison.as_good]
    gains, harms = (
        [finding for finding in tested if words & set(finding.words)]
        for words in ({HELPS, WORTH}, {HARMS})
    )
    one, of, verb = len(tested) == 1, f"of {len(tested)} comparisons", ("shows", "show")
    sentences = []
    if gains:
        which = "The comparison" if one else f"{len(gains)} {of}"
        sentences.append(f"**{which} {verb[len(gains) > 1]} a gain**: {_list(study, gains)}.")
    elif tested:
        none = "The comparison shows no gain." if one else f"None {of} shows a gain."
        sentences += [f"**{none}**", *_still_allowed(study, tested)]
    elif not equal:
        why = "a run of each diverged" if main else "no main one is measured"
        sentences.append(f"No comparison is decided: {why}.")
    if harms:
        sentences.append(f"**{len(harms)} {verb[len(harms) > 1]} harm**: {_list(study, harms)}.")
    if equal:
        good = sum(AS_GOOD in finding.words for finding in equal)
        sentences.append(f"{good} of {len(equal)} claims to be as good as another row hold.")
    return " ".join(sentences)


def _list(study: StudyFile, findings: Sequence[Finding]) -> str:
    return "; ".join(
        f"{f.comparison.claim}, {f.tested.points()} points of {name_of(study.metric(f.comparison))}"
        for f in findings
        if f.tested
    )


def _still_allowed(study: StudyFile, tested: Sequence[Finding]) -> list[str]:
    known = [(f.tested.limits()[1], f) for f in tested if f.tested and f.tested.has_interval]
    count = len(tested) - len(known)
    has = "have" if count > 1 else "has"
    equal = f"{count} {has} fewer than five differences, all equal, and no interval."
    if not known:
        return [equal]
    limit, best = max(known, key=itemgetter(0))
    claimed = [f for f in tested if (f.comparison.reported_gain() or 0) > 0]
    excluded = sum(EXCLUDED in finding.words for finding in claimed)
    of_papers = f", and half of the paper's gain is excluded in {excluded} of {len(claimed)}"
    metric = name_of(study.metric(best.comparison))
    allowed = (
        f"The largest gain that a 95 % interval still allows is {max(0.0, limit):.2f} points of {metric} "
        f"({best.comparison.claim}){of_papers * bool(claimed)}."
    )
    return [allowed, equal] if count else [allowed]


def _counts(findings: Sequence[Finding]) -> str:
    """How often each word was said, controls aside."""
    counted = [f for f in findings if f.comparison.family != CONTROL]
    counts = Counter(word for finding in counted for word in finding.words)
    told = ", ".join(f"{count} *{word}*" for word, count in counts.most_common())
    return f"Verdicts on all {len(counted)}: {told}." if told else ""


def _lacking(study: StudyFile, findings: Sequence[Finding], choices: Sequence[Choices]) -> str:
    """The comparisons without a finding."""
    measured = {finding.comparison.name for finding in findings}
    tried = {choice.row: [score for _, score, _ in choice.tried] for choice in choices}
    hopeless = {row for row, scores in tried.items() if scores and set(scores) == {None}}
    lacking = [
        f"`{of.name}`"
        + "".join(f" (all settings of `{row}` diverged)" for row in of.rows() if row in hopeless)
        for of in study.comparisons
        if of.name not in measured
    ]
    return f"Not measured yet: {'; '.join(lacking)}." if lacking else ""


# ---------------------------------------------------------------------------------------- the verdicts


def _verdicts(study: StudyFile, findings: Sequence[Finding]) -> str:
    pools, marked = pooled(study, findings), any(finding.registered for finding in findings)
    rows = []
    for group, of in grouped(findings).items():
        rows += [_verdict(study, finding, marked) for finding in of]
        if pool := pools.get(group):
            about = [f"*{group}, pooled*", "*exploratory*", pool.points(), ""]
            rows.append([*about, f"{len(pool.differences)}", ""])
        elif group in pools:
            rows.append([f"*{group}, pooled*", DIVERGED, "", "", "", ""])
    p = "p" if findings[0].comparison.family == CONTROL else "adjusted p"
    return Table([*HEADER, p], rows, names=2).markdown()


def _verdict(study: StudyFile, finding: Finding, marked: bool) -> list[str]:
    comparison, tested, p = finding.comparison, finding.tested, finding.adjusted
    words, gain = ", ".join(finding.words), comparison.reported_gain()
    second, by_recall = secondary_metric(study, comparison), study.metric(comparison) == PAPERS
    if finding.secondary and {DISAGREE, *[EXCLUDED][by_recall:]} & set(finding.words):
        words += f" ({name_of(str(second))} {finding.secondary.points()})"
    if marked and not finding.registered:
        words += ", exploratory"
    lost = (f"`{row}`, {named('seed', seeds)}" for row, seeds in finding.diverged.items())
    dataset = comparison.reported_on()
    dataset = dataset.upper() if len(dataset) == 3 else dataset.title()
    return [
        name_of_claim(study, comparison).replace("-", "\N{NON-BREAKING HYPHEN}"),
        words,
        tested.points() + MARKS.get(tested.over, "") if tested else "; ".join(lost),
        "" if gain is None else f"{gain:+.1f}\N{NO-BREAK SPACE}({dataset})",
        f"{len(finding.seeds)}",
        "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}",
    ]


# ---------------------------------------------------------------------------------------- the appendix


def _sides(study: StudyFile) -> Table:
    rows = [
        [of.name, f"`{of.better}` - `{of.than}`", name_of(study.metric(of)), of.paper]
        for of in study.comparisons
    ]
    return Table(["", "rows", "metric", "paper"], rows, names=4)


def _processors(findings: Sequence[Finding], results: Results) -> str:
    """The comparisons whose rows one processor measured, and the others."""
    one, several, unknown = "one", "several, which round differently,", "not recorded"
    groups: dict[str, list[str]] = {one: [], several: [], unknown: []}
    for finding in findings:
        rows = [results[row].values() for row in finding.comparison.rows()]
        found = {result.get("processor") for result in chain(*rows)}
        group = unknown if None in found else one if len(found) == 1 else several
        groups[group].append(f"`{finding.comparison.name}`")
    told = [f"{group} for {', '.join(names)}" for group, names in groups.items() if names]
    return f"Processors of a comparison's rows: {'; '.join(told)}." if told else ""


def _means(results: Results) -> Table:
    rows = []
    for row, runs in results.items():
        diverged = [
            seed
            for seed, run in runs.items()
            if not run["metrics"] or any(has_diverged(run, of, SHOWN) for of in outputs_of(run))
        ]
        outputs = [outputs_of(run) for seed, run in runs.items() if seed not in diverged]
        seeds = count_of_seeds(len(outputs), diverged)
        if diverged and not outputs:
            rows.append([f"`{row}`", *("" for _ in SHOWN), seeds])
        for output in outputs[0] if outputs else ():
            found = [[of.get(output, {}).get(metric) for of in outputs] for metric in SHOWN]
            cells = ["" if None in values else estimate(values).percent() for values in found]
            if any(cells):
                rows.append([f"`{row}{output and ':'}{output}`", *cells, seeds])
    return Table(["row", *map(name_of, SHOWN), "seeds"], rows)


def _settings(study: StudyFile, chosen: Sequence[Choices]) -> Table:
    rows = []
    for choice in chosen:
        best, others = list[str](), list[str]()
        for values, score, diverged in choice.tried:
            lost = f"diverged ({named('draw', diverged)})"
            told = lost if score is None else f"{100 * score:.2f}"
            is_best = choice.settings and values.items() <= choice.settings.items()
            given = ", ".join(f"{value:g}" for value in values.values())
            (best if is_best else others).append(f"{given}: {told}")
        taken = ", ".join(f"`{one}`" for one in choice.takes)
        names = ", ".join(map(_short, study.rows[choice.row].choose)) or "none"
        about = [f"`{choice.row}`", taken, names, ", ".join(best), ", ".join(others)]
        rows.append([*about, f"{choice.budget}"])
    header = ["row", "takes over", "setting", f"chosen: {name_of(study.choice.metric)}"]
    return Table([*header, "also tried", "budget"], rows, names=5)


def _short(setting: str) -> str:
    """The last name of a setting's path."""
    return setting.rpartition(".")[2]
