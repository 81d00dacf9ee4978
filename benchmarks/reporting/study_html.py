"""The page of a study as one HTML file that loads nothing, for those whose images it is about."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from benchmarks.reporting.forest import colour_of, forest, study_figures
from benchmarks.reporting.names import metric_name, row_name
from benchmarks.reporting.paired import Estimate, estimate
from benchmarks.reporting.study_advice import NEAREST
from benchmarks.reporting.study_answer import cost
from benchmarks.reporting.study_choice import choose
from benchmarks.reporting.study_classes import Section
from benchmarks.reporting.study_page import Tried, study_content, verdict
from benchmarks.reporting.templates import fill
from benchmarks.reporting.untrained_rows import beyond_untrained
from benchmarks.reporting.verdicts import MAIN, Finding, Results, outputs_of
from benchmarks.settings.study_files import Comparison, StudyFile

FIGURES = {
    "_training": "What training gains over the untrained network, with 95 % intervals",
    "": "What each method gains over its own base, with 95 % intervals",
    "_curves": "Over the steps of a training",
    "_mechanisms": "Mechanisms and own claims",
    "_cosines": "Cosines of features over the steps of a training",
    "_ranks": "Effective ranks over the steps of a training",
}


def study_html(
    study: StudyFile,
    findings: Sequence[Finding],
    results: Results,
    *,
    figures: Mapping[str, bytes],
    labels: Mapping[str, str],
    tried: Tried,
    registration: str,
    command: str,
    steps: Mapping[str, str],
    told: Sequence[str],
    neighbours: str = "",
    known: Sequence[str] = (),
    sections: Sequence[Section] = (),
) -> str:
    """The page in HTML; other arguments as for `study_page`.

    Args:
        figures: Those of `study_figures`; the differences are drawn anew, with the methods' names.
        labels: The names of the rows' methods.
        steps: What to do next: {title: command}.
        told: The sentences of `advice`.
        neighbours: The section of nearest neighbours, in HTML; default: none.
        known: How well the recommended network tells known from unknown photographs, in sentences.
        sections: On the classes of the images.
    """
    row = choose(study, findings, results).row
    labels = {**labels, row: f"{labels[row]}\N{NO-BREAK SPACE}★"}
    training = beyond_untrained(study, findings, results)
    _, training = neutral(study, [_as_main(finding) for finding in training], labels)
    study, findings = neutral(study, findings, labels)
    drawn = {**figures, **study_figures(study, findings, results, "better")}
    if training:
        drawn["_training"] = forest(study, training, right="better")
    main = [of for of in findings if of.comparison.family == MAIN]

    def image(svg: bytes) -> str:  # by itself: its styles do not meet those of another
        return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"

    return fill(
        Path(__file__).with_name("study_page.html"),
        **study_content(study, findings, results, tried, registration, command),
        told=told,
        neighbours=neighbours,
        known=known,
        sections=sections,
        methods=methods(study, main, results, labels, row),
        networks=methods(study, training, results, labels, row),
        figures={name: (FIGURES[name], image(of)) for name, of in drawn.items() if of},
        steps=steps,
        marks=marks,
    )


def neutral(
    study: StudyFile, findings: Sequence[Finding], labels: Mapping[str, str]
) -> tuple[StudyFile, list[Finding]]:
    """The same with the compared methods' names in place of claims, which a verdict may deny."""

    def named(comparison: Comparison) -> Comparison:
        sides = (side.partition(":") for side in comparison.sides())
        names = [row_name(labels[row], output or "embedding") for row, _, output in sides]
        pairs = [" beside ".join(names[k : k + 2]) for k in range(0, len(names), 2)]
        return replace(comparison, claim=", less ".join(pairs))

    study = replace(study, comparisons=[named(comparison) for comparison in study.comparisons])
    return study, [replace(one, comparison=named(one.comparison)) for one in findings]


def _as_main(finding: Finding) -> Finding:
    """One that is drawn, and without the heading of a family."""
    return replace(finding, comparison=replace(finding.comparison, family=MAIN))


def methods(
    study: StudyFile,
    findings: Sequence[Finding],
    results: Results,
    labels: Mapping[str, str],
    best: str,
) -> list[dict[str, Any]]:
    """Each comparison's cells: base and method with their means, what was found, its colour, and what is best."""
    rows = []
    for finding in findings:
        comparison, tested = finding.comparison, finding.tested
        cells = verdict(study, finding, results, marked=False)
        metric, ratio = study.metric(comparison), cost(results, comparison)
        method, base = comparison.rows()
        row = {
            "method": labels[method],
            "base": labels[base],
            "metric": metric_name(metric),
            "means": [
                _mean(results, side, metric) for side in (comparison.than, comparison.better)
            ],
            "right": [
                _mean(results, side, NEAREST) for side in (comparison.than, comparison.better)
            ]
            if metric != NEAREST
            else [],
            "best": [side == best for side in (base, method)],
            "is_gain": finding.is_gain,
            "difference": f"{tested.mean:+.1f}" if tested else cells["difference"],
            "limits": tested.limits() if tested and tested.has_interval else None,
            "words": cells["verdict"],
            "colour": colour_of(finding),
            "cost": "" if ratio is None else f"× {ratio:.2f}",
        }
        rows.append(row)
    return rows


def _mean(results: Results, side: str, metric: str) -> Estimate | None:
    """Of a compared row or output, in percent; None if a run diverged."""
    row, _, output = side.partition(":")
    values = [outputs_of(run).get(output, {}).get(metric) for run in results[row].values()]
    return None if None in values or not values else estimate([100 * value for value in values])


def marks(text: str) -> Markup:
    """Text with Markdown's marks for code and emphasis, of which our sentences and cells are made."""
    shown = str(escape(text))
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", shown)
    shown = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", shown)
    return Markup(re.sub(r"\*([^*]+)\*", r"<em>\1</em>", shown))
