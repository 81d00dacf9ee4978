"""Differences of two rows in each test class, from what their runs stored."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.settings import Comparison, ConfigError, misfit

Results = Mapping[str, Mapping[int, dict[str, Any]]]
"""{row: {seed: result}}"""


def by_class(
    results: Results, comparison: Comparison, metric: str, seeds: Sequence[int]
) -> tuple[np.ndarray, list[int]]:
    """The difference of each test class by seed, and the classes' queries.

    Raises:
        ConfigError: if they are damaged, or not of the same classes.
    """
    place, rows = f"comparisons.{comparison.name}", comparison.rows()
    stored = {
        (row, seed): results[row][seed].get("per_class", {}) for row in rows for seed in seeds
    }
    for (row, seed), of in stored.items():
        if _is_damaged(of, metric):
            raise ConfigError(
                f"{place}: per_class of {row}, seed {seed}, is damaged: expected as many whole numbers of "
                f"queries as of {metric}; measure it again"
            )
    queries, *others = (of["queries"] for of in stored.values())
    if any(other != queries for other in others):
        raise ConfigError(
            f"{place}: its runs were tested on different classes; measure them on the same data"
        )
    better, than = (np.array([stored[row, seed][metric] for seed in seeds]) for row in rows)
    return (better - than) / 100, queries  # in percent


def _is_damaged(per_class: Any, metric: str) -> bool:
    if not isinstance(per_class, dict):
        return True
    if misfit(per_class, {"queries": [int], metric: [int]}) is not None:
        return True
    queries = per_class["queries"]
    return len(queries) != len(per_class[metric]) or min(queries, default=0) < 0
