"""Files and folders that are complete or absent."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(target: Path, *, wait: bool = False) -> Iterator[Path]:
    """An empty folder `.NAME.partial` beside the target, for this process alone and removed afterwards.

    Remains of a killed process are removed. The file `.NAME.lock` stays.

    Args:
        target: The result's path; the caller renames what it has written to it.
        wait: Wait for another process that is at work on the target.

    Raises:
        filelock.Timeout: if another process is at work on it.
        OSError: if the folder cannot be made.
    """
    from filelock import FileLock

    partial = target.with_name(f".{target.name}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock"), timeout=-1 if wait else 0):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
