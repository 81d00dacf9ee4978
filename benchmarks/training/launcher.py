"""Settings that Accelerate takes from the environment, where `accelerate launch` puts those of its config file."""

from benchmarks.records.provenance import describe_launcher
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment

OFF = {"", "0", "no", "none", "false", "default"}
"""Values of what is not used, in lower case."""

WITHOUT_EFFECT = {
    *("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY"),
    *("ACCELERATE_DEBUG_MODE", "ACCELERATE_DEBUG_RDV_FILE", "ACCELERATE_ENABLE_RICH"),
    *("ACCELERATE_LOG_LEVEL", "ACCELERATE_CONFIG_FILE", "ACCELERATE_NUM_PROCESSES"),
    *("ACCELERATE_BYPASS_DEVICE_MAP", "ACCELERATE_INIT_INCLUDE_BUFFERS", "ACCELERATE_IN_TPU_POD"),
}
"""Variables that say where and how to run, not what."""


def check_launcher(experiment: Experiment) -> None:
    """Refuse what Accelerate would act on, unseen, and the experiment does not say.

    Raises:
        ConfigError: naming the variable.
    """
    for name, value in describe_launcher().items():
        off = OFF | {"1"} if name.endswith("_STEPS") else OFF  # of accumulation: one is none
        if name == "ACCELERATE_MIXED_PRECISION":
            if value.lower() not in ("", "no", experiment.mixed_precision):
                raise ConfigError(
                    f"{name}={value}: the run has precision {experiment.precision}; set --precision, or take it "
                    "from the environment or Accelerate's config file"
                )
        elif value.lower() not in off and name not in WITHOUT_EFFECT:
            raise ConfigError(
                f"{name}={value}: is no setting of a run; take it from the environment or Accelerate's config file"
            )
