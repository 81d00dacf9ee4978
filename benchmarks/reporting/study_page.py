"""The page of a study: the answer, the verdicts with their intervals, and what is behind them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.reporting.comparison import metric_name
from benchmarks.reporting.paired import estimate
from benchmarks.reporting.table import Table, count_of_seeds, named
from benchmarks.reporting.templates import fill
from benchmarks.reporting.verdicts import (
    AS_GOOD,
    DIVERGED,
    EXCLUDED,
    HARMS,
    HELPS,
    MAIN,
    PAPERS,
    WORTH,
    Finding,
    Results,
    grouped,
    name_of_claim,
    outputs_of,
    pooled,
)
from benchmarks.settings import CONTROL, StudyFile

SHOWN = ("recall_at_1", "mean_average_precision_at_r", "seen_recall_at_1", "unseen_recall_at_1")
"""Metrics of the rows' table."""


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
        figures: The names of the files "main" and "mechanisms" beside the page.
    """
    runs = [result for of in results.values() for result in of.values()]
    families = [MAIN, CONTROL]
    main, controls = ([f for f in findings if f.comparison.family == one] for one in families)
    others = [finding for finding in findings if finding.comparison.family not in families]
    chosen = [choice for choice in choices if choice.tried or choice.takes]
    page = fill(
        Path(__file__).with_suffix(".md"),
        **{"study": study, "registration": registration, "figures": figures, "name_of": _name_of},
        answer=" ".join(_answer(study, main)),
        counts=_counts(findings),
        lacking=_lacking(study, findings, choices),
        alt="Paired differences with 95 % intervals",
        main=main and _verdicts(study, main),
        others=others and _verdicts(study, others),
        controls=controls and _verdicts(study, controls),
        over={finding.tested.over for finding in findings if finding.tested},
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


def _answer(study: StudyFile, main: Sequence[Finding]) -> list[str]:
    """Sentences that answer the question: how many help, and how much; or how much may have been missed."""
    tested = [f for f in main if f.tested and not f.comparison.as_good]
    sentences = []
    if tested:
        gains, harms = (
            [finding for finding in tested if words & set(finding.words)]
            for words in ({HELPS, WORTH}, {HARMS})
        )
        of = f"of {len(tested)} comparison{'s' * (len(tested) > 1)}"
        if gains:
            verb = "show" if len(gains) > 1 else "shows"
            sentences.append(f"**{len(gains)} {of} {verb} a gain**: {_list(study, gains)}.")
        else:
            sentences.append(f"**None {of} shows a gain.** {_still_allowed(study, tested)}")
        if harms:
            sentences.append(
                f"**{len(harms)} {'show' if len(harms) > 1 else 'shows'} harm**: {_list(study, harms)}."
            )
    if equal := [f for f in main if f.tested and f.comparison.as_good]:
        good = sum(AS_GOOD in finding.words for finding in equal)
        sentences.append(
            f"{good} of {len(equal)} rows claimed to be as good as another are shown to be."
        )
    return sentences  # fmt: skip


def _list(study: StudyFile, findings: Sequence[Finding]) -> str:
    metric = metric_name(study.primary)
    return "; ".join(
        f"{f.comparison.claim}, {f.tested.points()} points of {metric}"
        for f in findings
        if f.tested
    )


def _still_allowed(study: StudyFile, tested: Sequence[Finding]) -> str:
    limit, best = max(
        ((f.tested.limits()[1], f) for f in tested if f.tested), key=lambda pair: pair[0]
    )
    if limit <= 0:
        return "No 95 % interval allows one."
    claimed = [f for f in tested if (f.comparison.reported_gain() or 0) > 0]
    excluded = sum(EXCLUDED in finding.words for finding in claimed)
    of_papers = f", and half of the paper's gain is excluded in {excluded} of {len(claimed)}"
    return (
        f"The largest gain that a 95 % interval still allows is {limit:.2f} points of "
        f"{metric_name(study.primary)} ({best.comparison.claim}){of_papers * bool(claimed)}."
    )


def _counts(findings: Sequence[Finding]) -> str:
    """How often each word was said, controls aside."""
    counted = [f for f in findings if f.comparison.family != CONTROL]
    counts = Counter(word for finding in counted for word in finding.words)
    told = ", ".join(f"{count} *{word}*" for word, count in counts.most_common())
    return f"Verdicts on all {len(counted)}: {told}." if told else ""


def _lacking(study: StudyFile, findings: Sequence[Finding], choices: Sequence[Choices]) -> str:
    """The comparisons without a finding."""
    measured = {finding.comparison.name for finding in findings}
    hopeless = {
        choice.row for choice in choices
        if choice.tried and all(score is None for _, score, _ in choice.tried)
    }  # fmt: skip
    lacking = [
        comparison.name
        + "".join(
            f" (all settings of `{row}` diverged)" for row in comparison.rows() if row in hopeless
        )
        for comparison in study.comparisons
        if comparison.name not in measured
    ]
    return f"Not measured yet: {'; '.join(lacking)}." if lacking else ""


# ------------------------------------------------------------------------------------------ the verdicts


def _verdicts(study: StudyFile, findings: Sequence[Finding]) -> str:
    is_control = findings[0].comparison.family == CONTROL
    pools = {} if is_control else pooled(findings)
    marked = any(finding.registered for finding in findings)
    rows = []
    for group, of in grouped(findings).items():
        rows += [_verdict(study, finding, marked) for finding in of]
        if group in pools:
            about = f"*{group}, pooled over {len(of)}*"
            seeds = f"{len(pools[group].differences)}"
            rows.append([about, "*exploratory*", pools[group].points(), "", seeds, ""])
    header = [
        "comparison",
        "verdict",
        "difference",
        "paper's gain",
        "seeds",
        "p" if is_control else "adjusted p",
    ]
    return Table(header, rows, names=2).markdown()


def _verdict(study: StudyFile, finding: Finding, marked: bool) -> list[str]:
    comparison, tested, p = finding.comparison, finding.tested, finding.adjusted
    words = ", ".join(finding.words)
    if EXCLUDED in finding.words and study.metric(comparison) != PAPERS:
        words += f" by {metric_name(PAPERS)}"
    if marked and not finding.registered:
        words += " (exploratory)"
    gain = comparison.reported_gain()
    if tested is None:
        lost = (f"`{row}`, {named('seed', seeds)}" for row, seeds in finding.diverged.items())
        difference = f"{DIVERGED}: {'; '.join(lost)}"
    else:
        difference = tested.points() + " †" * (tested.over != "seeds")
    return [
        name_of_claim(study, comparison).replace("-", "\N{NON-BREAKING HYPHEN}"),
        words,
        difference,
        ""
        if gain is None
        else f"{gain:+.1f}\N{NO-BREAK SPACE}({_dataset(comparison.reported_on())})",
        f"{len(finding.seeds)}",
        "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}",
    ]


def _dataset(name: str) -> str:
    return name.upper() if len(name) == 3 else name.title()


# ------------------------------------------------------------------------------------------ the appendix


def _sides(study: StudyFile) -> Table:
    rows = [
        [of.name, f"`{of.better}` - `{of.than}`", _name_of(study.metric(of)), of.paper]
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
        diverged = [seed for seed, run in runs.items() if not run["metrics"]]
        outputs = [outputs_of(run) for run in runs.values() if run["metrics"]]
        seeds = count_of_seeds(len(outputs), diverged)
        if diverged and not outputs:
            rows.append([f"`{row}`", *("" for _ in SHOWN), seeds])
        for output in outputs[0] if outputs else ():
            found = [[of.get(output, {}).get(metric) for of in outputs] for metric in SHOWN]
            cells = ["" if None in values else estimate(values).percent() for values in found]
            if any(cells):
                rows.append([f"`{row}{output and ':'}{output}`", *cells, seeds])
    return Table(["row", *map(_name_of, SHOWN), "seeds"], rows)


def _settings(study: StudyFile, chosen: Sequence[Choices]) -> Table:
    rows = []
    for choice in chosen:
        told = [
            (values, f"{', '.join(f'{v:g}' for v in values.values())}: {_score(score, diverged)}")
            for values, score, diverged in choice.tried
        ]
        settings = choice.settings or {}
        is_best = [
            choice.settings is not None and values.items() <= settings.items() for values, _ in told
        ]
        best, others = (
            [words for (_, words), is_it in zip(told, is_best, strict=True) if is_it == wanted]
            for wanted in (True, False)
        )
        names = ", ".join(_short(setting) for setting in study.rows[choice.row].choose) or "none"
        taken = ", ".join(f"`{one}`" for one in choice.takes)
        row = [f"`{choice.row}`", taken, names, ", ".join(best), ", ".join(others)]
        rows.append([*row, f"{choice.budget}"])
    best = f"chosen: {_name_of(study.choice.metric)}"
    return Table(["row", "takes over", "setting", best, "also tried", "budget"], rows, names=5)  # fmt: skip


def _score(score: float | None, diverged: Sequence[int]) -> str:
    return f"diverged ({named('draw', diverged)})" if score is None else f"{100 * score:.2f}"


def _short(setting: str) -> str:
    """The end of a setting's path that is no position in a list and not too common to name it."""
    return setting.rpartition(".")[2]


def _name_of(metric: str) -> str:
    return metric_name(metric).replace("_", " ")
