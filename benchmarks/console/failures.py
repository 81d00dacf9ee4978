"""Failures of the machine, in one line each, with the way out."""

import errno
import re
import traceback
from collections.abc import Iterator

from benchmarks.console.printing import reason, shortened

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
    if isinstance(error, OSError):
        if error.filename is not None:
            return str(error.filename).startswith(("/dev/shm", "/torch_"))
        frames = traceback.extract_tb(error.__traceback__)
        return any("multiprocessing" in frame.filename for frame in frames)
    return isinstance(error, RuntimeError) and bool(SHARED_MEMORY.search(str(error)))


def machine_failure(error: BaseException) -> str | None:
    """One line about memory or data-loader workers that failed; None for anything else."""
    for cause in causes(error):
        text, is_memory = str(cause), isinstance(cause, MemoryError)
        if isinstance(cause, OSError):
            is_memory = cause.errno == errno.ENOMEM
        elif isinstance(cause, RuntimeError):
            is_memory = OUT_OF_MEMORY.search(text) is not None
        shown = f"{type(cause).__name__}: {reason(cause).partition('. ')[0].rstrip('.')}"
        if "Too many open files" in text:
            return f"{shown}; {WAYS_OUT['files']}"
        if isinstance(cause, BlockingIOError) or "can't start new thread" in text:
            return f"{shown}; {WAYS_OUT['processes']}"
        if caught := WORKER.search(text):
            is_memory = bool(OUT_OF_MEMORY.search(text)) or caught[1] == "MemoryError"
            way = WAYS_OUT["memory" if is_memory else "worker"]
            return f"a data-loader worker failed: {worker_reason(text, caught[1])}; {way}"
        if is_memory:
            return f"{shown}; {WAYS_OUT['memory']}"
        if lacks_shared_memory(cause):
            return f"{shown}; {WAYS_OUT['shared']}"
    return None


def worker_reason(text: str, name: str) -> str:
    """The error at the end of a worker's traceback, of this class."""
    starts = [*re.finditer(rf"^[\w.]*\b{name}(?=:|$)", text, re.MULTILINE)]
    last = text[starts[-1].start() :] if starts else text.strip().rpartition("\n")[2]
    return shortened(last)
