"""Resolved settings with some values changed."""

import copy
from collections.abc import Mapping
from typing import Any

from benchmarks.settings.errors import ConfigError


def changed(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of resolved settings with the values at their paths.

    Raises:
        ConfigError: naming the path, if it leads nowhere; whether the setting is known shows when it is parsed.
    """
    result = copy.deepcopy(dict(settings))
    for path, value in values.items():
        _place(result, path, value, path)
    return result


def _place(part: Any, rest: str, value: Any, path: str) -> None:
    """Set what `rest` of the path leads to in `part`."""
    steps = {}
    if isinstance(part, dict):  # names may hold dots: those of optimization.overrides do
        steps = {str(name): name for name in part}
    elif isinstance(part, list):
        steps = {f"[{i}]": i for i in range(len(part))}
    for step in sorted(steps, key=len, reverse=True):
        if rest == step:
            part[steps[step]] = value
            return
        if rest.startswith((f"{step}.", f"{step}[")):
            _place(part[steps[step]], rest[len(step) :].removeprefix("."), value, path)
            return
    # Values that the runner fills in, and those that YAML cannot hold, may be missing.
    if not isinstance(part, dict) or "." in rest or "[" in rest:
        raise ConfigError(
            f"{path}: leads nowhere in the settings of the recipe, which benchmarks/run.py --print_config shows"
        )
    part[rest] = value
