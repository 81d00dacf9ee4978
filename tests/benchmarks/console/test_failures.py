"""Failures of the machine are one line, with the way out; the runner says which systems it runs on."""

import errno
import multiprocessing.synchronize
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.console import lacks_shared_memory, machine_failure
from benchmarks.run import _told
from benchmarks.settings import parse
from tests.support.processes import TIMEOUT, environment

MEMORY, WORKERS = "--data.batch_size", "--data.num_workers 0"
FAILURES = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"), MEMORY),
    (RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory"), MEMORY),
    (MemoryError(), MEMORY),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), MEMORY),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), MEMORY),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "/torch_7_1"), WORKERS),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), "--shm-size"),
    (RuntimeError("unable to write to file </torch_7_1>: No space left on device"), "--shm-size"),
    (RuntimeError("unable to open shared memory object </torch_7> in read-write"), "--shm-size"),
    (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), WORKERS),
    (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
]


@pytest.mark.parametrize(("error", "way_out"), FAILURES)
def test_a_failure_of_the_machine_is_one_line_with_the_way_out(
    error: Exception, way_out: str
) -> None:
    """Also where another error came of it."""
    other = KeyError("x")
    other.__context__ = error
    for raised in (error, other):
        line = _told(raised, parse([]))
        assert line is not None and "\n" not in line and way_out in line and len(line) < 450
        assert "with --resume" not in line


class Failing(torch.utils.data.Dataset[int]):
    """Raises an error of several lines, deep in other calls."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.deeper(300 * "long ", index)
        return index

    def deeper(self, text: str, index: int) -> None:
        raise LookupError(f"image {index} is odd,\nand this is why")


def test_the_reason_of_a_workers_error_is_not_cut() -> None:
    with pytest.raises(LookupError) as failed:
        list(DataLoader(Failing(), num_workers=1))
    line = machine_failure(failed.value)
    assert (
        line is not None and "failed: LookupError: image 0 is odd, and this is why; --data" in line
    )


def test_no_room_for_a_semaphore_is_no_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **others: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "_make_name", full)
    with pytest.raises(OSError) as failed:
        multiprocessing.get_context("spawn").Lock()
    assert lacks_shared_memory(failed.value)
    line = _told(failed.value, parse([]))
    assert line is not None and "--shm-size" in line


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    assert _told(ValueError("memory"), parse([])) is None
    assert _told(RuntimeError("The size of tensor a (3) must match"), parse([])) is None


def test_windows_is_told_in_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['fcntl'] = None; "
        "from benchmarks.study import main; sys.exit(main(['glyphs', '--page-only']))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment(),
        cwd=tmp_path,
    )
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and [*tmp_path.iterdir()] == []
    assert line.startswith("error: the runner needs Linux or macOS (Python's fcntl)")
