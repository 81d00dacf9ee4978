"""What the server of forked runs imports before the first of them."""

import multiprocessing
import os
from contextlib import suppress

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
