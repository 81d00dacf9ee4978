"""The findings of a study: each comparison's tested difference, and the words that say what it means."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.reporting.paired import Paired
from benchmarks.settings import Comparison, StudyFile

Result = dict[str, Any]

Results = Mapping[str, Mapping[int, Result]]
"""{row: {seed: result}}"""


@dataclass(frozen=True)
class Finding:
    """A comparison's differences in percentage points, tested, and the words for them.

    Args:
        seeds: Those of the pairs.
        tested: None if a run diverged.
        diverged: {row: seeds}.
        adjusted: Holm's p; not corrected for a control, None if a run diverged.
        secondary: The differences by the metric that must agree, or by the paper's Recall@1; see `judge`.
        registered: False for an exploratory comparison.
    """

    comparison: Comparison
    seeds: list[int]
    tested: Paired | None
    diverged: dict[str, list[int]]
    words: tuple[str, ...]
    adjusted: float | None
    secondary: Paired | None
    registered: bool


def judge(
    study: StudyFile, results: Results, *, registered: Mapping[str, bool] | None = None
) -> list[Finding]:
    """The findings on the comparisons that have all seeds, in the order of the file."""
    raise NotImplementedError
