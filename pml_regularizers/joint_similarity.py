r"""Joint representation similarity (Chu et al., "Distance metric learning with joint representation
diversification", ICML 2020): keep the classes' distributions apart, at several layers at once.

    x^-, x, x^+     pooled features, L2-normalised embeddings, cosines with the class weights     eq. 9
    K_ij            = prod_l k^l(x_i^l, x_j^l), over the representations l                        `joint_kernel`
    S_IJ            = mean of K_ij over i in class I, j in class J: <C_I, C_J>                    eq. 8
    L_JRS           = sum_{I != J} n_I n_J S_IJ = sum of K_ij over pairs of different classes     eq. 10

and the regularizers that the paper compares it with, with the same weights n_I n_J / N_pairs:

    JMMD            = -|C_I - C_J|,         |C_I - C_J|^2 = S_II + S_JJ - 2 S_IJ                  eqs. 14, 15
    JIntra          = -|C_I| - |C_J|,       |C_I|^2 = S_II                                        eq. 16
    intra-class     = -sum_I mean of exp(-|x_i - x_j|^2 / 2) over i != j in class I               eq. 4

C_I is the class's mean of products of kernel functions (eq. 7), and n_I the number of its images in the batch
(the text says "in the training set"). Pairs are ordered, I != J as printed; this does not change the mean.

Differs from the paper: the comma in eq. 15 is read as a minus; the norms of eqs. 15 and 16 are not squared, while
eq. 14's is. If two classes coincide, |C_I - C_J| has gradient 0 instead of infinity. The paper
calls energy confusion "a particular case of JRS". With the linear kernel on the unit sphere a pair of classes has
L_ec = 2 - 2 S_IJ. The signs are opposite: energy confusion draws classes together, and JRS pushes them apart.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .distributed import gather_features
from .feature_loss import LabelAwareRegularizer, already_reduced
from .reproducing_kernels import GaussianKernel, GaussianMixtureKernel, ReproducingKernel

PairReduction = Literal["mean", "ordered_sum"]
"""The reduction of all pairs of samples of different classes to one number."""


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
    matrices = [kernels[name](x) for name, x in representations.items()]
    product = matrices[0]
    for matrix in matrices[1:]:
        product = product * matrix  # eq. 8, its product
    return product


def between_class_similarity(
    K: Tensor, labels: Tensor, reduction: PairReduction = "mean"
) -> Tensor:
    """Eq. 10: mean or sum of the joint kernel (N, N) over pairs of different classes; 0 without such pairs."""
    return _over_pairs(K, labels, reduction)


def joint_mmd(K: Tensor, labels: Tensor, reduction: PairReduction = "mean") -> Tensor:
    """Eq. 15: minus the distance of the classes of a pair."""
    S = _class_means(K, labels)
    norms, scale = S.diagonal(), _class_scales(K, labels)
    squares = norms[:, None] + norms - 2 * S  # eq. 14
    return -_over_pairs(_sqrt(squares, scale[:, None] + scale), labels, reduction)  # eq. 15


def joint_intra(K: Tensor, labels: Tensor, reduction: PairReduction = "mean") -> Tensor:
    """Eq. 16: minus the norms of both classes of a pair."""
    norms = _sqrt(_class_means(K, labels).diagonal(), _class_scales(K, labels))
    return -_over_pairs(norms[:, None] + norms, labels, reduction)  # eq. 16


def intra_class_similarity(K: Tensor, labels: Tensor) -> Tensor:
    """Eq. 4's sum over classes of the mean of K_ij over their pairs i != j; a class of one image has none."""
    same = _same_class(K, labels)
    sizes = same.sum(dim=1)
    per_row = K.masked_fill(~same, 0).sum(dim=1) - K.diagonal()
    return (per_row / (sizes * (sizes - 1)).clamp(min=1)).sum()  # eq. 4, its sum


def _same_class(K: Tensor, labels: Tensor) -> Tensor:
    count = len(K)
    if K.shape != (count, count) or labels.shape != (count,):
        raise ValueError(
            "labels: expected a kernel matrix (N, N) and a vector of N labels, got shapes "
            f"{tuple(K.shape)} and {tuple(labels.shape)}"
        )
    return labels[:, None] == labels


