"""Runs of `benchmarks/run.py` as processes of their own: started, watched, and stopped when this one is."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from textwrap import shorten
from typing import Any, Self, TypeVar

from tqdm import tqdm

from benchmarks.console import StopRequest
from benchmarks.studies.jobs import Job
from benchmarks.studies.processes import POLL, RUN, start

LONGEST = 60  # characters of the names of the runs at work

SAVING = 60  # seconds that a run whose launcher is gone may take to save

Item = TypeVar("Item")


class Here:
    """This machine, where a run is a process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def start(self, command: Sequence[str], job: Job) -> Any:
        """Start a run; the result has `wait` and `terminate`, as a Popen."""
        return start(command, job.log)


class Launcher:
    """Starts runs within a context, each as a process; none outlives it.

    Every SIGINT or SIGTERM becomes one SIGTERM for each run at work, which saves and ends, and no run is started
    any more once `stop` has a signal.

    Args:
        command: Starts `benchmarks/run.py`, up to its name.
        jobs: How many at once.
        machines: Where.
    """

    def __init__(
        self, command: Sequence[str] = (sys.executable,), jobs: int = 1, machines: Any = None
    ) -> None:
        self.command, self.jobs, self.machines = command, jobs, machines or Here()
        self.stop = StopRequest(patient=True)
        self._answered = 0
        self._at_work: dict[Path, tuple[Job, Any]] = {}
        self._threads = ThreadPoolExecutor(jobs)
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.machines.__enter__()
        self.stop.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        if self.stop.signal is None:  # a second SIGTERM would keep a run from saving
            self._terminate()
        while self._at_work:
            self._answer()
            time.sleep(POLL)
        self._threads.shutdown()
        self.stop.__exit__()
        self.machines.__exit__()

    def each(
        self,
        work: Callable[[Item], Any],
        following: Callable[[], Item | None],
        bar: "tqdm[Any]",
    ) -> Iterator[tuple[Item, Future[Any]]]:
        """Do the work for items, `jobs` of them at once in threads, and hand on each as it ends.

        `following` gives the next item; None if there is none, or none before another ends. Once there is a signal,
        no further one is begun. The bar shows what runs.
        """
        left: dict[Future[Any], Item] = {}
        shown = ""
        while True:
            while self.stop.signal is None and len(left) < self.jobs:
                if (item := following()) is None:
                    break
                left[self._threads.submit(work, item)] = item
            if not left:
                return
            done, _ = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
            self._answer()
            if (said := shorten("; ".join(self.at_work()), LONGEST)) != shown:
                bar.set_description(shown := said)
            for future in done:
                yield left.pop(future), future

    def run(self, job: Job) -> bool:
        """Run it to its end, from its last checkpoint; False if there was a signal before.

        Any thread may call this.
        """
        command = [*self.command, str(RUN), *job.settings, f"--output={job.folder}", "--resume"]
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log_begin, begun = job.log.stat().st_size if job.log.exists() else 0, time.monotonic()
        with self._lock:
            if self._closed or self.stop.signal is not None:
                return False
            process = self.machines.start(command, job)
            self._at_work[job.folder] = job, process
        try:
            job.exit_status = process.wait()
        finally:
            with self._lock:
                del self._at_work[job.folder]
        if self.stop.signal is not None:
            # A launcher may be gone while its process saves; `in_use` waits itself.
            deadline = time.monotonic() + SAVING
            while job.in_use() and time.monotonic() < deadline:
                pass
        job.seconds = time.monotonic() - begun
        return True

    def at_work(self) -> list[str]:
        """The names of the runs that were started, and have not ended."""
        with self._lock:
            return [job.name for job, _ in self._at_work.values()]

    def _answer(self) -> None:
        while self._answered < self.stop.requests:
            self._answered += 1
            self._terminate()

    def _terminate(self) -> None:
        with self._lock:
            for _, process in self._at_work.values():
                process.terminate()
