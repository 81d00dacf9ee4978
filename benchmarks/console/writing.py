"""Files that are written whole, and folders that one process owns: safe for any number of processes at once."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, Self

from benchmarks.console.printing import PrintableError

LOCK = ".lock"

POLL = 0.1  # seconds between two tries to own a folder

TRIES = 100  # to make a folder that others may delete at the same time


class InUseError(PrintableError, ValueError):
    """Error: another process owns the folder."""


@contextmanager
def _named(path: Path, temporary: Path) -> Iterator[None]:
    """Name a file in the system's errors about the temporary one, or about what is in it."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, so that the old or the new one is there, whole, even if the process is killed.

    Each writer has a temporary file of its own, so that of several at once the last one wins.

    Raises:
        OSError: naming the file, and not the temporary one.
    """
    temporary = path.parent / f".{path.name}.{token_hex(4)}.tmp"
    try:
        with _named(path, temporary):
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()  # makes room on a full disk
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as `replacing` does."""
    with replacing(path) as file:
        file.write(content)


def let_others_read(path: Path) -> None:
    """Give a file the mode of a new one: other programs keep their temporary files to their user."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


class OwnedFolder:
    """A folder that this process alone uses, from construction to `close` or the end of the process.

    It is made if need be. Its file `.lock`, which stays, holds the last owner's process id.

    Args:
        patience: Seconds to wait for another owner.

    Raises:
        InUseError: if another process owns it.
        OSError: if it cannot be made, or its file system has no locks.
    """

    def __init__(self, path: Path, *, patience: float = 0) -> None:
        from filelock import FileLock, Timeout  # late: `--help` locks nothing

        self.path = path
        self._lock = FileLock(
            *(path / LOCK, patience),
            thread_local=False,
            poll_interval=POLL,
            fallback_to_soft=False,  # it would outlive a machine that is lost
            on_acquired=self._sign,
        )
        for left in reversed(range(TRIES)):
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()
                return
            except Timeout:
                raise InUseError(
                    f"{path} is being written by another process ({self._owner()}); wait for it, or choose another "
                    "folder"
                ) from None
            except (FileExistsError, FileNotFoundError):
                if not left:
                    raise

    def _sign(self, lock: int) -> None:
        """Write this process's id into the lock; a FileNotFoundError if the folder was moved meanwhile."""
        if not os.path.samestat(os.fstat(lock), (self.path / LOCK).stat()):
            raise FileNotFoundError(self.path)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}".encode(), 0)

    def _owner(self) -> str:
        with suppress(OSError):
            return (self.path / LOCK).read_text() or "unknown"
        return "unknown"

    def move(self, path: Path) -> None:
        """Rename the folder, still owned."""
        self.path = self.path.rename(path)

    def close(self) -> None:
        """Let others use the folder."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
    partial = target.with_name(f".{target.name}.partial")
    work = partial / "work"
    try:
        with _named(target, partial), OwnedFolder(partial, patience=math.inf if wait else 0):
            try:
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
                (partial / LOCK).unlink()
    finally:
        with suppress(OSError):  # another owner has it
            partial.rmdir()
