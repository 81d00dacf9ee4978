"""Trainings as jobs, planned from recipes, seeds and folds: their command lines, and what became of them."""

import fnmatch
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

# Light, also for Ray's workers: torch is imported when settings are parsed or a record is read.
from benchmarks import building, records, training
from benchmarks.console import InUseError
from benchmarks.settings import (
    Change,
    Command,
    ConfigError,
    changes_of_results,
    digest,
    is_recipe,
    parse,
    plain,
    read_entry,
    recipe_names,
    settings_of_results,
)

OURS = ("--recipe", "--seed", "--output", "--resume", "--list", "--print_config", "--help", "-h")
"""Options of benchmarks/run.py that the commands set themselves."""

IN_USE = 3  # exit status of benchmarks/run.py if another process writes the run folder


@dataclass(eq=False)
class Job:
    """A training with one seed."""

    settings: Sequence[str]  # its command line, without --output and --resume
    folder: Path
    log: Path  # the file that it prints to
    name: str
    process: Any = None  # the Popen that runs it
    exit_status: int | None = None  # once it has ended, negative if a signal ended it
    log_begin: int = 0  # where its own part of the file begins
    status: str = "not started"  # a queue's word for it
    why: str | None = None  # the reason why it is not finished

    @cached_property
    def command(self) -> Command:
        return parse([*self.settings, f"--output={self.folder}"])

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = building.resolved(self.command.config)
        return config

    @property
    def training(self) -> str:
        return str(self.command.recipe)

    @property
    def seed(self) -> int:
        return int(self.command.experiment.seed)

    @cached_property
    def weights(self) -> dict[str, str] | None:
        """Name and hash of the file of pretrained weights."""
        return records.describe_weights(self.command.experiment.model)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the settings and weights that can change the result, for any seed.

        Null settings are left out, like settings that older code did not have, and 1 equals 1.0.
        """
        evaluation, chosen = self.config["evaluation"], self.config["data"].get("test_classes")
        curves = [evaluation["every"] > 0, evaluation["curve_classes"]]
        found = settings_of_results(self.config).items()
        moving = {key: json.loads(plain(value)) for key, value in found}
        if isinstance(chosen, str) and Path(chosen).is_file():  # wherever it is, whatever its name
            moving["data.test_classes"] = records.file_digest(Path(chosen))
        weights = self.weights and self.weights["sha256"]
        return digest(json.dumps([moving, weights, curves], sort_keys=True))

    def record(self) -> dict[str, Any] | None:
        """Its run.json; None if there is none, a ValueError if it is damaged."""
        there = (self.folder / "run.json").exists()
        return records.load_run(self.folder).info if there else None

    def is_finished(self) -> bool:
        return (self.record() or {}).get("status") == "finished"

    def has_ended(self) -> bool:
        """True if it is finished or has diverged: the same settings would diverge again."""
        record = self.record() or {"status": "missing"}
        return record["status"] == "finished" or records.has_diverged(record)

    def result(self) -> dict[str, Any] | None:
        """Its run.json, once it is finished; a RunFolderError if it is that of other settings."""
        record = self.record() or {}
        if record.get("status") != "finished":
            return None
        records.check_same(record["config"], self.config, self.folder)
        return record

    def changes(self) -> list[Change]:
        """Differences between the recorded run and the requested one that can change the result."""
        if (record := self.record()) is None:
            return []
        changes = changes_of_results(record["config"], self.config)
        if record.get("weights") != self.weights:
            changes.append(Change("model.weights", record.get("weights"), self.weights))
        return changes

    def in_use(self) -> bool:
        """True if another process writes its folder."""
        if not (self.folder / ".lock").exists():
            return False
        try:
            records.RunFolder(self.folder).close()
        except InUseError:
            return True
        return False

    def problem(self) -> str:
        """Why it did not finish, in one line: as run.json tells, or else its log."""
        refused = self.exit_status in (2, IN_USE)  # before it wrote a record
        record = None if refused else self.record()
        if record is not None and record["status"] == "failed" and record.get("error"):
            return f"{record['error']}"
        log = self.log.read_bytes() if self.log.exists() else b""  # a signal may come before it
        lines = log[self.log_begin :].decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if not line.startswith("$ ")]
        errors = [line for line in said if line.startswith("error: ")]  # a launcher may say more
        return next((line for line in reversed(errors or said) if line), "it said nothing")


def wait_for(jobs: Sequence[Job], seconds: float = inf) -> None:
    """Wait until no other process writes their folders; `in_use` itself waits some seconds."""
    deadline = time.monotonic() + seconds
    while any(job.in_use() for job in jobs) and time.monotonic() < deadline:
        pass


def check_settings(settings: Sequence[str], ours: Sequence[str] = ()) -> None:
    """Refuse options behind -- that are not the user's to set."""
    for option in settings:
        if option.partition("=")[0] in (*OURS, *ours):
            raise ConfigError(
                f"{option}: is set by this command; leave it out behind --, and see its --help"
            )


