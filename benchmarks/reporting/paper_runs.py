"""Finished runs for the entries of a paper's table."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.building import resolved
from benchmarks.console import printable
from benchmarks.records import Run, damage_named, has_diverged, load_run
from benchmarks.reporting.comparison import TESTED_ON
from benchmarks.reporting.paired import Estimate, estimate
from benchmarks.settings import (
    GROUPS,
    Change,
    Entry,
    RecipeTable,
    changes_of_methods,
    merge,
    parse,
)


@dataclass(frozen=True)
class Group:
    """Finished runs of one training that differ only in their seeds, and those that diverged."""

    runs: list[Run]  # by seed
    changes: list[Change]  # before in these runs, now in the recipe
    diverged: list[Run]

    @property
    def first(self) -> dict[str, Any]:
        return (self.runs or self.diverged)[0].info

    @cached_property
    def outputs(self) -> dict[str, list[dict[str, float]]]:
        """{output: [the metrics of each run]}, for the outputs that all runs measured."""
        measured = [{"embedding": run.info["metrics"], **run.info["outputs"]} for run in self.runs]
        return {
            name: [outputs[name] for outputs in measured]
            for name in (measured[0] if measured else ())
            if all(name in outputs for outputs in measured)
        }

    def estimate(self, metric: str, output: str | None = None) -> Estimate | None:
        """A metric over seeds, or of a single run over the parts of the test set; None unless all runs have it.

        Args:
            output: Default: the first that has the metric.
        """
        names = self.outputs if output is None else [output]
        for name in names:
            values = [run[metric] for run in self.outputs.get(name, []) if metric in run]
            if values and len(values) == len(self.runs):
                half_width = self.first.get("half_widths", {}).get(name, {}).get(metric)
                over_parts = len(values) == 1 and half_width is not None
                return Estimate(values[0], half_width) if over_parts else estimate(values)
        return None


@dataclass(frozen=True)
class Found:
    """The runs of a table's trainings, {training: groups}, and notes on those left out."""

    groups: dict[str, list[Group]]
    notes: list[str]

    def of(self, entry: Entry) -> list[Group]:
        """The entry's groups, fresh ones first."""
        return sorted(self.groups[entry.training], key=lambda group: bool(group.changes))

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
        if run.info.get("recipe") not in runs:
            continue
        if reason := _why_not(run.info):
            notes.append(f"left out: {folder} {reason}")
        else:
            runs[run.info["recipe"]].append(run)
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
    groups: dict[str, dict[int, Run]] = {}
    changes: dict[str, list[Change]] = {}
    recipe = resolved(parse(["--recipe", training]).config) if runs else {}
    # Those that diverged come first: one that finished takes the place of the same seed.
    for run in sorted(runs, key=lambda run: str(run.info.get("finished") or "")):
        config = run.info["config"]
        # An oracle adds a number and changes none.
        same = merge(recipe, {"evaluation": {"oracle": bool(config["evaluation"].get("oracle"))}})
        with damage_named(run.folder / "run.json"):
            changed = changes_of_methods(config, same)
        key = json.dumps(
            [
                [run.info["data"].get(name) for name in TESTED_ON],
                _weights(run.info),
                [(change.key, change.before) for change in changed],
            ],
            sort_keys=True,
        )
        seeds, changes[key] = groups.setdefault(key, {}), changed
        if run.seed in seeds:
            older = seeds[run.seed].folder
            notes.append(f"left out: {older}, seed {run.seed} was run again in {run.folder}")
        seeds[run.seed] = run
    found = []
    for key, seeds in groups.items():
        ordered = [seeds[seed] for seed in sorted(seeds)]
        diverged = [run for run in ordered if has_diverged(run.info)]
        told = (f"{run.folder}, seed {run.seed}: {run.info.get('error')}" for run in diverged)
        notes += [f"diverged: {one}" for one in told]
        found.append(Group([run for run in ordered if run not in diverged], changes[key], diverged))
    return found
