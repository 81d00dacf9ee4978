"""Files that are whole or not there, and say so if they are not as they were written."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.console import reason


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Whatever goes wrong with what a file holds is a ValueError of one line that names the file."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {reason(error)}"
        raise ValueError(
            f"{path}: is damaged ({said}); run that training again, or delete the file"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file such that, killed at any moment, either the old or the new one is there."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # room on a full disk
        raise


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def signed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a JSON file, and the SHA-256 of them as "sha256"."""
    others = {name: value for name, value in entries.items() if name != "sha256"}
    return others | {"sha256": hashlib.sha256(json.dumps(others).encode()).hexdigest()}


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file that `write_json` wrote.

    Raises:
        ValueError: if it is anything else; the caller names the file.
    """
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ValueError("it is no file")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(entries, ensure_ascii=False).encode()  # halves of a character cannot be written
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(entries, dict):
        raise ValueError(f"expected a mapping, got {type(entries).__name__}")
    if entries.get("sha256") != signed(entries)["sha256"]:
        raise ValueError("its sha256 is not that of its content")
    return entries


def write_json(path: Path, obj: Mapping[str, Any]) -> None:
    """Writes `obj`, `signed`, atomically as indented JSON.

    NaN and infinity become the words `NaN` and `Infinity`, which Python's json reads back but
    strict parsers refuse: a null could not be told from a number that was never measured.
    """
    replace_file(path, (json.dumps(signed(obj), indent=2, ensure_ascii=False) + "\n").encode())
