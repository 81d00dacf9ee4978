"""Joint representation diversification (Chu et al., ICML 2020), one pair of samples at a time."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.oracles.vectors import dot, squared_distance

Kernel = Callable[[np.ndarray], list[list[float]]]
"""All rows of one representation -> the kernel of every pair."""


def l1_distance(a: np.ndarray, b: np.ndarray) -> float:
    return math.fsum(abs(float(u) - float(v)) for u, v in zip(a, b, strict=True))


def unit(rows: np.ndarray) -> np.ndarray:
    return np.array([row / math.sqrt(dot(row, row)) for row in rows])


def average(rows: np.ndarray, distance: Callable[[np.ndarray, np.ndarray], float]) -> float:
    """Mean distance over all pairs i != j of the batch."""
    n = len(rows)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    return math.fsum(distance(rows[i], rows[j]) for i, j in pairs) / len(pairs)


def matrix(rows: np.ndarray, k: Callable[[np.ndarray, np.ndarray], float]) -> list[list[float]]:
    return [[k(a, b) for b in rows] for a in rows]


def gaussian_mixture(multiples: Sequence[float] = (0.5, 1.0, 2.0), tau: float = 0.0) -> Kernel:
    """Section 5.1: the mean of Gaussians with sigma_k^2 = multiple * tau; tau = 0 stands for the average."""

    def kernel(rows: np.ndarray) -> list[list[float]]:
        width = tau or average(rows, squared_distance)

        def k(a: np.ndarray, b: np.ndarray) -> float:
            d = squared_distance(a, b)
            return math.fsum(math.exp(-d / (m * width)) for m in multiples) / len(multiples)

        return matrix(rows, k)

    return kernel


def laplace(sigma: float = 0.0) -> Kernel:
    """Table 4; sigma = 0 stands for the average L1 distance."""

    def kernel(rows: np.ndarray) -> list[list[float]]:
        width = sigma or average(rows, l1_distance)
        return matrix(rows, lambda a, b: math.exp(-l1_distance(a, b) / width))

    return kernel


def polynomial(degree: int, constant: float = 1.0) -> Kernel:
    """Table 4."""
    return lambda rows: matrix(rows, lambda a, b: math.prod([dot(a, b) + constant] * degree))


def exponential(rows: np.ndarray) -> list[list[float]]:
    """Table 4."""
    return matrix(rows, lambda a, b: math.exp(dot(a, b)))


def joint(kernels: Sequence[Kernel], representations: Sequence[np.ndarray]) -> list[list[float]]:
    """prod_l k^l(x_i^l, x_j^l), for all samples i and j."""
    matrices = [kernel(rows) for kernel, rows in zip(kernels, representations, strict=True)]
    n = len(representations[0])
    return [[math.prod(m[i][j] for m in matrices) for j in range(n)] for i in range(n)]


def members(labels: Sequence[int]) -> dict[int, list[int]]:
    return {c: [i for i, label in enumerate(labels) if label == c] for c in sorted(set(labels))}


def similarity(K: list[list[float]], rows: list[int], columns: list[int]) -> float:
    """Eq. 8: of two sets of samples."""
    return math.fsum(K[i][j] for i in rows for j in columns) / (len(rows) * len(columns))


def over_class_pairs(
    labels: Sequence[int], value: Callable[[list[int], list[int]], float]
) -> tuple[float, int]:
    """The sum over I != J of n_I n_J value(I, J), and N_pairs."""
    classes, terms, pairs = members(labels), [], 0
    for I, first in classes.items():  # noqa: E741
        for J, second in classes.items():
            if I != J:
                terms.append(len(first) * len(second) * value(first, second))
                pairs += len(first) * len(second)
    return math.fsum(terms), pairs


def jrs(K: list[list[float]], labels: Sequence[int]) -> tuple[float, int]:
    """Eq. 10, and N_pairs."""
    return over_class_pairs(labels, lambda a, b: similarity(K, a, b))


def jmmd(K: list[list[float]], labels: Sequence[int]) -> tuple[float, int]:
    """Eq. 15 by eq. 14."""

    def value(a: list[int], b: list[int]) -> float:
        square = similarity(K, a, a) + similarity(K, b, b) - 2 * similarity(K, a, b)
        return -math.sqrt(square)

    return over_class_pairs(labels, value)


def jintra(K: list[list[float]], labels: Sequence[int]) -> tuple[float, int]:
    """Eq. 16."""

    def norm(a: list[int]) -> float:
        return math.sqrt(similarity(K, a, a))

    return over_class_pairs(labels, lambda a, b: -norm(a) - norm(b))


def intra_class(K: list[list[float]], labels: Sequence[int]) -> float:
    """The sum in eq. 4, with its minus."""
    value = 0.0
    for rows in members(labels).values():
        pairs = [(i, j) for i in rows for j in rows if i != j]
        if pairs:
            value -= math.fsum(K[i][j] for i, j in pairs) / len(pairs)
    return value


def class_cosines(embeddings: np.ndarray, W: np.ndarray) -> np.ndarray:
    """x^+ of eq. 9; W holds one class weight per column."""
    x, w = unit(embeddings), unit(W.T)
    return np.array([[dot(a, b) for b in w] for a in x])
