"""The report of runs as one HTML file that loads nothing."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent

from benchmarks.console.printing import printable
from benchmarks.console.writing import replace_file
from benchmarks.records.results import Run
from benchmarks.reporting.comparison import compare, grouped
from benchmarks.reporting.curves import RECALLS, curves_svg
from benchmarks.reporting.neighbours import Images, report_neighbours
from benchmarks.reporting.pages import to_html
from benchmarks.settings.yaml_files import dump

CURVES = """
Strong: means over seeds; light: single seeds. A line of 150 points or more is a moving mean. Recall@1 is over
some of the classes, for inspection only: fewer classes give higher values, and no setting may be chosen by test
classes."""


def write_html(
    runs: Sequence[Run], path: Path, baseline: str | None = None, images: Images | None = None
) -> None:
    """Write the report; arguments and errors as in `compare`, and `images` as in `report_neighbours`."""
    comparison = compare(runs, baseline)
    methods = {label: group.runs for label, group in grouped(runs).items() if group.runs}
    result, *blocks = comparison.parts()
    near, drawn = report_neighbours(methods, images), [*curves(methods)]
    figures: dict[str, bytes | str] = {
        f"neighbours {n}": content for n, content in enumerate(near.values())
    }
    text = [f"# {printable(' vs. '.join(methods))}", f"**{result}**", comparison.title, *blocks]
    text.append("## Nearest neighbours")
    for number, (title, name) in enumerate(zip(near, figures, strict=True)):
        text += [f"{'### ' * (number > 0)}{printable(title)}", f"![](<{name}>)"]
    if not near:
        text.append("None were saved, or the images are not where the run found them.")
    text += ["## Curves", *(f"![](<curve {n}>)" for n in range(len(drawn)))]
    text.append(CURVES.strip() if drawn else "No curves were recorded.")
    text.append("## What was run")
    for run in runs:
        title = printable(f"{run.label}, seed {run.seed}: {run.folder}")
        text += [f"### {title}", indent(dump(run.info), "    ")]
    figures |= {f"curve {n}": figure for n, figure in enumerate(drawn)}
    replace_file(path, to_html("\n\n".join(text), figures).encode())


def curves(methods: Mapping[str, Sequence[Run]]) -> Iterator[bytes]:
    """Recall@1 on seen and on unseen classes, and the loss, over steps: those that were recorded."""
    panels = {title: ("evaluation", column) for title, column in RECALLS.items()}
    for title, (name, column) in (panels | {"Training loss": ("training", "loss")}).items():
        tables = {label: [run.table(name) for run in members] for label, members in methods.items()}
        if figure := curves_svg(tables, {title: column}, singles=True):
            yield figure.encode()
