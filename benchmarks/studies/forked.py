"""What the server of forked runs imports before the first of them."""

import fcntl
import multiprocessing
import os
import select
import signal
import sys
from contextlib import suppress

import numpy as np
import torch

# torch then counts GPUs without opening one, which would be of no use to a fork.
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
before = os.environ.get(NVML)
os.environ[NVML] = "1"

from benchmarks import (  # noqa: E402
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

del os.environ[NVML]
if before is not None:
    os.environ[NVML] = before

records.keep_code()
if multiprocessing.parent_process() is None:  # the server, which no signal to the command may end
    with suppress(PermissionError):
        os.setsid()


def seed_anew() -> None:
    """Give this process random states of its own, as a new one has."""
    np.random.seed()  # noqa: NPY002
    torch.seed()


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
