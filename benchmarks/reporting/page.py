"""The report as one HTML file that loads nothing."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Run, replace_file
from benchmarks.reporting import figures
from benchmarks.reporting.comparison import compare
from benchmarks.reporting.templates import fill
from benchmarks.settings import dump

PAGE = Path(__file__).with_suffix(".html")


def write_html(runs: Sequence[Run], path: Path, baseline: str | None = None) -> None:
    """Write the report as one file that loads nothing; arguments and errors as in `compare`."""
    comparison = compare(runs, baseline)
    firsts = [members[0] for members in comparison.methods.values()]
    page = fill(
        PAGE,
        comparison=comparison,
        runs=runs,
        yaml=dump,
        curves=figures.curves(comparison.methods),
        features=[figure for run in firsts if (figure := figures.deep_features(run))],
        neighbours=figures.neighbours(comparison.methods),
    )
    replace_file(path, page.encode())
