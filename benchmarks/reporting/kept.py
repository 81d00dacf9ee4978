"""Results of finished trainings, in a file that remains when their folders are deleted."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.console import alone
from benchmarks.records import damage_named, load_run, read_json, write_json
from benchmarks.settings import misfit, settings_of_results

Result = dict[str, Any]
"""Result of a training: the entries of `KEPT`, and its "processor". A training that diverged has no metrics."""

NUMBER = (int, float)

KEPT = {
    **{"commit": (str, type(None)), "dirty": (bool, type(None)), "wall_time_s": NUMBER},
    **{"metrics": {...: NUMBER}, "outputs": {...: {...: NUMBER}}, "curve": {...: NUMBER}},
}
"""Entries of a kept result, and the kinds of their values; see `misfit`."""


class Training(Protocol):
    """A training with a seed, made by `studies.plan`."""

    folder: Path
    training: str
    seed: int
    config: dict[str, Any]
    weights: dict[str, str] | None


class Results:
    """The file of results.

    Raises:
        ValueError: if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = self._read()

    def _read(self) -> dict[str, Result]:
        with damage_named(self._path, "restore it, since it holds the results of all trainings"):
            kept = read_json(self._path)["results"] if self._path.exists() else {}
            if (place := misfit(kept, {...: KEPT})) is not None:
                raise ValueError(f"results.{place} is missing or of another kind")
            return dict(kept)

    def of(self, training: Training) -> Result | None:
        """The result of a training with these weights and settings; None if there is none.

        Settings that cannot change a result do not count.
        """
        return self._kept.get(_name(training))

    def add(self, trainings: Iterable[Training]) -> None:
        """Keep the results from these run folders, beside those that other commands keep meanwhile."""
        found = {}
        for training in trainings:
            run = load_run(training.folder)
            curve = {name: of[-1] for name, of in run.table("evaluation").items() if of}
            told = ("commit", "dirty", "wall_time_s", "metrics", "outputs")
            found[_name(training)] = {
                **{key: run.info.get(key) for key in told},
                "processor": run.info["hardware"].get("processor"),
                "curve": curve,
            }
        with alone(self._path, wait=True):  # nobody writes between reading and writing
            self._kept |= self._read() | found
            write_json(self._path, {"results": self._kept})


def _name(training: Training) -> str:
    """A key of the recipe, the seed, and a digest of the settings and weights that can change the result.

    Null settings are left out, like settings that older code did not have, and 1 equals 1.0.
    """
    evaluation = training.config["evaluation"]
    curves = [evaluation["every"] > 0, evaluation["curve_classes"]]
    moving = {
        key: _plain(value)
        for key, value in settings_of_results(training.config).items()
        if value is not None
    }
    weights = training.weights and training.weights["sha256"]
    settings = json.dumps([moving, weights, curves], sort_keys=True)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    return f"{training.training}, seed {training.seed}, settings {digest[:16]}"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(value) if type(value) is int else value
