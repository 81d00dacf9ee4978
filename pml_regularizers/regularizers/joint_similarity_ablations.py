r"""What only the ablations of joint representation similarity use (Chu et al., ICML 2020): no method of its own.

Other functions of the joint kernel K and the labels, by the weights of eq. 10:

    JMMD            = -|C_I - C_J|,         |C_I - C_J|^2 = S_II + S_JJ - 2 S_IJ                  eqs. 14, 15
    JIntra          = -|C_I| - |C_J|,       |C_I|^2 = S_II                                        eq. 16
    intra-class     = -sum_I mean of exp(-|x_i - x_j|^2 / 2) over i != j in class I               eq. 4

Other kernels, of Table 4; `PolynomialKernel(1, constant=0)` is the linear kernel of section 6:

    Laplace         exp(-|x - x'|_1 / sigma)
    polynomial      (<x, x'> + c)^p
    exponential     exp(<x, x'>)

Differs from the paper: the comma in eq. 15 is read as a minus; the norms of eqs. 15 and 16 are not squared, while
eq. 14's is; if two classes coincide, |C_I - C_J| has gradient 0 instead of infinity. Laplace's sigma, which is not
given, is the mean L1 distance, as tau in `functional/kernels.py`.
"""

from typing import Any

import torch
from torch import Tensor

from ..features.feature_loss import already_reduced
from ..functional.checks import number, whole_numbers
from ..functional.kernels import DistanceKernel, GaussianKernel, ReproducingKernel, diagonal
from .joint_similarity import JRSRegularizer


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
    same = labels[:, None] == labels
    sizes = same.sum(dim=1)
    pairs = same.fill_diagonal_(False)
    per_row = K.masked_fill(~pairs, 0).sum(dim=1)
    return (per_row / (sizes * (sizes - 1)).clamp(min=1)).sum()  # eq. 4, its sum


def _class_average(K: Tensor, labels: Tensor) -> Tensor:
    """The matrix whose row i averages over the class of sample i: A K A^T is S of the samples' classes, eq. 8."""
    same = (labels[:, None] == labels).to(K.dtype)
    return same / same.sum(dim=1, keepdim=True)  # eq. 7


def _sqrt(squares: Tensor, scale: Tensor) -> Tensor:
    """Square root of a sum of terms of size `scale`: 0, with gradient 0, where it is below their rounding."""
    zero = squares <= 8 * torch.finfo(squares.dtype).eps * scale
    return squares.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


class IntraClassRegularizer(JRSRegularizer):
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

    def negative_pairs(
        self, kernel: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None
    ) -> dict[str, Any]:
        return already_reduced(-intra_class_similarity(kernel, labels))  # eq. 4


class LaplaceKernel(DistanceKernel):
    """exp(-|x - x'|_1 / sigma), Table 4.

    `bandwidth` is sigma. Default: the mean L1 distance over all pairs of different rows, without a gradient.
    """

    def distances(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x, p=1.0)


class PolynomialKernel(ReproducingKernel):
    """(<x, x'> + c)^p, Table 4.

    Powers of long vectors overflow float32, as p = 5 of 1,024 entries of 1e4; with `normalize=True`, none is above
    (1 + c)^p.

    Args:
        degree: p. Table 4: 2 and 5.
        constant: c. Table 4: 1; 0 gives the homogeneous kernel.
        **kwargs: `normalize` and `collect_stats`.

    Raises:
        ValueError: if degree < 1 or constant < 0: the function is then no kernel.
    """

    def __init__(self, degree: int = 2, constant: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        whole_numbers(degree=degree)
        number("constant", constant, least=0)
        self.degree = degree
        self.constant = constant
        self.add_to_recordable_attributes(list_of_names=["degree", "constant"], is_stat=False)

    def compute(self, x: Tensor) -> Tensor:
        return (x @ x.T + self.constant) ** self.degree


class ExponentialKernel(ReproducingKernel):
    """exp(<x, x'>), Table 4's "kernel inducing moment generating function".

    It overflows float32 for <x, x'> > 88, as of most pooled features; `normalize=True` bounds it by e.
    """

    def compute(self, x: Tensor) -> Tensor:
        return (x @ x.T).exp()
