r"""Joint representation similarity (Chu et al., "Distance metric learning with joint representation
diversification", ICML 2020): keep the classes' distributions apart, at several layers at once.

    x^-, x, x^+     pooled features, L2-normalised embeddings, cosines with the class weights     eq. 9
    K_ij            = prod_l k^l(x_i^l, x_j^l), over the representations l                        `joint_kernel`
    S_IJ            = mean of K_ij over i in class I, j in class J: <C_I, C_J>                    eq. 8
    L_JRS           = sum_{I != J} n_I n_J S_IJ = sum of K_ij over pairs of different classes     eq. 10

and what the paper compares it with, by the same weights n_I n_J / N_pairs:

    JMMD            = -|C_I - C_J|,         |C_I - C_J|^2 = S_II + S_JJ - 2 S_IJ                  eqs. 14, 15
    JIntra          = -|C_I| - |C_J|,       |C_I|^2 = S_II                                        eq. 16
    intra-class     = -sum_I mean of exp(-|x_i - x_j|^2 / 2) over i != j in class I               eq. 4

C_I is the class's mean of products of kernel functions (eq. 7), and n_I the number of its images in the batch (the
text says "in the training set"). Pairs are ordered, I != J as printed; this does not change the mean.

Differs from the paper: the comma in eq. 15 is read as a minus; the norms of eqs. 15 and 16 are not squared, while
eq. 14's is; if two classes coincide, |C_I - C_J| has gradient 0 instead of infinity. The paper calls energy
confusion "a particular case of JRS", but the signs are opposite: with the linear kernel on the unit sphere, L_ec of
a pair of classes is 2 - 2 S_IJ.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from pytorch_metric_learning.reducers import MeanReducer, SumReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor, nn

from ..distributed import gather_features
from ..features.feature_loss import LabelAwareRegularizer, already_reduced
from ..functional.kernels import (
    GaussianKernel,
    GaussianMixtureKernel,
    ReproducingKernel,
    diagonal,
)


def joint_kernel(
    representations: Mapping[str, Tensor],
    kernels: Mapping[str, Callable[[Tensor], Tensor]] | nn.ModuleDict,
) -> Tensor:
    """K_ij = prod_l k^l(x_i^l, x_j^l): L representations (N, D_l), with a kernel for each -> (N, N)."""
    if not representations or set(representations) != set(kernels):
        raise ValueError(
            f"kernels: expected one for each representation ({', '.join(representations) or 'none came'}), got "
            f"{', '.join(kernels) or 'none'}"
        )
    matrices = (kernels[name](x) for name, x in representations.items())
    return reduce(torch.mul, matrices)  # eq. 8, its product


def joint_mmd(K: Tensor, labels: Tensor) -> Tensor:
    """Eq. 15: minus the distance of the classes of samples i and j, (N, N) -> (N, N)."""
    average = _class_average(K, labels)
    means = average @ K  # over the class of i
    norms = (means * average).sum(dim=1)
    squares = norms[:, None] + norms - 2 * means @ average.T  # eq. 14
    scale = average @ diagonal(K.detach())
    return -_sqrt(squares, scale[:, None] + scale)  # eq. 15


def joint_intra(K: Tensor, labels: Tensor) -> Tensor:
    """Eq. 16: minus the norms of the classes of samples i and j, (N, N) -> (N, N)."""
    average = _class_average(K, labels)
    norms = _sqrt((average @ K * average).sum(dim=1), average @ diagonal(K.detach()))
    return -(norms[:, None] + norms)  # eq. 16


def intra_class_similarity(K: Tensor, labels: Tensor) -> Tensor:
    """Eq. 4's sum over classes of the mean of K_ij over their pairs i != j; a class of one image has none."""
    same = _same_class(K, labels)
    sizes = same.sum(dim=1)
    pairs = same.fill_diagonal_(False)
    per_row = K.masked_fill(~pairs, 0).sum(dim=1)
    return (per_row / (sizes * (sizes - 1)).clamp(min=1)).sum()  # eq. 4, its sum


def between_classes(
    values: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, reducer: Any
) -> dict[str, Any]:
    """A sub-loss for PML's reducer: the values (N, N) of pairs of different classes, or of mined negative ones.

    On a GPU and in compiled code, a mean or a sum gets no list of pairs, whose length the labels decide.
    """
    if indices_tuple is None:
        same = _same_class(values, labels)
        waits = values.device.type != "cpu" or torch.compiler.is_compiling()
        if waits and type(reducer) in (MeanReducer, SumReducer) and not reducer.collect_stats:
            total = values.masked_fill(same, 0).sum()
            mean = type(reducer) is MeanReducer
            return already_reduced(total / (~same).sum().clamp(min=1) if mean else total)
        a, n = torch.where(~same)
        losses = values.masked_select(~same)
    else:
        _, _, a, n = lmu.convert_to_pairs(indices_tuple, labels)
        losses = values[a, n]
    if len(a) == 0:
        return already_reduced(losses.sum())  # 0; the mean over no pair would be NaN
    return {"losses": losses, "indices": (a, n), "reduction_type": "neg_pair", "divisor": len(a)}


