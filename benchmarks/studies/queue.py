"""Runs a list of jobs, several at once, and goes on when one of them fails."""

import signal
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from textwrap import shorten

from benchmarks.console import InUseError, StopRequest, columns, printable, progress_bar
from benchmarks.records import RunFolder, has_diverged
from benchmarks.studies.jobs import IN_USE, Job
from benchmarks.studies.launching import POLL, Launcher

LONGEST = 60  # characters of the names of the runs at work

SAVING = 60  # seconds that runs whose launcher is gone may take to save


class Queue:
    """Jobs to run; they know what became of them.

    Every SIGINT or SIGTERM becomes one SIGTERM for each run at work, which saves and ends, and no run is started
    after it. None outlives the queue.

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
        self._waiting: list[Job] = []
        self._has_news = True  # a job has ended since `ready` was asked
        self._at_work: list[Job] = []
        self._answered = 0  # signals

    def run(self) -> int | None:
        """Run what is left; the signal that stopped it, if one did.

        Raises:
            ConfigError: if no run can be started.
        """
        about = {"total": self._total, "unit": "run", "smoothing": 0}  # all runs so far
        with (
            self.launcher,
            StopRequest(patient=True) as self.stop,
            progress_bar(**about) as self.bar,
        ):
            try:
                self._start()
                while self._at_work:
                    self._look()
                    self._start()
            finally:
                if self.stop.signal is None:  # a second SIGTERM would keep a run from saving
                    self._terminate()
                while self._at_work:
                    self._answer()
                    self._at_work = [job for job in self._at_work if job.process.poll() is None]
                    time.sleep(POLL)
            # A launcher may be gone while its process saves; `in_use` waits itself.
            deadline = time.monotonic() + SAVING
            for job in self.jobs:
                while job.status == "stopped" and job.in_use() and time.monotonic() < deadline:
                    pass
        return self.stop.signal

    def _start(self) -> None:
        """Start what is ready, as far as there is room."""
        while self.stop.signal is None and len(self._at_work) < self.launcher.jobs:
            if (job := self._next()) is None:
                return
            try:
                self.launcher.start(job)
            except OSError as error:  # the others go on
                self._end(job, "failed", str(error))
                continue
            self._at_work.append(job)
            self.bar.set_description(shorten("; ".join(j.name for j in self._at_work), LONGEST))

    def _next(self) -> Job | None:
        """The next job to start; None if there is none, or none before another ends."""
        while self._has_news:
            self._has_news = False
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
        """True if it has to run; a stale run is moved aside for it, if that is asked and nobody writes it."""
        try:
            if self.redo_stale and job.changes():
                with RunFolder(job.folder) as folder:
                    names = (f"{job.folder.name}.stale-{n}" for n in count(1))
                    aside = next(
                        path for path in map(job.folder.with_name, names) if not path.exists()
                    )
                    folder.move(aside)
                self.bar.write(f"{job.name}: the stale run is now {aside}")
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

    def _look(self) -> None:
        """Pass signals on, and report the runs that have ended; wait a little if none has."""
        self._answer()
        ended = [(job, code) for job in self._at_work if (code := job.process.poll()) is not None]
        for job, code in ended:
            self._at_work.remove(job)
            job.exit_status, job.seconds = code, time.monotonic() - job.begun
            self._look_back(job, code)
        if not ended:
            time.sleep(POLL)

    def _look_back(self, job: Job, code: int) -> None:
        """Report the end of a run."""
        try:
            if code == 0 and job.is_finished():
                self._end(job, "finished", f"finished in {job.duration}")
            elif self.stop.signal is not None and code != IN_USE:
                self._end(job, "stopped", "stopped; the same command goes on with it")
            else:
                record, why = job.record(), job.problem()
                status = "diverged" if record and has_diverged(record) else "failed"
                status = "in use" if code == IN_USE else status
                ended_by = f"ended by {signal.Signals(-code).name}" if code < 0 else ""
                how = ended_by or f"exit status {code}"
                self._end(job, status, f"{status} ({how}): {why}; see {job.log}", why)
        except Exception as error:
            self._end(job, "failed", str(error))

    def _end(self, job: Job, status: str, said: str, why: str | None = None) -> None:
        job.status, self._has_news = status, True
        self.bar.write(printable(f"{job.name}: {said}"))
        self.bar.update()
        if status not in ("finished", "was finished"):
            job.why = why or said

    def _answer(self) -> None:
        while self._answered < self.stop.requests:
            self._answered += 1
            self._terminate()

    def _terminate(self) -> None:
        for job in self._at_work:
            job.process.terminate()


def summary(jobs: Sequence[Job]) -> str:
    rows = [
        [job.training, str(job.seed), job.status, job.duration, str(job.log) * job.log.exists()]
        for job in jobs
    ]
    return columns([["recipe", "seed", "status", "time", "log"], *rows])
