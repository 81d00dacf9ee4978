"""Losses on the k-th powers of cosines, one image and one pair at a time."""

import math
from collections.abc import Sequence

import numpy as np


def cosine_power(a: np.ndarray, b: np.ndarray, power: float) -> float:
    """(<a, b> / (|a| |b|))^k."""
    dot, aa, bb = (
        math.fsum(float(u) * float(v) for u, v in zip(x, y, strict=True))
        for x, y in ((a, b), (a, a), (b, b))
    )
    return float((dot / math.sqrt(aa * bb)) ** power)


def centred(vectors: np.ndarray) -> np.ndarray:
    """The vectors less their mean, entry by entry."""
    means = [math.fsum(float(v) for v in column) / len(vectors) for column in vectors.T]
    return vectors - np.array(means)


def binomial_deviance(
    vectors: np.ndarray, labels: Sequence[int], power: float = 1, beta: float = 0.5
) -> float:
    """The sum over anchors of two means (alpha = 2, C = 25), with the k-th power of the cosine."""
    total = []
    for i in range(len(vectors)):
        positives, negatives = [], []
        for j in range(len(vectors)):
            s = cosine_power(vectors[i], vectors[j], power)
            if labels[i] != labels[j]:
                negatives.append(math.log1p(math.exp(50 * (s - beta))))
            elif i != j:
                positives.append(math.log1p(math.exp(-2 * (s - beta))))
        total += [math.fsum(part) / len(part) for part in (positives, negatives) if part]
    return math.fsum(total)


def multi_similarity(vectors: np.ndarray, labels: Sequence[int], power: float) -> float:
    """Wang et al., CVPR 2019, eq. 15, on all pairs, with PML's 2, 50 and 0.5: the mean over anchors."""
    total = 0.0
    for i in range(len(vectors)):
        positives, negatives = 1.0, 1.0
        for j in range(len(vectors)):
            s = cosine_power(vectors[i], vectors[j], power)
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
            s = cosine_power(x, proxies[c], power)
            if label == c:
                near += math.exp(-32 * (s - 0.1))
            else:
                far += math.exp(32 * (s + 0.1))
        if c in labels:
            pulled.append(math.log(near))
        pushed.append(math.log(far))
    return math.fsum(pulled) / len(pulled) + math.fsum(pushed) / len(pushed)


def am_softmax(
    vectors: np.ndarray, labels: Sequence[int], weights: np.ndarray, power: float
) -> float:
    """JRD, eq. 12, m = 0.1, s = 20: the mean over images of -log softmax of its own class."""
    values = []
    for x, label in zip(vectors, labels, strict=True):
        logits = [20 * cosine_power(x, w, power) for w in weights]
        logits[label] -= 20 * 0.1
        values.append(math.log(math.fsum(math.exp(v) for v in logits)) - logits[label])
    return math.fsum(values) / len(values)