def _over_pairs(values: Tensor, labels: Tensor, reduction: PairReduction) -> Tensor:
    if reduction not in get_args(PairReduction):
        raise ValueError(
            f"reduction: expected one of {', '.join(get_args(PairReduction))}; got {reduction!r}"
        )
    same = _same_class(values, labels)
    total = values.masked_fill(same, 0).sum()  # eq. 10
    return total if reduction == "ordered_sum" else total / (~same).sum().clamp(min=1)


def _class_means(K: Tensor, labels: Tensor) -> Tensor:
    """S of the classes of samples i and j, eq. 8: (N, N).

    A sum over pairs of samples of a function of S has the weights n_I n_J, with no search for classes.
    """
    same = _same_class(K, labels).to(K.dtype)
    average = same / same.sum(dim=1, keepdim=True)
    return average @ K @ average.T  # eqs. 7, 8


def _class_scales(K: Tensor, labels: Tensor) -> Tensor:
    """Mean of K_ii over the class of sample i, the scale of S_II's rounding error: (N,)."""
    same = _same_class(K, labels).to(K.dtype)
    return (same / same.sum(dim=1, keepdim=True)) @ K.diagonal().detach()


def _sqrt(squares: Tensor, scale: Tensor) -> Tensor:
    """Square root of a sum of terms of size `scale`: 0, with gradient 0, where it is below their rounding."""
    zero = squares <= 8 * torch.finfo(squares.dtype).eps * scale
    return squares.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


