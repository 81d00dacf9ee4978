"""Energy confusion (ECAML, AAAI 2019) and the distances of its Lemmas 2 and 3, one pair at a time."""

import math
from collections.abc import Callable, Sequence

import numpy as np

Distance = Callable[[np.ndarray, np.ndarray], float]


def squared_euclidean(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b|^2."""
    return math.fsum((float(u) - float(v)) ** 2 for u, v in zip(a, b, strict=True))


def unit(vectors: np.ndarray, p: float = 2) -> np.ndarray:
    """Every row divided by its p-norm."""
    return np.stack(
        [row / math.fsum(abs(float(u)) ** p for u in row) ** (1 / p) for row in vectors]
    )


def mean_over_pairs(X: Sequence[np.ndarray], Y: Sequence[np.ndarray], function: Distance) -> float:
    """The expectation of a function of two independent vectors, uniform on X and on Y."""
    return math.fsum(function(x, y) / len(X) / len(Y) for x in X for y in Y)


def energy_confusion(
    X: Sequence[np.ndarray], Y: Sequence[np.ndarray], distance: Distance = squared_euclidean
) -> float:
    """Eq. 3: sum over i, j of p_ij |x_i - x_j|^2."""
    return mean_over_pairs(X, Y, distance)


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
    distance: Distance = squared_euclidean,
) -> dict[tuple[int, int], float]:
    """Terms of eq. 11, or of eq. 7 without the logarithm, by the ordered pair of classes."""
    sets = class_sets(vectors, labels)
    energies = {
        (i, j): energy_confusion(sets[i], sets[j], distance) for i in sets for j in sets if i != j
    }
    return {pair: math.log(1 + energy) if log else energy for pair, energy in energies.items()}


def energy_distance(X: Sequence[np.ndarray], Y: Sequence[np.ndarray]) -> float:
    """Eq. 4, with the squared Euclidean distance; two draws of one class may be the same image."""
    rho = squared_euclidean
    return 2 * mean_over_pairs(X, Y, rho) - mean_over_pairs(X, X, rho) - mean_over_pairs(Y, Y, rho)


def squared_mmd(X: Sequence[np.ndarray], Y: Sequence[np.ndarray]) -> float:
    """Eq. 5, with the homogeneous polynomial kernel of degree 1."""

    def k(a: np.ndarray, b: np.ndarray) -> float:
        return math.fsum(float(u) * float(v) for u, v in zip(a, b, strict=True))

    return mean_over_pairs(X, X, k) + mean_over_pairs(Y, Y, k) - 2 * mean_over_pairs(X, Y, k)
