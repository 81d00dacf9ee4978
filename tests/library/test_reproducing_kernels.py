"""The kernels against loops over pairs, and as kernels: symmetric, positive semi-definite, exact at 0."""

import math
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
from tests.support.counting import Count
from tests.support.tolerances import assert_close

CASES = {
    "mixture": (GaussianMixtureKernel, oracle.gaussian_mixture()),
    "mixture of 4": (lambda: GaussianMixtureKernel(4), oracle.gaussian_mixture((0.25, 0.5, 1, 2))),
    "mixture, fixed": (
        lambda: GaussianMixtureKernel(bandwidth=0.7),
        oracle.gaussian_mixture(tau=0.7),
    ),
    "gaussian": (GaussianKernel, oracle.gaussian_mixture((1.0,))),
    "gaussian, fixed": (lambda: GaussianKernel(2.0), oracle.gaussian_mixture((1.0,), tau=2.0)),
    "laplace": (LaplaceKernel, oracle.laplace()),
    "laplace, fixed": (lambda: LaplaceKernel(1.5), oracle.laplace(1.5)),
    "polynomial": (PolynomialKernel, oracle.polynomial(2)),
    "polynomial of 5": (lambda: PolynomialKernel(5, 0.5), oracle.polynomial(5, 0.5)),
    "exponential": (ExponentialKernel, oracle.exponential),
    "linear": (lambda: PolynomialKernel(1, constant=0.0), oracle.linear),
}
of_distances = pytest.mark.parametrize("make", [GaussianMixtureKernel, LaplaceKernel])


def rows(count: int = 6, width: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_equals_the_oracle(name: str, dtype: torch.dtype) -> None:
    (make, expected), x = CASES[name], rows(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        K = make()(x)
    assert K.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(K, torch.tensor(expected(x.double().numpy()), dtype=torch.float64))


@pytest.mark.parametrize("name", CASES)
def test_normalized_rows(name: str) -> None:
    (make, expected), x = CASES[name], rows()
    kernel = make()
    kernel.normalize = True
    assert_close(kernel(x), torch.tensor(expected(oracle.unit(x.numpy())), dtype=torch.float64))


@of_distances
def test_the_bandwidth_is_no_part_of_the_gradient(make: Any) -> None:
    adapting, x, weights = make(collect_stats=True), rows().requires_grad_(), rows(6, 6)
    value = (adapting(x) * weights).sum()
    fixed = make(bandwidth=adapting.mean_distance)
    (expected,) = torch.autograd.grad((fixed(x) * weights).sum(), x)
    (gradient,) = torch.autograd.grad(value, x)
    assert_close(gradient, expected)


@of_distances
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1.0, 1e4])
def test_identical_rows_are_alike_and_still(
    make: Any, dtype: torch.dtype, magnitude: float
) -> None:
    x = (magnitude * torch.randn(1, 50, dtype=dtype)).repeat(6, 1).requires_grad_()
    K = make()(x)
    (gradient,) = torch.autograd.grad((K * torch.randn(6, 6, dtype=dtype)).sum(), x)
    assert torch.equal(K, torch.ones_like(K))
    assert gradient.abs().max() == 0


@pytest.mark.parametrize("make", [GaussianMixtureKernel, LaplaceKernel])
@pytest.mark.parametrize("bandwidth", [None, 2.0])
@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4])
def test_clusters_far_from_each_other(make: Any, bandwidth: float | None, offset: float) -> None:
    """In float32, values and gradients are those of the same rows in float64, within and between clusters."""
    x = torch.randn(12, 8) * (1 if bandwidth else 3)
    x[4:8] += offset
    x[8:] -= offset * torch.arange(8)
    weights = torch.randn(12, 12)
    found, exact = ((x.to(dtype).requires_grad_()) for dtype in (torch.float32, torch.float64))
    values = [make(bandwidth=bandwidth)(rows) for rows in (found, exact)]
    assert_close(values[0], values[1])
    gradients = [
        torch.autograd.grad((K * weights).sum(), rows)[0]
        for K, rows in zip(values, (found, exact), strict=True)
    ]
    assert_close(gradients[0], gradients[1])
    oracle_of = {GaussianMixtureKernel: oracle.gaussian_mixture, LaplaceKernel: oracle.laplace}
    settings = {"tau" if make is GaussianMixtureKernel else "sigma": bandwidth or 0.0}
    right = torch.tensor(oracle_of[make](**settings)(exact.detach().numpy()), dtype=torch.float64)
    assert_close(values[0], right)


@pytest.mark.parametrize("count", [6, 60])
@pytest.mark.parametrize("row", [0, 3])
def test_a_row_far_away_costs_the_others_little(count: int, row: int) -> None:
    """N rows, one of them far away: the bandwidth is the mean distance, and N eps bounds the kernel's error."""
    x = torch.randn(count, 8)
    x[row] = 1e4 * torch.randn(8)
    K, exact = (GaussianMixtureKernel()(x.to(dtype)) for dtype in (torch.float32, torch.float64))
    assert (K - exact).abs().max() <= 4 * count * torch.finfo(torch.float32).eps


def test_distances_are_never_negative() -> None:
    x = rows(40, 1000, torch.float32)
    distances = squared_distances(x)
    assert distances.min() == 0 and not distances.diagonal().any()
    assert GaussianMixtureKernel()(x).max() <= 1


def test_derivatives_of_squared_distances() -> None:
    """First and second, by finite differences."""
    x = rows(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(squared_distances, [x])
    assert torch.autograd.gradgradcheck(squared_distances, [x])


def test_one_product_forward_and_one_backward() -> None:
    x = rows(30, 200).requires_grad_()
    with Count() as count:
        GaussianMixtureKernel()(x).sum().backward()
    assert count.operations["aten.mm"] == 2
    assert max(count.storages) == 30 * 200
    assert count.storages.count(30 * 200) == 2  # the translated rows and the gradient


def test_faint_powers_and_what_overflows() -> None:
    x = torch.full((2, 100), 1.0)
    assert ExponentialKernel()(x).isinf().all()
    assert_close(ExponentialKernel(normalize=True)(x), torch.full((2, 2), math.e))
    assert PolynomialKernel(5)(1e5 * x).isinf().all()
    assert_close(PolynomialKernel(5, normalize=True)(1e5 * x), torch.full((2, 2), 32.0))
