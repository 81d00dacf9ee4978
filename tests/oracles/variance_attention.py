"""Second-order attention (Sun, Kamata): eqs. 3 and 5, from the paper alone."""

import math
from collections.abc import Sequence

import numpy as np


def batch_variance(features: np.ndarray, *, unbiased: bool = False) -> list[float]:
    """a_i, the variance of each of the m features (N, m) over the batch; 0 for one sample."""
    N, m = features.shape
    variances = []
    for i in range(m):
        mean = math.fsum(features[n, i] for n in range(N)) / N
        squares = math.fsum((features[n, i] - mean) ** 2 for n in range(N))
        variances.append(squares / (N - 1 if unbiased and N > 1 else N))
    return variances


def variance_loss(
    features: np.ndarray, predicted: Sequence[float], *, unbiased: bool = False
) -> float:
    """Eq. 3."""
    a = batch_variance(features, unbiased=unbiased)
    return math.fsum((a[i] - predicted[i]) ** 2 for i in range(len(a))) / len(a)


def attended(features: np.ndarray, predicted: Sequence[float]) -> np.ndarray:
    """Eq. 5: s_i = sigmoid(A_i) v_i for each of the features (N, m)."""
    weighted = np.zeros_like(features)
    for n, i in np.ndindex(*features.shape):
        weighted[n, i] = features[n, i] / (1 + math.exp(-predicted[i]))
    return weighted
