"""A paper's table, with our results beside its numbers."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from benchmarks.console.printing import printable
from benchmarks.records.results import DONE, Run, load_run
from benchmarks.reporting.comparison import DESCRIPTOR
from benchmarks.reporting.names import metric_name, row_name
from benchmarks.reporting.paired import percent
from benchmarks.reporting.rows import Group, check_alike, differing_settings
from benchmarks.reporting.table import Page, Table, count_of_seeds
from benchmarks.settings.command import parse
from benchmarks.settings.data import Data
from benchmarks.settings.differences import changes_of_methods
from benchmarks.settings.recipe_files import Entry, RecipeTable

ABOUT_A_QUOTED_ROW = ("row", "dataset", "backbone", "embedding_dim")
ABOUT_OURS = ("runs", "trunk", "crop", "dimension")

REMARKS = {
    "differs": "Differs from the paper",
    "not_given": "Not given by the paper",
    "printed": "About the printed numbers",
    "published_code": "Follows the paper, not its published code",
}

NOTES = {
    "| quoted |": "quoted: the paper's numbers of other work, copied from elsewhere.",
    "| ours |": "± of ours: the half-width of the 95 % Student-t interval over seeds; one seed has none.",
    "over parts": "± over parts: of a single run, the half-width of the 95 % interval over parts of the test set.",
    "†": DESCRIPTOR,
}
"""Notes on what stands in a heading or a cell."""


def paper_page(table: RecipeTable, folders: Sequence[Path]) -> Page:
    """Lay out a paper's table, with the runs below some folders beside its numbers."""
    entries, (groups, told) = table.entries, _collect(table, folders)
    datasets = dict.fromkeys([*map(_dataset, entries), *(row["dataset"] for row in table.quoted)])
    blocks: list[str | Table] = []
    for dataset in datasets:
        of_it = [entry for entry in entries if _dataset(entry) == dataset]
        quoted = [row for row in table.quoted if row["dataset"] == dataset]
        blocks += [f"### {dataset}", _table(of_it, quoted, groups)]
    shown = Page("", blocks).markdown()
    done = sum(entry.training in groups for entry in entries)
    notes = [f"{done} of {len(entries)} rows have runs of the recipe as it is."]
    notes += [note for words, note in NOTES.items() if words in shown]
    runs = chain(*(group.runs for group in groups.values()))
    if commits := {str(run.info.get("commit")) for run in runs}:
        notes.append(f"ours was run at commit {', '.join(sorted(commits))}.")
    lists = {"Notes": [*notes, *told]}
    lists |= {title: _remarks(entries, key) for key, title in REMARKS.items()}
    for title, lines in lists.items():
        if lines:
            blocks += [f"### {title}", "\n".join(f"* {line}" for line in lines)]
    return Page(table.title, blocks)


def _dataset(entry: Entry) -> str:
    return str(entry.settings.get("data", {}).get("dataset", Data.dataset))


def _remarks(entries: Sequence[Entry], key: str) -> list[str]:
    """Remarks on trainings and paper, each with the names of its recipe rows unless it holds for all."""
    rows: dict[str, list[str]] = {}
    for entry in entries:
        for remark in entry.remarks.get(key, []):
            rows.setdefault(remark.text, []).append(entry.name.rpartition("/")[2])
    return [
        line if len(names) == len(entries) else f"{', '.join(names)}: {line}"
        for line, names in rows.items()
    ]


# ------------------------------------------------------------------------------------------- the rows


def _table(
    entries: Sequence[Entry], quoted: Sequence[Mapping[str, Any]], groups: Mapping[str, Group]
) -> Table:
    """The table of a dataset without empty columns; its metrics are those that the paper reports, or else ours."""
    rows, reported = list[dict[str, str]](), [*chain(*(entry.cells.values() for entry in entries))]
    for row in quoted:
        cells = {key: row[key] for key in row if key not in ABOUT_A_QUOTED_ROW}
        reported.append(cells)
        about = {"trunk": row.get("backbone", ""), "dimension": str(row.get("embedding_dim", ""))}
        printed = {metric_name(key): _as_printed(value) for key, value in cells.items()}
        rows.append({"method": row["row"], "numbers": "quoted", **about, **printed})
    found = [groups[entry.training] for entry in entries if entry.training in groups]
    measured = (group.first["metrics"] for group in found)
    metrics = list(dict.fromkeys(chain(*(reported or measured))))
    for entry in entries:
        rows += _rows(entry, groups.get(entry.training), metrics)
    names = ["method", "numbers", *map(metric_name, metrics), *ABOUT_OURS, *chain(*rows)]
    columns = [name for name in dict.fromkeys(names) if any(row.get(name) for row in rows)]
    text = {"method", "numbers", *ABOUT_OURS}
    header = [name if name in text else f"{name} (%)" for name in columns]
    return Table(header, [[row.get(name, "") for name in columns] for row in rows], names=2)


