"""Files that are complete or absent, and whose damage is noticed."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.console.printing import reason
from benchmarks.console.writing import replace_file


@contextmanager
def damage_named(
    path: Path, remedy: str = "run that training again, or delete the file"
) -> Iterator[None]:
    """Turn any error from a file's content into a ValueError of one line that names the file."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {reason(error)}"
        raise ValueError(f"{path}: is damaged ({said}); {remedy}") from error


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def signed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a JSON file, with their SHA-256 as "sha256"."""
    others = {name: value for name, value in entries.items() if name != "sha256"}
    return others | {"sha256": hashlib.sha256(json.dumps(others).encode()).hexdigest()}


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that `write_json` wrote.

    Raises:
        ValueError: for any other file; the caller names it.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, dict) or entries.get("sha256") != signed(entries)["sha256"]:
        raise ValueError("its sha256 is not that of its content")
    return entries


def write_json(path: Path, obj: Mapping[str, Any]) -> None:
    """Write `obj`, `signed`, atomically as indented JSON.

    NaN and infinity become the words `NaN` and `Infinity`, which Python's json reads but strict parsers refuse: a
    null would look like a number that was never measured.
    """
    replace_file(path, (json.dumps(signed(obj), indent=2, ensure_ascii=False) + "\n").encode())
