"""Tensor sketches: equal to dense matrices, without bias, and with the variance of the theory."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pml_regularizers.functional.moments import cascaded_moments, sketched_moments
from pml_regularizers.functional.sketches import draw_table, summed_convolutions
from tests.library.expected import as_matrix
from tests.oracles import horde as oracle
from tests.support.counting import Count, Peak
from tests.support.tolerances import assert_close

IMAGES, POSITIONS, CHANNELS, ORDER = 3, 4, 5, 4
either = pytest.mark.parametrize("checkpoint", [False, True])
every_width = pytest.mark.parametrize("d", [1, 2, 3, 8, 33])


@pytest.fixture(autouse=True)
def narrow_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With d = 8: blocks of three positions, or of two images if the test asks for it."""
    size = getattr(request, "param", 24)
    monkeypatch.setattr("pml_regularizers.functional.sketches.BLOCK", size)


in_blocks = pytest.mark.parametrize(
    "narrow_blocks", [24, 64], ids=["positions", "images"], indirect=True
)


def draw(d: int, order: int = ORDER, channels: int = CHANNELS) -> list[Tensor]:
    tables = torch.zeros(order, d, math.ceil(channels / d), dtype=torch.int32)
    for table in tables:
        draw_table(table, channels)
    return list(tables)


def features(**options: Any) -> Tensor:
    return torch.randn(IMAGES, POSITIONS, CHANNELS, **{"dtype": torch.float64, **options})


@in_blocks
@either
@every_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_dense_matrices(checkpoint: bool, d: int, dtype: torch.dtype) -> None:
    x, tables = features(dtype=dtype), draw(d)
    sums = summed_convolutions(x, tables, checkpoint=checkpoint)
    assert sums.dtype == dtype
    matrices = [as_matrix(table, CHANNELS) for table in tables]
    exact = np.array([oracle.sketched(image, matrices) for image in x.double().numpy()])
    assert_close(sums, exact.swapaxes(0, 1) * POSITIONS)


@in_blocks
@either
@pytest.mark.parametrize("d", [1, 3, 8])
def test_gradients_by_finite_differences(checkpoint: bool, d: int) -> None:
    x, tables = features()[:2].requires_grad_(), draw(d, order=3)

    def sums(x: Tensor) -> Tensor:
        return summed_convolutions(x, tables, checkpoint=checkpoint)

    assert torch.autograd.gradcheck(sums, x)
    assert torch.autograd.gradgradcheck(sums, x)


@either
def test_only_gathers_are_run(checkpoint: bool) -> None:
    """No operation runs that, on CUDA devices, adds in the order in which threads run."""
    x, tables = features(requires_grad=True), draw(8)
    with Count() as count:
        summed_convolutions(x, tables, checkpoint=checkpoint).sum().backward()
    assert not {name for name in count.operations if "scatter" in name or "index_add" in name}


@either
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # jacfwd
def test_transformations(checkpoint: bool) -> None:
    x, tables = features(), draw(8)

    def value(x: Tensor) -> Tensor:
        return summed_convolutions(x, tables, checkpoint=checkpoint)

    each = torch.func.vmap(lambda image: value(image.unsqueeze(0))[:, 0], out_dims=1)(x)
    assert_close(each, value(x))
    jacobian = torch.autograd.functional.jacobian(value, x)
    assert_close(torch.func.jacrev(value)(x), jacobian)
    assert_close(torch.func.jacfwd(value)(x), jacobian)


# Memory, counted


def peak(checkpoint: bool) -> int:
    x = torch.randn(8, 16, 32, requires_grad=True)
    tables = draw(2048, order=5, channels=32)
    with Peak() as peak:
        sums = summed_convolutions(x, tables, checkpoint=checkpoint)
        results = [sums, *torch.autograd.grad(sums.sum(), x)]
    return peak.bytes(without=results)


