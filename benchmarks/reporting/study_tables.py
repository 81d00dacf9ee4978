"""The tables behind a study's answer: verdicts with intervals, mean results, and the settings that were tried."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from benchmarks.reporting.names import UNTRAINED, metric_name, row_name
from benchmarks.reporting.paired import Paired, estimate
from benchmarks.reporting.study_answer import NEAREST, asked, cost, every_run, has_papers
from benchmarks.reporting.table import Table, count_of_seeds, named
from benchmarks.reporting.verdicts import (
    MAIN,
    PAPERS,
    SEEDS_ALONE,
    Finding,
    Results,
    Word,
    by_method,
    has_diverged,
    name_of_claim,
    outputs_of,
    pooled,
    sides_of,
)
from benchmarks.settings.study_files import CONTROL, Comparison, StudyFile

SHOWN = ("recall_at_1", "mean_average_precision_at_r", "seen_recall_at_1", "unseen_recall_at_1")

MARKS = {"seeds and classes": " †", SEEDS_ALONE: " ‡"}  # of intervals


class Candidate(NamedTuple):
    """Settings that were tried for a row: the mean of the metric that chooses, None if a draw diverged."""

    values: dict[str, float]
    score: float | None
    diverged: list[int]  # draws

    def told(self) -> str:
        lost = f"diverged ({named('draw', self.diverged)})"
        score = lost if self.score is None else f"{100 * self.score:.2f}"
        return f"{', '.join(f'{value:g}' for value in self.values.values())}: {score}"


Tried = Mapping[str, Sequence[Candidate]]
"""The candidates of each row whose scores are known."""


def best(tried: Sequence[Candidate]) -> Candidate | None:
    """The candidate that is chosen; None if all diverged."""
    finished = [candidate for candidate in tried if candidate.score is not None]
    return max(finished, key=attrgetter("score"), default=None)


def study_tables(
    study: StudyFile,
    findings: Sequence[Finding],
    training: Sequence[Finding],
    results: Results,
    tried: Tried,
    registration: str,
    command: str | None,
    own: bool,
) -> dict[str, Any]:
    """The values of the template; arguments as for `study_files`, and the findings beside the untrained network."""
    runs = every_run(results)
    seconds = sum(run["wall_time_s"] for run in runs)
    controls = [f for f in findings if f.comparison.family == CONTROL]
    judged = [f for f in findings if f.comparison.family != CONTROL]
    main = [f for f in judged if f.comparison.family == MAIN]
    others = [f for f in judged if f.comparison.family != MAIN]
    tested = [pair for f in findings for pair in (f.tested, f.secondary) if pair]
    sides = [
        [c.name, c.formula(), metric_name(study.metric(c)), c.paper] for c in study.comparisons
    ]
    return {
        **{"study": study, "registration": registration, "metric_name": metric_name},
        "command": command or f"python -m benchmarks.study {study.name}",
        "papers": has_papers(study),
        "costs": not has_papers(study) and any(cost(results, f.comparison) for f in findings),
        "counts": _counts(judged),
        "lacking": _lacking(study, findings, tried),
        "ends": _ends(study, judged, tried),
        "main": main and _verdicts(study, main, results, own),
        "training": training and _verdicts(study, training, results, own),
        "others": others and _verdicts(study, others, results, own),
        "controls": controls and _verdicts(study, controls, results, own),
        "over": {pair.over for pair in tested},
        "exploratory": not any(finding.registered for finding in findings),
        **{"Word": Word, "points": f"{study.margin:g} point{'s' * (study.margin != 1)}"},
        "reported": any(c.reported for c in study.comparisons),
        "equal": not all(pair.has_interval for pair in tested),
        "sides": Table(["", "rows", "metric", "paper"], sides, names=4),
        "commits": ", ".join(sorted({f"`{str(run['commit'])[:7]}`" for run in runs})),
        "queries": "; ".join(asked(runs)),
        "runs": len(runs),
        "hours": f"{seconds / 3600:.1f}",
        "dirty": any(run["dirty"] for run in runs),
        "processors": _processors(findings, results),
        "means": _means(results),
        **{"settings": _settings(study, tried), "short": _short},
        "paths": sorted({path for row in study.rows.values() for path in row.choose}),
    }


def _counts(findings: Sequence[Finding]) -> str:
    """How often each word was said."""
    counts = Counter(word for finding in findings for word in finding.words)
    told = ", ".join(f"{count} *{word}*" for word, count in counts.most_common())
    number = f"{len(findings)} comparisons" if len(findings) > 1 else "comparison"
    several = ", some of which have several" if counts.total() > len(findings) else ""
    return f"Verdicts of the {number}{several}: {told}." if told else ""


def _lacking(study: StudyFile, findings: Sequence[Finding], tried: Tried) -> str:
    """The comparisons without a finding."""
    measured = {finding.comparison.name for finding in findings}
    hopeless = [row for row, candidates in tried.items() if candidates and not best(candidates)]
    told = {row: f" (all settings of `{row}` diverged)" for row in hopeless}
    lacking = [
        f"`{comparison.name}`{''.join(told.get(row, '') for row in comparison.all_rows())}"
        for comparison in study.comparisons
        if comparison.name not in measured
    ]
    return f"Not measured yet: {'; '.join(lacking)}." if lacking else ""


def _ends(study: StudyFile, findings: Sequence[Finding], tried: Tried) -> str:
    """The rows that a gain was found over and that chose the end of a list: beyond it they may be better."""
    gains = (finding.comparison.rows() for finding in findings if finding.is_gain)
    beaten = {*chain(*(study.needed([than]) for better, than in gains if than != better))}
    rows: dict[tuple[str, str], list[str]] = {}
    for row in (row for row in tried if row in beaten):
        chosen = best(tried[row])
        for setting, value in chosen.values.items() if chosen else ():
            values = study.rows[row].choose[setting]
            ends = {min(values): "lowest", max(values): "highest"} if len(values) > 1 else {}
            if value and value in ends:
                rows.setdefault((ends[value], setting), []).append(f"`{row}`")
    return " ".join(
        f"The {end} {_short(setting)} of the grid was best for {', '.join(names)}: a {end[:-2]}r one may be better "
        "still, and reduce a gain over it."
        for (end, setting), names in rows.items()
    )


def _verdicts(study: StudyFile, findings: Sequence[Finding], results: Results, own: bool) -> Table:
    pools, marked = pooled(study, findings), any(finding.registered for finding in findings)
    rows: list[dict[str, str]] = []
    for group, members in by_method(findings).items():
        rows += [_verdict(study, finding, results, marked, own) for finding in members]
        if group in pools:
            row = {"comparison": f"*{group}, pooled*", "verdict": str(Word.DIVERGED)}
            if pool := pools[group]:
                seeds = f"{len(pool.differences)}"
                row |= {"verdict": "*exploratory*", "difference": pool.points(), "seeds": seeds}
            rows.append(row)
    *others, p = rows[0]
    shown = [*(name for name in others if any(row.get(name) for row in rows)), p]
    return Table(shown, [[row.get(name, "") for name in shown] for row in rows], 2)


def _verdict(
    study: StudyFile, finding: Finding, results: Results, marked: bool, own: bool
) -> dict[str, str]:
    """The cells of a comparison, by the names of their columns."""
    comparison, tested, p = finding.comparison, finding.tested, finding.adjusted
    metric, nearest = study.metric(comparison), dict[str, str]()
    if own and metric != NEAREST:
        nearest = {"nearest right, of 100": _change(results, comparison, NEAREST, digits=1)}
    words, second = ", ".join(finding.words), finding.secondary
    if marked and not finding.registered:
        words += ", exploratory"
    lost = (f"`{row}`, {named('seed', seeds)}" for row, seeds in finding.diverged.items())
    gain, ratio, dataset = comparison.reported_gain(), cost(results, comparison), ""
    if gain is not None and metric.endswith(PAPERS):
        dataset = comparison.reported_on()
        dataset = dataset.upper() if len(dataset) == 3 else dataset.title()
    beside = {"time of a step": "" if ratio is None else f"× {ratio:.2f}"}
    if has_papers(study):
        beside = {"paper's gain": dataset and f"{gain:+.1f}\N{NO-BREAK SPACE}({dataset})"}
    return {
        "comparison": name_of_claim(study, comparison).replace("-", "\N{NON-BREAKING HYPHEN}"),
        "verdict": words,
        "difference": _points(tested) if tested else "; ".join(lost),
        "from → to (%)": _change(results, comparison, metric),
        **nearest,
        f"by {metric_name(study.agrees or '')}": _points(second) if second else "",
        **beside,
        "seeds": f"{len(finding.seeds)}",
        "p" if comparison.family == CONTROL else "adjusted p": (
            "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
        ),
    }


def _change(results: Results, comparison: Comparison, metric: str, digits: int = 2) -> str:
    """The means of the two sides; nothing for an interaction, and where a run diverged."""
    means = list[float]()
    for row, output in sides_of(comparison):
        values = [outputs_of(run).get(output, {}).get(metric) for run in results[row].values()]
        means.append(float(np.mean([np.nan if value is None else value for value in values])))
    if len(means) > 2 or not np.isfinite(means).all():
        return ""
    after, before = (f"{100 * mean:.{digits}f}" for mean in means)
    return f"{before} → {after}"


def _points(tested: Paired) -> str:
    return tested.points() + MARKS.get(tested.over, "")


def _processors(findings: Sequence[Finding], results: Results) -> str:
    """The comparisons whose rows one processor measured, and the others."""
    one, several, unknown = "one", "several, which round differently,", "not recorded"
    groups: dict[str, list[str]] = {one: [], several: [], unknown: []}
    for finding in findings:
        rows = [results[row].values() for row in finding.comparison.all_rows()]
        processors = {result.get("processor") for result in chain(*rows)}
        group = unknown if None in processors else one if len(processors) == 1 else several
        groups[group].append(f"`{finding.comparison.name}`")
    told = [f"{group} for {', '.join(names)}" for group, names in groups.items() if names]
    return f"Processors of a comparison's rows: {'; '.join(told)}." if told else ""


def _means(results: Results) -> Table:
    rows = []
    for row, runs in results.items():
        by_seed = {seed: outputs_of(run) for seed, run in runs.items()}
        diverged = [
            s for s, o in by_seed.items() if any(has_diverged(runs[s], x, SHOWN) for x in o)
        ]
        outputs = [own for seed, own in by_seed.items() if seed not in diverged]
        seeds = count_of_seeds(len(outputs), diverged)
        if diverged and not outputs:
            rows.append([f"`{row}`", *("" for _ in SHOWN), seeds])
        for output in outputs[0] if outputs else ():
            found = [[own.get(output, {}).get(metric) for own in outputs] for metric in SHOWN]
            cells = ["" if None in values else estimate(values).percent() for values in found]
            name = f", {row_name(row, output)}" if output.startswith(UNTRAINED) else ""
            if any(cells):
                rows.append([f"`{row}{output and ':'}{output}`{name}", *cells, seeds])
    return Table(["row", *map(metric_name, SHOWN), "seeds"], rows)


def _settings(study: StudyFile, tried: Tried) -> Table:
    """The rows that chose settings, or take them over without choosing more."""
    rows = []
    for row, candidates in tried.items():
        about, chosen = study.rows[row], best(candidates)
        if not candidates and (about.choose or not about.takes):
            continue
        taken = ", ".join(f"`{other}`" for other in about.takes)
        names = ", ".join(map(_short, about.choose)) or "none"
        others = ", ".join(other.told() for other in candidates if other is not chosen)
        budget = sum(len(tried[other]) for other in study.needed([row]))
        told = chosen.told() if chosen else ""
        rows.append([f"`{row}`", taken, names, told, others, f"{budget}"])
    header = ["row", "takes over", "setting", f"chosen: {metric_name(study.choice.metric)}"]
    return Table([*header, "also tried", "budget"], rows, names=5)


def _short(setting: str) -> str:
    """The last name of a setting's path."""
    return setting.rpartition(".")[2]
