"""Binomial deviance (Yi, Lei, Li, 2014) as HORDE trains it: a sum over anchors of two means."""

import math
from collections.abc import Sequence

import numpy as np

from tests.oracles.vectors import cosine


def anchor_losses(
    vectors: np.ndarray,
    labels: Sequence[int],
    *,
    alpha: float = 2.0,
    beta: float = 0.5,
    C: float = 25.0,
    power: float = 1,
    references: tuple[np.ndarray, Sequence[int]] | None = None,
) -> list[float]:
    """One value per anchor: the mean over its positives plus the mean over its negatives, of powers of cosines.

    `references` are compared with instead of the batch itself.
    """
    others, other_labels = (vectors, labels) if references is None else references
    losses = []
    for i in range(len(vectors)):
        positives, negatives = [], []
        for j in range(len(others)):
            if references is None and i == j:
                continue
            s = cosine(vectors[i], others[j]) ** power
            if labels[i] == other_labels[j]:
                positives.append(math.log1p(math.exp(-alpha * (s - beta))))
            else:
                negatives.append(math.log1p(math.exp(alpha * C * (s - beta))))
        losses.append(sum(math.fsum(part) / len(part) for part in (positives, negatives) if part))
    return losses


def binomial_deviance(vectors: np.ndarray, labels: Sequence[int]) -> float:
    """The sum over anchors, with the settings of HORDE's code."""
    return math.fsum(anchor_losses(vectors, labels))
