"""The measures of JRD's section 2, one image at a time."""

from collections.abc import Sequence

import numpy as np

Images = Sequence[tuple[np.ndarray, int]]
Domain = tuple[Images, Images]
"""Images that the classifier knows, and others."""


def error(tested: Images, fitted: Images) -> float:
    """Share of the tested images that the 1-nearest-neighbour classifier gives a wrong label."""
    wrong = 0
    for x, label in tested:
        distances = [float(((x - other) ** 2).sum()) for other, _ in fitted]
        wrong += fitted[distances.index(min(distances))][1] != label
    return wrong / len(tested)


def ideal_joint_error(seen: Domain, unseen: Domain) -> float:
    """Eq. 3."""
    fitted = [*seen[0], *unseen[0]]
    return error(seen[1], fitted) + error(unseen[1], fitted)


def h_divergence(seen: Domain, unseen: Domain) -> tuple[float, float]:
    """Eq. 2 with the error over all images, and with the mean of the two domains' errors."""
    fitted = [(x, 0) for x, _ in seen[0]] + [(x, 1) for x, _ in unseen[0]]
    of_seen, of_unseen = [(x, 0) for x, _ in seen[1]], [(x, 1) for x, _ in unseen[1]]
    balanced = (error(of_seen, fitted) + error(of_unseen, fitted)) / 2
    return 1 - error([*of_seen, *of_unseen], fitted), 1 - balanced
