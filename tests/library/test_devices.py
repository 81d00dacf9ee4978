"""Nothing asks a device for numbers or operators that it lacks, and nothing is less exact there."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pml_regularizers import GaussianKernel, RankAccuracyCalculator
from pml_regularizers.gradient_ratios import gradient_norm_ratios
from pml_regularizers.offered.losses.energy_confusion_loss import energy_confusion
from tests.library.contract import LOSSES, MODULES, Batch, call
from tests.support.apple import APPLE, Apple

pytestmark = pytest.mark.filterwarnings("ignore:powers. .* even and cannot tell opposite features")

# Of the largest entry: in float32, by other kernels.
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def measured(loss: nn.Module, batch: Batch) -> list[Tensor]:
    """The value, and the gradients of embeddings, features and parameters."""
    batch = batch.map(lambda x: x.detach().requires_grad_())
    value = call(loss, batch)
    value.backward()
    tensors = [*(x for _, x in batch.tensors()), *loss.parameters()]
    return [x.detach().cpu() for x in (value, *(x.grad for x in tensors)) if x is not None]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_a_device_without_float64(name: str) -> None:
    loss, batch = LOSSES[name].make(), Batch.draw(LOSSES[name])
    expected = measured(copy.deepcopy(loss), batch)
    with Apple():
        there = Batch(*(x.to(APPLE) for x in (batch.embeddings, batch.labels)), batch.features)
        there = Batch(there.embeddings, there.labels, batch.map(lambda x: x.to(APPLE)).features)
        found = measured(loss.to(APPLE), there)
    assert len(found) == len(expected) > 1
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **NEAR)


@pytest.mark.parametrize("name", MODULES)
def test_modules_on_a_device_without_float64(name: str) -> None:
    module, x = MODULES[name].make(), torch.randn(4, *MODULES[name].shape)
    expected = module(x)
    with Apple():
        found = module.to(APPLE)(x.to(APPLE))
        pairs = zip(*([y] if isinstance(y, Tensor) else y for y in (found, expected)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one.detach().cpu(), other.detach(), **NEAR)


def test_what_lies_close_keeps_its_digits_without_float64() -> None:
    """A float32 product would leave none of these distances."""
    x, classes = 1e3 + 1e-2 * torch.randn(6, 4), torch.arange(6) % 3
    x[0] -= 1e3  # what a common offset is taken from
    for measure in (
        GaussianKernel(bandwidth=1e-3),
        lambda x: energy_confusion(x, classes.to(x.device), num_classes=3),
    ):
        with Apple():
            there = measure(x.to(APPLE)).cpu()
        torch.testing.assert_close(there, measure(x), rtol=1e-6, atol=0)
        assert measure(x)[1:, 1:].min() > 0


def test_ranks_and_gradient_ratios_on_a_device_without_float64() -> None:
    vectors, labels = torch.randn(60, 4), torch.arange(60) % 7
    weights = torch.ones(4, requires_grad=True)

    def ratios(x: Tensor, weights: Tensor) -> Any:
        terms = {"a": (x * weights).sum(), "b": (x * weights).square().sum()}
        return gradient_norm_ratios(terms, base="a", at={"weights": weights})["b"]["weights"]

    def calculator(device: torch.device) -> RankAccuracyCalculator:
        return RankAccuracyCalculator(exclude=("NMI", "AMI"), device=device)

    expected = calculator(torch.device("cpu")).get_accuracy(vectors, labels)
    assert len(expected) > 3
    with Apple():
        there = weights.detach().to(APPLE).requires_grad_()
        assert ratios(vectors.to(APPLE), there) == pytest.approx(ratios(vectors, weights), rel=1e-6)
        found = calculator(APPLE).get_accuracy(vectors.to(APPLE), labels.to(APPLE))
        assert found == pytest.approx(expected, rel=1e-12)
        exact = calculator(APPLE).get_accuracy(vectors.double(), labels)  # ranked on the CPU
    assert exact == pytest.approx(expected)
