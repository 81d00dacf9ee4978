"""Failures of the machine, in one line each, with the way out."""

import traceback
from collections.abc import Iterator

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


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came of."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def lacks_shared_memory(error: BaseException) -> bool:
    """True for an error of sharing tensors between processes; some look like that of a full disk."""
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, OSError) else []
    shares = any("multiprocessing" in frame.filename for frame in frames)
    return shares or _says(error, SHARED_MEMORY)


def machine_failure(error: BaseException) -> str | None:
    """One line about too little memory, or workers that were killed for it; None for anything else."""
    for cause in causes(error):
        shown = f"{type(cause).__name__}: {reason(cause).partition('. ')[0].rstrip('.')}"
        if _says(cause, OUT_OF_MEMORY):
            return (
                f"{shown}; too little memory: take a smaller --data.batch_size or --evaluation.batch_size, a "
                "smaller trunk, or --precision bf16; other programs may hold some"
            )
        if lacks_shared_memory(cause):
            return (
                f"{shown}; the data-loader workers lack shared memory or were killed: set --data.num_workers 0 or "
                "fewer, or give them more (docker run --shm-size 8g)"
            )
    return None


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    text = f"{type(error).__name__}: {error}".lower()
    kind = isinstance(error, (MemoryError, OSError, RuntimeError))
    return kind and any(phrase in text for phrase in phrases)
