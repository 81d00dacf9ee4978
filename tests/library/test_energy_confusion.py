"""Energy confusion against the paper in loops, its lemmas, and every contract a PML loss keeps."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances, reducers
from torch import Tensor

from pml_regularizers import EnergyConfusionRegularizer
from pml_regularizers.regularizers.energy_confusion import energy_confusion
from tests.oracles import energy_confusion as oracle
from tests.support.counting import Count
from tests.support.tolerances import assert_close

LABELS = torch.tensor([7, 1, 7, 4, 1, 7, -2])  # -2 and 4 are singletons
CLASSES = torch.unique(LABELS, return_inverse=True)[1]
C = 4
ROWS = [torch.where(row)[0] for row in torch.arange(C).unsqueeze(1) == CLASSES]


def lp(p: float, power: float) -> oracle.Distance:
    return lambda a, b: float((np.abs(a - b) ** p).sum() ** (power / p))


def snr(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.var(a - b, ddof=1) / np.var(a, ddof=1))


# PML's distance; how it normalises (the p of the norm), if it does; the distance itself
DISTANCES: dict[str, tuple[Any, float | None, oracle.Distance]] = {
    "default": (None, 2, oracle.squared_euclidean),
    "raw": (
        distances.LpDistance(power=2, normalize_embeddings=False),
        None,
        oracle.squared_euclidean,
    ),
    "euclidean": (distances.LpDistance(), 2, lp(2, 1)),
    "root": (distances.LpDistance(power=0.5), 2, lp(2, 0.5)),
    "manhattan": (distances.LpDistance(p=1, normalize_embeddings=False), None, lp(1, 1)),
    "snr": (distances.SNRDistance(), 2, snr),  # not symmetric: both orders of a pair count
}
every_distance = pytest.mark.parametrize("distance", DISTANCES)
every_reducer = pytest.mark.parametrize("reducer", [reducers.MeanReducer, reducers.SumReducer])
every_log = pytest.mark.parametrize("log", [True, False], ids=["log", "plain"])


def vectors(count: int = len(LABELS), dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 5, dtype=torch.float64).to(dtype)


def build(distance: str = "default", **kwargs: Any) -> EnergyConfusionRegularizer:
    """Regularizer on the embeddings of the call, unless a test is about the other mode."""
    return EnergyConfusionRegularizer(
        **{"gradient": "all", "distance": DISTANCES[distance][0], **kwargs}
    )


def expected_terms(
    embeddings: Tensor,
    labels: Tensor = LABELS,
    distance: str = "default",
    log: bool = True,
) -> dict[tuple[int, int], float]:
    """One term per ordered pair of classes, by the oracle."""
    _, p, function = DISTANCES[distance]
    x = embeddings.detach().double().numpy()
    x = x if p is None else oracle.unit(x, p)
    return oracle.terms(x, labels.tolist(), log=log, distance=function)


def expected(
    embeddings: Tensor, labels: Tensor = LABELS, reducer: Any = reducers.MeanReducer, **kwargs: Any
) -> float:
    """Value of the regularizer, by the oracle: the mean over ordered pairs, or eqs. 7 and 11, their sum."""
    terms = expected_terms(embeddings, labels, **kwargs).values()
    return math.fsum(terms) / (len(terms) if reducer is reducers.MeanReducer else 1)


def class_sets(x: Tensor) -> list[Sequence[np.ndarray]]:
    return list(oracle.class_sets(x.numpy(), LABELS.tolist()).values())


# Value and gradient


@every_distance
@every_reducer
@every_log
def test_equals_the_oracle(distance: str, reducer: Any, log: bool) -> None:
    embeddings = vectors()
    value = build(distance, reducer=reducer(), log=log)(embeddings, LABELS)
    assert value.shape == () and value.dtype == torch.float64
    assert_close(value, expected(embeddings, distance=distance, reducer=reducer, log=log))


@every_distance
def test_reducers_get_every_ordered_pair_of_classes_by_an_image_of_each(distance: str) -> None:
    embeddings = vectors()
    parts = build(distance, reducer=reducers.DoNothingReducer())(embeddings, LABELS)["loss"]
    assert parts["reduction_type"] == "neg_pair"
    pairs = zip(*(LABELS[index].tolist() for index in parts["indices"]), strict=True)
    found = dict(zip(pairs, parts["losses"], strict=True))
    terms = expected_terms(embeddings, distance=distance)
    assert found.keys() == terms.keys() and len(parts["losses"]) == C * (C - 1)
    for pair, term in terms.items():
        assert_close(found[pair], term)


def test_values_made_by_hand() -> None:
    """Two images at a right angle, of one class, and the image opposite to the first."""
    embeddings = torch.tensor([[3.0, 0.0], [0.0, 0.1], [-2.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([5, 5, 2])
    energy = (4 + 2) / 2
    assert_close(build(log=False)(embeddings, labels), energy)
    assert_close(build()(embeddings, labels), math.log(1 + energy))
    summed = build(reducer=reducers.SumReducer(), collect_stats=True)
    assert_close(summed(embeddings, labels), 2 * math.log(1 + energy))
    assert summed.between_class_energy == pytest.approx(energy)


def test_no_tensor_is_larger_than_the_batch_or_the_matrix_of_classes() -> None:
    embeddings = torch.randn(600, 8, requires_grad=True)
    with Count() as count:
        build()(embeddings, torch.arange(600) % 10).backward()
    assert max(count.storages) == 600 * 8
    # Of class means: one forward, two backward.
    assert (count.operations["aten.addmm"], count.operations["aten.mm"]) == (1, 2)


# Properties


def test_lemma_2_and_lemma_3() -> None:
    """EC bounds half the energy distance (Lemma 2) and the squared MMD (Lemma 3), which are equal (eq. 6)."""
    for _ in range(5):
        x = vectors() * torch.rand(1, 5, dtype=torch.float64)
        energies = energy_confusion(x, CLASSES, C)
        within = energies.diagonal()
        halves = energies - (within.unsqueeze(1) + within) / 2
        sets = class_sets(x)
        for i, j in ((i, j) for i in range(C) for j in range(C) if i != j):
            half, mmd = (
                oracle.energy_distance(sets[i], sets[j]) / 2,
                oracle.squared_mmd(sets[i], sets[j]),
            )
            assert energies[i, j] >= half - 1e-12 and energies[i, j] >= mmd - 1e-12
            assert_close(halves[i, j], half)
            assert_close(halves[i, j], mmd)
        # Strict where a class varies, tight between singletons.
        assert energies[1, 3] > 1.01 * halves[1, 3]
        assert_close(energies[0, 2], halves[0, 2])


@pytest.mark.parametrize(
    ("gap", "offset"), [(1e-4, 0), (1e-2, 0), (1.0, 0), (1e-2, 2**10), (1.0, 2**10)]
)
def test_close_classes_beside_far_ones(gap: float, offset: int) -> None:
    """Each energy and each gradient is exact in proportion to itself, not to the largest one."""
    near = torch.tensor([0, 0, 1, 1, 2, 3]).unsqueeze(1) * gap + gap / 9 * torch.rand(6, 5)
    x = offset + torch.cat([near, near[:3] + 4]).float()
    classes = torch.tensor([0, 0, 1, 1, 2, 3, 4, 4, 5])
    energies = energy_confusion(x.requires_grad_(), classes, 6)
    assert energies.dtype == torch.float32
    sets = list(oracle.class_sets(x.detach().double().numpy(), classes.tolist()).values())
    for i, j in ((i, j) for i in range(6) for j in range(6) if i != j):
        exact = oracle.energy_confusion(sets[i], sets[j])
        assert_close(energies[i, j], exact)
    wide = x.detach().double().requires_grad_()
    exactly = energy_confusion(wide, classes, 6)
    for i, j in ((0, 1), (2, 3), (1, 4)):
        (found,) = torch.autograd.grad(energies[i, j], x, retain_graph=True)
        (exact,) = torch.autograd.grad(exactly[i, j], wide, retain_graph=True)
        assert_close(found, exact)


@every_distance
@every_reducer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_look_at_values(
    distance: str, reducer: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which would have to be waited for: by pairs of images instead of classes."""
    regularizer = build(distance, reducer=reducer())
    for labels in (LABELS, LABELS * 0, torch.arange(7), LABELS[:1]):
        x = vectors(len(labels), dtype).requires_grad_()
        wide = x.detach().double().requires_grad_()
        exact = regularizer(wide, labels)
        with monkeypatch.context() as patch:
            patch.setattr("pml_regularizers.regularizers.energy_confusion._waits", lambda x: True)
            value = regularizer(x, labels)
        assert value.dtype == dtype
        if exact > 0:
            assert_close(value, exact.item())
            assert_close(*(torch.autograd.grad(*pair)[0] for pair in ((value, x), (exact, wide))))
        else:
            assert value == 0 and not torch.autograd.grad(value, x)[0].any()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's, at a graph break
@pytest.mark.parametrize("reducer", ["MeanReducer", "SumReducer", "AvgNonZeroReducer"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(reducer: str, backend: str) -> None:
    """One graph serves batches of any number of classes for a mean or a sum; other reducers select pairs."""
    torch.compiler.reset()
    eager = build(reducer=getattr(reducers, reducer)())
    whole = reducer != "AvgNonZeroReducer"
    if whole:
        # fullgraph=True alone would let a number of classes go to Python, which waits for the device.
        found = torch._dynamo.explain(copy.deepcopy(eager))(vectors(), LABELS)
        assert (found.graph_count, found.graph_break_count) == (1, 0)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=whole, backend=backend)
    for labels in (LABELS, LABELS.clamp(max=1), torch.arange(7), torch.zeros(7, dtype=torch.long)):
        x = vectors().requires_grad_()
        value, again = eager(x, labels), compiled(x, labels)
        if value > 0:
            assert_close(again, value.item())
            assert_close(torch.autograd.grad(again, x)[0], torch.autograd.grad(value, x)[0])
        else:
            assert again == 0
            assert torch.autograd.grad(again, x)[0].abs().max() == 0
