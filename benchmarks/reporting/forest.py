"""The figure of a study: each comparison's difference and interval, beside the paper's gain."""

from collections.abc import Sequence
from typing import Literal

from benchmarks.reporting.verdicts import Finding
from benchmarks.settings import StudyFile


def forest(
    study: StudyFile, findings: Sequence[Finding], which: Literal["main", "mechanisms"]
) -> bytes:
    """An SVG file."""
    raise NotImplementedError
