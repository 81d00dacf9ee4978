"""The accelerator of a run, and what Accelerate takes from the environment.

`accelerate launch` puts the settings of its config file there.
"""

import ctypes
import os
import sys
from importlib.util import find_spec

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import parse_flag_from_env

from benchmarks.records.provenance import describe_launcher
from benchmarks.records.trackers import check_trackers
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment
from pml_regularizers.functional.precision import device_for

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Options of glibc's `mallopt`."""

OFF = {"", "0", "no", "none", "false", "default"}
"""Values of what is not used, in lower case."""

WITHOUT_EFFECT = {
    *("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY"),
    *("ACCELERATE_DEBUG_MODE", "ACCELERATE_DEBUG_RDV_FILE", "ACCELERATE_ENABLE_RICH"),
    *("ACCELERATE_LOG_LEVEL", "ACCELERATE_CONFIG_FILE", "ACCELERATE_NUM_PROCESSES"),
    *("ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_INIT_INCLUDE_BUFFERS", "ACCELERATE_IN_TPU_POD"),
}
"""Variables that say where and how to run, not what."""


def start(experiment: Experiment) -> Accelerator:
    """Make the accelerator that a run trains on, if machine and launcher suit the experiment."""
    check_launcher(experiment)
    check_trackers(experiment.trackers)
    on_gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    if experiment.precision == "fp16" and not on_gpu:  # Accelerate would train in float32
        raise ConfigError("precision: fp16 needs a GPU; on a CPU use bf16 or float32")
    if experiment.evaluation.clustering and find_spec("faiss") is None:
        raise ConfigError("evaluation.clustering: needs faiss-cpu; install it, or set it to false")
    accelerator = Accelerator(
        mixed_precision=experiment.precision if experiment.precision in ("bf16", "fp16") else "no",
        gradient_accumulation_steps=1,
        step_scheduler_with_optimizer=False,
        project_dir=experiment.output,
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
    )
    device = accelerator.device
    if experiment.precision == "float64" and device_for(torch.float64, device) != device:
        raise ConfigError(f"precision: {device.type} has no float64; set ACCELERATE_USE_CPU=true")
    if device.type == "cpu":
        keep_memory()
        if (
            accelerator.mixed_precision == "bf16"
            and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            accelerator.print(
                "precision: this processor has no instructions for bfloat16, so that bf16 is many times slower "
                "than --precision float32"
            )
    if experiment.data.batch_size % accelerator.num_processes:
        raise ConfigError(
            f"data.batch_size: {experiment.data.batch_size} images do not divide by "
            f"{accelerator.num_processes} processes; expected a multiple, also of data.samples_per_class"
        )
    return accelerator


def check_launcher(experiment: Experiment) -> None:
    """Refuse what Accelerate would act on, unseen, and the experiment does not say."""
    for name, value in describe_launcher().items():
        off = OFF | {"1"} if name.endswith("_STEPS") else OFF  # of accumulation: one is none
        if name == "ACCELERATE_MIXED_PRECISION":
            if value.lower() not in ("", "no", experiment.precision):
                raise ConfigError(
                    f"{name}={value}: the run has precision {experiment.precision}; set --precision, or take it "
                    "from the environment or Accelerate's config file"
                )
        elif value.lower() not in off and name not in WITHOUT_EFFECT:
            raise ConfigError(
                f"{name}={value}: is no setting of a run; take it from the environment or Accelerate's config file"
            )


def keep_memory() -> bool:
    """Keep freed memory for the next tensor; True if it is kept.

    glibc would hand large tensors back after each use, and Linux clear their pages for the next one. Other systems
    stay as they are, and so does an environment that sets this (MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_).
    """
    given = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys()
    if given or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # another C library
        return False
    return bool(library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, -1))  # -1: never
