"""A study's JSON file: the plans that were registered, and the results of all its trainings."""

import hashlib
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.console import alone
from benchmarks.records import damage_named, describe_code, load_run, now, read_json, write_json
from benchmarks.records.provenance import git
from benchmarks.settings import misfit, settings_of_results
from benchmarks.studies.jobs import Job

Result = dict[str, Any]
"""Result of a training: the entries of `KEPT`, its "processor", of a test also "per_class" and "plan".

A training that diverged has no metrics.
"""

NUMBER = (int, float)

KEPT = {
    **{"commit": (str, type(None)), "dirty": (bool, type(None)), "wall_time_s": NUMBER},
    **{"metrics": {...: NUMBER}, "outputs": {...: {...: NUMBER}}, "curve": {...: NUMBER}},
}
"""Entries of a kept result, and the kinds of their values; see `misfit`."""

PLAN = {"plan": str, "commit": (str, type(None)), "dirty": (bool, type(None)), "date": str}

TOLD = ("commit", "dirty", "wall_time_s", "metrics", "outputs")


class Results:
    """The file of plans and results; several commands may add to it at once.

    Raises:
        ValueError: if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plans, self._kept = self._read()

    def _read(self) -> tuple[list[dict[str, Any]], dict[str, Result]]:
        with damage_named(self._path, "restore it, since it holds the results of all trainings"):
            content = read_json(self._path) if self._path.exists() else {"results": {}}
            plans, kept = content.get("plans", []), content["results"]
            if (place := misfit(kept, {...: KEPT})) is not None:
                raise ValueError(f"results.{place} is missing or of another kind")
            if (place := misfit(plans, [PLAN])) is not None:
                raise ValueError(f"plans{place} is missing or of another kind")
            return list(plans), dict(kept)

    def of(self, job: Job) -> Result | None:
        """The result of a training with these weights and settings; None if there is none.

        Settings that cannot change a result do not count.
        """
        return self._kept.get(_name(job))

    def add(self, jobs: Iterable[Job], plan: str | None = None) -> None:
        """Keep the results from these run folders, tests with the plan that they were made under."""
        found = {}
        for job in jobs:
            run = load_run(job.folder)
            curve = {name: of[-1] for name, of in run.table("evaluation").items() if of}
            found[_name(job)] = {
                **{key: run.info.get(key) for key in TOLD},
                "processor": run.info["hardware"].get("processor"),
                "curve": curve,
            }
            if job.config["data"]["split"] == "test":
                known = self.plan(plan) if plan else None
                is_later = known is not None and str(run.info.get("started", "")) >= known["date"]
                tested = {
                    "per_class": run.info.get("per_class"),
                    "plan": plan if is_later else None,
                }
                found[_name(job)] |= {key: of for key, of in tested.items() if of}
        self._merge([], found)

    def seconds(self) -> dict[str, float]:
        """The mean time of the trainings of each recipe."""
        times: dict[str, list[float]] = {}
        for name, result in self._kept.items():
            times.setdefault(name.partition(", seed ")[0], []).append(result["wall_time_s"])
        return {training: sum(of) / len(of) for training, of in times.items()}

    def plan(self, digest: str) -> dict[str, Any] | None:
        """The registered plan, if it is the newest one."""
        newest = self._plans[-1] if self._plans else None
        return newest if newest and newest["plan"] == digest else None

    def register(self, digest: str) -> None:
        """Write down a plan, with the commit of the code, unless it is the newest one."""
        if self.plan(digest) is None:
            self._merge([{"plan": digest, **describe_code(), "date": now()}], {})

    def counts(self, result: Result, digest: str) -> bool:
        """True if a test was made under the registered plan, by code that descends from its commit."""
        plan = self.plan(digest)
        return (
            plan is not None
            and result.get("plan") == digest
            and descends(result["commit"], plan["commit"])
        )

    def _merge(self, plans: list[dict[str, Any]], found: dict[str, Result]) -> None:
        with alone(self._path, wait=True):  # nobody writes between reading and writing
            before, kept = self._read()
            newest = before[-1]["plan"] if before else None
            self._plans = before + [plan for plan in plans if plan["plan"] != newest]
            self._kept |= kept | found
            write_json(self._path, {"plans": self._plans, "results": self._kept})


def descends(commit: str | None, ancestor: str | None) -> bool:
    """True if a commit is the ancestor or comes after it; False if git does not know them."""
    if commit is None or ancestor is None:
        return False
    try:
        git(Path(__file__).parent, "merge-base", "--is-ancestor", ancestor, commit)
    except (OSError, subprocess.SubprocessError):
        return commit == ancestor
    return True


def _name(job: Job) -> str:
    """A key of the recipe, the seed, and a digest of the settings and weights that can change the result."""
    return f"{job.training}, seed {job.seed}, settings {digest_of(job)[:16]}"


def digest_of(job: Job) -> str:
    """SHA-256 of the settings and weights that can change a job's result, for any seed.

    Null settings are left out, like settings that older code did not have, and 1 equals 1.0.
    """
    evaluation = job.config["evaluation"]
    curves = [evaluation["every"] > 0, evaluation["curve_classes"]]
    moving = {
        key: _plain(value)
        for key, value in settings_of_results(job.config).items()
        if value is not None
    }
    weights = job.weights and job.weights["sha256"]
    return hashlib.sha256(
        json.dumps([moving, weights, curves], sort_keys=True).encode()
    ).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return float(value) if type(value) is int else value
