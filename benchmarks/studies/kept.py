"""A study's JSON file: the plans that were registered, and the results of all its trainings."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.building.images import build_datasets
from benchmarks.console.writing import alone
from benchmarks.records.files import damage_named, read_json, write_json
from benchmarks.records.provenance import descends, describe_code, now
from benchmarks.records.results import load_run
from benchmarks.settings.errors import ConfigError
from benchmarks.studies.jobs import Job

Result = dict[str, Any]
"""Result of a training: the entries of `KEPT`, its "processor", "data", the fingerprint of the images, "content",
the SHA-256 of their files' bytes, "queries", how many were asked and had nothing to find, and "curve", the last
point of its curves. A training that diverged has no metrics.

A test also has the entries of `OF_TESTS`, its "curves", the "plan" that was registered when it began, "registered",
the date of that, and "commits" if other code resumed it.
"""

KEPT = ("commit", "dirty", "wall_time_s", "metrics", "outputs")

RENAMED = "renamed"
"""Digests of today's settings, with those under which the file has them: tools/published_names.py adds to them."""

QUERIES = ("test_queries", "unanswered_queries")

PLANS = "plans.json"  # in the folder of the runs

OF_TESTS = ("per_class", "per_class_of_outputs", "before_training", "images_per_second")


class Results:
    """The file of plans and results; several commands may add to it at once.

    The folder of the runs holds the plans, too, so that a page drawn elsewhere knows them. A damaged file is a
    ValueError.
    """

    def __init__(self, path: Path, runs: Path | None = None) -> None:
        self.path, self._runs = path, runs
        self.renamed: dict[str, str] = {}  # a digest of settings or of a plan: the published one
        self.readings = 0  # of the file: another command may have added to it, or replaced a result
        self._images: dict[Any, str] = {}  # digests of those at hand, by kind and test classes
        # Registrations in both places, the newest last; results by the names of their trainings.
        self.plans, self.kept = self._read()

    def _read(self) -> tuple[list[dict[str, Any]], dict[str, Result]]:
        content = _content(self.path, "the results of all trainings")
        self.readings += 1
        self.renamed |= content.get(RENAMED, {})
        return self._with_shared(content.get("plans", [])), content.get("results", {})

    def _with_shared(self, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """These plans and those in the folder of the runs, each registration once."""
        if self._runs is None:
            return plans
        shared = _content(self._runs / PLANS, "the registered plans").get("plans", [])
        return sorted([*plans, *(p for p in shared if p not in plans)], key=itemgetter("date"))

    def share_plans(self) -> None:
        """Write the plans into the folder of the runs, if there is one."""
        if self.plans and self._runs is not None and self._runs.is_dir():
            with alone(path := self._runs / PLANS, wait=True):
                write_json(path, {"plans": self._with_shared(self.plans)})

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Nobody else writes between reading and writing."""
        with alone(self.path, wait=True):
            self.plans, kept = self._read()
            self.kept |= kept
            yield
            renamed = {RENAMED: self.renamed} if self.renamed else {}
            write_json(self.path, {"plans": self.plans, "results": self.kept, **renamed})

    def name(self, job: Job) -> str:
        """A key of the recipe, the seed, and a digest of the settings and weights that can change the result."""
        digest = job.digest[:16]
        return f"{job.training}, seed {job.seed}, settings {self.renamed.get(digest, digest)}"

    def of(self, job: Job) -> Result | None:
        """The result of a training whose weights and settings, as far as they change it, are these; or None."""
        return self.kept.get(self.name(job))

    def checked(self, job: Job) -> Result | None:
        """The same; a ConfigError if it is of other images than those that are at hand."""
        result = self.of(job)
        for name, kind in (("data", "fingerprint"), ("content", "content")):
            before = (result or {}).get(name)
            if before is None:  # no result, or one of older code, which recorded no content
                continue
            place = kind, job.config["data"]["test_classes"]
            if place not in self._images:
                data = job.experiment.data  # Glyphs are the same everywhere
                there = data.dataset != "glyphs" and job.has_images()
                images = build_datasets(data, seed=job.seed).test if there else None
                self._images[place] = getattr(images, kind, None) or before
            if before != self._images[place]:
                raise ConfigError(
                    f"data.root: {job.name} was measured on other images ({kind} {before[:8]}, not "
                    f"{self._images[place][:8]}); give these, or another --output and --runs"
                )
        return result

    def add(self, jobs: Iterable[Job]) -> None:
        """Keep the results from these run folders; one that is there stays."""
        with self._changing():
            for job in jobs:
                self.kept.setdefault(self.name(job), self._result(job))

    def _result(self, job: Job) -> Result:
        run = load_run(job.folder)
        curves = {name: of for name, of in run.table("evaluation").items() if of}
        data = run.info["data"]
        result = {
            **{key: run.info.get(key) for key in KEPT},
            "processor": run.info["hardware"].get("processor"),
            "data": data.get("fingerprint"),
            **({"content": data["content"]} if data.get("content") else {}),
            **({"queries": [data[name] for name in QUERIES]} if {*QUERIES} <= {*data} else {}),
            "curve": {name: of[-1] for name, of in curves.items()},
        }
        if job.config["data"]["split"] == "test":
            sessions = run.info.get("sessions", [])
            commits = {one.get("commit") for one in sessions} - {run.info.get("commit")}
            tested = {key: run.info.get(key) for key in OF_TESTS}
            # The newest plan that was registered when it began.
            begun = str(run.info.get("started", ""))
            plans = [plan for plan in self.plans if plan["date"] <= begun]
            plan = plans[-1] if plans else {}
            tested |= {"curves": curves, "commits": [*commits], "plan": plan.get("plan")}
            tested |= {"registered": plan.get("date")}
            result |= {key: of for key, of in tested.items() if of}
        return result

    def plan(self, digest: str) -> dict[str, Any] | None:
        """The registration of a plan: the first one; None if there is none."""
        return next((plan for plan in self.plans if plan["plan"] == digest), None)

    def register(self, digest: str, words: list[str]) -> None:
        """Write down that the tests from now on follow a plan, with its words and the commit of the code."""
        entry = {"plan": digest, "words": words}
        if not self.plans or not entry.items() <= self.plans[-1].items():
            with self._changing():
                self.plans.append({**entry, **describe_code(), "date": now()})
            self.share_plans()

    def words(self, result: Result) -> list[str] | None:
        """The words that were registered when a test began; None if the plan of older code has none."""
        begun = {"plan": result.get("plan"), "date": result.get("registered")}
        plans = [plan for plan in self.plans if begun.items() <= plan.items()]
        return plans[-1].get("words") if plans else None

    def counts(self, result: Result, digest: str) -> bool:
        """True if a test was made under the registered plan, by committed code that descends from its commit."""
        plan = self.plan(digest)
        if plan is None or result.get("plan") != digest or result["dirty"]:
            return False
        commits = [result["commit"], *result.get("commits", [])]
        return all(descends(commit, plan["commit"]) for commit in commits)


def _content(path: Path, held: str) -> dict[str, Any]:
    """The content of a file; {} if it is not there."""
    with damage_named(path, f"restore it, since it holds {held}"):
        return read_json(path) if path.exists() else {}
