"""Runs as rows: found below folders, grouped into methods, with one row per output and seed."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from benchmarks.building import resolved
from benchmarks.console import printable
from benchmarks.records import Run, damage_named, has_diverged, load_run
from benchmarks.reporting.paired import Estimate, Rows, estimate, values_of
from benchmarks.reporting.table import count_of_seeds
from benchmarks.settings import GROUPS, Change, Entry, RecipeTable, changes_of_methods, merge, parse

TESTED_ON = ("name", "split", "fold", "fingerprint", "test_classes", "test_images", "view")
"""Facts about the data that must be equal in one table."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds, by seed: those that finished, and those that diverged."""

    runs: list[Run]
    diverged: list[Run]
    replaced: list[tuple[Run, Run]]  # a run of a seed, and the later one that counts
    changes: list[Change] = field(default_factory=list)  # before in these runs, now in the recipe

    @classmethod
    def of(cls, runs: Iterable[Run], changes: Sequence[Change] = ()) -> Self:
        """Group runs; of those of one seed, the last counts."""
        seeds: dict[int, Run] = {}
        replaced = []
        for run in runs:
            if older := seeds.get(run.seed):
                replaced.append((older, run))
            seeds[run.seed] = run
        diverged = [seed for seed in sorted(seeds) if has_diverged(seeds[seed].info)]
        finished = [seeds[seed] for seed in sorted(seeds.keys() - diverged)]
        return cls(finished, [seeds[seed] for seed in diverged], replaced, [*changes])

    @property
    def first(self) -> dict[str, Any]:
        """The record of the first run."""
        return (self.runs or self.diverged)[0].info

    @property
    def count(self) -> str:
        return count_of_seeds(len(self.runs), [run.seed for run in self.diverged])

    @cached_property
    def outputs(self) -> Rows:
        """The metrics of each output and seed, those of the embedding first."""
        rows: Rows = {"embedding": {}}
        for run in self.runs:
            for output, metrics in {
                "embedding": run.info["metrics"],
                **run.info.get("outputs", {}),
            }.items():
                rows.setdefault(output, {})[run.seed] = metrics
        return rows

    def estimate(self, metric: str, output: str | None = None) -> Estimate | None:
        """A metric over seeds, or of a single run over the parts of the test set; None unless all runs have it.

        Args:
            output: Default: the first that has the metric.
        """
        for name in self.outputs if output is None else [output]:
            values = values_of(self.outputs.get(name, {}), metric)
            if values and len(values) == len(self.runs):
                half_width = self.first.get("half_widths", {}).get(name, {}).get(metric)
                over_parts = len(values) == 1 and half_width is not None
                return Estimate(values[0], half_width) if over_parts else estimate(values)
        return None


OF_A_METHOD = {"variance_correlation"}
"""Metrics that only networks with a method have."""


def check_alike(first: Run, run: Run, keys: Sequence[str] = TESTED_ON) -> None:
    """Raise a ValueError unless both were tested on the same data, by the same metrics."""
    for key in keys:
        expected, got = first.info["data"].get(key), run.info["data"].get(key)
        if got != expected:
            raise ValueError(
                f"{run.folder}: data {key} is {got!r}, but {expected!r} in {first.folder}; "
                "only runs tested on the same data can be compared"
            )
    measured, expected = (one.info["metrics"].keys() - OF_A_METHOD for one in (run, first))
    if measured != expected and not has_diverged(run.info):
        raise ValueError(
            f"{run.folder}: measured {sorted(measured)}, but {first.folder} {sorted(expected)}; test both with the "
            "same evaluation settings"
        )


# ---------------------------------------------------------------------------------- a paper's tables


@dataclass(frozen=True)
class Found:
    """The groups of a table's trainings, those of the unchanged recipe first, and notes on runs left out."""

    groups: dict[str, list[Group]]
    notes: list[str]

    def of(self, entry: Entry) -> list[Group]:
        return self.groups[entry.training]

    def fresh(self, entry: Entry) -> list[Group]:
        """The entry's groups of the unchanged recipe."""
        return [group for group in self.of(entry) if not group.changes]


def collect(table: RecipeTable, folders: Iterable[Path]) -> Found:
    """Collect the runs of a table's trainings below some folders, in groups."""
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
    return Found(groups, [printable(note) for note in notes])


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
        # An oracle adds a number and changes none.
        same = merge(recipe, {"evaluation": {"oracle": bool(config["evaluation"].get("oracle"))}})
        with damage_named(run.folder / "run.json"):
            changed = changes_of_methods(config, same)
        data = [run.info["data"].get(name) for name in TESTED_ON]
        settings = [(change.key, change.before) for change in changed]
        key = json.dumps([data, _weights(run.info), settings], sort_keys=True)
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
