"""A paper's table, with our results beside its numbers."""

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    GROUPS,
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
    return _Layout(table, *_collect(table, folders), folders).page()


@dataclass
class _Layout:
    """Layout of a table, with the marks that it has given to rows so far."""

    table: RecipeTable
    groups: dict[str, list[Group]]
    left_out: list[str]
    folders: Sequence[Path]
    marks: list[str] = field(default_factory=list)

    def page(self) -> Page:
        entries = self.table.entries
        quoted = [row["dataset"] for row in self.table.quoted]
        blocks: list[str | Table] = []
        for dataset in dict.fromkeys([*map(_dataset, entries), *quoted]):
            blocks += [f"### {dataset}", _table(*self._rows(dataset))]
        shown = Page("", blocks).markdown()
        done = sum(bool(self._fresh(entry)) for entry in entries)
        notes = [f"{done} of {len(entries)} rows have runs of the recipe as it is.", EXPLAINED]
        notes += [note for words, note in NOTES.items() if words in shown]
        notes += [f"note {number}: {mark}" for number, mark in enumerate(self.marks, 1)]
        groups = [group for of_one in self.groups.values() for group in of_one]
        if commits := {str(run.info.get("commit")) for group in groups for run in group.runs}:
            notes.append(f"ours was run at commit {', '.join(sorted(commits))}.")
        lists = {"Notes": [*notes, *self.left_out]}
        lists |= {title: self._remarks(key) for key, title in REMARKS.items()}
        for title, lines in lists.items():
            if lines:
                blocks += [f"### {title}", "\n".join(f"* {line}" for line in lines)]
        if commands := self._commands():
            blocks += ["### Rows that are missing", "\n".join(["```bash", *commands, "```"])]
        return Page(self.table.title, blocks)

    def _fresh(self, entry: Entry) -> list[Group]:
        """The entry's groups of the unchanged recipe."""
        return [group for group in self.groups[entry.training] if not group.changes]

    def _rows(self, dataset: str) -> tuple[list[dict[str, str]], list[str]]:
        """Rows as {column: text}, and the metrics' columns."""
        entries = [entry for entry in self.table.entries if _dataset(entry) == dataset]
        quoted = [row for row in self.table.quoted if row["dataset"] == dataset]
        reported = [cells for entry in entries for cells in entry.cells.values()]
        reported += [_quoted_metrics(row) for row in quoted]
        if not reported:
            groups = [group for entry in entries for group in self.groups[entry.training]]
            every = [seeds for group in groups for seeds in group.outputs.values()]
            reported = [metrics for seeds in every for metrics in seeds.values()]
        metrics = list(dict.fromkeys(metric for cells in reported for metric in cells))
        rows = [_quoted_row(row) for row in quoted]
        for entry in entries:
            rows += self._entry_rows(entry, metrics)
        return rows, [metric_name(metric) for metric in metrics]

    def _entry_rows(self, entry: Entry, metrics: Sequence[str]) -> Iterator[dict[str, str]]:
        groups = self.groups[entry.training]
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
                yield {**method, **self._ours(entry, group, output, metrics)}
                if paper and group.runs and not group.changes:
                    yield {"numbers": "difference", **_difference(group, output, paper)}
                method = {}

    def _ours(
        self, entry: Entry, group: Group, output: str, metrics: Sequence[str]
    ) -> dict[str, str]:
        model = group.first["config"]["model"]
        over_parts = len(group.runs) == 1 and group.first.get("half_widths", {}).get(output)
        ensemble, dirty = model.get("ensemble"), sum(bool(r.info.get("dirty")) for r in group.runs)
        cells = {}
        for metric in metrics:
            if found := group.estimate(metric, output):
                cells[metric_name(metric)] = found.percent()
            elif metric in entry.cells.get(output, {}):
                cells[metric_name(metric)] = "not measured"
        return cells | {
            "numbers": f"ours{', ± over parts' if over_parts else ''}{self._mark(entry, group)}",
            "runs": group.count + (f" ({dirty} dirty)" if dirty else ""),
            "trunk": model["trunk"]
            + (f", ensemble of {ensemble['num_heads']}" if ensemble else ""),
            "crop": str(group.first["data"].get("image_size") or ""),
            "dimension": str(model["embedding_size"]),
            **(_oracle(group) if output == "embedding" else {}),
        }

    def _mark(self, entry: Entry, group: Group) -> str:
        """Mark after "ours", for a stale group or for one of several fresh groups of the entry."""
        if self._fresh(entry) == [group]:
            return ""
        said = [
            f"{c.key} is {shorten(json.dumps(c.before), 80)} in these runs, "
            f"{shorten(json.dumps(c.now), 80)} in the recipe"
            for c in group.changes
        ]
        text = f"{entry.training}: {'; '.join(said) or _tested_with(group)}"
        if text not in self.marks:
            self.marks.append(text)
        return f"{', stale' if said else ''} (note {self.marks.index(text) + 1})"

    def _remarks(self, key: str) -> list[str]:
        """Remarks on trainings and paper, each with the names of its recipe rows unless it holds for all."""
        rows: dict[str, list[str]] = {}
        for entry in self.table.entries:
            for remark in entry.remarks.get(key, []):
                rows.setdefault(remark.text, []).append(entry.name.rpartition("/")[2])
        return [
            line if len(names) == len(self.table.entries) else f"{', '.join(names)}: {line}"
            for line, names in rows.items()
        ]

    def _commands(self) -> list[str]:
        """Commands that train the missing rows, one command for rows that share settings."""
        missing: dict[tuple[str, ...], dict[str, None]] = {}  # ordered
        for entry in self.table.entries:
            if not self._fresh(entry):
                missing.setdefault(_options(entry), {})[entry.training] = None
        runs = [] if list(self.folders) == [RUNS] else ["--runs", str(self.folders[0])]
        commands = []
        for options, trainings in missing.items():
            recipes = [*trainings] if len(missing) > 1 else [self.table.name]
            sweep = ["python", "-m", "benchmarks.sweep", *recipes, *runs]
            commands.append(shlex.join([*sweep, *(["--", *options] if options else [])]))
        return commands


