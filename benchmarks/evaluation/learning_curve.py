"""A learning curve: how often the nearest photograph is right with fewer photographs of each class.

For each number, photographs are drawn at random from training and test classes alike. The layer in closed form is
fitted to those of the training classes, and each drawn test photograph is a query among the others.
"""

import numpy as np
import torch
from torch import Tensor

from benchmarks.evaluation.closed_form import layer_outputs
from benchmarks.evaluation.tester import measure

DRAWS = 10
"""Random draws for each number of photographs, except the largest, which is the whole folder."""

Features = tuple[Tensor, Tensor]
"""Pooled features (N, C) and labels (N,)."""


def learning_curve(
    train: Features, test: Features, kind: str, size: int
) -> list[tuple[int, list[float]]]:
    """For each number of photographs per class, all of them last: Recall@1 in percent, of each draw.

    From the median of the test classes downwards, each number is half of the one before. It stops at two.

    Args:
        kind: Of the layer, as in `fit_layer`.
        size: Number of components, if there are enough photographs.
    """
    counts = torch.bincount(test[1])
    most = int(counts[counts > 0].median())
    numbers = [most]
    while numbers[-1] >= 4:
        numbers.append(numbers[-1] // 2)
    curve = []
    for number in reversed(numbers):
        whole = number == most
        right = []
        for draw in range(1 if whole else DRAWS):
            generator = np.random.default_rng((number, draw))
            seen, tested = (
                (train, test)
                if whole
                else (_thinned(images, number, generator) for images in (train, test))
            )
            features, labels = seen
            # Fewer components if there are fewer photographs or features.
            width = features.shape[1] if kind == "features" else min(size, *features.shape)
            rows = layer_outputs(features, labels, tested[0], kind, width).float()
            right.append(100 * measure(rows, tested[1], [1])["recall_at_1"])
        curve.append((number, right))
    return curve


def _thinned(images: Features, number: int, generator: np.random.Generator) -> Features:
    """At most `number` random images of each class."""
    features, labels = images
    mixed = torch.from_numpy(generator.permutation(len(labels)))
    kept = torch.cat([mixed[labels[mixed] == label][:number] for label in labels.unique()])
    return features[kept], labels[kept]
