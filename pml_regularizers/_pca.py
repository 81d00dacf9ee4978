"""The principal components of descriptors: HORDE, section 4, reduces its orders by them."""

import torch
from torch import Tensor
from torch.nn import functional as F


def principal_components(descriptors: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The mean (D,) of descriptors (M, D), and their first components (D, size), of length 1."""
    x = descriptors.double()
    mean = x.mean(dim=0)
    x = x - mean
    if len(x) < x.shape[1]:  # the smaller of the two matrices with the same eigenvalues
        components = F.normalize(x.T @ _leading_eigenvectors(x @ x.T, size), dim=0)
    else:
        components = _leading_eigenvectors(x.T @ x, size)
    # An eigenvector has no sign of its own: fix it, so that the same data give the same PCA.
    largest = components.gather(0, components.abs().argmax(dim=0, keepdim=True))
    return mean.to(descriptors.dtype), (components * largest.sign()).to(descriptors.dtype)


def is_pca(mean: Tensor | None, components: Tensor | None) -> bool:
    """True if both are of one fit, or there is neither."""
    if mean is None or components is None:
        return mean is components
    floating = mean.is_floating_point() and components.is_floating_point()
    return floating and components.ndim == 2 and mean.shape == components.shape[:1]


def _leading_eigenvectors(symmetric: Tensor, count: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(symmetric).eigenvectors
    return vectors.flip(1)[:, :count]
