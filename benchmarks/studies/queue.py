"""Runs a list of jobs, and goes on when one of them fails."""

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from textwrap import shorten

from benchmarks.console import InUseError, columns, printable, progress_bar
from benchmarks.records import RunFolder, has_diverged
from benchmarks.studies.jobs import IN_USE, Job
from benchmarks.studies.launching import Launcher


class Queue:
    """Jobs to run; they know what became of them.

    Args:
        ready: The jobs that can run now, the first ones first; asked again whenever one has ended.
        total: Number of jobs that are expected.
        redo_stale: Move stale runs aside, and run them again.

    Attributes:
        jobs: All that were looked at.
    """

    def __init__(
        self,
        ready: Callable[[], Sequence[Job]],
        total: int,
        launcher: Launcher,
        *,
        redo_stale: bool = False,
    ) -> None:
        self._ready, self._total = ready, total
        self.launcher, self.redo_stale = launcher, redo_stale
        self.jobs: list[Job] = []
        self._is_waiting: dict[Path, bool] = {}
        self._waiting: list[Job] | None = None  # None: to be asked for

    def run(self) -> int | None:
        """Run what is left; the signal that stopped it, if one did.

        Raises:
            ConfigError: if no run can be started.
        """
        about = {"total": self._total, "unit": "run", "smoothing": 0}  # all runs so far
        with self.launcher as launcher, progress_bar(**about) as self.bar:
            for job, future in launcher.each(launcher.run, self._next, self.bar):
                self._look_back(job, future)
                self._waiting = None
        return launcher.stop.signal

    def _next(self) -> Job | None:
        """The next job to start; None if there is none, or none before another ends."""
        if self._waiting is None:
            ready = self._ready()
            for job in ready:
                if job.folder not in self._is_waiting:
                    self.jobs.append(job)
                    self._is_waiting[job.folder] = self._is_left(job)
            self._waiting = [job for job in ready if self._is_waiting[job.folder]]
            self.bar.total = max(self.bar.total, len(self.jobs))
        if not self._waiting:
            return None
        job = self._waiting.pop(0)
        self._is_waiting[job.folder] = False
        return job

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
        except InUseError as error:
            self._end(job, "in use", str(error))
        except Exception as error:  # the others go on
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

    def _look_back(self, job: Job, was_started: Future[bool]) -> None:
        """Report the end of a run."""
        try:
            if not was_started.result():
                return
            if (code := job.exit_status) == 0 and job.is_finished():
                self._end(job, "finished", f"finished in {job.duration}")
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
        self.bar.update()
        if status not in ("finished", "was finished"):
            job.why = why or said


def some_are_missing(jobs: Sequence[Job]) -> bool:
    """True if a run has no result although it was not stopped."""
    return any(job.status in ("failed", "diverged", "stale", "in use") for job in jobs)


def summary(jobs: Sequence[Job]) -> str:
    rows = [
        [job.training, str(job.seed), job.status, job.duration, str(job.log) * job.log.exists()]
        for job in jobs
    ]
    return columns([["recipe", "seed", "status", "time", "log"], *rows])
