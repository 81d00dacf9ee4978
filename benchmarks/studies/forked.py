"""What the server of forked runs imports before the first of them."""

import ctypes
import os
import signal

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

PARENT_DEATH_SIGNAL = 1  # of prctl


def end_with_parent() -> None:
    """Get a SIGTERM as soon as the server has ended: it does so with the command that started it."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
