"""Energy confusion against the paper in loops, its lemmas, and every contract a PML loss keeps."""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances
from torch import Tensor

from pml_regularizers import EnergyConfusionRegularizer, energy_confusion
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
every_reduction = pytest.mark.parametrize("reduction", ["mean", "ordered_sum"])
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
    embeddings: Tensor, labels: Tensor = LABELS, reduction: str = "mean", **kwargs: Any
) -> float:
    """Value of the regularizer, by the oracle."""
    terms = expected_terms(embeddings, labels, **kwargs).values()
    return math.fsum(terms) / (len(terms) if reduction == "mean" else 1)


def class_sets(x: Tensor) -> list[Sequence[np.ndarray]]:
    return list(oracle.class_sets(x.numpy(), LABELS.tolist()).values())


# Value and gradient


@every_distance
@every_reduction
@every_log
def test_equals_the_oracle(distance: str, reduction: Any, log: bool) -> None:
    embeddings = vectors()
    value = build(distance, reduction=reduction, log=log)(embeddings, LABELS)
    assert value.shape == () and value.dtype == torch.float64
    assert_close(value, expected(embeddings, distance=distance, reduction=reduction, log=log))


def test_values_made_by_hand() -> None:
    """Two images at a right angle, of one class, and the image opposite to the first."""
    embeddings = torch.tensor([[3.0, 0.0], [0.0, 0.1], [-2.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([5, 5, 2])
    energy = (4 + 2) / 2
    assert_close(build(log=False)(embeddings, labels), energy)
    assert_close(build()(embeddings, labels), math.log(1 + energy))
    assert_close(build(reduction="ordered_sum")(embeddings, labels), 2 * math.log(1 + energy))


def test_no_tensor_is_larger_than_the_batch_or_the_matrix_of_classes() -> None:
    embeddings = torch.randn(600, 8, requires_grad=True)
    with Count() as count:
        build()(embeddings, torch.arange(600) % 10).backward()
    assert max(count.storages) == 600 * 8
    assert count.operations["aten.mm"] == 3  # of class means: one forward, two backward


# Which embeddings, and where the gradient goes


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


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 2**10), (torch.float64, 2**30)])
def test_an_offset_does_not_drown_the_energies(dtype: torch.dtype, offset: int) -> None:
    x = offset + torch.randint(-9, 9, (len(LABELS), 5), dtype=dtype) / 64  # exact in both
    value = build("raw", log=False)(x, LABELS)
    assert_close(value, expected(x, distance="raw", log=False))


# A random choice of pairs


def drawn(regularizer: EnergyConfusionRegularizer, x: Tensor, calls: int) -> list[tuple[int, int]]:
    """Pairs of classes that a regularizer with num_pairs=1 draws, deduced from its values."""
    terms = {pair: term for pair, term in expected_terms(x).items() if pair[0] < pair[1]}
    pairs = []
    for _ in range(calls):
        value = regularizer(x, LABELS)
        pairs.append(min(terms, key=lambda pair: abs(terms[pair] - value.item())))
        assert_close(value, terms[pairs[-1]])
    return pairs


def test_draws_are_equally_frequent_and_independent() -> None:
    pairs = drawn(build(num_pairs=1), vectors(), 432)
    # Chi-squared with 5 and 35 degrees of freedom exceeds these once in a thousand.
    for outcomes, kinds, bound in ((pairs, 6, 20.5), (list(pairwise(pairs)), 36, 66.6)):
        counts, fair = Counter(outcomes), len(outcomes) / kinds
        assert len(counts) == kinds
        assert sum((count - fair) ** 2 / fair for count in counts.values()) < bound


@every_reduction
def test_drawn_pairs_are_different_pairs_in_both_orders(reduction: str) -> None:
    x = vectors()
    terms = expected_terms(x)
    low = [terms[pair] for pair in terms if pair[0] < pair[1]]
    for count in (2, 4, 5):
        value = build(num_pairs=count, reduction=reduction, seed=count)(x, LABELS).item()
        scale = 1 / count if reduction == "mean" else 2
        subsets = [
            scale * math.fsum(term for i, term in enumerate(low) if choice >> i & 1)
            for choice in range(2**6)
            if choice.bit_count() == count
        ]
        assert_close(
            torch.tensor(value, dtype=torch.float64), min(subsets, key=lambda s: abs(s - value))
        )


def test_seeds_draw_differently() -> None:
    x = vectors()
    runs = [drawn(build(num_pairs=1, seed=seed), x, 12) for seed in (0, 0, 1, 2, -1, 2**40 + 3)]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 5


def test_draws_go_on_from_a_state_dict_with_its_seed() -> None:
    x, regularizer, resumed = vectors(), build(num_pairs=1, seed=1), build(num_pairs=1)
    first = drawn(regularizer, x, 12)
    resumed.load_state_dict(regularizer.state_dict())
    assert drawn(resumed, x, 12) == drawn(regularizer, x, 12) != first
    assert not build().state_dict()
    cast = {"draws": regularizer.draws.bfloat16()}
    with pytest.raises(RuntimeError, match=r"draws: expected signed integers, got torch\.bfloat16"):
        build(num_pairs=1).load_state_dict(cast)


@pytest.mark.parametrize("num_pairs", [None, 2])
def test_compiled_without_a_graph_break(num_pairs: int | None) -> None:
    """One graph serves batches of any number of classes; values and gradients are those of the loops."""
    torch._dynamo.reset()
    eager = build(num_pairs=num_pairs)
    # fullgraph=True alone would let a number of classes go to Python, which waits for the device.
    found = torch._dynamo.explain(copy.deepcopy(eager))(vectors(), LABELS)
    assert (found.graph_count, found.graph_break_count) == (1, 0)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    for labels in (LABELS, LABELS.clamp(max=1), torch.arange(7), torch.zeros(7, dtype=torch.long)):
        x = vectors().requires_grad_()
        value, again = eager(x, labels), compiled(x, labels)
        if value > 0:
            assert_close(again, value.item())
            assert_close(torch.autograd.grad(again, x)[0], torch.autograd.grad(value, x)[0])
        else:
            assert again == 0
            assert torch.autograd.grad(again, x)[0].abs().max() == 0
