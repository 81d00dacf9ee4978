"""A paper's table, with our results beside its numbers."""

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from benchmarks.backbones import KNOWN_WEIGHTS
from benchmarks.building import resolved
from benchmarks.console import printable
from benchmarks.records import Run, damage_named, has_diverged, load_run
from benchmarks.reporting.comparison import DESCRIPTOR, metric_name
from benchmarks.reporting.paired import percent
from benchmarks.reporting.rows import TESTED_ON, Group
from benchmarks.reporting.table import Page, Table
from benchmarks.settings import (
    Change,
    Data,
    Entry,
    RecipeTable,
    changes_of_methods,
    merge,
    parse,
)

RUNS = Path("runs")

WEIGHTS = {known.model: f"weights/{known.file}" for known in KNOWN_WEIGHTS}
"""Weights that timm does not have, where `python -m benchmarks.backbones download TRUNK --output weights` puts
them."""

ABOUT_A_QUOTED_ROW = ("row", "dataset", "backbone", "embedding_dim")

EXPLAINED = (
    "paper: what the paper reports, in percent, with its own 95 % interval where it gives one; quoted: what the "
    "paper copied from elsewhere. ours: the mean over seeds ± the half-width of its 95 % Student-t interval, of "
    "single models on the test classes; one seed has no interval. difference: ours - paper, in percentage points."
)

OVER_PARTS = (
    "± over parts: of a single run, the half-width of the 95 % interval over parts of the test set."
)

REMARKS = {
    "differs": "Differs from the paper",
    "not_given": "Not given by the paper",
    "printed": "About the printed numbers",
    "published_code": "Follows the paper, not its published code",
}

DIRTY = "dirty: the code had changes that were in no commit."

SUFFIX = {"embedding": "", "descriptor": " †"}

NOTES = {"over parts": OVER_PARTS, " dirty)": DIRTY, "†": DESCRIPTOR}
"""Notes on what stands in a heading or a cell."""


def paper_page(table: RecipeTable, folders: Sequence[Path]) -> Page:
    """Lay out a paper's table, with the runs below some folders beside its numbers."""
    entries, groups, left_out = table.entries, *_collect(table, folders)
    fresh = {of: [one for one in found if not one.changes] for of, found in groups.items()}
    datasets = dict.fromkeys([*map(_dataset, entries), *(row["dataset"] for row in table.quoted)])
    marks: dict[str, int] = {}  # what is said about a group, and its number
    blocks: list[str | Table] = []
    for dataset in datasets:
        of_it = [entry for entry in entries if _dataset(entry) == dataset]
        for entry in of_it:
            for group in groups[entry.training]:
                if fresh[entry.training] != [group]:  # stale, or one of several
                    number = marks.setdefault(_about(entry, group), len(marks) + 1)
                    group.mark = f"{', stale' if group.changes else ''} (note {number})"
        quoted = [row for row in table.quoted if row["dataset"] == dataset]
        blocks += [f"### {dataset}", _table(of_it, quoted, groups)]
    shown = Page("", blocks).markdown()
    done = sum(bool(fresh[entry.training]) for entry in entries)
    notes = [f"{done} of {len(entries)} rows have runs of the recipe as it is.", EXPLAINED]
    notes += [note for words, note in NOTES.items() if words in shown]
    notes += [f"note {number}: {mark}" for mark, number in marks.items()]
    runs = chain(*(group.runs for of in groups.values() for group in of))
    if commits := {str(run.info.get("commit")) for run in runs}:
        notes.append(f"ours was run at commit {', '.join(sorted(commits))}.")
    lists = {"Notes": [*notes, *left_out]}
    lists |= {title: _remarks(entries, key) for key, title in REMARKS.items()}
    for title, lines in lists.items():
        if lines:
            blocks += [f"### {title}", "\n".join(f"* {line}" for line in lines)]
    missing = [entry for entry in entries if not fresh[entry.training]]
    if commands := _commands(table.name, missing, folders):
        blocks += ["### Rows that are missing", "\n".join(["```bash", *commands, "```"])]
    return Page(table.title, blocks)


def _dataset(entry: Entry) -> str:
    dataset: str = entry.settings.get("data", {}).get("dataset", Data.dataset)
    return dataset


