"""Losses on the k-th powers of cosines, one image and one pair at a time."""

import math
from collections.abc import Sequence

import numpy as np

from tests.oracles.base_losses import am_softmax  # noqa: F401  with a power of its own
from tests.oracles.binomial_deviance import anchor_losses
from tests.oracles.vectors import cosine


def centred(vectors: np.ndarray) -> np.ndarray:
    """The vectors less their mean, entry by entry."""
    means = [math.fsum(float(v) for v in column) / len(vectors) for column in vectors.T]
    return vectors - np.array(means)


def binomial_deviance(
    vectors: np.ndarray, labels: Sequence[int], power: float = 1, beta: float = 0.5
) -> float:
    """The sum over anchors, with the k-th power of the cosine."""
    return math.fsum(anchor_losses(vectors, labels, beta=beta, power=power))


def multi_similarity(vectors: np.ndarray, labels: Sequence[int], power: float) -> float:
    """Wang et al., CVPR 2019, eq. 15, on all pairs, with PML's 2, 50 and 0.5: the mean over anchors."""
    total = 0.0
    for i in range(len(vectors)):
        positives, negatives = 1.0, 1.0
        for j in range(len(vectors)):
            s = cosine(vectors[i], vectors[j]) ** power
            if labels[i] != labels[j]:
                negatives += math.exp(50 * (s - 0.5))
            elif i != j:
                positives += math.exp(-2 * (s - 0.5))
        total += math.log(positives) / 2 + math.log(negatives) / 50
    return total / len(vectors)


def proxy_anchor(
    vectors: np.ndarray, labels: Sequence[int], proxies: np.ndarray, power: float
) -> float:
    """Kim et al., CVPR 2020, eq. 4, alpha = 32, delta = 0.1: means over proxies with images, and over all."""
    pulled, pushed = [], []
    for c in range(len(proxies)):
        near, far = 1.0, 1.0
        for x, label in zip(vectors, labels, strict=True):
            s = cosine(x, proxies[c]) ** power
            if label == c:
                near += math.exp(-32 * (s - 0.1))
            else:
                far += math.exp(32 * (s + 0.1))
        if c in labels:
            pulled.append(math.log(near))
        pushed.append(math.log(far))
    return math.fsum(pulled) / len(pulled) + math.fsum(pushed) / len(pushed)
