"""Space of a search: settings by their path, each with its range or its values.

optimization.learning_rate: {low: 1e-5, high: 1e-2, log: true}
model.embedding_size: {low: 32, high: 128, int: true}
losses[0].loss.init_args.neg_margin: {low: 0.0, high: 1.0}
model.pool: {choices: [avg, max]}

A path is that of the resolved settings, as on the command line of `benchmarks/run.py`, with the position in a list
in brackets.
"""

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from benchmarks.settings import ConfigError, misfit, read_yaml

Space = dict[str, BaseDistribution]

FIXED = re.compile(
    r"(output|seed|protocol|label|evaluation"
    r"|data\.(dataset|root|split|folds?|test_classes|class_level|max_classes|stage))($|\.)"
)
"""Settings that say what a trial is measured on and how: a search may not choose them."""

PLAIN = (bool, int, float, str, type(None))


def read_space(path: Path) -> Space:
    """The ranges of a YAML file.

    Raises:
        ConfigError: naming the file and the key, if it is missing or not as described above.
    """
    content = read_yaml(path)
    if not content:
        raise ConfigError(f"{path}: expected at least one setting and its range, got none")
    return {str(key): _distribution(f"{path}: {key}", given) for key, given in content.items()}


def _distribution(place: str, given: Any) -> BaseDistribution:
    if FIXED.match(place.rpartition(": ")[2]):
        raise ConfigError(f"{place}: says what a trial is measured on or how; leave it out")
    with suppress(TypeError, ValueError):  # of Optuna, too
        match given:
            case {"choices": [_, _, *_] as choices, **others} if not others:
                if misfit(choices, [PLAIN]) is None:
                    return CategoricalDistribution(choices)
            case {"low": low, "high": high, **flags} if -math.inf < low < high < math.inf:
                if not flags.pop("int", False):
                    return FloatDistribution(low, high, **flags)
                if type(low) is type(high) is int:
                    return IntDistribution(low, high, **flags)
    raise ConfigError(
        f"{place}: expected {{low: NUMBER, high: LARGER NUMBER}}, with int: true (of whole numbers) or "
        f"log: true (of numbers above 0) if need be, or {{choices: [two or more different values]}}, got {given!r}"
    )


def least(space: Space) -> dict[str, Any]:
    """The low end of each range, and the first of each list of values."""
    return {
        key: kind.choices[0] if isinstance(kind, CategoricalDistribution) else kind.low
        for key, kind in space.items()
    }
