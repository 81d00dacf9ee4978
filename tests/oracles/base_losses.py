"""The base losses of the four papers, one image, pair or triplet at a time."""

import math
from collections.abc import Sequence

import numpy as np

from tests.oracles.vectors import cosine, dot, squared_distance, unit


def unit_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Euclidean distance of the directions of a and b."""
    return math.sqrt(squared_distance(unit(a), unit(b)))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def softplus(x: float) -> float:
    """log(1 + e^x)."""
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def all_pairs(labels: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Ordered pairs of different images, of one class and of two."""
    rows = range(len(labels))
    ordered = [(i, j) for i in rows for j in rows if i != j]
    positive = [(i, j) for i, j in ordered if labels[i] == labels[j]]
    negative = [(i, j) for i, j in ordered if labels[i] != labels[j]]
    return positive, negative


def all_triplets(labels: Sequence[int]) -> list[tuple[int, int, int]]:
    positive, negative = all_pairs(labels)
    return [(a, p, n) for a, p in positive for b, n in negative if a == b]


def horde_contrastive(vectors: np.ndarray, labels: Sequence[int]) -> float:
    """HORDE's code: mean of (s - 1)^2 / 2, plus the sum of (s - 0.5)_+ / 2 over the number of active pairs."""
    positive, negative = all_pairs(labels)
    pulled = [(cosine(vectors[i], vectors[j]) - 1) ** 2 / 2 for i, j in positive]
    pushed = [(cosine(vectors[i], vectors[j]) - 0.5) / 2 for i, j in negative]
    return mean(pulled) + mean([value for value in pushed if value > 0])


def horde_triplet(vectors: np.ndarray, labels: Sequence[int]) -> float:
    """HORDE's code, its index bug corrected: mean over active triplets, on cosines, margin 0.1."""
    costs = [
        cosine(vectors[a], vectors[n]) - cosine(vectors[a], vectors[p]) + 0.1
        for a, p, n in all_triplets(labels)
    ]
    return mean([cost for cost in costs if cost > 0])


def ecaml_triplet(vectors: np.ndarray, triplets: Sequence[tuple[int, int, int]]) -> float:
    """ECAML, eq. 8, for given triplets: a sum of squared distances on the unit sphere, margin 0.1."""
    return math.fsum(
        max(
            0.0,
            unit_distance(vectors[a], vectors[p]) ** 2
            - unit_distance(vectors[a], vectors[n]) ** 2
            + 0.1,
        )
        for a, p, n in triplets
    )


def semihard(vectors: np.ndarray, labels: Sequence[int]) -> list[tuple[int, int, int]]:
    """Per anchor its farthest positive, and the nearest of the negatives that lie farther than that."""
    triplets = []
    positive, negative = all_pairs(labels)
    for a in range(len(labels)):
        positives = [(unit_distance(vectors[a], vectors[p]), p) for b, p in positive if a == b]
        if not positives:
            continue
        reach, p = max(positives)
        negatives = [(unit_distance(vectors[a], vectors[n]), n) for b, n in negative if a == b]
        farther = [(distance, n) for distance, n in negatives if distance > reach]
        if farther:
            triplets.append((a, p, min(farther)[1]))
    return triplets


def ecaml_n_pair(vectors: np.ndarray, labels: Sequence[int]) -> float:
    """ECAML, eq. 9, a term for each positive of an image: inner products of the vectors as they are."""
    positive, negative = all_pairs(labels)
    terms = []  # log(1 + sum_j exp(x_i^T x_j - x_i^T x_p)) of each positive pair (i, p)
    for i, p in positive:
        gaps = [
            dot(vectors[i], vectors[j]) - dot(vectors[i], vectors[p]) for a, j in negative if a == i
        ]
        highest = max([0.0, *gaps])
        total = math.exp(-highest) + math.fsum(math.exp(gap - highest) for gap in gaps)
        terms.append(highest + math.log(total))
    return math.fsum(terms)


def ecaml_binomial(vectors: np.ndarray, labels: Sequence[int]) -> float:
    """ECAML, eq. 10, without the constant of i = j."""
    total = 0.0
    for i in range(len(labels)):
        for j in range(len(labels)):
            if i == j:
                continue
            s = 1 if labels[i] == labels[j] else 0
            eta = 1 if s == 1 else 25
            total += softplus(-(2 * s - 1) * 2 * (cosine(vectors[i], vectors[j]) - 0.5) * eta)
    return total


def margin(
    vectors: np.ndarray,
    labels: Sequence[int],
    triplets: Sequence[tuple[int, int, int]],
    beta: float = 1.2,
) -> float:
    """Second-order attention, eq. 2, alpha = 0.2: mean over the active pairs of given triplets."""
    costs = []
    for a, p, n in triplets:
        for other in (p, n):
            y = 1 if labels[a] == labels[other] else -1
            costs.append(0.2 + y * (unit_distance(vectors[a], vectors[other]) - beta))
    return mean([cost for cost in costs if cost > 0])


def am_softmax(
    vectors: np.ndarray,
    labels: Sequence[int],
    proxies: np.ndarray,
    power: float = 1,
    *,
    s: float = 20.0,
    m: float = 0.1,
) -> float:
    """JRD, eq. 12, with the k-th power of the cosine; one proxy per row."""
    costs = []
    for x, y in zip(vectors, labels, strict=True):
        logits = [s * cosine(x, w) ** power for w in proxies]
        logits[y] -= s * m
        costs.append(math.log(math.fsum(math.exp(z - logits[y]) for z in logits)))
    return mean(costs)
