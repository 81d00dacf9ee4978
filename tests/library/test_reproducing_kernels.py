"""The kernels against loops over pairs, and as kernels: exact at 0, and far from it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pml_regularizers import (
    ExponentialKernel,
    GaussianKernel,
    GaussianMixtureKernel,
    LaplaceKernel,
    PolynomialKernel,
)
from pml_regularizers.functional.kernels import squared_distances
from tests.oracles import joint_similarity as oracle
from tests.support.tolerances import assert_close

CASES = {
    "mixture": (GaussianMixtureKernel(), oracle.gaussian_mixture()),
    "mixture of 4": (GaussianMixtureKernel(4), oracle.gaussian_mixture((0.25, 0.5, 1, 2))),
    "mixture, fixed": (GaussianMixtureKernel(bandwidth=0.7), oracle.gaussian_mixture(tau=0.7)),
    "gaussian": (GaussianKernel(), oracle.gaussian_mixture((1.0,))),
    "gaussian, fixed": (GaussianKernel(2.0), oracle.gaussian_mixture((1.0,), tau=2.0)),
    "laplace": (LaplaceKernel(), oracle.laplace()),
    "laplace, fixed": (LaplaceKernel(1.5), oracle.laplace(1.5)),
    "polynomial": (PolynomialKernel(), oracle.polynomial(2)),
    "polynomial of 5": (PolynomialKernel(5, 0.5), oracle.polynomial(5, 0.5)),
    "exponential": (ExponentialKernel(), oracle.exponential),
    "linear": (PolynomialKernel(1, constant=0.0), oracle.polynomial(1, 0.0)),
}
of_distances = pytest.mark.parametrize("make", [GaussianMixtureKernel, LaplaceKernel])


def rows(count: int = 6, width: int = 4) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("normalize", [False, True])
def test_equals_the_oracle(name: str, normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel, expected), x = CASES[name], rows()
    monkeypatch.setattr(kernel, "normalize", normalize)
    exact = expected(oracle.unit(x.numpy()) if normalize else x.numpy())
    assert_close(kernel(x), torch.tensor(exact, dtype=torch.float64))


@of_distances
def test_the_bandwidth_is_no_part_of_the_gradient(make: Any) -> None:
    adapting, x, weights = make(collect_stats=True), rows().requires_grad_(), rows(6, 6)
    value = (adapting(x) * weights).sum()
    fixed = make(bandwidth=adapting.mean_distance)
    assert f"bandwidth={adapting.mean_distance}" in repr(fixed)
    (expected,) = torch.autograd.grad((fixed(x) * weights).sum(), x)
    (gradient,) = torch.autograd.grad(value, x)
    assert_close(gradient, expected)


@of_distances
@pytest.mark.parametrize("bandwidth", [None, 2.0])
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_clusters_far_from_each_other(make: Any, bandwidth: float | None, offset: float) -> None:
    """In float32, values and gradients are those of the same rows in float64, within and between clusters."""
    x = torch.randn(12, 8) * (1 if bandwidth else 3)
    x[4:8] += offset
    x[8:] -= offset * torch.arange(8)
    weights = torch.randn(12, 12)
    pair = [x.to(dtype).requires_grad_() for dtype in (torch.float32, torch.float64)]
    values = [make(bandwidth=bandwidth)(rows) for rows in pair]
    assert_close(*values)
    totals = [(K * weights).sum() for K in values]
    assert_close(*(torch.autograd.grad(*both)[0] for both in zip(totals, pair, strict=True)))


@pytest.mark.parametrize("row", [0, 3])
def test_a_row_far_away_costs_the_others_little(row: int) -> None:
    """N rows, one of them far away: the bandwidth is the mean distance, and N eps bounds the kernel's error."""
    x = torch.randn(60, 8)
    x[row] = 1e4 * torch.randn(8)
    K, exact = (GaussianMixtureKernel()(x.to(dtype)) for dtype in (torch.float32, torch.float64))
    assert (K - exact).abs().max() <= 4 * 60 * torch.finfo(torch.float32).eps


def test_derivatives_of_squared_distances() -> None:
    """First and second, by finite differences; and those of torch.func."""
    x = rows(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(squared_distances, [x])
    assert torch.autograd.gradgradcheck(squared_distances, [x])
    jacobian = torch.autograd.functional.jacobian(squared_distances, x)
    assert_close(torch.func.jacrev(squared_distances)(x.detach()), jacobian)
