"""Principal components and within-class whitening of labelled features, sums written out."""

from collections.abc import Sequence

import numpy as np


def scatter(x: np.ndarray, centres: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over images of the outer product of what each differs from its centre by."""
    total = np.zeros((x.shape[1], x.shape[1]))
    for row, centre in zip(x, centres, strict=True):
        total += np.outer(row - centre, row - centre)
    return total / len(x)


def class_means(x: np.ndarray, labels: Sequence[int]) -> list[np.ndarray]:
    """The mean of each image's class."""
    return [
        np.mean([row for row, other in zip(x, labels, strict=True) if other == label], axis=0)
        for label in labels
    ]


def whitened(
    x: np.ndarray, labels: Sequence[int], y: np.ndarray, size: int, shrinkage: float = 0.5
) -> np.ndarray:
    """The leading components of y after the within-class whitening of x, up to their signs."""
    within = scatter(x, class_means(x, labels))
    equal = np.trace(within) / len(within) * np.eye(len(within))
    values, vectors = np.linalg.eigh((1 - shrinkage) * within + shrinkage * equal)
    root = sum(np.outer(v, v) / np.sqrt(value) for value, v in zip(values, vectors.T, strict=True))
    root *= np.sqrt(1 - shrinkage)
    mean = x.mean(axis=0)
    white = (x - mean) @ root
    _, directions = np.linalg.eigh(scatter(white, [np.zeros(x.shape[1])] * len(x)))
    return (y - mean) @ root @ directions[:, ::-1][:, :size]
