"""HORDE (Jacob, Picard, Histace, Klein, ICCV 2019), one position and one entry at a time."""

import math
from collections.abc import Sequence

import numpy as np

from tests.oracles.vectors import dot, unit


def product(x: np.ndarray, columns: Sequence[np.ndarray]) -> float:
    """Eq. 3: the product of <w_i, x> over the vectors w_i."""
    return math.prod(dot(w, x) for w in columns)


def moment(image: Sequence[np.ndarray], matrices: Sequence[np.ndarray]) -> np.ndarray:
    """Eq. 4 with Algorithm 1's factor at each position, then the mean of eq. 8: the order len(matrices)."""
    d = matrices[0].shape[1]
    z = np.zeros(d)
    for j in range(d):
        columns = [W[:, j] for W in matrices]
        z[j] = math.fsum(product(x, columns) / math.sqrt(d) for x in image) / len(image)
    return z


def cascaded(image: Sequence[np.ndarray], matrices: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Eq. 6 unrolled: order k is the product over the first k matrices."""
    return [moment(image, matrices[:k]) for k in range(2, len(matrices) + 1)]


def independent(
    image: Sequence[np.ndarray], sets: Sequence[Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Section 5.2, Table 4: order k has k matrices of its own."""
    return [moment(image, matrices) for matrices in sets]


def sketched(image: Sequence[np.ndarray], matrices: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pham and Pagh, KDD 2013: circular convolutions of projections, entry by entry; orders 2 .. K.

    `matrices` (C, d) hold one -1 or +1 per row.
    """
    d = matrices[0].shape[1]
    orders = [np.zeros(d) for _ in matrices[1:]]
    for x in image:
        phi = x @ matrices[0]
        for z, W in zip(orders, matrices[1:], strict=True):
            s = x @ W
            phi = np.array([sum(phi[i] * s[(j - i) % d] for i in range(d)) for j in range(d)])
            z += phi / len(image)
    return orders


def sketch_variance(x: np.ndarray, y: np.ndarray, order: int, d: int, places: int) -> float:
    """Variance of <phi_k(x), phi_k(y)> over tables of `places` places.

    Frequency by frequency: E of A(f) and the conjugate of A(g), where A = the transform of x's sketch times the
    conjugate of that of y's, is the sum of three pairings of the signs.
    """
    squares, same, both = x @ x * (y @ y), (x @ y) ** 2, (x * x) @ (y * y)
    total = 0.0
    for f in range(d):
        for g in range(d):
            equal = 1.0 if f == g else -1 / (places - 1)
            opposite = 1.0 if (f + g) % d == 0 else -1 / (places - 1)
            total += (same + (squares - both) * equal + (same - both) * opposite) ** order
    return total / d**2 - float(same**order)


def embed(z: np.ndarray, matrix: np.ndarray | None, normalize: bool) -> np.ndarray:
    """Input of an order's loss: z, embedded by a matrix (E, d) if there is one, of length one if asked."""
    if matrix is not None:
        z = np.array([dot(row, z) for row in matrix])
    return unit(z) if normalize else z
