"""What the server of forked runs imports before the first of them."""

import fcntl
import multiprocessing
import os
import select
import signal
import sys

# torch then counts GPUs without opening one, which would be of no use to a fork.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from benchmarks import (
    building,
    console,
    datasets,
    evaluation,
    records,
    reporting,
    settings,
    training,
)

for package in (building, console, datasets, evaluation, records, reporting, settings, training):
    for name in package.__all__:  # a module is imported when one of its names is asked for
        getattr(package, name)

del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]


def end_with_parent() -> None:
    """Get a SIGTERM as soon as the process that asked for this one is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = parent.sentinel  # it closes the other end
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # before that
        sys.exit()
