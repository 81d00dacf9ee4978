"""Arguments and output of the small commands of the benchmarks."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from math import isfinite
from pathlib import Path

from tabulate import tabulate

from benchmarks.console.printing import PrintableError, as_line
from benchmarks.console.stopping import leave, signals_handled

INTEGER = r"[-+]?(?:0|[1-9][0-9]*)"

DECIMAL = rf"(?:{INTEGER}(?:\.[0-9]*)?|[-+]?\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
"""Patterns of numbers: programs read other spellings, such as 010 and 1_000, as different numbers."""


def refusing(main: Callable[..., int]) -> Callable[..., int]:
    """A command's `main`: what it refuses is one line, and exit status 2; a signal ends it at once.

    Where there are runs that can save, they handle signals themselves.
    """

    @wraps(main)
    @signals_handled(leave)
    def told(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except (PrintableError, ValueError, OSError) as error:
            print(f"error: {as_line(error)}", file=sys.stderr)
            return 2

    return told


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of `python -m benchmarks.NAME`, which takes no abbreviations."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text, every column as wide as its widest cell."""
    return str(tabulate(rows, tablefmt="plain", disable_numparse=True))


def say(text: str, end: str = "\n") -> None:
    """Print and flush; ignore a reader that has closed the pipe (`| head`)."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        # Python flushes again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def at_least(least: int) -> Callable[[str], int]:
    """A `type` for argparse: an integer that is not smaller."""

    def number(text: str) -> int:
        if not re.fullmatch(INTEGER, text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer >={least}, got {text!r}")
        return int(text)

    return number


def decimal(text: str) -> float:
    """A `type` for argparse: a finite number in decimal digits."""
    if not re.fullmatch(DECIMAL, text) or not isfinite(float(text)):
        raise argparse.ArgumentTypeError(f"expected a number, got {text}")
    return float(text)


def user_path(text: str) -> Path:
    """A `type` for argparse and for settings: a path, in which ~ is the user's folder.

    A shell writes that folder in `--runs ~/x`, but not in `--runs=~/x`.
    """
    if not os.fspath(text).strip():
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no such user
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}: {error}") from error


def user_folder(text: str) -> Path:
    """A `type` for argparse: as `user_path`, of a folder that is there or can be made."""
    folder = user_path(text)
    if folder.exists() and not folder.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {text!r}, which is none")
    return folder


def split_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and the settings for its runs, which follow the first `--`."""
    own = list(argv)
    here = own.index("--") if "--" in own else len(own)
    return own[:here], own[here + 1 :]
