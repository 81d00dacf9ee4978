r"""Reproducing kernels: similarities of vectors, used to compare distributions.

    Gaussian mixture   (1/K) sum_k exp(-|x - x'|^2 / sigma_k^2),   sigma_k^2 = tau 2^(k - K//2), k = 0..K-1
    Laplace            exp(-|x - x'|_1 / sigma)
    polynomial         (<x, x'> + c)^p
    exponential        exp(<x, x'>)

These are the kernels of joint representation diversification (Chu et al., ICML 2020): section 5.1 has the
mixture, Table 4 the others; `PolynomialKernel(1, constant=0)` is the linear kernel of section 6.

What the paper leaves open, and the choices made here:

* tau, "averages of l2-distances in the exponent part", is the mean *squared* distance over all pairs i != j of
  the batch, of any classes, and a constant for the gradient, as in the authors' code. Here it is never 0:
  identical rows have kernel 1 and gradient 0, while the code gives nan.
* The Laplace kernel's sigma is not given: here it is the mean L1 distance, computed in the same way.
* Squared distances are computed after a translation by the median of three rows. A common offset then costs no
  digits, nor does a row that is far away, and equal rows stay equal.
"""

from typing import Any

import torch
from pytorch_metric_learning.utils.module_with_records import ModuleWithRecords
from torch import Tensor
from torch.nn import functional as F

from ._precision import full_precision


