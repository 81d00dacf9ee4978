"""The kernels against loops over pairs, and as kernels: symmetric, positive semi-definite, exact at 0."""

import math
import shutil
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
from pml_regularizers.reproducing_kernels import squared_distances
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
KERNELS = {name: make for name, (make, _) in CASES.items()}
each_kernel = pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
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
    (_, expected), x = CASES[name], rows()
    kernel = KERNELS[name]()
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


@each_kernel
def test_two_sets_of_rows(make: Any) -> None:
    """A block of the kernel of both together, given their bandwidth."""
    x, y = rows(5), rows(3)
    kernel = make()
    if getattr(kernel, "bandwidth", 1.0) is None:
        kernel.bandwidth = 1.3
    assert_close(kernel(x, y), kernel(torch.cat([x, y]))[:5, 5:])


@of_distances
def test_two_sets_adapt_to_the_distances_between_them(make: Any) -> None:
    x, y = rows(5), rows(3)
    adapting = make(collect_stats=True)
    K = adapting(x, y)
    distance = oracle.l1_distance if make is LaplaceKernel else oracle.squared_distance
    between = [distance(a, b) for a in x.numpy() for b in y.numpy()]
    assert math.isclose(adapting.mean_distance, math.fsum(between) / 15, rel_tol=1e-12)
    assert_close(K, make(bandwidth=math.fsum(between) / 15)(x, y))


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


@of_distances
def test_a_common_offset_costs_no_digits(make: Any) -> None:
    x = torch.randint(-8, 9, (8, 40)).float()  # so that the sum is exact
    assert_close(make()(x + 4096), make()(x))


def test_distances_are_never_negative() -> None:
    x = rows(40, 1000, torch.float32)
    kernel = GaussianMixtureKernel()
    assert kernel.distances(x, x).min() == 0
    assert kernel.distances(x, None).min() == 0
    assert kernel(x).max() <= 1


@pytest.mark.parametrize("sets", [1, 2])
def test_derivatives_of_squared_distances(sets: int) -> None:
    """First and second, by finite differences, one by one and in batches, and by torch.func."""
    inputs = [rows(count, 3).requires_grad_() for count in (5, 4)[:sets]]
    assert torch.autograd.gradcheck(squared_distances, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(squared_distances, inputs)

    def value(*inputs: Tensor) -> Tensor:
        return squared_distances(*inputs).exp().sum()

    expected = torch.autograd.grad(value(*inputs), inputs)
    for gradient, exact in zip(
        torch.func.grad(value, tuple(range(sets)))(*inputs), expected, strict=True
    ):
        assert_close(gradient, exact)


def test_one_product_forward_and_one_backward() -> None:
    x = rows(30, 200).requires_grad_()
    with Count() as count:
        GaussianMixtureKernel()(x).sum().backward()
    assert count.operations["aten.mm"] == 2
    assert max(count.storages) == 30 * 200
    assert count.storages.count(30 * 200) == 2  # the translated rows and the gradient


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor compiles C++")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of inductor's own
def test_compiled_gradients() -> None:
    """Uses a size at which inductor overwrites buffers that it has read."""
    x = rows(64, 40, torch.float32).requires_grad_()

    def value(x: Tensor) -> Tensor:
        return (-squared_distances(x) / 40).exp().sum()

    torch.compiler.reset()
    compiled = torch.compile(value, fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(x), x)
    assert_close(gradient, torch.autograd.grad(value(x), x)[0])
    torch.compiler.reset()


def test_faint_powers_and_what_overflows() -> None:
    x = torch.full((2, 100), 1.0)
    assert ExponentialKernel()(x).isinf().all()
    assert_close(ExponentialKernel(normalize=True)(x), torch.full((2, 2), math.e))
    assert PolynomialKernel(5)(1e5 * x).isinf().all()
    assert_close(PolynomialKernel(5, normalize=True)(1e5 * x), torch.full((2, 2), 32.0))


@pytest.mark.parametrize("row", range(6))
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_a_row_far_away_costs_the_others_no_digits(row: int, offset: float) -> None:
    x = torch.randn(6, 8, dtype=torch.float64) + offset
    x[row] *= 1e4
    others = torch.arange(6) != row
    x = x.float()
    exact = (x.double()[:, None] - x.double()).square().sum(dim=2)
    assert_close(squared_distances(x)[others][:, others], exact[others][:, others])
    assert_close(squared_distances(x, x)[others][:, others], exact[others][:, others])
