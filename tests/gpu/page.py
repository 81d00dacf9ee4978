"""The page docs/gpu.md: what the parts of `make gpu` have found."""

import ast
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from benchmarks.console import replace_file

PARTS = Path(__file__).with_name("test_parts.py")

INTRODUCTION = """# On a GPU

{origin}

`make gpu` measures this page again on a machine with a GPU, in a few minutes and without a network. It keeps what
each part finds at once. If it is stopped, the same command goes on with the parts that have not passed.

An error is the largest difference from the expected entries, divided by the largest of them; **bold** errors are
too large. Times are medians of rounds in which the rows take turns, and a ratio compares a row with the first row
of the same round.
"""

NO_ORIGIN = "**Nobody has run this on a GPU yet.**"

NOT_ENDED = "not ended"
"""Outcome of a part while it runs; it stays if the part's process dies."""


def descriptions() -> dict[str, str]:
    """The docstrings of the parts, by name, in the order in which they run."""
    return {
        node.name.removeprefix("test_"): str(ast.get_docstring(node))
        for node in ast.parse(PARTS.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def read_page(path: Path, origin: str) -> dict[str, str]:
    """The results of the parts on a page, by name; none if it is missing or of another origin."""
    head, *sections = (path.read_text() if path.exists() else "").split("\n## ")
    if head.strip() != INTRODUCTION.format(origin=origin).strip():
        return {}
    found = [re.search(r"\n`(\w+)`: (.*)", section, re.DOTALL) for section in sections]
    return {match[1]: match[2].strip() for match in found if match}


def write_page(path: Path, origin: str | None, results: Mapping[str, str]) -> None:
    """Write the page with the results so far; one line names the parts without any."""
    text = INTRODUCTION.format(origin=origin or NO_ORIGIN)
    missing = []
    for name, description in descriptions().items():
        title, _, about = description.partition("\n\n")
        title = title.rstrip(".")
        if name not in results:
            missing.append(f"{title[0].lower()}{title[1:]} (`{name}`)")
            continue
        text += f"\n## {title}\n\n{textwrap.fill(' '.join(about.split()), 116)}\n"
        text += f"\n`{name}`: {results[name]}\n"
    if missing:
        text += "\n## Not run\n\n" + textwrap.fill("; ".join(missing) + ".", 116) + "\n"
    replace_file(path, text.encode())


def mark_dead(path: Path, status: int) -> str | None:
    """Name the part whose process ended before it did, if there is one, and say so on the page."""
    text = path.read_text() if path.exists() else ""
    match = re.search(rf"\n`(\w+)`: {NOT_ENDED}", text)
    if match is None:
        return None
    said = f"\n`{match[1]}`: failed, its process ended with status {status}"
    replace_file(path, text.replace(match[0], said, 1).encode())
    return match[1]
