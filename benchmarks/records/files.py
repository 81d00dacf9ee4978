"""Files that are complete or absent, and whose damage is noticed."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.console import reason


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


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, so that the old or the new one is there, even if the process is killed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except Exception:
        temporary.unlink(missing_ok=True)  # makes room on a full disk
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that the old or the new one is there, even if the process is killed."""
    with replacing(path) as file:
        file.write(content)


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
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ValueError("it is not a file")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(entries, ensure_ascii=False).encode()  # half a character cannot be written
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(entries, dict):
        raise ValueError(f"expected a mapping, got {type(entries).__name__}")
    if entries.get("sha256") != signed(entries)["sha256"]:
        raise ValueError("its sha256 is not that of its content")
    return entries


def write_json(path: Path, obj: Mapping[str, Any]) -> None:
    """Write `obj`, `signed`, atomically as indented JSON.

    NaN and infinity become the words `NaN` and `Infinity`, which Python's json reads but strict parsers refuse: a
    null would look like a number that was never measured.
    """
    replace_file(path, (json.dumps(signed(obj), indent=2, ensure_ascii=False) + "\n").encode())
