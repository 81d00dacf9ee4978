"""Tensor sketches: equal to dense matrices, without bias, and with the variance of the theory."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pml_regularizers.functional.sketches import draw_table, summed_convolutions
from tests.library.expected import as_matrix
from tests.oracles import horde as oracle
from tests.support.counting import Count, Peak
from tests.support.tolerances import assert_close

IMAGES, POSITIONS, CHANNELS, ORDER = 3, 4, 5, 4
either = pytest.mark.parametrize("checkpoint", [False, True])


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


def features(images: int = IMAGES, **options: Any) -> Tensor:
    return torch.randn(images, POSITIONS, CHANNELS, **{"dtype": torch.float64, **options})


@in_blocks
@either
@pytest.mark.parametrize("d", [1, 2, 3, 8, 33])
def test_equals_dense_matrices(checkpoint: bool, d: int) -> None:
    x, tables = features(), draw(d)
    sums = summed_convolutions(x, tables, checkpoint=checkpoint)
    matrices = [as_matrix(table, CHANNELS) for table in tables]
    exact = np.array([oracle.sketched(image, matrices) for image in x.numpy()])
    assert_close(sums, exact.swapaxes(0, 1) * POSITIONS)


@in_blocks
@either
@pytest.mark.parametrize("d", [1, 3, 8])
def test_gradients_by_finite_differences(checkpoint: bool, d: int) -> None:
    x, tables = features(2).requires_grad_(), draw(d, order=3)

    def sums(x: Tensor) -> Tensor:
        return summed_convolutions(x, tables, checkpoint=checkpoint)

    assert torch.autograd.gradcheck(sums, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(sums, x, fast_mode=True)


@either
def test_only_gathers_are_run(checkpoint: bool) -> None:
    """No operation runs that, on CUDA devices, adds in the order in which threads run."""
    x, tables = features(requires_grad=True), draw(8)
    with Count() as count:
        summed_convolutions(x, tables, checkpoint=checkpoint).sum().backward()
    assert not {name for name in count.operations if "scatter" in name or "index_add" in name}


def peak(checkpoint: bool) -> int:
    x = torch.randn(8, 16, 32, requires_grad=True)
    tables = draw(1024, order=5, channels=32)
    with Peak() as peak:
        sums = summed_convolutions(x, tables, checkpoint=checkpoint)
        results = [sums, *torch.autograd.grad(sums.sum(), x)]
    return peak.bytes(without=results)


@pytest.mark.parametrize("narrow_blocks", [2**12], indirect=True)
def test_memory_of_a_forward_and_backward_pass() -> None:
    transform = 8 * 16 * 1026 * 4
    assert 5 * transform < peak(checkpoint=False) < 6 * transform
    assert peak(checkpoint=True) < transform


X, Y = np.array([0.9, -0.5]), np.array([0.6, -0.7])


def all_tables(d: int) -> list[Tensor]:
    """Each choice of places and signs of two channels."""
    places = max(2, d)
    tables = []
    for chosen in itertools.permutations(range(places), 2):
        for signs in itertools.product((-1, 1), repeat=2):
            table = torch.zeros(places, dtype=torch.int32)
            for number, (place, sign) in enumerate(zip(chosen, signs, strict=True), start=1):
                table[place] = sign * number
            tables.append(table.view(d, -1))
    return tables


@pytest.mark.parametrize(("d", "order"), [(2, 2), (1, 3), (3, 2)])
def test_mean_and_variance_over_all_tables_there_are(d: int, order: int) -> None:
    """docs/theory.md has those of random Maclaurin."""
    pair = torch.from_numpy(np.stack([X, Y])[:, None])
    found = []
    for tables in itertools.product(all_tables(d), repeat=order):
        z = summed_convolutions(pair, tables)[-1]
        found.append(float(z[0] @ z[1]))
    assert len(found) >= 64
    assert np.mean(found) == pytest.approx((X @ Y) ** order, rel=1e-10)
    expected = oracle.sketch_variance(X, Y, order, d, places=max(2, d))
    assert np.var(found) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("d", [1, 3])
def test_all_tables_are_drawn_equally_often(d: int) -> None:
    """By chi-squared; the seed is fixed, and a correct draw exceeds the bound once in a million seeds."""
    tables, each = all_tables(d), 100
    counts = Counter(tuple(draw(d, 1, 2)[0].flatten().tolist()) for _ in range(each * len(tables)))
    chi_squared = sum((counts[tuple(t.flatten().tolist())] - each) ** 2 / each for t in tables)
    assert chi_squared < {8: 42, 24: 72}[len(tables)]
