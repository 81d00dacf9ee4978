"""Recipes and seeds as a list of runs."""

import fnmatch
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any

from benchmarks.building import parse_resolved
from benchmarks.console import columns, printable, progress_bar
from benchmarks.records import (
    RunFolder,
    RunFolderInUseError,
    check_same,
    describe_weights,
    has_diverged,
)
from benchmarks.settings import (
    Change,
    Command,
    ConfigError,
    changes_of_results,
    read_entry,
    recipe_names,
)
from benchmarks.studies.launching import IN_USE, Launcher, SubRun, check_settings, tail


@dataclass
class Job(SubRun):
    """A training with one seed, and what became of it."""

    status: str = "not started"
    why: str | None = None
    steps_done: int = 0

    @cached_property
    def command(self) -> Command:
        return parse_resolved([*self.settings, f"--output={self.folder}"])

    @property
    def config(self) -> dict[str, Any]:
        return self.command.config

    @property
    def training(self) -> str:
        return str(self.command.recipe)

    @property
    def seed(self) -> int:
        return self.command.experiment.seed

    @property
    def steps(self) -> int:
        return self.command.experiment.optimization.steps

    @cached_property
    def weights(self) -> dict[str, str] | None:
        """Name and hash of the file of pretrained weights."""
        return describe_weights(self.command.experiment.model)

    def result(self) -> dict[str, Any] | None:
        """Its run.json, once it is finished; a RunFolderError if it is that of other settings."""
        if not self.is_finished() or (record := self.record()) is None:
            return None
        check_same(record["config"], self.config, self.folder)
        return record

    def changes(self) -> list[Change]:
        """Differences between the recorded run and the requested one that can change the result."""
        if (record := self.record()) is None:
            return []
        changes = changes_of_results(record["config"], self.config)
        if record.get("weights") != self.weights:
            changes.append(Change("model.weights", record.get("weights"), self.weights))
        return changes


# ----------------------------------------------------------------------------------------------- plan


def trainings(patterns: Sequence[str]) -> list[str]:
    """The distinct trainings of entries, tables and patterns, in their order."""
    found: dict[str, None] = {}
    everything = recipe_names()
    for pattern in patterns:
        names = fnmatch.filter(everything, pattern) or fnmatch.filter(everything, f"{pattern}/*")
        found |= dict.fromkeys(read_entry(name).training for name in names or [pattern])
    return list(found)


def plan(
    patterns: Sequence[str], seeds: Sequence[int], runs: Path, settings: Sequence[str]
) -> list[Job]:
    """All jobs, each of which `benchmarks/run.py` accepts; nothing is written."""
    check_settings(settings)
    jobs = []
    for training in trainings(patterns):
        for seed in seeds:
            name = f"{training.replace('/', '-')}-seed{seed}"
            arguments = ["--recipe", training, "--seed", str(seed), *settings]
            log = runs / "logs" / f"{name}.log"
            jobs.append(Job(arguments, runs / name, log, f"{training}, seed {seed}"))
            weights = jobs[-1].command.experiment.model.weights
            if weights is not None and not weights.is_file():
                raise ConfigError(f"model.weights: {weights}: No such file")
    return jobs


# ------------------------------------------------------------------------------------------------ run


class Sweep:
    """Runs jobs, and goes on when one of them fails.

    Args:
        redo_stale: Move stale runs aside, and run them again.
    """

    def __init__(
        self, jobs: Sequence[Job], launcher: Launcher, *, redo_stale: bool = False
    ) -> None:
        self.jobs, self.launcher, self.redo_stale = jobs, launcher, redo_stale

    def run(self) -> int | None:
        """The signal that stopped the sweep, if one did; the jobs know what became of them.

        Raises:
            ConfigError: if no run can be started.
        """
        steps = sum(job.steps for job in self.jobs)
        with self.launcher as launcher, progress_bar(total=steps, unit="step") as self.bar:
            left = [job for job in self.jobs if self._is_left(job)]
            for job, future in launcher.each(launcher.run, left, self.bar, self._look):
                self._look_back(job, future)
        return launcher.stop.signal

    def _is_left(self, job: Job) -> bool:
        try:
            if self.redo_stale and job.changes():
                self._move_aside(job)
            if changes := job.changes():
                said = "; ".join(f"{c.key} {c.before!r}, not {c.now!r}" for c in changes)
                remedy = "run it again with --redo-stale, or choose another --runs"
                told = f"{job.folder} was run with {shorten(said, 400)}; {remedy}"
                self._end(job, "stale", told)
            elif job.is_finished():
                self._end(job, "was finished", "was finished")
            else:
                return True
        except RunFolderInUseError as error:
            self._end(job, "in use", str(error))
        except Exception as error:  # a sweep outlives each of its runs
            self._end(job, "failed", str(error))
        return False

    def _move_aside(self, job: Job) -> None:
        """Rename a stale run, unless it is being written."""
        folder = RunFolder(job.folder)
        try:
            names = (job.folder.with_name(f"{job.folder.name}.stale-{n}") for n in count(1))
            aside = next(path for path in names if not path.exists())
            folder.move(aside)
            self.bar.write(f"{job.name}: the stale run is now {aside}")
        finally:
            folder.close()

    def _look(self) -> None:
        for run in self.launcher.at_work():
            assert isinstance(run, Job)
            self._advance(run, last_step(run))

    def _look_back(self, job: Job, was_started: Future[bool]) -> None:
        """Report the end of a run."""
        try:
            if not was_started.result():
                return
            self._advance(job, last_step(job))
            if (code := job.exit_status) == 0 and job.is_finished():
                self._end(job, "finished", f"finished in {_duration(job)}")
            elif self.launcher.stop.signal is not None and code != IN_USE:
                self._end(job, "stopped", "stopped; the same command goes on with it")
            else:
                record, why = job.record(), job.problem()
                status = "diverged" if record and has_diverged(record) else "failed"
                status = "in use" if code == IN_USE else status
                how = f"exit status {code}"
                if code is not None and code < 0:
                    how = f"ended by {signal.Signals(-code).name}"
                self._end(job, status, f"{status} ({how}): {why}; see {job.log}", why)
        except Exception as error:
            self._end(job, "failed", str(error))

    def _end(self, job: Job, status: str, said: str, why: str | None = None) -> None:
        job.status = status
        self.bar.write(printable(f"{job.name}: {said}"))
        if status in ("finished", "was finished"):
            self._advance(job, job.steps)
        else:
            job.why = why or said
            self.bar.total -= job.steps - job.steps_done  # which nobody will do now

    def _advance(self, job: Job, step: int) -> None:
        self.bar.update(step - job.steps_done)
        job.steps_done = step


def last_step(job: Job) -> int:
    """The last step that a run has recorded, as far as its table can be read."""
    last = tail(job.folder / "records" / "training.csv")[-1:]
    step = last[0].split(b",", 1)[0][:20] if last else b""
    return min(int(step), job.steps) if step.isdigit() else 0  # the header's first word is none


# --------------------------------------------------------------------------------------------- command


def some_are_missing(jobs: Sequence[Job]) -> bool:
    """True if a run has no result although it was not stopped."""
    return any(job.status in ("failed", "diverged", "stale", "in use") for job in jobs)


def summary(jobs: Sequence[Job]) -> str:
    rows = [
        (
            *(job.training, str(job.seed), job.status),
            *(_duration(job), str(job.log) if job.log.exists() else ""),
        )
        for job in jobs
    ]
    return columns([("recipe", "seed", "status", "time", "log"), *rows])


def _duration(job: Job) -> str:
    return "" if job.seconds is None else str(timedelta(seconds=round(job.seconds)))