def _same_class(K: Tensor, labels: Tensor) -> Tensor:
    count = len(K)
    if K.shape != (count, count) or labels.shape != (count,):
        raise ValueError(
            "labels: expected a kernel matrix (N, N) and a vector of N labels, got shapes "
            f"{tuple(K.shape)} and {tuple(labels.shape)}"
        )
    return labels[:, None] == labels


def _class_average(K: Tensor, labels: Tensor) -> Tensor:
    """The matrix whose row i averages over the class of sample i: A K A^T is S of the samples' classes, eq. 8."""
    same = _same_class(K, labels).to(K.dtype)
    return same / same.sum(dim=1, keepdim=True)  # eq. 7


def _sqrt(squares: Tensor, scale: Tensor) -> Tensor:
    """Square root of a sum of terms of size `scale`: 0, with gradient 0, where it is below their rounding."""
    zero = squares <= 8 * torch.finfo(squares.dtype).eps * scale
    return squares.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


class _JointRegularizer(LabelAwareRegularizer):
    """Base of the regularizers that are a function of the joint kernel and the labels."""

    def __init__(
        self, kernels: Mapping[str, ReproducingKernel] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.kernels = kernel_modules(self.get_default_kernels() if kernels is None else kernels)
        self.feature_names = tuple(name for name in self.kernels if name != "embeddings")

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None, *_: Any
    ) -> dict[str, dict[str, Any]]:
        rows = {"embeddings": embeddings, **whole_batch(self.named_features, embeddings)}
        K = joint_kernel({name: rows[name] for name in self.kernels}, self.kernels)
        return {"loss": self.sub_loss(K, labels, indices_tuple)}

    def get_default_distance(self) -> None:
        """Return None: nothing uses it."""

    def get_default_kernels(self) -> dict[str, ReproducingKernel]:
        raise NotImplementedError

    def sub_loss(
        self, K: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None
    ) -> dict[str, Any]:
        """The values for the reducer, from the joint kernel (N, N) of the whole batch."""
        raise NotImplementedError


class JRSRegularizer(_JointRegularizer):
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

    def get_default_kernels(self) -> dict[str, ReproducingKernel]:
        return {
            "pooled": GaussianMixtureKernel(),
            "embeddings": GaussianMixtureKernel(normalize=True),
        }

    def sub_loss(
        self, K: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None
    ) -> dict[str, Any]:
        return between_classes(K, labels, indices_tuple, self.reducer)  # eq. 10


class IntraClassRegularizer(_JointRegularizer):
    """Minus the similarity of the images of a class, summed over the classes: eq. 4, the paper's Figure 2.

    The paper adds it to AM-softmax to show what is lost when classes are made too compact. A class with one
    image in the batch adds nothing. A mined `indices_tuple` and the reducer have no effect.

    Args:
        kernels: As in `JRSRegularizer`. Default: exp(-|x - x'|^2 / 2) on the L2-normalised embeddings.
        **kwargs: As in `JRSRegularizer`, whose shapes and errors it shares.

    Reducer input: **loss**, one number, reduction type "already_reduced".

    Example:
        >>> IntraClassRegularizer()(torch.eye(4), torch.tensor([0, 0, 1, 2]))
        tensor(-0.3679)
    """

    def get_default_kernels(self) -> dict[str, ReproducingKernel]:
        return {"embeddings": GaussianKernel(bandwidth=2.0, normalize=True)}

    def sub_loss(
        self, K: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None
    ) -> dict[str, Any]:
        return already_reduced(-intra_class_similarity(K, labels))  # eq. 4


def kernel_modules(kernels: Mapping[str, ReproducingKernel]) -> nn.ModuleDict:
    """The kernels by name; raises a ValueError if there are none, or one is not a kernel."""
    if not isinstance(kernels, Mapping) or not kernels:
        raise ValueError(
            f'kernels: expected a dict such as {{"embeddings": GaussianMixtureKernel()}}, got {kernels!r}'
        )
    for name, kernel in kernels.items():
        if not isinstance(kernel, ReproducingKernel):
            raise ValueError(
                f"kernels: expected a kernel such as GaussianMixtureKernel() for {name}, got {kernel!r}"
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
            came = tuple(getattr(x, "shape", ())) or type(x).__name__
            raise ValueError(
                f"features: expected a matrix (N, D) of {name}, got {came}; read pooled features, or flatten(1)"
            )
    names = sorted(features)  # the same on every process
    parts = gather_features([features[name] for name in names], embeddings) if names else []
    return dict(zip(names, parts, strict=True))
