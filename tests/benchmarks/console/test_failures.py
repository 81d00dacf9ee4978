"""Failures of the machine are one line, with the way out; a run on a CPU keeps the memory of freed tensors."""

import errno
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.console.failures import machine_failure
from benchmarks.settings.command import parse
from benchmarks.training.failures import expected_failure
from benchmarks.training.launcher import keep_memory
from tests.support.processes import environment

MEMORY, WORKERS = "--data.batch_size", "--data.num_workers 0"
FAILURES = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"), MEMORY),
    (RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory"), MEMORY),
    (MemoryError(), MEMORY),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), MEMORY),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "/torch_7_1"), WORKERS),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), "--shm-size"),
    (RuntimeError("unable to write to file </torch_7_1>: No space left on device (28)"), WORKERS),
]


@pytest.mark.parametrize(("error", "way_out"), FAILURES)
def test_a_failure_of_the_machine_is_one_line_with_the_way_out(error, way_out):
    """Also where another error came of it."""
    other = KeyError("x")
    other.__context__ = error
    for raised in (error, other):
        line = expected_failure(raised, parse([]).experiment)
        assert line is not None and "\n" not in line and way_out in line and len(line) < 450


def test_a_full_disk_is_told_of_a_run_and_of_others():
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    line = "No space left on device; repair that, and rerun the same command"
    assert machine_failure(error) == f"the disk: {line}"
    assert machine_failure(error, Path("runs/x")) == f"runs/x: {line} with --resume"
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory", "runs/x/records/a.csv")
    told = "No such file or directory; repair that, and rerun the same command with --resume"
    assert machine_failure(gone, Path("runs/x")) == f"runs/x/records/a.csv: {told}"
    assert machine_failure(gone, Path("runs/y")) is None


def test_a_fault_of_the_program_keeps_its_traceback():
    for error in (ValueError("memory"), RuntimeError("The size of tensor a (3) must match")):
        assert expected_failure(error, parse([]).experiment) is None


def test_windows_is_told_in_one_line(tmp_path):
    code = "import sys; sys.platform = 'win32'; from benchmarks.study import main"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and [*tmp_path.iterdir()] == []
    assert line.startswith("error: the runner needs Linux or macOS")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_is_kept_unless_the_environment_says_otherwise(monkeypatch):
    assert keep_memory()
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "9")
    assert not keep_memory()