@pytest.mark.parametrize("narrow_blocks", [2**13], indirect=True)
def test_memory_of_a_forward_and_backward_pass() -> None:
    transform = 8 * 16 * 2050 * 4
    assert 5 * transform < peak(checkpoint=False) < 6 * transform
    assert peak(checkpoint=True) < transform


@either
def test_a_channel_without_a_place_has_no_gradient(checkpoint: bool) -> None:
    """Whatever the memory held before."""
    x, tables = features(requires_grad=True), draw(5, 2)
    for table in tables:
        table[table.abs() == 3] = 0
    summed_convolutions(x, tables, checkpoint=checkpoint).square().sum().backward()
    assert x.grad is not None
    assert x.grad[:, :, 2].eq(0).all() and x.grad[:, :, [0, 1, 3, 4]].ne(0).all()


# Bias and variance

X = np.array([0.9, -0.5, 0.2, 0.7, -0.1])
Y = np.array([0.6, -0.7, 0.4, 0.3, 0.5])


def inner_products(channels: int, tables: list[Tensor]) -> list[float]:
    pair = torch.from_numpy(np.stack([X, Y])[:, None, :channels])
    return [float(z[0] @ z[1]) for z in sketched_moments(pair, tables)]


@pytest.mark.parametrize(
    ("channels", "d", "order"), [(2, 2, 2), (2, 2, 3), (2, 3, 2), (3, 1, 2), (2, 1, 3)]
)
def test_mean_and_variance_over_all_tables_there_are(channels: int, d: int, order: int) -> None:
    places = math.ceil(channels / d) * d
    tables = []
    for chosen in itertools.permutations(range(places), channels):
        for signs in itertools.product((-1, 1), repeat=channels):
            table = torch.zeros(places, dtype=torch.int32)
            for number, (place, sign) in enumerate(zip(chosen, signs, strict=True), start=1):
                table[place] = sign * number
            tables.append(table.view(d, -1))
    x, y = X[:channels], Y[:channels]
    found = [
        inner_products(channels, list(some))[-1] for some in itertools.product(tables, repeat=order)
    ]
    assert len(found) >= 64
    assert np.mean(found) == pytest.approx((x @ y) ** order, rel=1e-10)
    expected = oracle.sketch_variance(x, y, order, d, places)
    assert np.var(found) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("order", [2, 3])
def test_mean_and_variance_of_random_maclaurin_over_all_signs(order: int) -> None:
    signs = itertools.product((-1.0, 1.0), repeat=3 * order)
    matrices = torch.tensor(list(signs), dtype=torch.float64).view(-1, order, 3).permute(1, 2, 0)
    pair = torch.from_numpy(np.stack([X, Y])[:, None, :3])
    z = cascaded_moments(pair, list(matrices))[-1].numpy()
    draws = z[0] * z[1] * z.shape[1]
    x, y = X[:3], Y[:3]
    assert draws.mean() == pytest.approx((x @ y) ** order, rel=1e-10)
    assert draws.var() == pytest.approx(oracle.maclaurin_variance(x, y, order, 1), rel=1e-10)


@pytest.mark.parametrize("d", [4, 16])
def test_mean_and_variance_of_what_is_drawn(d: int) -> None:
    """z-scores; the seed is fixed, and a correct draw exceeds 5 once in two million seeds."""
    draws = np.array([inner_products(5, draw(d)) for _ in range(1500)])
    places = math.ceil(5 / d) * d
    for order, found in enumerate(draws.T, start=2):
        claim = (X @ Y) ** order
        assert abs(found.mean() - claim) < 5 * found.std() / math.sqrt(len(found))
        squares = (found - claim) ** 2
        error = squares.std() / math.sqrt(len(squares))
        expected = oracle.sketch_variance(X, Y, order, d, places)
        assert abs(squares.mean() - expected) < 5 * error
        if order == 2:  # and of nothing near it: random Maclaurin's, and with replacement
            maclaurin = oracle.maclaurin_variance(X, Y, order, d)
            replaced = oracle.sketch_variance(X, Y, order, d, math.inf)
            assert min(maclaurin, replaced) - squares.mean() > 3 * error
