"""Runs of `benchmarks/run.py` as processes of their own, and the options that say what starts them."""

import argparse
import atexit
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from secrets import token_hex
from shutil import which
from typing import Any

import psutil

from benchmarks.console.arguments import at_least, decimal
from benchmarks.console.writing import replace_file
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.yaml_files import dump
from benchmarks.studies.jobs import Job

RUN = Path(__file__).parents[1] / "run.py"

RECIPE = "BENCHMARKS_RECIPE"  # variable for the server of forked runs

POLL = 0.2  # seconds between two looks at what runs

# On Linux a command that gets a SIGTERM as soon as the thread that started it is gone, however that ended.
BOUND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


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


class Launcher(AbstractContextManager["Launcher"]):
    """Starts runs on this machine within a context.

    Args:
        command: What stands before `benchmarks/run.py`; default: this Python.
        jobs: So many at once.
        fork: Fork them from a process that has imported all modules; on Linux. In all else, they are as programs.
    """

    def __init__(self, command: Sequence[str] = (), jobs: int = 1, *, fork: bool = False) -> None:
        self.command, self.jobs, self.fork = command or [sys.executable], jobs, fork

    def __exit__(self, *exception: object) -> None:
        pass

    def prepare(self, recipe: str) -> None:
        """Begin to import what forked runs of a recipe need, beside whatever is done before the first of them."""
        if self.fork:
            _server()
            os.environ[RECIPE] = recipe
            forkserver.ensure_running()
            del os.environ[RECIPE]

    def start(self, job: Job) -> None:
        """Start a run, from its last checkpoint."""
        settings = job.log.with_suffix(".yaml")
        settings.parent.mkdir(parents=True, exist_ok=True)
        replace_file(settings, dump(job.config).encode())
        trusted = [f"--trust={module}" for module in job.trusted]
        options = [f"--recipe={job.training}", f"--config={settings}", *trusted, "--resume"]
        command = [*self.command, str(RUN), *options]
        job.log_begin = job.log.stat().st_size if job.log.exists() else 0
        job.process = self.place(command, job)

    def place(self, command: Sequence[str], job: Job) -> Any:
        """Start its command; the result has `poll` and `terminate`, as a Popen."""
        return Forked(command, job.log) if self.fork else start(command, job.log)


SERVER_GONE = 255
"""What multiprocessing gives as the exit status of a forked process whose server has ended."""


class Forked:
    """A Python program in a forked process, with a Popen's `poll` and `terminate`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        log.open("ab").close()  # an error is this process's to tell
        try:
            self._process = _fork(command, log)
        except EOFError:  # the server has just ended: another one takes its place
            self._process = _fork(command, log)
        self._pid = int(self._process.pid or 0)
        self._code: int | None = None

    def poll(self) -> int | None:
        code = self._process.exitcode if self._code is None else None
        gone = code != SERVER_GONE or not psutil.pid_exists(self._pid)
        if code is not None and gone:
            self._code = code
            self._process.close()  # its pipes
        return self._code

    def terminate(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.studies.forked"])
    return context


def _fork(command: Sequence[str], log: Path) -> Any:
    # The server has the environment of its own start.
    process = _server().Process(target=run_forked, args=(command, log, dict(os.environ)))
    process.start()
    return process


def run_forked(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """Run a Python program in this process, as `start` runs it in a new one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.setsid()
    with log.open("ab") as file, Path(os.devnull).open("rb") as nothing:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        for given, stream in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(given.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    # As in a new program: by the server's method, data-loader workers would import all modules anew.
    multiprocessing.set_start_method(None, force=True)
    if "torch" in sys.modules:  # imported by the server, whose random states every run would have
        sys.modules["numpy"].random.seed()
        sys.modules["torch"].seed()
    sys.argv = [*command[1:]]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process would leave without


def _end_with_parent() -> None:
    """Get a SIGTERM as soon as the process that asked for this one is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


# ------------------------------------------------------------------------ options of a command


def add_arguments(parser: argparse.ArgumentParser, jobs: str) -> None:
    """The options that `launcher` reads; `jobs` says what there is so many of at once."""
    add = parser.add_argument
    add("--jobs", type=at_least(1), metavar="N", help=jobs)
    program = "what starts benchmarks/run.py; default: this Python"
    add("--launcher", type=_command, metavar="COMMAND", help=program)
    where = "let Ray place the runs: on this machine, or on the cluster at HOST:PORT ('auto': this machine's)"
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help=where)
    add("--gpus-per-run", type=decimal, metavar="N", help="with --ray; 0.5: two runs share a GPU")
    add("--cpus-per-run", type=decimal, metavar="N", help="with --ray; default: 1")


def _command(text: str) -> list[str]:
    try:
        command = shlex.split(text)
    except ValueError as error:  # an open quotation mark
        raise argparse.ArgumentTypeError(f"expected a command, got {text!r}: {error}") from error
    if not command or which(command[0]) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no command here")
    return command


def make_launcher(options: argparse.Namespace, runs: Path, jobs: int = 1) -> Launcher:
    """Build the launcher of runs below a folder from the command line; without --jobs and --ray, of `jobs` at once.

    Raises:
        ConfigError: if Ray is asked for and missing, or its options without it.
    """
    if options.ray is None:
        if options.gpus_per_run or options.cpus_per_run:
            raise ConfigError("--gpus-per-run, --cpus-per-run: are Ray's; add --ray")
        if options.launcher is None and sys.platform == "linux":
            return Launcher(jobs=options.jobs or jobs, fork=True)
        return Launcher(options.launcher, options.jobs or jobs)
    if find_spec("ray") is None:
        raise ConfigError("--ray: Ray is not installed; pip install '.[benchmarks,cluster]'")
    if options.ray == "local":  # it listens to the network, and reads this when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # 30 where machines are idle
    from benchmarks.studies.cluster import Cluster  # Ray is optional

    return Cluster(options, runs)
