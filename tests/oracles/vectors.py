"""Products, lengths and distances of two vectors, one entry at a time."""

import math

import numpy as np


def dot(a: np.ndarray, b: np.ndarray) -> float:
    return math.fsum(float(u) * float(v) for u, v in zip(a, b, strict=True))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """<a, b> / (|a| |b|)."""
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def squared_distance(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b|^2."""
    return math.fsum((float(u) - float(v)) ** 2 for u, v in zip(a, b, strict=True))


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector at length one; the zero vector stays."""
    length = math.sqrt(dot(vector, vector))
    return vector / length if length > 0 else vector
