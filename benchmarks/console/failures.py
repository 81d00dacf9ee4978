"""Failures of the machine, in one line each, with the way out."""

import errno
import re
import traceback
from collections.abc import Iterator

from benchmarks.console.printing import LONGEST, printable, reason

WORKER = re.compile(r"Caught (\w+) in DataLoader worker process")

OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|cannot allocate memory|std::bad_alloc|_ALLOC_FAILED",
    re.I,
)

SHARED_MEMORY = re.compile(
    r"shared memory|bus error|/torch_\d+|/dev/shm|DataLoader worker \(pid|received 0 items of ancdata",
    re.I,
)

WAYS_OUT = {
    "shared": "the data-loader workers lack shared memory or were killed: set --data.num_workers 0 or fewer, "
    "or give them more (docker run --shm-size 8g)",
    "processes": "too many processes or threads: set --data.num_workers 0 or fewer, or raise the limit (ulimit -u)",
    "files": "too many open files: set --data.num_workers 0, or raise the limit (ulimit -n 65536)",
    "memory": "too little memory: take a smaller --data.batch_size or --evaluation.batch_size, a smaller trunk, or "
    "--precision bf16; other programs may hold some",
    "worker": "--data.num_workers 0 shows where",
}


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came of."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def lacks_shared_memory(error: BaseException) -> bool:
    """True for an error of sharing tensors between processes; some look like that of a full disk."""
    frames = traceback.extract_tb(error.__traceback__)
    among_processes = any("multiprocessing" in frame.filename for frame in frames)
    no_space = isinstance(error, OSError) and error.filename is None and among_processes
    named = isinstance(error, OSError) and str(error.filename or "").startswith(
        ("/dev/shm", "/torch_")
    )
    return (
        no_space
        or named
        or (isinstance(error, RuntimeError) and bool(SHARED_MEMORY.search(str(error))))
    )


def machine_failure(error: BaseException) -> str | None:
    """One line about memory or data-loader workers that failed; None for anything else."""
    for cause in causes(error):
        text = str(cause)
        if "Too many open files" in text:
            return f"{_short(cause)}; {WAYS_OUT['files']}"
        if isinstance(cause, BlockingIOError) or "can't start new thread" in text:
            return f"{_short(cause)}; {WAYS_OUT['processes']}"
        if caught := WORKER.search(text):
            kind = (
                "memory" if OUT_OF_MEMORY.search(text) or caught[1] == "MemoryError" else "worker"
            )
            return (
                f"a data-loader worker failed: {worker_reason(text, caught[1])}; {WAYS_OUT[kind]}"
            )
        no_memory = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
        if (
            no_memory
            or isinstance(cause, MemoryError)
            or (isinstance(cause, RuntimeError) and OUT_OF_MEMORY.search(text))
        ):
            return f"{_short(cause)}; {WAYS_OUT['memory']}"
        if lacks_shared_memory(cause):
            return f"{_short(cause)}; {WAYS_OUT['shared']}"
    return None


def worker_reason(text: str, name: str) -> str:
    """The error at the end of a worker's traceback, of this class."""
    starts = [*re.finditer(rf"^[\w.]*\b{name}(?=:|$)", text, re.MULTILINE)]
    told = text[starts[-1].start() :] if starts else text.strip().rpartition("\n")[2]
    shown = printable(" ".join(told.split()))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} ..."


def _short(error: BaseException) -> str:
    first = reason(error).partition(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {first}"
