"""What the server of forked runs imports before the first of them."""

import multiprocessing
import os
from contextlib import suppress

# torch then counts GPUs without opening one, which would be of no use to a fork.
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
before = os.environ.get(NVML)
os.environ[NVML] = "1"

import benchmarks.training.run  # noqa: E402, F401
from benchmarks.records.provenance import describe_code  # noqa: E402
from benchmarks.settings.class_paths import resolved  # noqa: E402
from benchmarks.settings.command import parse  # noqa: E402

del os.environ[NVML]
if before is not None:
    os.environ[NVML] = before

describe_code()
resolved(parse([]).experiment)  # the parser, and the arguments of common classes, once for all runs
if multiprocessing.parent_process() is None:  # the server, which no signal to the command may end
    with suppress(PermissionError):
        os.setsid()
