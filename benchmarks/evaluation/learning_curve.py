"""A learning curve: how often the nearest photograph is right with fewer photographs of each class.

For each number, photographs are drawn at random from training and test classes alike. The layer in closed form is
fitted to those of the training classes, and each drawn test photograph is a query among the others.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from benchmarks.evaluation.tester import measure
from pml_regularizers import pca_init_, whitening_init_

DRAWS = 10
"""Random draws for each number of photographs, except the largest, which is the whole folder."""

Features = tuple[Tensor, Tensor]
"""Pooled features (N, C) and labels (N,)."""


def learning_curve(
    train: Features, test: Features, size: int | None, *, whiten: bool
) -> list[tuple[int, list[float]]]:
    """For each number of photographs per class, all of them last: Recall@1 in percent, of each draw.

    From the median of the test classes downwards, each number is half of the one before. It stops at two.

    Args:
        size: Width of the layer, if there are enough photographs; None: all features, centred.
        whiten: Fit within-class whitening; default: principal components.
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
            rows = _outputs(*seen, tested[0], size, whiten=whiten)
            right.append(100 * measure(rows, tested[1], [1])["recall_at_1"])
        curve.append((number, right))
    return curve


def _thinned(images: Features, number: int, generator: np.random.Generator) -> Features:
    """At most `number` random images of each class."""
    features, labels = images
    mixed = torch.from_numpy(generator.permutation(len(labels)))
    kept = torch.cat([mixed[labels[mixed] == label][:number] for label in labels.unique()])
    return features[kept], labels[kept]


@torch.no_grad()
def _outputs(
    trained: Tensor, labels: Tensor, features: Tensor, size: int | None, *, whiten: bool
) -> Tensor:
    """A layer's outputs for features (n, C), if it is fitted on others (N, C); fewer than `size` if N or C is."""
    if size is None:
        return features - trained.mean(dim=0)
    layer = skip_init(nn.Linear, trained.shape[1], min(size, *trained.shape), dtype=torch.float64)
    fitted = whitening_init_(layer, trained, labels) if whiten else pca_init_(layer, trained)
    outputs: Tensor = fitted(features.double()).float()
    return outputs