class _JointRegularizer(LabelAwareRegularizer):
    """Base of the regularizers that are a function of the joint kernel and the labels."""

    def __init__(self, kernels: Mapping[str, ReproducingKernel], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kernels = kernel_modules(kernels)
        self.feature_names = tuple(name for name in kernels if name != "embeddings")

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> dict[str, dict[str, Any]]:
        found = {"embeddings": embeddings, **whole_batch(self.named_features, embeddings)}
        K = joint_kernel({name: found[name] for name in self.kernels}, self.kernels)
        return {"loss": already_reduced(self.compute(K, labels))}

    def get_default_distance(self) -> None:
        """Return None: nothing uses it."""

    def compute(self, K: Tensor, labels: Tensor) -> Tensor:
        """The value, from the joint kernel (N, N) of the whole batch."""
        raise NotImplementedError


class JRSRegularizer(_JointRegularizer):
    """Similarity of the joint distributions of different classes (eq. 10), a value to minimise.

    Only pairs of images of different classes count, so nothing pulls a class together. A mined `indices_tuple` is
    ignored: the equation takes all pairs.

    Args:
        kernels: A kernel for each representation, by name. "embeddings" are those that the loss is called with;
            all other names are features: stages of an `EmbeddingHead` after `attach(head)`, any modules after
            `attach({"pooled": ..., ...})`, or `features={"pooled": ..., ...}`. Default: the paper's Gaussian
            mixture on "pooled" and on the L2-normalised "embeddings". The paper's third representation needs
            class weights: `JRDLoss`.
        reduction: "mean" over the pairs, which is L_JRS / N_pairs in eq. 11, or "ordered_sum", eq. 10.
        **kwargs: `collect_stats`, `embedding_regularizer` and `embedding_reg_weight`, as in any PML loss.

    Default reducer: `MeanReducer()`; another one has no effect.
    Reducer input: **loss**, one number, reduction type "already_reduced".

    Shape:
        embeddings (N, E), labels (N,), each feature (N, D).

    Raises:
        ValueError: if there are no kernels, or one is not a kernel; for unknown words, features that are not
            matrices, a call without labels or with a reference set.
        MissingFeaturesError: in the call, see `FeatureLoss`.

    Example:
        >>> import torch
        >>> regularizer = JRSRegularizer()
        >>> embeddings, pooled = torch.eye(4), torch.eye(4, 7)
        >>> regularizer(embeddings, torch.tensor([0, 0, 1, 1]), features={"pooled": pooled})
        tensor(0.1368)
    """

    def __init__(
        self,
        kernels: Mapping[str, ReproducingKernel] | None = None,
        *,
        reduction: PairReduction = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(self.get_default_kernels() if kernels is None else kernels, **kwargs)
        if reduction not in get_args(PairReduction):
            raise ValueError(
                f"reduction: expected one of {', '.join(get_args(PairReduction))}; got {reduction!r}"
            )
        self.reduction = reduction
        self.add_to_recordable_attributes(name="reduction", is_stat=False)

    def get_default_kernels(self) -> dict[str, ReproducingKernel]:
        return {
            "pooled": GaussianMixtureKernel(),
            "embeddings": GaussianMixtureKernel(normalize=True),
        }

    def compute(self, K: Tensor, labels: Tensor) -> Tensor:
        return between_class_similarity(K, labels, self.reduction)


class JMMDRegularizer(JRSRegularizer):
    """Minus the joint maximum mean discrepancy of different classes (eq. 15), for the paper's comparison.

    It keeps classes apart, but also draws each class together, which the paper finds harmful (section 5.3, Figure
    5). Each pair of classes has the weight n_I n_J / N_pairs, as in `JRSRegularizer`. Its gradient grows without
    bound as two classes approach each other, and is 0 if they coincide.

    Args:
        kernels: As in `JRSRegularizer`.
        reduction: As in `JRSRegularizer`.
        **kwargs: As in `JRSRegularizer`, whose shapes, reducer and errors it shares.

    Example:
        >>> import torch
        >>> regularizer = JMMDRegularizer({"embeddings": GaussianMixtureKernel()})
        >>> regularizer(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(-0.7938)
    """

    def compute(self, K: Tensor, labels: Tensor) -> Tensor:
        return joint_mmd(K, labels, self.reduction)


class JIntraRegularizer(JRSRegularizer):
    """Minus the norms of the classes' kernel means (eq. 16): the paper's comparison that only compacts classes.

    Args:
        kernels: As in `JRSRegularizer`.
        reduction: As in `JRSRegularizer`.
        **kwargs: As in `JRSRegularizer`, whose shapes, reducer and errors it shares.

    Example:
        >>> import torch
        >>> regularizer = JIntraRegularizer({"embeddings": GaussianMixtureKernel()})
        >>> regularizer(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(-1.6552)
    """

    def compute(self, K: Tensor, labels: Tensor) -> Tensor:
        return joint_intra(K, labels, self.reduction)


class IntraClassRegularizer(_JointRegularizer):
    """Minus the similarity of the images of a class, summed over the classes: eq. 4, the paper's Figure 2.

    The paper adds it to AM-softmax to show what is lost when classes are made too compact. A class with one
    image in the batch adds nothing.

    Args:
        kernels: As in `JRSRegularizer`. Default: exp(-|x - x'|^2 / 2) on the L2-normalised embeddings.
        **kwargs: As in `JRSRegularizer`, whose shapes, reducer and errors it shares.

    Example:
        >>> import torch
        >>> IntraClassRegularizer()(torch.eye(4), torch.tensor([0, 0, 1, 2]))
        tensor(-0.3679)
    """

    def __init__(
        self, kernels: Mapping[str, ReproducingKernel] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(self.get_default_kernels() if kernels is None else kernels, **kwargs)

    def get_default_kernels(self) -> dict[str, ReproducingKernel]:
        return {"embeddings": GaussianKernel(bandwidth=2.0, normalize=True)}

    def compute(self, K: Tensor, labels: Tensor) -> Tensor:
        return -intra_class_similarity(K, labels)  # eq. 4


def kernel_modules(kernels: Mapping[str, ReproducingKernel]) -> nn.ModuleDict:
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
            "kernels: expected names without dots that are not attributes of nn.ModuleDict, got "
            f"{', '.join(map(repr, kernels))} ({error.args[0]}); choose others"
        ) from error


def whole_batch(features: Mapping[str, Any], embeddings: Tensor) -> dict[str, Tensor]:
    """Each feature's rows of the whole batch, gathered from all processes."""
    if not features:
        return {}
    for name in features:
        if not isinstance(features[name], Tensor) or features[name].ndim != 2:
            came = tuple(getattr(features[name], "shape", ())) or type(features[name]).__name__
            raise ValueError(
                f"features: expected a matrix (N, D) of {name}, got {came}; read pooled features, or flatten(1)"
            )
    names = sorted(features)  # the same on every process
    parts = gather_features([features[name] for name in names], embeddings)
    return dict(zip(names, parts, strict=True))
