"""The page of a study: the answer, the verdicts with their intervals, and what is behind them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.reporting.forest import study_figures
from benchmarks.reporting.names import row_name
from benchmarks.reporting.pages import to_html
from benchmarks.reporting.study_advice import advice
from benchmarks.reporting.study_answer import answer
from benchmarks.reporting.study_choice import beyond_untrained, choose
from benchmarks.reporting.study_sections import Section
from benchmarks.reporting.study_tables import Tried, study_tables
from benchmarks.reporting.templates import fill
from benchmarks.reporting.verdicts import Finding, Results
from benchmarks.settings.study_files import Comparison, StudyFile


class Own(NamedTuple):
    """Further parts of the page of one's own images, which is also in HTML, and names methods instead of claims."""

    labels: Mapping[str, str] = {}  # the names of the rows' methods
    setup: Sequence[str] = ()  # sentences for `advice`
    steps: Mapping[str, str] = {}  # what to do next: {title: command}
    known: Sequence[
        str
    ] = ()  # sentences on how well the network tells known images from unknown ones
    sections: Sequence[Section] = ()
    neighbours: str = ""  # pictures, in HTML


def study_files(
    name: str,
    study: StudyFile,
    findings: Sequence[Finding],
    results: Results,
    *,
    tried: Tried,
    registration: str,
    protocols: str = "protocols.md",
    command: str | None = None,
    own: Own | None = None,
) -> tuple[list[str], dict[str, bytes]]:
    """The answer, paragraph by paragraph, and the page's files: Markdown, its figures and, of own images, HTML.

    Args:
        name: Of the page, without a suffix.
        registration: A paragraph that says if the comparisons were registered beforehand.
        protocols: The path of docs/protocols.md from the page.
        command: The command that measures it again; default: that of a study that comes with the runner.
    """
    training = beyond_untrained(study, findings, results)
    if own is None:
        told, starred = [answer(study, findings, results)], None
    else:
        row = choose(study, findings, results).row
        starred = {**own.labels, row: f"{own.labels[row]}\N{NO-BREAK SPACE}★"}
        claims = neutral(study, findings, own.labels)
        told = advice(*claims, results, own.labels, own.setup)
        _, training = neutral(study, training, starred)
        study, findings = neutral(study, findings, starred)
    drawn = study_figures(study, findings, results, starred, training)
    content = study_tables(
        study, findings, training, results, tried, registration, command, own is not None
    )
    figures = {ending: f"{name}{ending}.svg" for ending in drawn}
    content |= {"figures": figures, "protocols": protocols, "told": told, "own": own is not None}
    content |= (own or Own())._asdict()
    files = {figures[ending]: figure for ending, figure in drawn.items()}
    template = Path(__file__).with_name("study_page.md")
    pages = {f"{name}.md": _spaced(fill(template, **content, pictured=False))}
    if own is not None:
        shown = {section.title: section.pictures for section in own.sections}
        page = _spaced(fill(template, **content, pictured=True))
        pages[f"{name}.html"] = to_html(page, {**files, **shown, "neighbours": own.neighbours})
    return told, {name: page.encode() for name, page in pages.items()} | files


def _spaced(page: str) -> str:
    page = re.sub(r"\n{3,}", "\n\n", page)
    return page.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


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
    return study, [replace(f, comparison=named(f.comparison)) for f in findings]
