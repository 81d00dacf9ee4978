"""Runs a list of jobs, several at once, and goes on when one of them fails."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from textwrap import shorten

from benchmarks.console.printing import printable, progress_bar
from benchmarks.console.stopping import StopRequest
from benchmarks.console.writing import InUseError
from benchmarks.records.results import DONE
from benchmarks.records.run_folder import RunFolder
from benchmarks.studies.jobs import IN_USE, Job, wait_for
from benchmarks.studies.launching import POLL, Launcher

LONGEST = 60  # characters of the names of the runs at work

FORM = "{desc}{percentage:.0f} %|{bar:10}| {n_fmt} of {total_fmt} runs, {elapsed} so far, {remaining} left"

SAVING = 60  # seconds that runs whose launcher is gone may take to save


class Queue:
    """Jobs to run; they know what became of them.

    Every SIGINT or SIGTERM becomes one SIGTERM for each run at work, which saves and ends, and no run is started
    after it. None outlives the queue.

    Args:
        ready: The jobs that can run now, the first ones first; asked again whenever one has ended.
        total: Number of jobs that are expected.
        redo_stale: Move stale runs aside, and run them again.
        meanwhile: Work of this process, bit by bit, while it waits for runs; an error in it ends them.
    """

    def __init__(
        self,
        ready: Callable[[], Sequence[Job]],
        total: int,
        launcher: Launcher,
        *,
        redo_stale: bool = False,
        meanwhile: Iterator[object] | None = None,
    ) -> None:
        self._ready, self._total = ready, total
        self.launcher, self.redo_stale = launcher, redo_stale
        self._meanwhile = meanwhile or iter(())
        self.jobs: list[Job] = []  # all that were looked at
        self._waiting: list[Job] = []
        self._has_news = True  # a job has ended since `ready` was asked
        self._at_work: list[Job] = []
        self._passed_on = 0  # signals

    def run(self) -> int:
        """Run what is left; 0, or 128 + the signal that stopped it.

        Raises:
            ConfigError: if no run can be started.
        """
        with (
            self.launcher,
            StopRequest(patient=True) as self.stop,
            # A smoothing of 0 counts all runs so far.
            progress_bar(total=self._total, smoothing=0, bar_format=FORM) as self.bar,
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
                    self._pass_signals_on()
                    self._at_work = [job for job in self._at_work if job.process.poll() is None]
                    time.sleep(POLL)
            # A launcher may be gone while its process saves.
            wait_for([job for job in self.jobs if job.status == "stopped"], SAVING)
        return 0 if self.stop.signal is None else 128 + self.stop.signal

    def _start(self) -> None:
        """Start what is ready, as far as there is room."""
        while self.stop.signal is None and len(self._at_work) < self.launcher.jobs:
            if (job := self._next()) is None:
                return
            with self._others_go_on(job):
                self.launcher.start(job)
                self._at_work.append(job)
                self.bar.set_description(shorten("; ".join(j.name for j in self._at_work), LONGEST))

    def _next(self) -> Job | None:
        """The next job to start; None if there is none, or none before another ends."""
        while self._has_news:
            self._has_news = False
            ready = self._ready()
            for job in ready:
                if job not in self.jobs:
                    self.jobs.append(job)
                    job.status, job.why = "not started", None
                    with self._others_go_on(job):
                        self._look_at(job)
            left = [job for job in ready if job.status == "not started"]
            self._waiting = [job for job in left if job not in self._at_work]
            self.bar.total = max(self.bar.total, len(self.jobs))
        return self._waiting.pop(0) if self._waiting else None

    def _look_at(self, job: Job) -> None:
        """End it if it need not run; a stale run is moved aside for it, if that is asked and nobody writes it."""
        changes = job.changes()
        if changes and self.redo_stale:
            with RunFolder(job.folder) as folder:
                places = (job.folder.with_name(f"{job.folder.name}.stale-{n}") for n in count(1))
                folder.move(next(path for path in places if not path.exists()))
            self.bar.write(f"{job.name}: the stale run is now {folder.path}")
        elif changes:
            said = "; ".join(f"{c.key} {c.before!r}, not {c.now!r}" for c in changes)
            remedy = "run it again with --redo-stale, or choose another --runs"
            self._end(job, "stale", f"{job.folder} was run with {shorten(said, 400)}; {remedy}")
        elif (outcome := job.outcome()) == "finished":
            self._end(job, "was finished")
        elif outcome in DONE:
            self._end(job, outcome, job.problem())

    def _look(self) -> None:
        """Pass signals on, and report the runs that have ended; wait a little if none has."""
        self._pass_signals_on()
        ended = [(job, code) for job in self._at_work if (code := job.process.poll()) is not None]
        for job, code in ended:
            self._at_work.remove(job)
            job.exit_status = code
            with self._others_go_on(job):
                self._look_back(job, code)
        if not ended:
            if sys.stderr is not None and sys.stderr.isatty():
                self.bar.refresh()  # the time goes on
            next(self._meanwhile, None)
            time.sleep(POLL)

    def _look_back(self, job: Job, code: int) -> None:
        """Report the end of a run."""
        outcome = job.outcome()
        if code == 0 and outcome == "finished":
            self._end(job, outcome)
        elif self.stop.signal is not None and code != IN_USE:
            self._end(job, "stopped", "rerun the same command to resume it")
        else:
            why, failed = job.problem(), outcome if outcome == "diverged" else "failed"
            status = "in use" if code == IN_USE else failed
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            self._end(job, status, why, f"{status} ({how}): {why}; see {job.log}")

    @contextmanager
    def _others_go_on(self, job: Job) -> Iterator[None]:
        """Take an error as what became of a job."""
        try:
            yield
        except Exception as error:
            self._end(job, "in use" if isinstance(error, InUseError) else "failed", str(error))

    def _end(self, job: Job, status: str, why: str | None = None, said: str | None = None) -> None:
        job.status, job.why, self._has_news = status, why, True
        said = said or (f"{status}: {why}" if why else status)
        self.bar.write(printable(f"{job.name}: {said}"))
        self.bar.update()

    def _pass_signals_on(self) -> None:
        while self._passed_on < self.stop.requests:
            self._passed_on += 1
            self._terminate()

    def _terminate(self) -> None:
        for job in self._at_work:
            job.process.terminate()
