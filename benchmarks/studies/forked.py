"""What the server of forked runs imports before the first of them."""

import multiprocessing
import os
from contextlib import suppress

# torch then counts GPUs without opening one, which would be of no use to a fork; runs get other variables.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import benchmarks.training.run  # noqa: F401
from benchmarks.records.provenance import describe_code
from benchmarks.settings.class_paths import resolved
from benchmarks.settings.command import parse
from benchmarks.settings.errors import ConfigError
from benchmarks.studies.launching import RECIPE

describe_code()
with suppress(ConfigError):  # which the command tells
    recipe = os.environ.get(RECIPE)
    # The parser, the recipe's file, and the arguments of common classes, once for all runs.
    resolved(parse([f"--recipe={recipe}"] if recipe else []).experiment)
if multiprocessing.parent_process() is None:  # the server, which no signal to the command may end
    with suppress(PermissionError):
        os.setsid()
