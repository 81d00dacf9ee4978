"""A study's JSON file: the plans that were registered, and the results of all its trainings."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.console import alone
from benchmarks.records import (
    damage_named,
    descends,
    describe_code,
    load_run,
    now,
    read_json,
    write_json,
)
from benchmarks.settings import misfit
from benchmarks.studies.jobs import Job

Result = dict[str, Any]
"""Result of a training: the entries of `KEPT`, its "processor", and "data", the fingerprint of the images.

A training that diverged has no metrics. A test also has the entries of `OF_TESTS`, its "curves", the "plan" that
was registered when it began, and "commits" if other code resumed it.
"""

NUMBER = (int, float)

KEPT = {
    **{"commit": (str, type(None)), "dirty": (bool, type(None)), "wall_time_s": NUMBER},
    **{"metrics": {...: NUMBER}, "outputs": {...: {...: NUMBER}}, "curve": {...: NUMBER}},
}
"""Entries of a kept result, and the kinds of their values; see `misfit`."""

PLAN = {"plan": str, "commit": (str, type(None)), "dirty": (bool, type(None)), "date": str}

OF_TESTS = ("per_class", "before_training", "images_per_second")

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

    def add(self, jobs: Iterable[Job]) -> None:
        """Keep the results from these run folders."""
        found, begun = {}, {}
        for job in jobs:
            run, name = load_run(job.folder), _name(job)
            curves = {name: of for name, of in run.table("evaluation").items() if of}
            found[name] = {
                **{key: run.info.get(key) for key in TOLD},
                "processor": run.info["hardware"].get("processor"),
                "data": run.info["data"].get("fingerprint"),
                "curve": {name: of[-1] for name, of in curves.items()},
            }
            if job.config["data"]["split"] == "test":
                begun[name] = str(run.info.get("started", ""))
                sessions = run.info.get("sessions", [])
                commits = {one.get("commit") for one in sessions} - {run.info.get("commit")}
                tested = {key: run.info.get(key) for key in OF_TESTS}
                tested |= {"curves": curves, "commits": [*commits]}
                found[name] |= {key: of for key, of in tested.items() if of}
        self._merge([], found, begun)

    @property
    def count(self) -> int:
        return len(self._kept)

    def plan(self, digest: str) -> dict[str, Any] | None:
        """The registration of a plan: the first one; None if there is none."""
        return next((plan for plan in self._plans if plan["plan"] == digest), None)

    def others(self, digest: str) -> int:
        """The number of other plans that were registered in this file."""
        return len({plan["plan"] for plan in self._plans} - {digest})

    def register(self, digest: str) -> None:
        """Write down that the tests from now on follow a plan, with the commit of the code."""
        if not self._plans or self._plans[-1]["plan"] != digest:
            self._merge([{"plan": digest, **describe_code(), "date": now()}], {}, {})

    def counts(self, result: Result, digest: str) -> bool:
        """True if a test was made under the registered plan, by committed code that descends from its commit."""
        plan = self.plan(digest)
        if plan is None or result.get("plan") != digest or result["dirty"]:
            return False
        commits = [result["commit"], *result.get("commits", [])]
        return all(descends(commit, plan["commit"]) for commit in commits)

    def _merge(
        self, plans: list[dict[str, Any]], found: dict[str, Result], begun: dict[str, str]
    ) -> None:
        """Add plans and results; a test that began after a plan was registered has the newest such plan."""
        with alone(self._path, wait=True):  # nobody writes between reading and writing
            before, kept = self._read()
            newest = before[-1]["plan"] if before else None
            self._plans = before + [plan for plan in plans if plan["plan"] != newest]
            for name, date in begun.items():
                if under := [plan["plan"] for plan in self._plans if plan["date"] <= date]:
                    found[name]["plan"] = under[-1]
            self._kept |= found | kept  # a result that is there stays
            write_json(self._path, {"plans": self._plans, "results": self._kept})


def _name(job: Job) -> str:
    """A key of the recipe, the seed, and a digest of the settings and weights that can change the result."""
    return f"{job.training}, seed {job.seed}, settings {job.digest[:16]}"
