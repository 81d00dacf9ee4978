"""HORDE (Jacob, Picard, Histace, Klein, ICCV 2019), one position and one entry at a time."""

import math
from collections.abc import Callable, Sequence

import numpy as np


def product(x: np.ndarray, columns: Sequence[np.ndarray]) -> float:
    """Eq. 3: the product of <w_i, x> over the vectors w_i."""
    value = 1.0
    for w in columns:
        value *= math.fsum(float(a) * float(b) for a, b in zip(w, x, strict=True))
    return value


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


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector at length one; the zero vector stays."""
    length = math.sqrt(math.fsum(float(v) ** 2 for v in vector))
    return vector / length if length > 0 else vector


def embed(z: np.ndarray, matrix: np.ndarray | None, normalize: bool) -> np.ndarray:
    """What the loss of an order sees: z, embedded by a matrix (E, d) if there is one, at length one if asked."""
    if matrix is not None:
        z = np.array(
            [math.fsum(float(a) * float(b) for a, b in zip(row, z, strict=True)) for row in matrix]
        )
    return unit(z) if normalize else z


def horde(
    embeddings: np.ndarray,
    orders: Sequence[np.ndarray],
    labels: Sequence[int],
    loss: Callable[[np.ndarray, Sequence[int]], float],
    weights: Sequence[float],
) -> float:
    """Eq. 9 with eq. 7: the same loss on the embeddings and on every order."""
    total = loss(embeddings, labels)
    for weight, order in zip(weights, orders, strict=True):
        total += weight * loss(order, labels)
    return total
