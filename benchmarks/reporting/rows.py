"""Runs as rows: grouped into methods, with one row per output and seed."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from benchmarks.records.results import Run
from benchmarks.reporting.paired import Estimate, Rows, estimate, values_of
from benchmarks.settings.differences import Change, changes_of_methods, flat

TESTED_ON = ("name", "split", "fold", "fingerprint", "test_classes", "test_images", "view")
"""Facts about the data that must be equal in one table."""


class Group:
    """Runs that differ only in their seeds, by seed: those that finished, and those that diverged.

    Of several runs of one seed, the last counts.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self.replaced: list[tuple[Run, Run]] = []  # each with the later one that counts
        seeds: dict[int, Run] = {}
        for run in runs:
            if older := seeds.get(run.seed):
                self.replaced.append((older, run))
            seeds[run.seed] = run
        of_seeds = [seeds[seed] for seed in sorted(seeds)]
        self.runs = [run for run in of_seeds if run.outcome != "diverged"]
        self.diverged = [run for run in of_seeds if run.outcome == "diverged"]

    @property
    def first(self) -> dict[str, Any]:
        """The record of the first run."""
        return (self.runs or self.diverged)[0].info

    @property
    def diverged_notes(self) -> list[str]:
        """Notes on the runs that diverged."""
        return [
            f"diverged: {run.folder}, seed {run.seed}: {run.info.get('error')}"
            for run in self.diverged
        ]

    @cached_property
    def outputs(self) -> Rows:
        """The metrics of each output and seed, those of the embedding first."""
        rows: Rows = {"embedding": {}}
        for run in self.runs:
            rows["embedding"][run.seed] = run.info["metrics"]
            for output, metrics in run.info.get("outputs", {}).items():
                rows.setdefault(output, {})[run.seed] = metrics
        return rows

    def estimate(self, metric: str, output: str) -> Estimate | None:
        """A metric over seeds, or of a single run over the parts of the test set; None unless all runs have it."""
        values = values_of(self.outputs.get(output, {}), metric)
        if not values or len(values) < len(self.runs):
            return None
        over_parts = self.first.get("half_widths", {}).get(output, {}).get(metric)
        only = len(values) == 1 and over_parts is not None
        return Estimate(values[0], over_parts) if only else estimate(values)


def tested(groups: Mapping[str, Group], entry: str) -> dict[str, list[dict[str, Any]]]:
    """An entry of the records of each method's runs: of the methods of which some run has it."""
    known = {
        label: [run.info[entry] for run in group.runs if run.info.get(entry)]
        for label, group in groups.items()
    }
    return {label: entries for label, entries in known.items() if entries}


def differing_settings(first: Run, run: Run) -> list[str]:
    """The settings in which two runs differ and that change the result, except seed and fold."""
    before, now = first.info["config"], run.info["config"]
    changes = [change for change in changes_of_methods(before, now) if not _same_classes(change)]
    old, new = (other.info.get("weights") or {} for other in (first, run))
    places = {flat(config).get("model.weights") for config in (before, now)}
    # Seeds and folds take turns with the files of a folder.
    in_turn = len(places) == 1 and old and new and old.get("file") != new.get("file")
    if old.get("sha256") != new.get("sha256") and not in_turn:
        changes.append(Change("model.weights", old, new))
    return list(dict.fromkeys(change.key for change in changes))


def check_method(first: Run, run: Run, told: str) -> None:
    """Raise a ValueError, which tells why and what to do, if two runs have other settings than seed and fold."""
    for setting in differing_settings(first, run):
        raise ValueError(f"{run.folder}: its {setting} is not that of {first.folder}; {told}")


def _same_classes(change: Change) -> bool:
    """True for two paths of the file that names test classes: the data's fingerprint tells if they are the same."""
    both = isinstance(change.before, str) and isinstance(change.now, str)
    return change.key == "data.test_classes" and both


OF_A_METHOD = {"variance_correlation"}  # metrics that only networks with a method have


def check_alike(first: Run, run: Run, keys: Sequence[str] = TESTED_ON) -> None:
    """Raise a ValueError unless both were tested on the same data, by the same metrics."""
    both = all(other.info["data"].get("content") for other in (first, run))  # not of older code
    for key in [*keys, *(["content"] if both else [])]:
        expected, got = first.info["data"].get(key), run.info["data"].get(key)
        if got != expected:
            raise ValueError(
                f"{run.folder}: data {key} is {got!r}, but {expected!r} in {first.folder}; "
                "only runs tested on the same data can be compared"
            )
    measured, expected = (other.info["metrics"].keys() - OF_A_METHOD for other in (run, first))
    if measured != expected and "diverged" not in (run.outcome, first.outcome):
        raise ValueError(
            f"{run.folder}: measured {sorted(measured)}, but {first.folder} {sorted(expected)}; test both with the "
            "same evaluation settings"
        )
