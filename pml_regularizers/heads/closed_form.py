r"""Linear layers in closed form, from a trunk's features: principal components, and within-class whitening.

    pca:        y = V^T (x - m)             m the mean, V the leading eigenvectors of the covariance S
    whitening:  y = U^T A (x - m)           A = (S_w + r tr(S_w) / C I)^(-1/2), U the leading eigenvectors of A S A

S_w is the covariance of features around the means of their classes. A multiple of its mean variance, tr(S_w) / C,
is added since classes of a few images leave most directions without any variance: r = s / (1 - s) for a shrinkage s
(Ledoit and Wolf, 2004). Up to the factor sqrt(1 - s), A is the whitening of (1 - s) S_w + s tr(S_w) / C I.

A layer of random numbers throws away what a pretrained trunk knows; these keep it (docs/heads.md has the evidence).
Everything is computed in float64 on the CPU, and signs are fixed, so that equal features give equal layers.
"""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..functional.checks import came, number
from .embedding_head import EmbeddingHead

Layer = TypeVar("Layer", nn.Linear, EmbeddingHead)

BLOCK = 8192  # rows in float64 at a time


@torch.no_grad()
def pca_init_(layer: Layer, features: Tensor) -> Layer:
    """Set a linear layer to the leading principal components of features, in place.

    The layer's outputs are then the centred features in the directions of their largest variances, the largest
    first; the component of a direction whose largest entry is positive. A layer without a bias gets one, so call
    this before an optimizer is made of its parameters.

    Args:
        layer: A `torch.nn.Linear`, or an `EmbeddingHead`, whose layer it is.
        features: (N, C), what the layer will see, such as those of `EmbeddingHead.extract_features`. The same ones
            on every process.

    Returns:
        The layer itself, as functions of `torch.nn.init` do.

    Raises:
        ValueError: if the layer has another width than C, or more outputs than there are rows or channels; for
            NaN or inf; for a layer whose weight is computed, as by weight norm.

    Example:
        >>> layer = pca_init_(nn.Linear(4, 1), torch.eye(4)[[0, 0, 1, 2]] * 3)
        >>> f"{layer(torch.eye(4)[0] * 3).item():.3f}"
        '1.837'
    """
    linear, mean, span, covariance = _start(layer, features)
    _set(linear, mean, _leading(covariance, linear.out_features, span) @ span)
    return layer


@torch.no_grad()
def whitening_init_(
    layer: Layer, features: Tensor, labels: Tensor, *, shrinkage: float = 0.5
) -> Layer:
    """Set a linear layer to the leading components of features after within-class whitening, in place.

    Directions in which images of one class differ count less. It is LDA's whitening, without its limit of one
    component fewer than there are classes.

    Args:
        layer: As in `pca_init_`.
        features: As in `pca_init_`.
        labels: (N,), the classes.
        shrinkage: s, between 0 and 1: the weight of equal variances in the covariance within classes. Near 1, the
            layer is that of `pca_init_`, scaled. With a few images per class, try 0.9 on validation classes.

    Returns:
        The layer itself.

    Raises:
        ValueError: as in `pca_init_`; for labels of another shape; if no two images of a class differ; for a
            shrinkage that is not between 0 and 1.
    """
    number("shrinkage", shrinkage, above=0)
    if shrinkage >= 1:
        raise ValueError(f"shrinkage: expected a number below 1, got {shrinkage}; try 0.5")
    linear, mean, span, covariance = _start(layer, features)
    if getattr(labels, "shape", None) != features.shape[:1] or not isinstance(labels, Tensor):
        raise ValueError(
            f"labels: expected a tensor with one for each of {len(features)} features, got {came(labels)}; pass "
            "torch.tensor(labels), one label for each row"
        )
    _, classes, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), len(covariance), dtype=torch.float64)
    for rows, of_rows in zip(_centred(features, mean, span), classes.split(BLOCK), strict=True):
        sums.index_add_(0, of_rows, rows)
    between = sums.T @ (sums / counts[:, None]) / len(features)
    within = covariance - between
    if not within.trace() > 1e-12 * covariance.trace():
        raise ValueError(
            "labels: no two features of a class differ, so that there is nothing to whiten by; pass features of "
            "two or more images of a class, or use pca_init_"
        )
    within.diagonal().add_(shrinkage / (1 - shrinkage) * within.trace() / len(mean))
    variances, directions = torch.linalg.eigh(within)
    whitening = directions / variances.sqrt() @ directions.T
    components = _leading(whitening @ covariance @ whitening, linear.out_features, span)
    _set(linear, mean, components @ whitening @ span)
    return layer


