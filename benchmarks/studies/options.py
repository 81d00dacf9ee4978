"""The options by which commands say how their runs are started, and the launcher that they choose."""

import argparse
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from shutil import which

from benchmarks.console import at_least
from benchmarks.settings import ConfigError
from benchmarks.studies.launching import Launcher

MOST = 1000  # runs that Ray has to place at once


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


def launcher(options: argparse.Namespace, runs: Path, jobs: int = 1) -> Launcher:
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
    from benchmarks.studies.cluster import Cluster

    return Launcher(options.launcher, options.jobs or MOST, Cluster(options, runs))
