"""The products of HORDE's moments, in blocks: equal to the paper's, and no larger than they must be."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pml_regularizers.functional.products import summed_products
from tests.oracles import horde as oracle
from tests.support.counting import Peak
from tests.support.tolerances import assert_close

# 300 columns: blocks of 128, 128 and 44
IMAGES, POSITIONS, CHANNELS, COLUMNS, ORDER = 2, 3, 4, 300, 4
either = pytest.mark.parametrize("checkpoint", [False, True])


@pytest.fixture(autouse=True)
def narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pml_regularizers.functional.products.BLOCK", 1)


def by_autograd(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return torch.stack([x @ W.to(x.dtype) for W in matrices]).cumprod(dim=0)[1:].sum(dim=2)


def draw(columns: int = COLUMNS, order: int = ORDER, **options: Any) -> tuple[Tensor, list[Tensor]]:
    options = {"dtype": torch.float64, **options}
    matrices = [torch.randn(CHANNELS, columns, **options) for _ in range(order)]
    return torch.randn(IMAGES, POSITIONS, CHANNELS, **options), matrices


@either
@pytest.mark.parametrize("order", [2, 5])
def test_equals_the_oracle(checkpoint: bool, order: int) -> None:
    x, matrices = draw(order=order)
    sums = summed_products(x, matrices, checkpoint=checkpoint)
    arrays = [matrix.numpy() for matrix in matrices]
    exact = np.array([oracle.cascaded(image, arrays) for image in x.numpy()])
    assert_close(sums, exact.swapaxes(0, 1) * POSITIONS * math.sqrt(COLUMNS))


@either
def test_gradients_by_finite_differences(checkpoint: bool) -> None:
    inputs = draw(columns=2, order=3, requires_grad=True)

    def sums(x: Tensor, *matrices: Tensor) -> Tensor:
        return summed_products(x, matrices, checkpoint=checkpoint)

    assert torch.autograd.gradcheck(sums, (inputs[0], *inputs[1]), fast_mode=True)
    assert torch.autograd.gradgradcheck(sums, (inputs[0], *inputs[1]), fast_mode=True)


@either
@pytest.mark.parametrize("trained", [[], [0], [2, 4], [0, 1, 2, 3, 4]], ids=str)
def test_only_what_is_asked_for_has_a_gradient(checkpoint: bool, trained: list[int]) -> None:
    x, matrices = draw()
    inputs = [x, *matrices]
    for index in trained:
        inputs[index].requires_grad_()
    sums = summed_products(x, matrices, checkpoint=checkpoint)
    assert sums.requires_grad == bool(trained)
    if trained:
        sums.square().sum().backward()
    reference = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    by_autograd(reference[0], reference[1:]).square().sum().backward()
    for index, (tensor, exact) in enumerate(zip(inputs, reference, strict=True)):
        assert (tensor.grad is not None) == (index in trained)
        if tensor.grad is not None and exact.grad is not None:
            assert_close(tensor.grad, exact.grad)


def peak(sums: Callable[[Tensor, list[Tensor]], Tensor]) -> int:
    """Without the features' gradient, which is a result; the matrices' are made of the blocks' at the end."""
    x = torch.randn(8, 16, 32, requires_grad=True)
    matrices = [torch.randn(32, 2048).sign().to(torch.int8) for _ in range(5)]
    with Peak() as peak:
        value = sums(x, matrices)
        results = [value, *torch.autograd.grad(value.sum(), x)]
    return peak.bytes(without=results)


def test_memory_of_a_forward_and_backward_pass() -> None:
    plain, projection = peak(by_autograd), 8 * 16 * 2048 * 4
    assert plain > 8 * projection  # A_2 .. A_5, phi_1 .. phi_4
    stored = peak(partial(summed_products, checkpoint=False))
    assert 5 * projection < stored < 6 * projection
    assert peak(partial(summed_products, checkpoint=True)) < projection
    half = partial(summed_products, checkpoint=False, dtype=torch.bfloat16)
    assert peak(half) < 2 / 3 * stored


@either
def test_matrices_changed_before_the_backward_pass_are_an_error(checkpoint: bool) -> None:
    x, matrices = draw(requires_grad=True)
    value = summed_products(x, matrices, checkpoint=checkpoint).sum()
    with torch.no_grad():
        matrices[0].zero_()
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        value.backward()