def _start(layer: nn.Module, features: Tensor) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """The linear layer, and the features' mean, an orthonormal basis and their covariance in it, checked.

    All components lie in the span of the centred features. Where rows are fewer than channels, it is smaller than
    the whole space, and so quicker.
    """
    linear = layer.fc if isinstance(layer, EmbeddingHead) else layer
    if not isinstance(linear, nn.Linear) or "weight" not in linear._parameters:
        raise ValueError(
            f"layer: expected a plain torch.nn.Linear, or an EmbeddingHead that has one, got {linear}; make "
            "one, layer = torch.nn.Linear(C, E), and set head.fc = layer"
        )
    for name, tensor in (("layer", linear.weight), ("features", features)):
        if getattr(tensor, "is_meta", False):
            raise ValueError(
                f"{name}: on the meta device, which holds no numbers; make it on a real one, as by to_empty"
            )
    real = isinstance(features, Tensor) and not features.is_complex()
    if not real or features.ndim != 2 or features.shape[1] != linear.in_features:
        raise ValueError(
            f"features: expected a tensor (N, {linear.in_features}), as the layer takes them, got {came(features)}"
            "; take those of head.extract_features(trunk, loader)"
        )
    most = min(features.shape)
    if linear.out_features > most:
        raise ValueError(
            f"features: {linear.out_features} components need as many rows and channels, got shape "
            f"{tuple(features.shape)}; pass more features, or make a layer of at most {most} outputs"
        )
    if not features.isfinite().all():
        raise ValueError(
            "features: expected finite numbers, got NaN or inf; find the images behind them"
        )
    blocks = features.detach().split(BLOCK)
    mean = torch.stack([rows.cpu().double().sum(dim=0) for rows in blocks]).sum(dim=0)
    mean /= len(features)
    span = torch.eye(len(mean), dtype=torch.float64)
    if len(features) < len(mean):
        span = torch.linalg.qr((features.detach().cpu().double() - mean).T).Q.T
    covariance = torch.zeros(len(span), len(span), dtype=torch.float64)
    for rows in _centred(features, mean, span):
        covariance += rows.T @ rows / len(features)
    if not covariance.isfinite().all():
        raise ValueError(
            "features: their squares leave the range of float64; divide them by their largest"
        )
    return linear, mean, span, covariance


def _centred(features: Tensor, mean: Tensor, span: Tensor) -> Iterator[Tensor]:
    """The centred features in the basis, in float64 on the CPU, a block of rows at a time."""
    for rows in features.detach().split(BLOCK):
        rows = rows.cpu().double() - mean
        yield rows if len(span) == len(mean) else rows @ span.T


def _leading(covariance: Tensor, count: int, span: Tensor) -> Tensor:
    """The eigenvectors of the largest eigenvalues in the basis, the largest first, with signs fixed outside it."""
    vectors = torch.linalg.eigh(covariance).eigenvectors.T.flip(0)[:count]
    outside = vectors @ span
    largest = outside.gather(1, outside.abs().argmax(dim=1, keepdim=True))
    components: Tensor = vectors * largest.sign()
    return components


def _set(linear: nn.Linear, mean: Tensor, weight: Tensor) -> None:
    bias = (-weight @ mean).to(linear.weight.dtype)
    if not bias.isfinite().all():
        raise ValueError(
            f"layer: its bias leaves the range of {bias.dtype}; make it in float32, and cast it when it is trained"
        )
    if linear.bias is None:
        with torch.inference_mode(False):  # or it could not be trained
            zeros = linear.weight.new_zeros(linear.out_features)
            linear.bias = nn.Parameter(zeros, linear.weight.requires_grad)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
