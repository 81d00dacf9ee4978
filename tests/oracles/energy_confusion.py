"""Energy confusion (ECAML, AAAI 2019), one pair at a time."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracles.vectors import squared_distance

Distance = Callable[[np.ndarray, np.ndarray], float]


def unit(vectors: np.ndarray, p: float = 2) -> np.ndarray:
    """Every row divided by its p-norm."""
    return np.stack(
        [row / math.fsum(abs(float(u)) ** p for u in row) ** (1 / p) for row in vectors]
    )


def energy_confusion(
    X: Sequence[np.ndarray], Y: Sequence[np.ndarray], distance: Distance = squared_distance
) -> float:
    """Eq. 3: sum over i, j of p_ij |x_i - x_j|^2."""
    return math.fsum(distance(x, y) / len(X) / len(Y) for x in X for y in Y)


def class_sets(vectors: np.ndarray, labels: Sequence[int]) -> dict[int, list[np.ndarray]]:
    """The vectors of every class."""
    return {
        label: [x for x, y in zip(vectors, labels, strict=True) if y == label]
        for label in sorted(set(labels))
    }


def terms(
    vectors: np.ndarray,
    labels: Sequence[int],
    *,
    log: bool = True,
    distance: Distance = squared_distance,
) -> dict[tuple[int, int], float]:
    """Terms of eq. 11, or of eq. 7 without the logarithm, by the ordered pair of classes."""
    sets = class_sets(vectors, labels)
    energies = {
        (i, j): energy_confusion(sets[i], sets[j], distance) for i in sets for j in sets if i != j
    }
    return {pair: math.log(1 + energy) if log else energy for pair, energy in energies.items()}
