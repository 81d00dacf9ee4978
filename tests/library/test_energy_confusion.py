"""Energy confusion against the paper in loops, and as on a GPU; docs/theory.md has its lemmas."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances, reducers
from torch import Tensor

from pml_regularizers import EnergyConfusionRegularizer
from pml_regularizers.offered.losses.energy_confusion_loss import energy_confusion
from tests.oracles import energy_confusion as oracle
from tests.support.apple import APPLE, Apple
from tests.support.counting import Count
from tests.support.tolerances import assert_close

LABELS = torch.tensor([7, 1, 7, 4, 1, 7, -2])  # -2 and 4 are singletons
C = 4


def snr(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.var(a - b, ddof=1) / np.var(a, ddof=1))


DISTANCES: dict[str, tuple[Any, oracle.Distance]] = {
    "default": (None, oracle.squared_distance),
    "snr": (distances.SNRDistance(), snr),  # not symmetric: both orders of a pair count
}
every_distance = pytest.mark.parametrize("distance", DISTANCES)


def vectors(count: int = len(LABELS), dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 5, dtype=torch.float64).to(dtype)


def build(distance: str = "default", **kwargs: Any) -> EnergyConfusionRegularizer:
    return EnergyConfusionRegularizer(distance=DISTANCES[distance][0], **kwargs)


@every_distance
@pytest.mark.parametrize("log", [True, False])
def test_reducers_get_every_ordered_pair_of_classes(distance: str, log: bool) -> None:
    """By the indices of an image of each."""
    embeddings = vectors()
    regularizer = build(distance, log=log, reducer=reducers.DoNothingReducer())
    parts = regularizer(embeddings, LABELS)["loss"]
    assert parts["reduction_type"] == "neg_pair"
    pairs = zip(*(LABELS[index].tolist() for index in parts["indices"]), strict=True)
    found = dict(zip(pairs, parts["losses"], strict=True))
    unit, function = oracle.unit(embeddings.numpy()), DISTANCES[distance][1]
    terms = oracle.terms(unit, LABELS.tolist(), log=log, distance=function)
    assert found.keys() == terms.keys() and len(parts["losses"]) == C * (C - 1)
    for pair, term in terms.items():
        assert_close(found[pair], term)


def test_values_made_by_hand() -> None:
    """Two images at a right angle, of one class, and the image opposite to the first."""
    embeddings = torch.tensor([[3.0, 0.0], [0.0, 0.1], [-2.0, 0.0]], dtype=torch.float64)
    summed = build(reducer=reducers.SumReducer(), collect_stats=True)
    energy, labels = (4 + 2) / 2, torch.tensor([5, 5, 2])
    with Apple():
        there = embeddings.float().to(APPLE), labels.to(APPLE)
        for batch in ((embeddings, labels), there):
            assert_close(summed(*batch).cpu(), 2 * math.log(1 + energy))
            assert summed.between_class_energy == pytest.approx(energy)


def test_no_tensor_is_larger_than_the_batch_or_the_matrix_of_classes() -> None:
    embeddings = torch.randn(600, 8, requires_grad=True)
    with Count() as count:
        build()(embeddings, torch.arange(600) % 10).backward()
    assert max(count.storages) == 600 * 8 * 4
    # Of class means: one forward, two backward.
    assert (count.operations["aten.addmm"], count.operations["aten.mm"]) == (1, 2)


@pytest.mark.parametrize(("gap", "offset"), [(1e-4, 0), (1.0, 0), (1e-2, 2**10)])
def test_close_classes_beside_far_ones(gap: float, offset: int) -> None:
    """Each energy and each gradient is exact in proportion to itself, not to the largest one."""
    near = torch.tensor([0, 0, 1, 1, 2, 3]).unsqueeze(1) * gap + gap / 9 * torch.rand(6, 5)
    x = offset + torch.cat([near, near[:3] + 4]).float()
    classes = torch.tensor([0, 0, 1, 1, 2, 3, 4, 4, 5])
    energies = energy_confusion(x.requires_grad_(), classes, 6)
    assert energies.dtype == torch.float32
    sets = list(oracle.class_sets(x.detach().double().numpy(), classes.tolist()).values())
    for i, j in ((i, j) for i in range(6) for j in range(6) if i != j):
        assert_close(energies[i, j], oracle.energy_confusion(sets[i], sets[j]))
    wide = x.detach().double().requires_grad_()
    exactly = energy_confusion(wide, classes, 6)
    for i, j in ((0, 1), (2, 3), (1, 4)):
        (found,) = torch.autograd.grad(energies[i, j], x, retain_graph=True)
        (exact,) = torch.autograd.grad(exactly[i, j], wide, retain_graph=True)
        assert_close(found, exact)


@every_distance
@pytest.mark.parametrize("reducer", [reducers.MeanReducer, reducers.SumReducer])
def test_without_a_look_at_values(distance: str, reducer: Any) -> None:
    """On a GPU, which would have to be waited for: by pairs of images instead of classes."""
    regularizer = build(distance, reducer=reducer())
    for labels in (LABELS, LABELS * 0, torch.arange(7), LABELS[:1]):
        x = vectors(len(labels), torch.float32).requires_grad_()
        wide = x.detach().double().requires_grad_()
        exact = regularizer(wide, labels)
        with Apple():
            value = regularizer(x.to(APPLE), labels.to(APPLE)).cpu()
            (gradient,) = torch.autograd.grad(value, x)
        if exact > 0:
            assert_close(value, exact.item())
            assert_close(gradient, torch.autograd.grad(exact, wide)[0])
        else:
            assert value == 0 and not gradient.any()
