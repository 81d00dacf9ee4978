"""A learning curve: how often the nearest photograph is right with fewer photographs of each class.

For each number, photographs are drawn at random from training and test classes alike. The layer in closed form is
fitted to those of the training classes, and each drawn test photograph is a query among the others.
"""

import numpy as np
import torch
from torch import Tensor

from benchmarks.evaluation.tester import measure

DRAWS = 10
"""Random draws for each number of photographs, except the largest, which is the whole folder."""

Features = tuple[Tensor, Tensor]
"""Pooled features (N, C) and labels (N,)."""


def learning_curve(
    train: Features, test: Features, size: int, *, whiten: bool
) -> list[tuple[int, list[float]]]:
    """For each number of photographs per class, all of them last: Recall@1 in percent, of each draw.

    From the median of the test classes downwards, each number is half of the one before. It stops at two.

    Args:
        size: Width of the layer, if there are enough photographs.
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
            rows = closed_form(*seen, tested[0], size, whiten=whiten)
            right.append(100 * measure(rows, tested[1], [1])["recall_at_1"])
        curve.append((number, right))
    return curve


def _thinned(images: Features, number: int, generator: np.random.Generator) -> Features:
    """At most `number` random images of each class."""
    features, labels = images
    mixed = torch.from_numpy(generator.permutation(len(labels)))
    kept = torch.cat([mixed[labels[mixed] == label][:number] for label in labels.unique()])
    return features[kept], labels[kept]


def closed_form(
    trained: Tensor, labels: Tensor, features: Tensor, size: int, *, whiten: bool
) -> Tensor:
    """The outputs (n, size) of the library's layer for features (n, C), if it is fitted on others (N, C).

    As `pca_init_` and `whitening_init_`, but within the span of the fitted features, which holds all components:
    where N is far below C, that takes a hundredth of the time. There are fewer outputs if the span has fewer
    dimensions.
    """
    mean = trained.double().mean(dim=0)
    centred = trained.double() - mean
    _, scales, directions = torch.linalg.svd(centred, full_matrices=False)
    span = directions[scales > 1e-9 * scales[0]]
    inside, outputs = centred @ span.T, (features.double() - mean) @ span.T
    if whiten:
        _, classes, counts = labels.unique(return_inverse=True, return_counts=True)
        means = torch.zeros(len(counts), len(span), dtype=torch.float64)
        means = means.index_add(0, classes, inside) / counts[:, None]
        within = inside - means[classes]
        within = within.T @ within / len(inside)
        within.diagonal().add_(within.trace() / trained.shape[1])
        variances, axes = torch.linalg.eigh(within)
        whitening = axes / variances.sqrt() @ axes.T
        inside, outputs = inside @ whitening, outputs @ whitening
    components = torch.linalg.eigh(inside.T @ inside).eigenvectors.flip(1)[:, :size]
    rows: Tensor = outputs @ components
    return rows.float()
