"""A run on a CPU keeps the memory of freed tensors."""

import platform
import subprocess
import sys

import pytest

from benchmarks.settings import parse
from benchmarks.training import trial
from tests.support.processes import ROOT

HEAP = """
import ctypes, re
from pathlib import Path
from benchmarks.console import keep_memory

def heap():
    found = re.search(r"^(\\w+)-(\\w+) .*\\[heap\\]", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return int(found[2], 16) - int(found[1], 16)

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
print(keep_memory(), end=" ")
size, before = 2**26, heap()
block = libc.malloc(ctypes.c_size_t(size))
inside = heap() - before >= size
libc.free(block)
print(inside, heap() - before >= size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_MMAP_MAX_": "9"}])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(
    environment: dict[str, str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAP], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(not environment)] * 3, done.stderr


def test_a_run_on_a_cpu_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(trial, "keep_memory", lambda: calls.append(True))
    trial.start(parse([]).experiment)
    assert calls == [True]
