"""Binomial deviance (Yi, Lei, Li, 2014) as HORDE trains it: a sum over anchors of two means."""

import math
from collections.abc import Sequence

import numpy as np


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """<a, b> / (|a| |b|)."""
    dot = math.fsum(float(u) * float(v) for u, v in zip(a, b, strict=True))
    return dot / math.sqrt(
        math.fsum(float(u) ** 2 for u in a) * math.fsum(float(v) ** 2 for v in b)
    )


def anchor_losses(
    vectors: np.ndarray,
    labels: Sequence[int],
    *,
    alpha: float = 2.0,
    beta: float = 0.5,
    C: float = 25.0,
    references: tuple[np.ndarray, Sequence[int]] | None = None,
    pairs: set[tuple[int, int]] | None = None,
) -> list[float]:
    """One value per anchor: the mean over its positives plus the mean over its negatives.

    `pairs` leaves only those (anchor, other); `references` are compared with instead of the batch itself.
    """
    others, other_labels = (vectors, labels) if references is None else references
    losses = []
    for i in range(len(vectors)):
        positives, negatives = [], []
        for j in range(len(others)):
            if (references is None and i == j) or (pairs is not None and (i, j) not in pairs):
                continue
            s = cosine(vectors[i], others[j])
            if labels[i] == other_labels[j]:
                positives.append(math.log1p(math.exp(-alpha * (s - beta))))
            else:
                negatives.append(math.log1p(math.exp(alpha * C * (s - beta))))
        losses.append(sum(math.fsum(part) / len(part) for part in (positives, negatives) if part))
    return losses


def binomial_deviance(vectors: np.ndarray, labels: Sequence[int]) -> float:
    """The sum over anchors, with the settings of HORDE's code."""
    return math.fsum(anchor_losses(vectors, labels))