class _SquaredDistances(torch.autograd.Function):
    """|x_i - x_j|^2: (N, D) -> (N, N), exactly 0 on the diagonal, with gradients of every order.

    The gradient takes one product of rows; autograd takes two for x @ x.T and two passes over the rows for their
    squares. There is no forward-mode derivative: torch.compile would refuse the function.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        gram = x @ x.T
        # The diagonal as a sum: torch 2.14's inductor overwrites `gram` while the gradient of
        # `gram.diagonal()` still reads it.
        squares = gram.tril().triu().sum(dim=1)
        return squares[:, None] + squares - 2 * gram

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """sum_j w_ij (x_i - x_j), w_ij = 2 (grad_ij + grad_ji): the Laplacian of a graph, times x."""
        (x,) = ctx.saved_tensors
        w = 2 * (grads[0] + grads[0].T)
        with torch.autocast(x.device.type, enabled=False):
            gradient: Tensor = (w.sum(dim=1).diag_embed() - w) @ x
        return gradient


def squared_distances(x: Tensor, y: Tensor | None = None) -> Tensor:
    """|x_i - y_j|^2: (N, D), (M, D) -> (N, M), never negative and without an N x M x D tensor.

    Without y, the distances within x, at half the cost.
    """
    origin = _origin(x)
    x = x - origin
    if y is None:
        distances: Tensor = _SquaredDistances.apply(x)
    else:
        y = y - origin
        squares = x.square().sum(dim=1, keepdim=True) + y.square().sum(dim=1)
        distances = squares - 2 * (x @ y.T)
    return distances.clamp(min=0)


def _origin(x: Tensor) -> Tensor:
    """A point among the rows: the median of three of them, which one far-away row does not move."""
    rows = x.detach()[:: max((len(x) - 1) // 2, 1)]
    return rows.median(dim=0, keepdim=True).values if len(rows) else rows


def mean_distance(distances: Tensor, pairs: int) -> Tensor:
    """The self-adapting bandwidth: the mean of `distances`, detached and never 0."""
    info = torch.finfo(distances.dtype)
    # Half or a quarter of it must still be a normal number, to avoid 0/0.
    return (distances.detach().sum() / max(pairs, 1)).clamp(min=info.tiny / info.eps)


class ReproducingKernel(ModuleWithRecords):
    """Base of the kernels: positive semi-definite functions of all pairs of rows.

    Half-precision rows are raised to float32 and autocast is off inside.

    Args:
        normalize: L2-normalise the rows first.
        collect_stats: Record statistics, as in any PML module.

    Shape:
        x: (N, D), y: (M, D) -> (N, M); without y, the rows of x with each other: (N, N).

    Raises:
        ValueError: in the call, unless x and y are matrices of one width.
    """

    def __init__(self, *, normalize: bool = False, collect_stats: bool | None = None) -> None:
        super().__init__(collect_stats=collect_stats)
        self.normalize = normalize
        self.add_to_recordable_attributes(name="normalize", is_stat=False)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.reset_stats()
        for name, rows in (("x", x), ("y", x if y is None else y)):
            if rows.ndim != 2 or rows.shape[1] != x.shape[1]:
                raise ValueError(
                    f"{name}: expected one row per sample, as wide for x as for y, got shape "
                    f"{tuple(rows.shape)}; pool features with more axes, or flatten(1) them"
                )
        with torch.autocast(x.device.type, enabled=False):
            x = self._prepared(x)
            return self.compute(x, None if y is None else self._prepared(y))

    def _prepared(self, x: Tensor) -> Tensor:
        x = full_precision(x)
        return F.normalize(x) if self.normalize else x

    def compute(self, x: Tensor, y: Tensor | None) -> Tensor:
        """The matrix of kernel values; y is None for pairs within x."""
        raise NotImplementedError


class _DistanceKernel(ReproducingKernel):
    """Base of the kernels of a distance divided by a bandwidth, which is fixed or the batch's mean distance."""

    def __init__(
        self,
        bandwidth: float | None = None,
        *,
        normalize: bool = False,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(normalize=normalize, collect_stats=collect_stats)
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(
                f"bandwidth: expected a positive number, or None for the batch's mean distance, got {bandwidth}"
            )
        self.bandwidth = bandwidth
        self.add_to_recordable_attributes(name="bandwidth", is_stat=False)
        self.add_to_recordable_attributes(name="mean_distance", is_stat=True)

    def compute(self, x: Tensor, y: Tensor | None) -> Tensor:
        distances = self.distances(x, y)
        n = len(x)
        tau = mean_distance(distances, n * (n - 1) if y is None else n * len(y))
        if self.collect_stats:
            self.mean_distance = tau.item()
        return self.of_distances(distances, tau if self.bandwidth is None else self.bandwidth)

    def distances(self, x: Tensor, y: Tensor | None) -> Tensor:
        raise NotImplementedError

    def of_distances(self, distances: Tensor, tau: Tensor | float) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"bandwidth={self.bandwidth}, normalize={self.normalize}"


class GaussianMixtureKernel(_DistanceKernel):
    """Mean of K Gaussians whose bandwidths double: exp(-|x - x'|^2 / (tau 2^(k - K//2))), k = 0..K-1.

    Args:
        components: K. The paper, section 5.1: 3, hence tau/2, tau, 2 tau, for pooled features and embeddings,
            1 for the class level. An even K is not centred, as in the authors' code.
        bandwidth: tau, in the units of a squared distance. Default: the mean squared distance over all pairs of
            different rows; no gradient flows through it.
        normalize: L2-normalise the rows first.
        collect_stats: Record `mean_distance`, the tau of the last call.

    Raises:
        ValueError: if components < 1 or bandwidth <= 0.

    Example:
        >>> import torch
        >>> GaussianMixtureKernel()(torch.tensor([[0.0], [1.0], [2.0]]))
        tensor([[1.0000, 0.5844, 0.1738],
                [0.5844, 1.0000, 0.5844],
                [0.1738, 0.5844, 1.0000]])
    """

    def __init__(
        self,
        components: int = 3,
        bandwidth: float | None = None,
        *,
        normalize: bool = False,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(bandwidth, normalize=normalize, collect_stats=collect_stats)
        if components < 1:
            raise ValueError(f"components: expected at least 1, got {components}")
        self.components = components
        self.add_to_recordable_attributes(name="components", is_stat=False)

    def distances(self, x: Tensor, y: Tensor | None) -> Tensor:
        return squared_distances(x, y)

    def of_distances(self, distances: Tensor, tau: Tensor | float) -> Tensor:
        K = self.components
        total = torch.zeros_like(distances)
        for k in range(K):
            total = total + torch.exp(-distances / (tau * 2.0 ** (k - K // 2)))
        return total / K

    def extra_repr(self) -> str:
        return f"components={self.components}, {super().extra_repr()}"


class GaussianKernel(GaussianMixtureKernel):
    """exp(-|x - x'|^2 / tau): the mixture's single component.

    Args:
        bandwidth: tau; 2.0 gives exp(-|x - x'|^2 / 2). Default: the mean squared distance.
        normalize: L2-normalise the rows first.
        collect_stats: Record `mean_distance`.

    Raises:
        ValueError: if bandwidth <= 0.
    """

    def __init__(
        self,
        bandwidth: float | None = None,
        *,
        normalize: bool = False,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(1, bandwidth, normalize=normalize, collect_stats=collect_stats)


class LaplaceKernel(_DistanceKernel):
    """exp(-|x - x'|_1 / sigma), Table 4.

    Args:
        bandwidth: sigma, in the units of an L1 distance. Default: the mean L1 distance over all pairs of
            different rows; no gradient flows through it. The paper does not give sigma.
        normalize: L2-normalise the rows first.
        collect_stats: Record `mean_distance`.

    Raises:
        ValueError: if bandwidth <= 0.
    """

    def distances(self, x: Tensor, y: Tensor | None) -> Tensor:
        return torch.cdist(x, x if y is None else y, p=1.0)

    def of_distances(self, distances: Tensor, tau: Tensor | float) -> Tensor:
        return torch.exp(-distances / tau)


class PolynomialKernel(ReproducingKernel):
    """(<x, x'> + c)^p, Table 4.

    Powers of long vectors grow fast: with 1,024 entries of 1e4 and p = 5 they overflow float32. `normalize=True`
    bounds the kernel by (1 + c)^p.

    Args:
        degree: p. Table 4: 2 and 5.
        constant: c. Table 4: 1; 0 gives the homogeneous kernel.
        normalize: L2-normalise the rows first.

    Raises:
        ValueError: if degree < 1 or constant < 0: the function is then no kernel.
    """

    def __init__(
        self,
        degree: int = 2,
        constant: float = 1.0,
        *,
        normalize: bool = False,
        collect_stats: bool | None = None,
    ) -> None:
        super().__init__(normalize=normalize, collect_stats=collect_stats)
        if degree < 1 or int(degree) != degree:
            raise ValueError(f"degree: expected an integer of at least 1, got {degree}")
        if not constant >= 0:
            raise ValueError(f"constant: expected a number of at least 0, got {constant}")
        self.degree = int(degree)
        self.constant = constant
        self.add_to_recordable_attributes(list_of_names=["degree", "constant"], is_stat=False)

    def compute(self, x: Tensor, y: Tensor | None) -> Tensor:
        return (_inner_products(x, y) + self.constant) ** self.degree

    def extra_repr(self) -> str:
        return f"degree={self.degree}, constant={self.constant}, normalize={self.normalize}"


class ExponentialKernel(ReproducingKernel):
    """exp(<x, x'>), Table 4's "kernel inducing moment generating function".

    It overflows float32 for <x, x'> > 88, which pooled features usually exceed. Use `normalize=True`, which
    bounds the kernel by e, or scale the features down.

    Args:
        normalize: L2-normalise the rows first.
    """

    def compute(self, x: Tensor, y: Tensor | None) -> Tensor:
        return _inner_products(x, y).exp()

    def extra_repr(self) -> str:
        return f"normalize={self.normalize}"


def _inner_products(x: Tensor, y: Tensor | None) -> Tensor:
    return x @ (x if y is None else y).T
