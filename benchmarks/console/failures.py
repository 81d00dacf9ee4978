"""Failures of the machine, in one line each, with the way out."""

import errno
import traceback
from pathlib import Path

from benchmarks.console.printing import reason

SHARED_MEMORY = (
    *("shared memory", "/dev/shm", "'/torch_", "</torch_", "bus error"),
    *("dataloader worker (pid", "received 0 items of ancdata"),
)
"""Parts of such an error's class and message, in small letters."""

OUT_OF_MEMORY = (
    *("out of memory", "memoryerror", "can't allocate memory", "cannot allocate memory"),
    *("bad_alloc", "_alloc_failed"),
)

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk that is full, over its quota, read-only or broken."""


def machine_failure(error: BaseException | None, place: Path | None = None) -> str | None:
    """One line about too little memory, workers that were killed for it, a disk, or a file of the run; or None.

    Args:
        error: The error; those that it came of are looked at, too.
        place: Folder of the run that was writing, which --resume continues.
    """
    while error is not None:
        text = f"{type(error).__name__}: {error}".lower()
        shown = f"{type(error).__name__}: {reason(error).partition('. ')[0].rstrip('.')}"
        frames = traceback.extract_tb(error.__traceback__) if isinstance(error, OSError) else []
        # Some errors of sharing tensors between processes look like that of a full disk.
        shares = any("multiprocessing" in frame.filename for frame in frames)
        if isinstance(error, (MemoryError, OSError, RuntimeError)):
            if any(phrase in text for phrase in OUT_OF_MEMORY):
                return (
                    f"{shown}; too little memory: take a smaller --data.batch_size or --evaluation.batch_size, a "
                    "smaller trunk, or --precision bf16; other programs may hold some"
                )
            if shares or any(phrase in text for phrase in SHARED_MEMORY):
                return (
                    f"{shown}; the data-loader workers lack shared memory or were killed: set --data.num_workers 0 "
                    "or fewer, or give them more (docker run --shm-size 8g)"
                )
        if isinstance(error, OSError):
            where, again = error.filename or place or "the disk", " with --resume" if place else ""
            inside = place is not None and Path(f"{where}").is_relative_to(place)
            if error.errno in DISK or (inside and error.filename):
                return f"{where}: {error.strerror}; repair that, and rerun the same command{again}"
        error = error.__cause__ or error.__context__
    return None
