"""Runs a list of jobs, and goes on when one of them fails."""

import signal
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from textwrap import shorten

from benchmarks.console import InUseError, columns, printable, progress_bar
from benchmarks.records import RunFolder, has_diverged
from benchmarks.studies.jobs import IN_USE, Job
from benchmarks.studies.launching import Launcher


class Queue:
    """Jobs to run; they know what became of them.

    Args:
        redo_stale: Move stale runs aside, and run them again.
        later: Number of jobs that follow in another queue: the bar shows the time until their end.
    """

    def __init__(
        self, jobs: Sequence[Job], launcher: Launcher, *, redo_stale: bool = False, later: int = 0
    ) -> None:
        self.jobs, self.launcher, self.redo_stale = jobs, launcher, redo_stale
        self.total = len(jobs) + later

    def run(self) -> int | None:
        """Run what is left; the signal that stopped it, if one did.

        Raises:
            ConfigError: if no run can be started.
        """
        about = {"total": self.total, "unit": "run", "smoothing": 0}  # all runs so far
        with self.launcher as launcher, progress_bar(**about) as self.bar:
            left = [job for job in self.jobs if self._is_left(job)]
            for job, future in launcher.each(launcher.run, left, self.bar):
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
