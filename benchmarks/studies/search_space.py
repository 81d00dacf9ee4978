"""Space of a search: settings by their path, each with its range or its values.

optimization.learning_rate: {low: 1e-5, high: 1e-2, log: true}
model.embedding_size: {low: 32, high: 128, int: true}
losses[0].loss.init_args.neg_margin: {low: 0.0, high: 1.0}
model.pool: {choices: [avg, max]}

A path is that of the resolved settings, as on the command line of `benchmarks/run.py`, with the position in a list
in brackets.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from benchmarks.settings import ConfigError, read_yaml

Space = dict[str, BaseDistribution]

FIXED = (
    *("output", "seed", "protocol", "label", "evaluation"),
    *("data.dataset", "data.root", "data.split", "data.fold", "data.folds"),
    *("data.test_classes", "data.class_level", "data.max_classes", "data.stage"),
)
"""Settings, or groups of them, that say what a trial is measured on and how: a search may not choose them."""


def read_space(path: Path) -> Space:
    """The ranges of a YAML file.

    Raises:
        ConfigError: naming the file and the key, if it is missing or not as described above.
    """
    content = read_yaml(path)
    if not content:
        raise ConfigError(f"{path}: expected at least one setting and its range, got none")
    return {key: _distribution(key, given, path) for key, given in content.items()}


def _distribution(key: Any, given: Any, path: Path) -> BaseDistribution:
    for fixed in FIXED:
        if key == fixed or str(key).startswith(f"{fixed}."):
            raise ConfigError(
                f"{path}: {key}: says what a trial is measured on or how; leave it out"
            )
    match given:
        case {"choices": [_, _, *_] as choices, **others} if not others and _distinct(choices):
            return CategoricalDistribution(choices)
        case {"low": low, "high": high, **flags} if all(
            name in ("log", "int") and isinstance(flag, bool) for name, flag in flags.items()
        ):
            integral = flags.pop("int", False)
            numbers = (int,) if integral else (int, float)
            if type(low) in numbers and type(high) in numbers and -math.inf < low < high < math.inf:
                with suppress(ValueError):  # of the logarithm of 0
                    return (IntDistribution if integral else FloatDistribution)(low, high, **flags)
    raise ConfigError(
        f"{path}: {key}: expected {{low: NUMBER, high: LARGER NUMBER}}, with int: true (of whole numbers) or "
        f"log: true (of numbers above 0) if need be, or {{choices: [two or more different values]}}, got {given!r}"
    )


def _distinct(choices: list[Any]) -> bool:
    plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in choices)
    return plain and len({(type(value), value) for value in choices}) == len(choices)


def corners(space: Space) -> list[dict[str, Any]]:
    """Few settings in which every end of a range and every choice occurs."""
    values: dict[str, Sequence[Any]] = {}
    for key, kind in space.items():
        match kind:
            case CategoricalDistribution():
                values[key] = kind.choices
            case IntDistribution():
                values[key] = [kind.low, kind.high]
            case FloatDistribution():  # a setting of whole numbers takes 8.0 as well
                values[key] = [kind.low, kind.high, kind.low + (kind.high - kind.low) / 3]
    return [
        {key: ends[i % len(ends)] for key, ends in values.items()}
        for i in range(max(map(len, values.values())))
    ]
