"""Files that are written whole, and folders that one process owns: safe for any number of processes at once."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from filelock import FileLock, Timeout

from benchmarks.console.printing import PrintableError

LOCK = ".lock"


class InUseError(PrintableError, ValueError):
    """Error: another process owns the folder."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, so that the old or the new one is there, whole, even if the process is killed.

    Each writer has a temporary file of its own, so that of several at once the last one wins.
    """
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # makes room on a full disk
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that the old or the new one is there, whole, even if the process is killed."""
    with replacing(path) as file:
        file.write(content)


def let_others_read(path: Path) -> None:
    """Give a file the mode of a new one: other programs keep their temporary files to their user."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


class OwnedFolder(AbstractContextManager["OwnedFolder"]):
    """A folder that this process alone uses, from construction to `close` or the end of the process.

    It is made if need be. Its file `.lock` holds the owner's process id, and `close` deletes it.

    Args:
        patience: Seconds to wait for another owner.

    Raises:
        InUseError: if another process owns it.
        OSError: if it cannot be made.
    """

    def __init__(self, path: Path, *, patience: float = 0) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = path, _locked(path / LOCK, path, patience)

    def move(self, path: Path) -> None:
        """Rename the folder, still owned."""
        self.path = self.path.rename(path)

    def close(self) -> None:
        """Let others use the folder."""
        if self._lock.is_locked:
            (self.path / LOCK).unlink(missing_ok=True)  # before others can lock it
            self._lock.release()

    def __exit__(self, *exception: object) -> None:
        self.close()


def _locked(file: Path, used: Path, patience: float) -> FileLock:
    """Lock the file that stands for a path in use, and write this process's id into it."""
    lock = FileLock(file, timeout=patience, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        owner = ""
        with suppress(FileNotFoundError):  # it has just ended
            owner = file.read_text()
        said = f"{used} is being written by another process ({owner or 'unknown'})"
        raise InUseError(f"{said}; wait for it, or choose another folder") from error
    file.write_text(f"{os.getpid()}")
    return lock


@contextmanager
def alone(target: Path, *, wait: bool = False) -> Iterator[Path]:
    """An empty folder beside the target, for what becomes the target; this process owns it, and it is deleted.

    The remains of a killed process are deleted first. What only one process may do to the target needs no more.

    Args:
        target: The result's path; the caller renames what it has written to it.
        wait: Wait for another process that is at work on the target.

    Raises:
        InUseError: if another process is at work on it.
        OSError: if the folder cannot be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    file, partial = (target.with_name(f".{target.name}.{kind}") for kind in ("lock", "partial"))
    lock = _locked(file, target, math.inf if wait else 0)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        file.unlink(missing_ok=True)
        lock.release()
