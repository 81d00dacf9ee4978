"""Options of commands that say what starts their runs: this machine, a launcher, or Ray."""

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from shutil import which

from benchmarks.console.arguments import at_least, decimal
from benchmarks.settings.errors import ConfigError
from benchmarks.studies.launching import Launcher


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
