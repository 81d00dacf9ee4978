"""Runs of `benchmarks/run.py` as processes of their own: started, watched, and stopped when this one is."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from secrets import token_hex
from shutil import which
from typing import Any, Self, TypeVar

from tqdm import tqdm

# Light, also for Ray's workers: torch is imported when a record is read.
from benchmarks import records
from benchmarks.console import StopRequest, at_least
from benchmarks.settings import ConfigError

RUN = Path(__file__).parents[1] / "run.py"

IN_USE = 3  # its exit status if another process writes the run folder

POLL = 0.2  # seconds between two looks at what runs

SAVING = 60  # seconds that a run whose launcher is gone may take to save

TAIL = 4096  # bytes of a file that are read for its last line

OURS = ("--recipe", "--seed", "--output", "--resume", "--list", "--print_config", "--help", "-h")
"""Options of benchmarks/run.py that whoever starts runs sets, or has itself."""

# On Linux a command that gets a SIGTERM as soon as the thread that started it is gone, however that ended.
BOUND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""

Item = TypeVar("Item")


# -------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser, jobs: str) -> None:
    """The options that `launcher` reads; `jobs` says what there is so many of at once."""
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help=jobs)
    parser.add_argument(
        "--launcher",
        type=_command,
        default=[sys.executable],
        metavar="COMMAND",
        help="what starts benchmarks/run.py; default: this Python",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        type=_address,
        metavar="ADDRESS",
        help="let Ray place the runs: on the devices of this machine, or on the cluster at HOST:PORT ('auto': the "
        "one that this machine belongs to)",
    )
    parser.add_argument(
        "--gpus-per-run", type=float, metavar="N", help="with --ray; 0.5: two runs share a GPU"
    )
    parser.add_argument("--cpus-per-run", type=float, metavar="N", help="with --ray; default: 1")


def _command(text: str) -> list[str]:
    command = shlex.split(text)
    if not command or which(command[0]) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no command here")
    return command


def _address(text: str) -> str:
    if text not in ("local", "auto") and not re.fullmatch(r"[^/]+:\d+", text):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT or auto, got {text!r}")
    return text


def launcher(options: argparse.Namespace, runs: Path, jobs: int = 1) -> "Launcher":
    """Build the launcher of runs below a folder from the command line; without --jobs and --ray, of `jobs` at once.

    Raises:
        ConfigError: if Ray is asked for and missing, or its options without it.
    """
    if options.ray is None:
        if options.gpus_per_run or options.cpus_per_run:
            raise ConfigError("--gpus-per-run, --cpus-per-run: are Ray's; add --ray")
        return Launcher(options.launcher, options.jobs or jobs)
    if find_spec("ray") is None:
        raise ConfigError("--ray: Ray is not installed; pip install '.[benchmarks,cluster]'")
    if options.ray == "local":  # it listens to the network, and reads this when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    from benchmarks.studies.cluster import RayLauncher

    return RayLauncher(options, runs)


def check_settings(settings: Sequence[str], ours: Sequence[str] = OURS) -> None:
    """Refuse options behind -- that are not the user's to set."""
    for option in settings:
        if option.partition("=")[0] in ours:
            raise ConfigError(
                f"{option}: is set by this command; leave it out behind --, and see its --help"
            )


# --------------------------------------------------------------------------------------------- runs


@dataclass
class SubRun:
    """A run, its folder, and the file that it prints to.

    Args:
        settings: Its command line, without --output and --resume.
        exit_status: Once it has ended, negative if a signal ended it.
    """

    settings: Sequence[str]
    folder: Path
    log: Path
    name: str
    exit_status: int | None = None
    seconds: float | None = None
    log_begin: int = 0

    def record(self) -> dict[str, Any] | None:
        """Its run.json; None if there is none, a ValueError if it is damaged."""
        there = (self.folder / "run.json").exists()
        return records.load_run(self.folder).info if there else None

    def is_finished(self) -> bool:
        record = self.record()
        return record is not None and record["status"] == "finished"

    def in_use(self) -> bool:
        """True if another process writes its folder."""
        if not (self.folder / ".lock").exists():
            return False
        try:
            records.RunFolder(self.folder).close()
        except records.RunFolderInUseError:
            return True
        return False

    def problem(self) -> str:
        """Why it did not finish, in one line: as run.json tells, or else its log."""
        refused = self.exit_status in (2, IN_USE)  # before it wrote a record
        record = None if refused else self.record()
        if record is not None and record["status"] == "failed" and record.get("error"):
            return f"{record['error']}"
        lines = [line.decode(errors="replace").strip() for line in tail(self.log, self.log_begin)]
        said = [line for line in lines if not line.startswith("$ ")]
        errors = [line for line in said if line.startswith("error: ")]  # a launcher may say more
        return next((line for line in reversed(errors or said) if line), "it said nothing")