def _rows(entry: Entry, group: Group | None, metrics: Sequence[str]) -> Iterator[dict[str, str]]:
    """Rows as {column: text}: for each output the paper's numbers, ours, and the difference."""
    for output in entry.cells or (group.outputs if group else ["embedding"]):
        rows, paper = list[dict[str, str]](), entry.cells.get(output, {})
        if paper:
            halves = entry.half_widths.get(output, {})
            cells = {metric_name(m): _as_printed(paper[m], halves.get(m)) for m in paper}
            rows.append({"numbers": "paper", **cells})
        elif not group:
            rows.append({"numbers": "ours", "runs": "0"})
        if group:
            rows.append(_ours(group, output, metrics))
            differences = {
                metric_name(metric): f"{100 * ours.mean - number:+.2f}"
                for metric, number in paper.items()
                if (ours := group.estimate(metric, output))
            }
            if paper and group.runs:
                rows.append({"numbers": "difference", **differences})
        # A paper calls its own baselines "(Ours)"; here the next column says whose numbers these are.
        rows[0]["method"] = row_name(entry.label.removesuffix(" (Ours)"), output)
        yield from rows


def _ours(group: Group, output: str, metrics: Sequence[str]) -> dict[str, str]:
    model, data = group.first["config"]["model"], group.first["data"]
    over_parts = len(group.runs) == 1 and group.first.get("half_widths", {}).get(output)
    ensemble = model.get("ensemble")
    cells = {
        "numbers": f"ours{', ± over parts' if over_parts else ''}",
        "runs": count_of_seeds(len(group.runs), [run.seed for run in group.diverged]),
        "trunk": model["trunk"] + (f", ensemble of {ensemble['num_heads']}" if ensemble else ""),
        "crop": str(data.get("image_size") or ""),
        "dimension": str(model["embedding_size"]),
    }
    for metric in metrics:
        if found := group.estimate(metric, output):
            cells[metric_name(metric)] = found.percent()
    if output == "embedding":
        metric = f"recall_at_{group.first['config']['evaluation']['recall_at'][0]}"
        oracles = [run.info["oracle"][metric] for run in group.runs if run.info.get("oracle")]
        if oracles and len(oracles) == len(group.runs):
            cells[f"oracle (test-selected) {metric_name(metric)}"] = percent(oracles)
    return cells


def _as_printed(percent: float, half_width: float | None = None) -> str:
    """A paper's number, with at least one decimal."""
    numbers = [percent] if half_width is None else [percent, half_width]
    return " ± ".join(f"{n:.1f}" if round(n, 1) == n else f"{n:g}" for n in numbers)


# ------------------------------------------------------------------------------------------- the runs


def _collect(table: RecipeTable, folders: Sequence[Path]) -> tuple[dict[str, Group], list[str]]:
    """The runs of each training that has some, and notes on those that diverged or are left out."""
    runs, notes = list[Run](), list[str]()
    paths = chain(*(sorted(folder.rglob("run.json")) for folder in folders))
    # A run found below two of the folders counts once.
    for path in {path.resolve(): path for path in paths}.values():
        try:
            runs.append(load_run(path.parent))
        except ValueError as error:
            notes.append(f"left out: {error}")
    # Those that diverged come first: one that finished takes the place of the same seed.
    runs.sort(key=lambda run: str(run.info.get("finished") or ""))
    groups: dict[str, Group] = {}
    for training in dict.fromkeys(entry.training for entry in table.entries):
        of_it = [run for run in runs if run.info.get("recipe") == training]
        recipe = parse(["--recipe", training]).resolved().config if of_it else {}
        alike: list[Run] = []
        for run in reversed(of_it):  # the newest one says which images and weights
            try:
                _check(run, recipe, *alike[-1:])
                alike.insert(0, run)
            except ValueError as error:
                notes.append(f"left out: {error}")
        if alike:
            group = groups[training] = Group(alike)
            for older, run in group.replaced:
                notes.append(
                    f"left out: {older.folder}, seed {run.seed} was run again in {run.folder}"
                )
            notes += group.diverged_notes
    return groups, [printable(note) for note in notes]


def _check(run: Run, recipe: Mapping[str, Any], other: Run | None = None) -> None:
    """Raise a ValueError unless the run is one of the recipe as it is, with the data and weights of the other."""
    info = run.info
    if run.outcome not in DONE:
        raise ValueError(f"{run.folder} is {run.outcome}, not finished")
    for change in changes_of_methods(info["config"], recipe):
        if change.key != "evaluation.oracle":  # adds a number and changes none
            before, now = (shorten(repr(value), 80) for value in (change.before, change.now))
            raise ValueError(f"{run.folder} was run with {change.key} {before}, not {now}")
    if other is not None:
        if "model.weights" in differing_settings(other, run):
            raise ValueError(f"{run.folder} started from other weights than {other.folder}")
        check_alike(other, run)
