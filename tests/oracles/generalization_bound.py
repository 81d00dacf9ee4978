"""The measures of JRD's section 2, one image at a time."""

from collections.abc import Sequence

import numpy as np


def nearest_label(x: np.ndarray, fitted: Sequence[tuple[np.ndarray, int]]) -> int:
    """1-nearest-neighbour classifier."""
    distances = [float(((x - other) ** 2).sum()) for other, _ in fitted]
    return fitted[distances.index(min(distances))][1]


def error(
    tested: Sequence[tuple[np.ndarray, int]], fitted: Sequence[tuple[np.ndarray, int]]
) -> float:
    """Share of the tested images that the classifier gives a wrong label."""
    return sum(nearest_label(x, fitted) != label for x, label in tested) / len(tested)


def ideal_joint_error(
    seen: tuple[Sequence[tuple[np.ndarray, int]], Sequence[tuple[np.ndarray, int]]],
    unseen: tuple[Sequence[tuple[np.ndarray, int]], Sequence[tuple[np.ndarray, int]]],
) -> float:
    """Eq. 3: each domain is the pair (labelled images, others)."""
    fitted = [*seen[0], *unseen[0]]
    return error(seen[1], fitted) + error(unseen[1], fitted)


def h_divergence(
    seen: tuple[Sequence[tuple[np.ndarray, int]], Sequence[tuple[np.ndarray, int]]],
    unseen: tuple[Sequence[tuple[np.ndarray, int]], Sequence[tuple[np.ndarray, int]]],
) -> tuple[float, float]:
    """Eq. 2 with the error over all images, and with the mean of the two domains' errors."""
    fitted = [(x, 0) for x, _ in seen[0]] + [(x, 1) for x, _ in unseen[0]]
    of_seen, of_unseen = [(x, 0) for x, _ in seen[1]], [(x, 1) for x, _ in unseen[1]]
    balanced = (error(of_seen, fitted) + error(of_unseen, fitted)) / 2
    return 1 - error([*of_seen, *of_unseen], fitted), 1 - balanced
