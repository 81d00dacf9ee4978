"""Errors that end a run before it starts."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.console.printing import PrintableError


class ConfigError(PrintableError, ValueError):
    """Error: the description of the run is wrong; one line with the key, the value and the remedy.

    Whatever reads settings or builds what they describe raises it, from the command line to the trial step.
    """


def idle(group: str, settings: Any, *reasons: tuple[bool, Iterable[str], str]) -> Iterator[str]:
    """A line on each of the settings named by a reason that holds, unless it has its default."""
    for holds, names, reason in reasons:
        for name in names:
            if holds and getattr(settings, name) != getattr(type(settings), name):
                yield f"{group}.{name}: {reason}; leave it out"


def one_line(error: BaseException) -> str:
    """The informative lines of an error's message, joined."""
    message = str(error) or type(error).__name__
    lines = [line.strip(" -\t") for line in message.splitlines()]
    noise = (
        "Does not validate against",
        "Subtypes:",
        "Errors:",
        "Given value",
        "Expected a <class 'NoneType'>",
        "^",  # PyYAML's mark below the wrong character
    )
    lines = [line for line in lines if line and not line.startswith(noise)]
    text = ": ".join(line.rstrip(":") for line in lines)
    text = re.sub(r"Expected a typing\.Literal\[(.*?)\]", r"expected one of \1", text)
    text = re.sub(r"\. Got value:? ?(.*)", lambda match: f", got {match[1] or repr('')}", text)
    if (given := re.search(r"Given value: (?!NestedArg)(.{,100})", message)) and "got " not in text:
        text += f", got {given[1]}"
    text = re.sub(r'in "<unicode string>", (?=line)', "", text)
    text = re.sub(r"Not of type \w+: |Problem with given class_path '[\w.]+': ", "", text)
    return re.sub(r'Parser key "([^"]*)"', r"\1", re.sub(r"<class '([^']*)'>", r"\1", text))