def _options(entry: Entry) -> tuple[str, ...]:
    """Options that a recipe leaves to the command line."""
    options = () if _dataset(entry) == Data.dataset else ("--data.root", "data")
    weights = WEIGHTS.get(entry.settings.get("model", {}).get("trunk", ""))
    return (*options, "--model.weights", weights) if weights else options


def _table(rows: Sequence[Mapping[str, str]], metrics: Sequence[str]) -> Table:
    """The table without empty columns."""
    first = ["method", "numbers", *metrics, "runs", "trunk", "crop", "dimension"]
    oracles = dict.fromkeys(key for row in rows for key in row if key not in first)
    columns = [name for name in (*first, *oracles) if any(row.get(name) for row in rows)]
    header = [f"{name} (%)" if name in metrics or name in oracles else name for name in columns]
    return Table(header, [[row.get(name, "") for name in columns] for row in rows], names=2)


def _dataset(entry: Entry) -> str:
    dataset: str = entry.settings.get("data", {}).get("dataset", Data.dataset)
    return dataset


def _quoted_row(row: Mapping[str, Any]) -> dict[str, str]:
    cells = {metric_name(key): _as_printed(value) for key, value in _quoted_metrics(row).items()}
    about = {"trunk": row.get("backbone", ""), "dimension": str(row.get("embedding_dim", ""))}
    return {"method": row["row"], "numbers": "quoted by the paper", **cells, **about}


def _quoted_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key not in ABOUT_A_QUOTED_ROW}


def _as_printed(percent: float, half_width: float | None = None) -> str:
    """A paper's number, with at least one decimal."""
    numbers = [percent] if half_width is None else [percent, half_width]
    return " ± ".join(f"{n:.1f}" if round(n, 1) == n else f"{n:g}" for n in numbers)


def _difference(group: Group, output: str, paper: Mapping[str, float]) -> dict[str, str]:
    return {
        metric_name(metric): f"{100 * ours.mean - number:+.2f}"
        for metric, number in paper.items()
        if (ours := group.estimate(metric, output))
    }


def _oracle(group: Group) -> dict[str, str]:
    metric = f"recall_at_{group.first['config']['evaluation']['recall_at'][0]}"
    values = [run.info["oracle"][metric] for run in group.runs if run.info.get("oracle")]
    column = f"oracle (test-selected) {metric_name(metric)}"
    return {column: percent(values)} if 0 < len(values) == len(group.runs) else {}


def _tested_with(group: Group) -> str:
    data, weights = group.first["data"], group.first.get("weights")
    said = f"tested on {data['name']} with fingerprint {data['fingerprint'][:8]}"
    file = weights and f", weights {weights['file']} (SHA-256 {weights['sha256'][:8]})"
    return said + (file or "")


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
    if not all(isinstance(info["config"].get(group), dict) for group in GROUPS):
        return "has a damaged config; run that training again"
    if "protocol" not in info or "outputs" not in info:
        return "is a record of older code; run that training again"
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
    members: dict[str, list[Run]] = {}
    changes: dict[str, list[Change]] = {}
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
        members.setdefault(key, []).append(run)
        changes[key] = changed
    groups = [Group.of(of, changes[key]) for key, of in members.items()]
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
