"""Recipes and seeds as a queue of runs."""

import fnmatch
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any

from benchmarks.building import parse_resolved
from benchmarks.console import columns, printable, progress_bar
from benchmarks.records import RunFolder, RunFolderInUseError, describe_weights
from benchmarks.settings import (
    Change,
    ConfigError,
    changes_of_results,
    read_entry,
    recipe_names,
)
from benchmarks.studies.launching import IN_USE, Child, Launcher, SubRun, check_settings, tail

SAVING = 60  # seconds that a run whose launcher is gone may take to save

ELSEWHERE = "running elsewhere"


@dataclass
class Job(SubRun):
    """One training with one seed.

    Args:
        config: As `benchmarks/run.py` will resolve it.
        weights: Name and hash of the file of pretrained weights.
    """

    training: str
    seed: int
    config: dict[str, Any]
    weights: dict[str, str] | None
    status: str = "not started"
    seconds: float | None = None
    steps_done: int = 0

    def __post_init__(self) -> None:
        self.steps: int = self.config["optimization"]["steps"]

    @property
    def name(self) -> str:
        return f"{self.training}, seed {self.seed}"

    def changes(self) -> list[Change]:
        """What differs between the recorded run and the one that is asked for."""
        if (record := self.record()) is None:
            return []
        try:
            changes = changes_of_results(record["config"], self.config)
        except (AttributeError, TypeError) as error:
            path = self.folder / "run.json"
            raise ValueError(f"{path}: its config is damaged; run that training again") from error
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
            arguments = ["--recipe", training, "--seed", str(seed), *settings]
            command = parse_resolved(arguments)
            model = command.experiment.model
            try:
                weights = describe_weights(model)
            except OSError as error:
                raise ConfigError(f"model.weights: {model.weights}: {error.strerror}") from error
            name = f"{training.replace('/', '-')}-seed{seed}"
            log = runs / "logs" / f"{name}.log"
            jobs.append(Job(arguments, runs / name, log, training, seed, command.config, weights))
    return jobs


# ------------------------------------------------------------------------------------------------ run


class Sweep:
    """Runs jobs, one per device at a time.

    Args:
        launcher: The command line that starts `benchmarks/run.py`, up to its name.
        devices: CUDA devices, one job on each at a time; None: whatever the run takes.
        redo_stale: Move stale runs aside, and run them again.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        launcher: Sequence[str],
        devices: Sequence[str | None],
        redo_stale: bool,
    ) -> None:
        self.redo_stale = redo_stale
        self.waiting = deque(jobs)
        self.free = deque(devices)
        self.launcher = Launcher(launcher)
        self.bar = progress_bar(total=sum(job.steps for job in jobs), unit="step")

    def run(self) -> int | None:
        """The signal that stopped the sweep, if one did; the jobs know what became of them."""
        with self.launcher as launcher, self.bar:
            while launcher.children or (self.waiting and launcher.stop.signal is None):
                while self.waiting and self.free and launcher.stop.signal is None:
                    self._begin(self.waiting.popleft())
                names = "; ".join(child.run.name for child in launcher.children)
                self.bar.set_description(names, refresh=False)
                for child in launcher.ended():
                    self._look_back(child)
                for child in launcher.children:
                    self._advance(child.run, last_step(child.run))
        return self.launcher.stop.signal

    def _begin(self, job: Job) -> None:
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
                self.launcher.start(job, self.free[0])
                self.free.popleft()
                job.status = "running"
        except RunFolderInUseError as error:
            self._end(job, ELSEWHERE, str(error))
        except Exception as error:  # a sweep outlives each of its runs
            self._end(job, "failed", str(error))

    def _move_aside(self, job: Job) -> None:
        """Rename a stale run, unless it is being written."""
        folder = RunFolder(job.folder)
        try:
            # Another sweep may have moved it while this one waited for the lock.
            if job.changes():
                names = (job.folder.with_name(f"{job.folder.name}.stale-{n}") for n in count(1))
                aside = next(path for path in names if not path.exists())
                job.folder.rename(aside)
                self.bar.write(f"{job.name}: the stale run is now {aside}")
        finally:
            folder.close()

    def _look_back(self, child: Child) -> None:
        """What became of a run that has ended."""
        job, code = child.run, child.process.returncode
        self.free.append(child.device)
        job.seconds = time.monotonic() - child.begun
        try:
            self._advance(job, last_step(job))
            stopped = self.launcher.stop.signal is not None
            if code == 0 and job.is_finished():
                self._end(job, "finished", f"finished in {_duration(job)}")
            elif code == IN_USE:
                self._end(job, ELSEWHERE, child.problem())
            elif stopped:
                self._await_saved(job)
                self._end(job, "stopped", "stopped; the same command goes on with it")
            elif job.in_use():  # a launcher has an exit status of its own
                self._end(job, ELSEWHERE, f"{job.folder} is being written by another run")
            else:
                ended = (
                    f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                )
                self._end(job, "failed", f"failed ({ended}): {child.problem()}; see {job.log}")
        except Exception as error:
            self._end(job, "failed", str(error))

    def _await_saved(self, job: Job) -> None:
        """A launcher may be gone while its process saves: wait until nobody writes the folder."""
        deadline = time.monotonic() + SAVING
        while job.in_use() and time.monotonic() < deadline:
            pass  # `in_use` waits itself

    def _end(self, job: Job, status: str, said: str) -> None:
        job.status = status
        self.bar.write(printable(f"{job.name}: {said}"))
        if status in ("finished", "was finished"):
            self._advance(job, job.steps)
        else:
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
