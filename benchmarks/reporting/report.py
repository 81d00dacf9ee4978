"""The report of runs as one HTML file that loads nothing."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.console.printing import printable
from benchmarks.console.writing import replace_file
from benchmarks.records.results import Run
from benchmarks.reporting.comparison import grouped
from benchmarks.reporting.curves import RECALLS, curves_svg
from benchmarks.reporting.neighbours import Images, report_neighbours
from benchmarks.reporting.pages import to_html
from benchmarks.reporting.table import Page
from benchmarks.reporting.templates import fill
from benchmarks.settings.yaml_files import dump


def write_html(
    runs: Sequence[Run], comparison: Page, path: Path, images: Images | None = None
) -> None:
    """Write the report of runs with their comparison, see `compare`; `images` as in `report_neighbours`."""
    methods = {label: group.runs for label, group in grouped(runs).items() if group.runs}
    result, *blocks = comparison.parts()
    near, drawn = report_neighbours(methods, images), [*curves(methods)]
    figures: dict[str, bytes | str] = {f"curve {n}": figure for n, figure in enumerate(drawn)}
    figures |= {f"neighbours {n}": shown for n, shown in enumerate(near.values())}
    text = fill(
        Path(__file__).with_suffix(".md"),
        **{"title": printable(" vs. ".join(methods)), "result": result},
        **{"about": comparison.title, "blocks": blocks},
        **{"near": [*map(printable, near)], "curves": len(drawn)},
        runs=[
            (printable(f"{run.label}, seed {run.seed}: {run.folder}"), dump(run.info))
            for run in runs
        ],
    )
    replace_file(path, to_html(text, figures).encode())


def curves(methods: Mapping[str, Sequence[Run]]) -> Iterator[bytes]:
    """Recall@1 on seen and on unseen classes, and the loss, over steps: those that were recorded."""
    panels = {title: ("evaluation", column) for title, column in RECALLS.items()}
    for title, (name, column) in (panels | {"Training loss": ("training", "loss")}).items():
        tables = {label: [run.table(name) for run in members] for label, members in methods.items()}
        if figure := curves_svg(tables, {title: column}, singles=True):
            yield figure.encode()
