"""Accelerate's trackers, such as wandb or mlflow: they get the rows of a run's record beside record-keeper."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from benchmarks.console.arguments import say
from benchmarks.console.printing import reason
from benchmarks.records.steps import Row
from benchmarks.settings.differences import flat
from benchmarks.settings.errors import ConfigError

PROJECT = "pml-regularizers"


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that Accelerate does not have, and those that are not installed, which it would leave out.

    Raises:
        ConfigError: naming the tracker.
    """
    available = {str(kind) for kind in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(LOGGER_TYPE_TO_CLASS)
            raise ConfigError(f"trackers: Accelerate has no {name!r}; it has {known}")
        if name in LoggerType.list() and name not in available:
            raise ConfigError(
                f"trackers: {name} is not installed; pip install {name}, or leave it out"
            )


@dataclass
class Trackers:
    """The trackers of an accelerator, by Accelerate's names; used by the main process alone."""

    accelerator: Accelerator
    names: Sequence[str]
    failed: bool = False

    def start(
        self, run: str, config: Mapping[str, Any], before: Mapping[str, str], step: int | None
    ) -> dict[str, str]:
        """Start a run in each tracker, or continue the one before.

        Args:
            run: Name of the run.
            config: Its settings, which a new run gets.
            before: What this method returned when the run began: {tracker: identifier of its run}, of those that
                can continue it.
            step: The step that it continues from, or None: TensorBoard hides an earlier session's later rows.

        Raises:
            ConfigError: if one does not start.
        """
        settings: dict[str, dict[str, Any]] = {
            "wandb": {"name": run, "resume": "allow", "id": before.get("wandb")},
            "mlflow": {"run_name": run, "run_id": before.get("mlflow")},
            "tensorboard": {"purge_step": 0 if step is None else step + 1},
        }
        ids = {"wandb": lambda own: own.id, "mlflow": lambda own: own.info.run_id}
        continued: dict[str, str] = {}
        started: list[Any] = []
        accelerator = self.accelerator
        for name in self.names:
            # One by one, so that an error names its tracker.
            accelerator.log_with, accelerator.trackers = [name], []
            try:
                accelerator.init_trackers(
                    PROJECT,
                    config=None if name in before else _plain(config),
                    init_kwargs={name: settings.get(name, {})},
                )
                if name in ids:
                    continued[name] = str(ids[name](accelerator.get_tracker(name, unwrap=True)))
            except (Exception, SystemExit) as error:
                accelerator.trackers = []
                raise ConfigError(
                    f"trackers: {name} does not start: {type(error).__name__}: {reason(error)}; set it up as its "
                    "documentation says (its offline mode needs no account), or leave it out"
                ) from error
            finally:
                started += accelerator.trackers
                accelerator.trackers = started
        return continued

    def log(self, tables: Mapping[str, Sequence[Row]]) -> None:
        """Hand over rows as {"TABLE/NAME": value}, in the order of their steps, which some trackers need."""
        steps: dict[int, dict[str, float]] = defaultdict(dict)
        for table, rows in tables.items() if self.names and not self.failed else ():
            for step, values in rows:
                steps[int(step)] |= {f"{table}/{name}": float(x) for name, x in values.items()}
        try:
            for step in sorted(steps):
                self.accelerator.log(steps[step], step=step)
        except Exception as error:
            self.failed = True
            failed = f"trackers: {type(error).__name__}: {reason(error)}"
            say(f"{failed}; they get no more rows, records/ has them")


def _plain(config: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Settings by path, as numbers and texts, without nulls; mlflow refuses brackets in names."""
    plain: dict[str, str | int | float | bool] = {}
    for path, value in flat(config).items():
        if value is not None:
            is_plain = isinstance(value, (bool, int, float, str))
            plain[re.sub(r"\[(\d+)\]", r".\1", path)] = value if is_plain else json.dumps(value)
    return plain