def trainings(patterns: Sequence[str]) -> list[str]:
    """The distinct trainings of entries, tables and patterns, in their order."""
    found: dict[str, None] = {}
    for pattern in patterns:
        names = [pattern]
        if not is_recipe(pattern):  # all tables are slow to read
            every = recipe_names()
            names = fnmatch.filter(every, pattern) or fnmatch.filter(every, f"{pattern}/*") or names
        found |= dict.fromkeys(read_entry(name).training for name in names)
    return list(found)


def plan(
    patterns: Sequence[str], seeds: Sequence[int], runs: Path, settings: Sequence[str]
) -> list[Job]:
    """A job for every training and seed, which benchmarks/run.py accepts; its log in a folder of logs."""
    check_settings(settings)
    jobs = []
    for recipe in trainings(patterns):
        for seed in seeds:
            name = f"{recipe.replace('/', '-')}-seed{seed}"
            arguments = ["--recipe", recipe, f"--seed={seed}", *settings]
            log = runs / "logs" / f"{name}.log"
            jobs.append(Job(arguments, runs / name, log, f"{recipe}, seed {seed}"))
            weights = jobs[-1].command.experiment.model.weights
            if weights is not None and not weights.is_file():
                raise ConfigError(f"model.weights: {weights}: No such file")
    return jobs


def plan_folds(
    recipe: str, settings: Sequence[str], seeds: Sequence[int], folder: Path
) -> list[Job]:
    """A job for every seed and fold; a ConfigError or RunFolderError if one cannot run, or has other settings."""
    mine = ["--protocol=fair", "--data.split=test", "--evaluation.save_embeddings=true"]
    arguments = ["--recipe", recipe, *settings, *mine]
    folds = range(parse(arguments).experiment.data.folds)
    jobs = []
    for seed in seeds:
        jobs += fold_jobs([*arguments, f"--seed={seed}"], folds, folder / f"seed{seed}")
    try_out(jobs)
    for job in jobs:
        job.result()
    return jobs


def fold_jobs(settings: Sequence[str], folds: Sequence[int], name: Path) -> list[Job]:
    """A training on all folds except one, for each of these; its log lies beside its folder."""
    jobs = []
    for fold in folds:
        folder = name.with_name(f"{name.name}-fold{fold}")
        log = folder.with_name(f"{folder.name}.log")
        jobs.append(Job([*settings, f"--data.fold={fold}"], folder, log, folder.name))
    return jobs


def try_out(jobs: Sequence[Job]) -> None:
    """Before any run: look through the data, build the parts and take a step, for each training, test set and fold.

    Raises:
        ConfigError: if a setting does not fit.
        DatasetError: if an image cannot be read.
    """
    from accelerate import Accelerator

    keys = ("test_classes", "fold")
    some = {(job.training, *map(job.config["data"].get, keys)): job for job in reversed(jobs)}
    for job in some.values():
        try:
            training.check_launcher(job.command.experiment)
            records.check_trackers(job.command.experiment.trackers)
            parts = training.build_parts(job.command.experiment, Accelerator())
            if parts and (listing := getattr(parts[1].test, "listing", None)) is not None:
                listing.digests  # noqa: B018  looks through all images
        except ConfigError as error:
            raise ConfigError(f"{job.training}: {error}") from error