def _about(entry: Entry, group: Group) -> str:
    """The changes of a stale group, or else the data and the weights that tell it from others."""
    said = [
        f"{c.key} is {shorten(json.dumps(c.before), 80)} in these runs, "
        f"{shorten(json.dumps(c.now), 80)} in the recipe"
        for c in group.changes
    ]
    data, weights = group.first["data"], group.first.get("weights")
    tested = f"tested on {data['name']} with fingerprint {data['fingerprint'][:8]}"
    if weights:
        tested += f", weights {weights['file']} (SHA-256 {weights['sha256'][:8]})"
    return f"{entry.training}: {'; '.join(said) or tested}"


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


def _commands(table: str, missing: Sequence[Entry], folders: Sequence[Path]) -> list[str]:
    """Commands that train the missing rows, one command for rows that share settings."""
    found: dict[tuple[str, ...], dict[str, None]] = {}  # ordered
    for entry in missing:
        # Options that a recipe leaves to the command line.
        options = () if _dataset(entry) == Data.dataset else ("--data.root", "data")
        if weights := WEIGHTS.get(entry.settings.get("model", {}).get("trunk", "")):
            options = (*options, "--model.weights", weights)
        found.setdefault(options, {})[entry.training] = None
    runs = [] if list(folders) == [RUNS] else ["--runs", str(folders[0])]
    commands = []
    for options, trainings in found.items():
        recipes = [*trainings] if len(found) > 1 else [table]
        sweep = ["python", "-m", "benchmarks.sweep", *recipes, *runs]
        commands.append(shlex.join([*sweep, *(["--", *options] if options else [])]))
    return commands


# ------------------------------------------------------------------------------------------- the rows


def _table(
    entries: Sequence[Entry],
    quoted: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[Group]],
) -> Table:
    """The table of a dataset without empty columns; its metrics are those that the paper reports, or else ours."""
    copied = [
        {key: value for key, value in row.items() if key not in ABOUT_A_QUOTED_ROW}
        for row in quoted
    ]
    reported = [*chain(*(entry.cells.values() for entry in entries)), *copied]
    if not reported:
        every = chain(*(groups[entry.training] for entry in entries))
        outputs = chain(*(group.outputs.values() for group in every))
        reported = [*chain(*(seeds.values() for seeds in outputs))]
    metrics = dict.fromkeys(chain(*reported))
    rows = [
        {"method": row["row"], "numbers": "quoted by the paper", "trunk": row.get("backbone", "")}
        | {"dimension": str(row.get("embedding_dim", ""))}
        | {metric_name(key): _as_printed(value) for key, value in cells.items()}
        for row, cells in zip(quoted, copied, strict=True)
    ]
    for entry in entries:
        rows += _entry_rows(entry, groups[entry.training], [*metrics])
    names = [metric_name(metric) for metric in metrics]
    first = ["method", "numbers", *names, "runs", "trunk", "crop", "dimension"]
    oracles = dict.fromkeys(key for row in rows for key in row if key not in first)
    columns = [name for name in (*first, *oracles) if any(row.get(name) for row in rows)]
    header = [f"{name} (%)" if name in names or name in oracles else name for name in columns]
    return Table(header, [[row.get(name, "") for name in columns] for row in rows], names=2)


def _entry_rows(
    entry: Entry, groups: Sequence[Group], metrics: Sequence[str]
) -> Iterator[dict[str, str]]:
    """Rows as {column: text}: for each output the paper's numbers, and ours of each group."""
    measured = dict.fromkeys(output for group in groups for output in group.outputs)
    for output in entry.cells or measured or ["embedding"]:
        suffix = SUFFIX.get(output, f", {output.replace('_', ' ')}")
        method = {"method": entry.label + suffix}
        paper = entry.cells.get(output, {})
        if paper:
            halves = entry.half_widths.get(output, {})
            cells = {metric_name(m): _as_printed(paper[m], halves.get(m)) for m in paper}
            yield {**method, "numbers": "paper", **cells}
            method = {}
        elif not groups:
            yield {**method, "numbers": "ours", "runs": "0"}
        for group in groups:
            yield {**method, **_ours(group, output, metrics, paper)}
            if paper and group.runs and not group.changes:
                differences = {
                    metric_name(metric): f"{100 * ours.mean - number:+.2f}"
                    for metric, number in paper.items()
                    if (ours := group.estimate(metric, output))
                }
                yield {"numbers": "difference", **differences}
            method = {}


