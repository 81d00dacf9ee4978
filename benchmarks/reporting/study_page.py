"""The page of a study: the answer, the verdicts with their intervals, and what is behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.reporting.verdicts import Finding, Results
from benchmarks.settings import StudyFile


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
    raise NotImplementedError
