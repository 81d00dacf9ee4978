r"""Reproducing kernels: similarities of vectors, used to compare distributions.

    Gaussian mixture   (1/K) sum_k exp(-|x - x'|^2 / sigma_k^2),   sigma_k^2 = tau 2^(k - K//2), k = 0..K-1

This is the kernel of joint representation diversification (Chu et al., ICML 2020, section 5.1);
`regularizers/joint_similarity_ablations.py` has those of its Table 4. What the paper leaves open:

* tau, "averages of l2-distances in the exponent part", is the mean *squared* distance over all pairs i != j of the
  batch, of any classes, and a constant for the gradient, as in the authors' code. Here it is never 0: identical
  rows have kernel 1 and gradient 0, while the code gives nan.
* Squared distances have an error of about eps max_i |x_i - x_0|^2. The batch's mean is at least an (N-1)-th of that
  maximum: with it, a kernel is exact to about N eps. For a bandwidth that is given, distances are in float64.
"""

from typing import Any

import torch
from pytorch_metric_learning.utils.module_with_records import ModuleWithRecords
from torch import Tensor
from torch.nn import functional as F

from ..offered.losses.jrs_loss import gaussian_mixture, mean_distance
from .checks import OwnArguments, number, whole_numbers
from .precision import full_precision, in_float64, without_autocast
from .products import is_transformed


class _SquaredDistances(torch.autograd.Function):
    """|x_i - x_j|^2: (N, D) -> (N, N), exactly 0 on the diagonal, with gradients of every order.

    The gradient takes one product of rows; autograd takes two, and two passes over the rows for their squares.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _closed_form(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """sum_j w_ij (x_i - x_j), w_ij = 2 (grad_ij + grad_ji): the Laplacian of a graph, times x."""
        (x,) = ctx.saved_tensors
        w = 2 * (grads[0] + grads[0].T)
        with without_autocast(x):
            gradient: Tensor = (w.sum(dim=1).diag_embed() - w) @ x
        return gradient


def _closed_form(x: Tensor) -> Tensor:
    gram = x @ x.T
    squares = diagonal(gram)
    distances = (squares[:, None] + squares).sub_(gram, alpha=2)
    return distances.clamp(min=0)  # not in place: torch 2.11 compiles that to a gradient of 0


def squared_distances(x: Tensor) -> Tensor:
    """|x_i - x_j|^2: (N, D) -> (N, N), never negative, without an N x N x D tensor."""
    # From one of the rows: a common offset costs no digits, and equal rows stay equal.
    x = x - x[:1].detach()
    distances: Tensor = _closed_form(x) if is_transformed() else _SquaredDistances.apply(x)
    return distances


def diagonal(matrix: Tensor) -> Tensor:
    """The diagonal of a square matrix (N, N) -> (N,); in compiled code as a sum.

    torch 2.14's inductor overwrites a matrix while its view `matrix.diagonal()` is still to be read.
    """
    compiling = torch.compiler.is_compiling()
    return matrix.tril().triu().sum(dim=1) if compiling else matrix.diagonal()


class ReproducingKernel(OwnArguments, ModuleWithRecords):
    """Base of the kernels: positive semi-definite functions of all pairs of rows.

    Half-precision rows are raised to float32 and autocast is off inside.

    Args:
        normalize: L2-normalise the rows first.
        **kwargs: `collect_stats`, as in any PML module.

    Shape:
        x: (N, D) -> (N, N).

    Raises:
        ValueError: in the call, unless x is a matrix.
    """

    def __init__(self, *, normalize: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.normalize = normalize
        self.add_to_recordable_attributes(name="normalize", is_stat=False)

    def forward(self, x: Tensor) -> Tensor:
        self.reset_stats()
        if x.ndim != 2:
            raise ValueError(
                f"x: expected one row per sample, got shape {tuple(x.shape)}; pool features with more axes, or "
                "flatten(1) them"
            )
        with without_autocast(x):
            x = full_precision(x)
            return self.compute(F.normalize(x) if self.normalize else x)

    def compute(self, x: Tensor) -> Tensor:
        """The matrix of kernel values, from rows in full precision."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self._record_these)


class DistanceKernel(ReproducingKernel):
    """Base of the kernels of a distance divided by a bandwidth, which is fixed or the batch's mean distance."""

    components = 1

    def __init__(self, bandwidth: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if bandwidth is not None:
            number("bandwidth", bandwidth, above=0)
        self.bandwidth = bandwidth
        self.add_to_recordable_attributes(name="bandwidth", is_stat=False)
        self.add_to_recordable_attributes(name="mean_distance", is_stat=True)

    def compute(self, x: Tensor) -> Tensor:
        distances = self.distances(x)
        tau: Tensor | float | None = self.bandwidth
        if tau is None or self.collect_stats:
            info, mean = torch.finfo(x.dtype), mean_distance(distances)
            if self.collect_stats:
                self.mean_distance = mean.item()
            if tau is None:
                tau = mean.clamp(min=info.tiny / info.eps)  # its reciprocal is far from infinity
        mixture: Tensor = gaussian_mixture(distances, self.components, tau)
        return mixture

    def distances(self, x: Tensor) -> Tensor:
        """Distances of all pairs of rows, (N, D) -> (N, N)."""
        raise NotImplementedError


class GaussianMixtureKernel(DistanceKernel):
    """Mean of K Gaussians whose bandwidths double: exp(-|x - x'|^2 / (tau 2^(k - K//2))), k = 0..K-1.

    Args:
        components: K. The paper, section 5.1: 3, hence tau/2, tau, 2 tau, for pooled features and embeddings,
            1 for the class level. An even K is not centred, as in the authors' code.
        bandwidth: tau, in the units of a squared distance. Default: the mean squared distance over all pairs of
            different rows; no gradient flows through it.
        **kwargs: `normalize` and `collect_stats`, which records `mean_distance`, the tau of the last call.

    Raises:
        ValueError: if components < 1 or bandwidth <= 0.

    Example:
        >>> GaussianMixtureKernel()(torch.tensor([[0.0], [1.0], [2.0]]))
        tensor([[1.0000, 0.5844, 0.1738],
                [0.5844, 1.0000, 0.5844],
                [0.1738, 0.5844, 1.0000]])
    """

    def __init__(self, components: int = 3, bandwidth: float | None = None, **kwargs: Any) -> None:
        super().__init__(bandwidth, **kwargs)
        whole_numbers(components=components)
        self.components = components
        self.add_to_recordable_attributes(name="components", is_stat=False)

    def distances(self, x: Tensor) -> Tensor:
        if self.bandwidth is None:
            return squared_distances(x)
        return squared_distances(in_float64(x)).to(x)


class GaussianKernel(GaussianMixtureKernel):
    """exp(-|x - x'|^2 / tau): the mixture's single component, with its arguments.

    `bandwidth=2.0` gives exp(-|x - x'|^2 / 2).
    """

    def __init__(self, bandwidth: float | None = None, **kwargs: Any) -> None:
        super().__init__(1, bandwidth, **kwargs)