def _ours(
    group: Group, output: str, metrics: Sequence[str], paper: Mapping[str, float]
) -> dict[str, str]:
    model, data = group.first["config"]["model"], group.first["data"]
    over_parts = len(group.runs) == 1 and group.first.get("half_widths", {}).get(output)
    ensemble, dirty = model.get("ensemble"), sum(bool(r.info.get("dirty")) for r in group.runs)
    cells = {
        "numbers": f"ours{', ± over parts' if over_parts else ''}{group.mark}",
        "runs": group.count + (f" ({dirty} dirty)" if dirty else ""),
        "trunk": model["trunk"] + (f", ensemble of {ensemble['num_heads']}" if ensemble else ""),
        "crop": str(data.get("image_size") or ""),
        "dimension": str(model["embedding_size"]),
    }
    for metric in metrics:
        if found := group.estimate(metric, output):
            cells[metric_name(metric)] = found.percent()
        elif metric in paper:
            cells[metric_name(metric)] = "not measured"
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


def _collect(
    table: RecipeTable, folders: Iterable[Path]
) -> tuple[dict[str, list[Group]], list[str]]:
    """The groups of each training, those of the unchanged recipe first, and notes on runs left out."""
    runs: dict[str, list[Run]] = {entry.training: [] for entry in table.entries}
    notes: list[str] = []
    # A run found below two of the folders counts once.
    for folder in {path.resolve(): path for path in _run_folders(folders)}.values():
        try:
            run = load_run(folder)
        except ValueError as error:
            notes.append(f"left out: {error}")
            continue
        if (training := run.info.get("recipe")) in runs:
            if reason := _why_not(run.info):
                notes.append(f"left out: {folder} {reason}")
            else:
                runs[training].append(run)
    groups = {training: _groups(training, of_it, notes) for training, of_it in runs.items()}
    return groups, [printable(note) for note in notes]


def _run_folders(folders: Iterable[Path]) -> Iterator[Path]:
    """All run folders; folders inside a run folder are not searched."""
    for folder in folders:
        for path, inside, files in os.walk(folder):
            inside.sort()
            if "run.json" in files:
                inside.clear()
                yield Path(path)


def _why_not(info: dict[str, Any]) -> str | None:
    """Why a run is no test by a paper's protocol."""
    if info["status"] != "finished" and not has_diverged(info):
        return f"is {info['status']}, not finished"
    if info["data"]["split"] != "test":
        return "was measured on validation classes, not on test classes"
    if info["protocol"] != "paper":
        return "is of protocol fair; python -m benchmarks.fair compares such runs"
    return None


def _weights(info: dict[str, Any]) -> Any:
    """The file of weights that a run started from, or the folder whose files its seeds use in turn."""
    asked, found = info["config"]["model"].get("weights"), info.get("weights")
    turns = asked and found and Path(str(asked)).name != found["file"]
    return Path(str(asked)).name if turns else found


def _groups(training: str, runs: Sequence[Run], notes: list[str]) -> list[Group]:
    alike: dict[str, tuple[list[Run], list[Change]]] = {}
    recipe = resolved(parse(["--recipe", training]).config) if runs else {}
    # Those that diverged come first: one that finished takes the place of the same seed.
    for run in sorted(runs, key=lambda run: str(run.info.get("finished") or "")):
        config = run.info["config"]
        with damage_named(run.folder / "run.json"):
            # An oracle adds a number and changes none.
            oracle = bool(config["evaluation"].get("oracle"))
            same = merge(recipe, {"evaluation": {"oracle": oracle}})
            changed, weights = changes_of_methods(config, same), _weights(run.info)
        data = [run.info["data"].get(name) for name in TESTED_ON]
        settings = [(change.key, change.before) for change in changed]
        key = json.dumps([data, weights, settings], sort_keys=True)
        alike.setdefault(key, ([], changed))[0].append(run)
    groups = [Group(*of) for of in alike.values()]
    for group in groups:
        notes += [
            f"left out: {older.folder}, seed {run.seed} was run again in {run.folder}"
            for older, run in group.replaced
        ]
        notes += [
            f"diverged: {run.folder}, seed {run.seed}: {run.info.get('error')}"
            for run in group.diverged
        ]
    return sorted(groups, key=lambda group: bool(group.changes))
