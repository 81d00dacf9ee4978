r"""Class-stratified parts of a test set, and the two measures of JRD's Table 3 on embeddings.

JRD (Chu et al., ICML 2020), section 2, after Ben-David et al. (2010), for seen classes s and unseen u:

    eps_u(h) <= eps_s(h) + d_H + lambda                  eq. 1
    d_H      = 1 - min_h eps*(h)                         eq. 2, `h_divergence`
    lambda   = eps_s(h*) + eps_u(h*)                     eq. 3, `ideal_joint_error`

eps* is the error of a binary classifier that separates seen images from unseen ones; h* is one classifier of all
classes. The hypotheses are 1-nearest-neighbour classifiers on unit vectors. Both are fitted on a random part of
every class, and their errors are counted on the rest. The minimum is therefore not searched: the fitted classifier
stands for it. What the paper leaves open: docs/generalization_bound.md.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor
from torch.nn.functional import normalize


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of at least two independent values and the half-width of its 95 % interval, by the normal 1.96.

    >>> mean, half_width = confidence_interval([0.25, 0.5, 0.75])
    >>> print(f"{mean} +- {half_width:.4f}")
    0.5 +- 0.2829
    """
    if (n := len(values)) < 2:
        raise ValueError(f"values: expected at least 2 for an interval, got {n}")
    return fmean(values), 1.96 * stdev(values) / n**0.5


def stratified_parts(labels: Tensor, count: int = 10, *, seed: int = 0) -> list[Tensor]:
    """Rows of disjoint parts with images of every class, drawn at random: in ascending order, part by part.

    Every class and the whole set are spread as evenly as possible: sizes differ by at most one. JRD divides the
    test sets of CUB and Cars into ten (section 5.3).

    >>> [part.tolist() for part in stratified_parts(torch.tensor([5, 5, 5, 8, 8]), 2)]
    [[0, 2, 3], [1, 4]]
    """
    classes, sizes = torch.unique(labels, return_counts=True)
    if sizes.min() < count:
        raise ValueError(
            f"labels: class {classes[sizes.argmin()].item()} has {sizes.min().item()} images, too few for "
            f"{count} parts with images of every class; leave out the small classes, or lower count"
        )
    # Every count-th row of a list sorted by class spreads each class evenly, to within one image.
    order = _shuffled_by_class(labels, seed)
    return [order[start::count].sort().values for start in range(count)]


def training_mask(labels: Tensor, seed: int) -> Tensor:
    """True for a random half of every class (n,): its size is rounded, at least one image and never all."""
    classes, sizes = torch.unique(labels, return_counts=True)
    if sizes.min() < 2:
        lone = classes[sizes.argmin()].item()
        raise ValueError(f"labels: class {lone} has one image, to fit on or to test; leave it out")
    chosen = (sizes / 2).round().long().minimum(sizes - 1)
    place = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[_shuffled_by_class(labels, seed)[place < chosen.repeat_interleave(sizes)]] = True
    return mask


def ideal_joint_error(
    seen: Tensor, seen_labels: Tensor, unseen: Tensor, unseen_labels: Tensor, *, seed: int = 0
) -> float:
    """lambda: the errors, on seen and on unseen images, of one classifier of all their classes. JRD, eq. 3.

    A sum of two rates, between 0 and 2. Small if the embeddings tell the unseen classes apart as well.

    Args:
        seen: (N, E), embeddings of images of training classes.
        seen_labels: (N,).
        unseen: (M, E), embeddings of images of other classes.
        unseen_labels: (M,), numbers that no seen class has.
        seed: Of the random half that is fitted on; the global generators are left alone.
    """
    if shared := set(seen_labels.tolist()) & set(unseen_labels.tolist()):
        raise ValueError(
            f"unseen_labels: {len(shared)} classes are also in seen_labels, such as {min(shared)}; give the unseen "
            "classes numbers that no seen class has"
        )
    labels = [seen_labels, unseen_labels]
    return sum(error.mean().item() for error in _errors([seen, unseen], labels, labels, seed))


def h_divergence(
    seen: Tensor, seen_labels: Tensor, unseen: Tensor, unseen_labels: Tensor, *, seed: int = 0
) -> float:
    """Accuracy, 1 - error, of a classifier that separates seen images from unseen ones. JRD, eq. 2.

    1 if seen and unseen images lie apart, about 1/2 if they are mixed (for domains of equal size). The arguments
    are those of `ideal_joint_error`; labels are used only to draw the half of every class.
    """
    labels = [seen_labels, unseen_labels]
    targets = [torch.zeros_like(seen_labels), torch.ones_like(unseen_labels)]
    return 1 - torch.cat(_errors([seen, unseen], labels, targets, seed)).mean().item()


def _errors(
    domains: list[Tensor], labels: list[Tensor], targets: list[Tensor], seed: int
) -> list[Tensor]:
    """For each domain, 1 for the tested images whose nearest image of the fitted ones has another target, or 0."""
    from sklearn.metrics import pairwise_distances_argmin  # takes a while to import

    units = [normalize(vectors.detach()) for vectors in domains]
    fitted = [training_mask(classes, seed) for classes in labels]
    references = torch.cat([x[mask] for x, mask in zip(units, fitted, strict=True)])
    known = torch.cat([y[mask] for y, mask in zip(targets, fitted, strict=True)])
    errors = []
    for x, y, mask in zip(units, targets, fitted, strict=True):
        nearest = pairwise_distances_argmin(x[~mask].numpy(), references.numpy())
        errors.append((known[nearest] != y[~mask]).double())
    return errors


def _shuffled_by_class(labels: Tensor, seed: int) -> Tensor:
    """Rows sorted by class, and in random order inside each class."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return shuffled[labels[shuffled].sort(stable=True).indices]
