"""Losses on pairs and triplets of unit vectors, one pair at a time."""

import math
from collections.abc import Iterable, Sequence

import numpy as np


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Euclidean distance of the directions of a and b."""
    a, b = a / math.sqrt(float(a @ a)), b / math.sqrt(float(b @ b))
    return math.sqrt(math.fsum(float(u - v) ** 2 for u, v in zip(a, b, strict=True)))


def mean_of_positive(values: Iterable[float]) -> float:
    """Mean of the values above zero, or 0: only violations count."""
    violations = [value for value in values if value > 0]
    return math.fsum(violations) / len(violations) if violations else 0.0


def contrastive(vectors: np.ndarray, labels: Sequence[int], margin: float = 1.0) -> float:
    """Distance of each pair of one class, and what each pair of two classes lacks to the margin."""
    positives, negatives = [], []
    for i in range(len(vectors)):
        for j in range(len(vectors)):
            if i == j:
                continue
            d = distance(vectors[i], vectors[j])
            if labels[i] == labels[j]:
                positives.append(d)
            else:
                negatives.append(margin - d)
    return mean_of_positive(positives) + mean_of_positive(negatives)


def triplet(vectors: np.ndarray, labels: Sequence[int], margin: float = 0.05) -> float:
    """d(anchor, positive) - d(anchor, negative) + margin over all triplets that violate it."""
    rows = range(len(vectors))
    return mean_of_positive(
        distance(vectors[a], vectors[p]) - distance(vectors[a], vectors[n]) + margin
        for a in rows
        for p in rows
        for n in rows
        if a != p and labels[a] == labels[p] and labels[a] != labels[n]
    )
