"""Safe printing: texts from files and users, without characters that control a terminal or break a picture."""

import os
import re
import sys
from typing import Any

from tqdm import tqdm

LONGEST = 300  # characters of an error's message

CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Control characters, ends of lines, changes of the writing direction, bytes that are not UTF-8, and what XML
cannot hold."""


def is_plain(text: str) -> bool:
    """True for one line of text without control characters, as a file's name should be."""
    return CONTROLS.search(text) is None


def reason(error: BaseException) -> str:
    """The error as one short line; errors of our own parser go through `settings.one_line`."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    line = printable(" ".join(text.split())) or type(error).__name__
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def as_line(error: Exception) -> str:
    """An error of ours as it is, one of the system's as `reason`."""
    return reason(error) if isinstance(error, OSError) else str(error)


def printable(text: str) -> str:
    """The text with escapes such as \\x1b in place of control characters."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


class PrintableError(Exception):
    """An error whose message is one line, whatever names are in it."""

    def __str__(self) -> str:
        return printable(super().__str__())


def progress_bar(iterable: Any = None, *, shown: bool = True, **options: Any) -> Any:
    """A tqdm bar that updates often on a terminal and writes few lines to a log file."""
    shown &= sys.stderr is not None  # closed, as by 2>&-
    interval = 0.1 if shown and sys.stderr.isatty() else 10
    return tqdm(iterable, disable=not shown, mininterval=interval, dynamic_ncols=True, **options)
