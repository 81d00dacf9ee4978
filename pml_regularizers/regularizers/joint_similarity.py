r"""Joint representation similarity (Chu et al., "Distance metric learning with joint representation
diversification", ICML 2020): keep the classes' distributions apart, at several layers at once.

    x^-, x, x^+     pooled features, L2-normalised embeddings, cosines with the class weights     eq. 9
    K_ij            = prod_l k^l(x_i^l, x_j^l), over the representations l                        `joint_kernel`
    S_IJ            = mean of K_ij over i in class I, j in class J: <C_I, C_J>                    eq. 8
    L_JRS           = sum_{I != J} n_I n_J S_IJ = sum of K_ij over pairs of different classes     eq. 10

C_I is the class's mean of products of kernel functions (eq. 7), and n_I the number of its images in the batch (the
text says "in the training set"). Pairs are ordered, I != J as printed; this does not change the mean.

Differs from the paper: it calls energy confusion "a particular case of JRS", but the signs are opposite: with the
linear kernel on the unit sphere, L_ec of a pair of classes is 2 - 2 S_IJ.

`joint_similarity_ablations.py` has what the paper compares this with.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from pytorch_metric_learning.reducers import MeanReducer
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor, nn

from ..distributed import gather_features
from ..features.feature_loss import FeatureLoss, already_reduced, sums_at_once
from ..functional.checks import came
from ..functional.kernels import GaussianMixtureKernel, ReproducingKernel
from ..offered.losses.jrs_loss import JRSLoss


def joint_kernel(
    rows: Mapping[str, Tensor], kernels: Mapping[str, Callable[[Tensor], Tensor]] | nn.ModuleDict
) -> Tensor:
    """K_ij = prod_l k^l(x_i^l, x_j^l), for kernels of the rows (N, D_l) of these names -> (N, N)."""
    matrices = (kernel(rows[name]) for name, kernel in kernels.items())
    return reduce(torch.mul, matrices)  # eq. 8, its product


def between_classes(
    values: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, reducer: Any
) -> dict[str, Any]:
    """A sub-loss for PML's reducer: the values (N, N) of pairs of different classes, or of mined negative ones."""
    if indices_tuple is None and sums_at_once(reducer, values):
        same = labels[:, None] == labels
        total = values.masked_fill(same, 0).sum()
        mean = type(reducer) is MeanReducer
        return already_reduced(total / (~same).sum().clamp(min=1) if mean else total)
    pairs: dict[str, Any] = JRSLoss.negative_pairs(values, labels, indices_tuple)
    return pairs


class JRSRegularizer(FeatureLoss, BaseRegularizer):
    """Similarity of the joint distributions of different classes (eq. 10), a value to minimise.

    Only pairs of images of different classes count, so nothing pulls a class together.

    Args:
        kernels: A kernel for each representation, by name. "embeddings" are those that the loss is called with;
            all other names are features: see `FeatureLoss.attach`. Default: the paper's Gaussian mixture on
            "pooled" and on the L2-normalised "embeddings". Its third representation needs class weights:
            `JRDLoss`.
        **kwargs: As in any PML loss, except `distance`.

    Default reducer: `MeanReducer()`, L_JRS / N_pairs in eq. 11. `SumReducer()` gives eq. 10.
    Reducer input: **loss**, K_ij of every ordered pair of different classes, or of the negative pairs of a mined
    `indices_tuple`; reduction type "neg_pair".

    Shape:
        embeddings (N, E), labels (N,), each feature (N, D).

    Raises:
        ValueError: if there are no kernels, or one is not a kernel; for features that are not matrices, a call
            without labels or with a reference set.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> regularizer = JRSRegularizer()
        >>> embeddings, pooled = torch.eye(4), torch.eye(4, 7)
        >>> regularizer(embeddings, torch.tensor([0, 0, 1, 1]), features={"pooled": pooled})
        tensor(0.1368)
    """

    compares_classes = True

    def __init__(
        self, kernels: Mapping[str, ReproducingKernel] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.kernels = kernel_modules(self.get_default_kernels() if kernels is None else kernels)
        self.feature_names = tuple(name for name in self.kernels if name != "embeddings")

    def get_default_distance(self) -> None:
        """Return None: nothing uses it."""

    def get_default_kernels(self) -> dict[str, ReproducingKernel]:
        return {
            "pooled": GaussianMixtureKernel(),
            "embeddings": GaussianMixtureKernel(normalize=True),
        }

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        rows = {"embeddings": embeddings, **whole_batch(self.named_features, embeddings)}
        kernel = joint_kernel(rows, self.kernels)
        return {"loss": self.negative_pairs(kernel, labels, indices_tuple)}

    def negative_pairs(
        self, kernel: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None
    ) -> dict[str, Any]:
        return between_classes(kernel, labels, indices_tuple, self.reducer)  # eq. 10


def kernel_modules(kernels: Mapping[str, ReproducingKernel]) -> nn.ModuleDict:
    """The kernels by name; raises a ValueError if there are none, or one is not a kernel."""
    made = list(kernels.values()) if isinstance(kernels, Mapping) else []
    if not made or not all(isinstance(kernel, ReproducingKernel) for kernel in made):
        raise ValueError(
            f'kernels: expected a dict such as {{"embeddings": GaussianMixtureKernel()}}, got {kernels!r}'
        )
    try:
        return nn.ModuleDict(kernels)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"kernels: expected names of submodules, got {', '.join(map(repr, kernels))} ({error.args[0]})"
        ) from error


def whole_batch(features: Mapping[str, Any], embeddings: Tensor) -> dict[str, Tensor]:
    """Each feature's rows of the whole batch, gathered from all processes."""
    for name, x in features.items():
        if not isinstance(x, Tensor) or x.ndim != 2:
            raise ValueError(
                f"features: expected a matrix (N, D) of {name}, got {came(x)}; read pooled features, or flatten(1)"
            )
    names = sorted(features)  # the same on every process
    parts = gather_features([features[name] for name in names], embeddings) if names else []
    return dict(zip(names, parts, strict=True))