def start(command: Sequence[str], log: Path, folder: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a command in a folder, its output behind what the log holds; it ends with the thread that calls."""
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        # A session of its own: a terminal's Ctrl-C reaches this process alone, which passes it on once.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOUND, str(os.getpid()), *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Launcher:
    """Starts runs within a context, each as a process; none outlives it.

    Every SIGINT or SIGTERM becomes one SIGTERM for each run at work, which saves and ends, and no run is started
    any more once `stop` has a signal.

    Args:
        command: Starts `benchmarks/run.py`, up to its name.
        jobs: How many at once.
    """

    def __init__(self, command: Sequence[str] = (sys.executable,), jobs: int = 1) -> None:
        self.command, self.jobs = command, jobs
        self.stop = StopRequest(patient=True)
        self._answered = 0
        self._at_work: dict[Path, tuple[SubRun, Any]] = {}
        self._threads = ThreadPoolExecutor(jobs)
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
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

    def each(
        self,
        work: Callable[[Item], Any],
        items: Iterable[Item],
        bar: "tqdm[Any]",
        look: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Item, Future[Any]]]:
        """Do the work for items, `jobs` of them at once in threads, and hand on each as it ends.

        Once there is a signal, no further one is begun. The bar shows what runs; `look` is called in between.
        """
        left: dict[Future[Any], Item] = {}
        items, shown = iter(items), ""
        while True:
            if self.stop.signal is None:
                for item in islice(items, self.jobs - len(left)):
                    left[self._threads.submit(work, item)] = item
            if not left:
                return
            done, _ = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
            self._answer()
            look()
            if (said := "; ".join(map(self.told, self.at_work()))) != shown:
                bar.set_description(shown := said)
            for future in done:
                yield left.pop(future), future

    def run(self, run: SubRun, watch: Callable[[], bool] | None = None) -> bool:
        """Run it to its end, from its last checkpoint; False if there was a signal before.

        Any thread may call this.

        Args:
            watch: Called while it runs; it saves and ends once this is true.
        """
        command = [*self.command, str(RUN), *run.settings, f"--output={run.folder}", "--resume"]
        run.log.parent.mkdir(parents=True, exist_ok=True)
        run.log_begin, begun = run.log.stat().st_size if run.log.exists() else 0, time.monotonic()
        with self._lock:
            if self._closed or self.stop.signal is not None:
                return False
            process = self._start(command, run)
            self._at_work[run.folder] = run, process
        try:
            while run.exit_status is None:
                try:
                    run.exit_status = process.wait(watch and POLL)
                except subprocess.TimeoutExpired:
                    if watch is not None and watch():
                        process.terminate()
                        watch = None
        finally:
            with self._lock:
                del self._at_work[run.folder]
        if self.stop.signal is not None:
            # A launcher may be gone while its process saves; `in_use` waits itself.
            deadline = time.monotonic() + SAVING
            while run.in_use() and time.monotonic() < deadline:
                pass
        run.seconds = time.monotonic() - begun
        return True

    def at_work(self) -> list[SubRun]:
        with self._lock:
            return [run for run, _ in self._at_work.values()]

    def told(self, run: SubRun) -> str:
        """A run at work as the bar shows it."""
        return run.name

    def _start(self, command: Sequence[str], run: SubRun) -> Any:
        """Start a run; the result has `wait` and `terminate`, as a Popen."""
        return start(command, run.log)

    def _answer(self) -> None:
        while self._answered < self.stop.requests:
            self._answered += 1
            self._terminate()

    def _terminate(self) -> None:
        with self._lock:
            for _, process in self._at_work.values():
                process.terminate()


def tail(path: Path, begin: int = 0) -> list[bytes]:
    """The last whole lines of a file, behind a position; [] if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - TAIL))
            return [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
    except OSError:
        return []
