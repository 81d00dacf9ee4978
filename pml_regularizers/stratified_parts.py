"""Class-stratified parts of a set, and the mean over the parts with its 95 % interval.

JRD (Chu et al., ICML 2020) divides the test sets of CUB and Cars into ten disjoint smaller sets, each
with images of all classes, measures Recall@K on each of them, and reports mean and 95 % interval (section 5.3,
Table 2; judging by its Recall@1, Table 3 too). The paper does not say how the interval is computed; here it is
1.96 s / sqrt(n), or uses Student's t.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """A mean and the half-width of its 95 % interval."""

    mean: float
    half_width: float


def stratified_parts(labels: Tensor, count: int = 10, *, seed: int = 0) -> list[Tensor]:
    """Rows of `count` disjoint parts with images of every class, drawn at random.

    Every class and the whole set are spread as evenly as possible: sizes differ by at most one.

    Args:
        labels: (N,).
        count: Number of parts. JRD, section 5.3: 10.
        seed: Seed of the draw; the global generators are not used.

    Returns:
        `count` tensors of row numbers, each in ascending order, on the device of `labels`.

    Raises:
        ValueError: if a class has fewer images than there are parts, as in Stanford Online Products.

    Example:
        >>> [part.tolist() for part in stratified_parts(torch.tensor([5, 5, 5, 8, 8]), 2)]
        [[0, 2, 3], [1, 4]]
    """
    check_labels(labels)
    if count < 1:
        raise ValueError(f"count: expected at least 1, got {count}")
    classes, sizes = torch.unique(labels, return_counts=True)
    if sizes.min() < count:
        raise ValueError(
            f"labels: class {classes[sizes.argmin()].item()} has {sizes.min().item()} images, too few for "
            f"{count} parts with images of every class; leave out the small classes, or lower count"
        )
    # Every count-th row of a list sorted by class spreads each class evenly, to within one image.
    order = shuffled_by_class(labels, seed)
    return [order[start::count].sort().values for start in range(count)]


def mean_interval(values: Sequence[float], *, student: bool = False) -> Interval:
    """Mean of independent values and the half-width of its 95 % interval.

    Args:
        values: At least two.
        student: Use Student's t quantile instead of the normal 1.96: 2.26 for ten values.

    Raises:
        ValueError: for fewer than two values.

    Example:
        >>> mean, half_width = mean_interval([0.25, 0.5, 0.75])
        >>> print(f"{mean} +- {half_width:.4f}")
        0.5 +- 0.2829
    """
    if len(values) < 2:
        raise ValueError(f"values: expected at least 2 for an interval, got {len(values)}")
    n = len(values)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    quantile = 1.96
    if student:
        from scipy.special import stdtrit  # type: ignore[import-untyped]

        quantile = float(stdtrit(n - 1, 0.975))
    return Interval(mean, quantile * deviation / math.sqrt(n))


def shuffled_by_class(labels: Tensor, seed: int) -> Tensor:
    """Rows sorted by class, and in random order inside each class."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator).to(labels.device)
    return shuffled[labels[shuffled].sort(stable=True).indices]


def check_labels(labels: Tensor, name: str = "labels") -> None:
    """Raise a ValueError unless the labels are a vector of at least one entry."""
    check_tensor(labels, name)
    if labels.ndim != 1 or len(labels) == 0:
        # PML's `get_all_embeddings` returns a column.
        column = labels.ndim == 2 and labels.shape[1] == 1
        raise ValueError(
            f"{name}: expected a vector, one class per image, got shape {tuple(labels.shape)}"
            f"{f'; pass {name}.squeeze(1)' if column else ''}"
        )


def check_tensor(x: Tensor, name: str) -> None:
    """Raise a ValueError unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(
            f"{name}: expected a tensor, got {type(x).__name__}; pass torch.as_tensor(...)"
        )
