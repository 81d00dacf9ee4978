"""Accuracies by ranks: against loops, against PML, at the limits of numbers and of memory."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from pml_regularizers import RankAccuracyCalculator
from pml_regularizers.metrics import ranks
from tests.support.counting import Peak

CPU = torch.device("cpu")
ROUNDING = 1e-12  # float64 means of at most some thousands of queries


METRICS = ("mean_average_precision_at_r", "r_precision")


def measured(
    vectors: Tensor,
    labels: Tensor,
    *,
    recall_at: tuple[int, ...] = (1, 2, 4, 8),
    is_query: Tensor | None = None,
    unit: bool = False,
    **settings: Any,
) -> dict[str, float]:
    """Result of the calculator on one matrix."""
    names = (*(f"recall_at_{k}" for k in recall_at), *METRICS)
    calculator = RankAccuracyCalculator(names, recall_at=recall_at, device=CPU, **settings)
    return calculator.get_accuracy_within(
        vectors,
        labels,
        queries=is_query,
        references=None if is_query is None else ~is_query,
        normalize=unit,
    )


def oracle(
    vectors: np.ndarray, labels: np.ndarray, recall_at: tuple[int, ...], is_query: np.ndarray | None
) -> dict[str, float]:
    """The metrics by their definitions, in float64 loops; of equally near images, right ones come last."""
    recalls: dict[int, list[bool]] = {k: [] for k in recall_at}
    average_precisions, r_precisions = [], []
    for q in range(len(labels)) if is_query is None else np.flatnonzero(is_query):
        others = [i for i in range(len(labels)) if i != q and (is_query is None or not is_query[i])]
        others.sort(key=lambda i: (sum((vectors[q] - vectors[i]) ** 2), labels[i] == labels[q]))
        right = [labels[i] == labels[q] for i in others]
        R = sum(right)
        if R == 0:
            continue
        for k in recall_at:
            recalls[k].append(any(right[:k]))
        r_precisions.append(sum(right[:R]) / R)
        average_precisions.append(
            sum(sum(right[: i + 1]) / (i + 1) for i in range(R) if right[i]) / R
        )
    return {
        **{f"recall_at_{k}": np.mean(hits) for k, hits in recalls.items()},
        "mean_average_precision_at_r": np.mean(average_precisions),
        "r_precision": np.mean(r_precisions),
    }


def clusters(seed: int, sizes: tuple[int, ...], width: int = 5) -> tuple[Tensor, Tensor]:
    """Overlapping clouds in shuffled order, one class for each size."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    centres = rng.normal(size=(len(sizes), width))
    points = centres[labels] + rng.normal(size=(len(labels), width))
    return torch.from_numpy(points).float(), torch.from_numpy(labels)


def halves(n: int, seed: int = 0) -> Tensor:
    """Mask of the queries among `n` images of a gallery."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5


# ---------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("rows", [2, 512])
@pytest.mark.parametrize("gallery", [False, True])
@pytest.mark.parametrize("sizes", [(2,) * 8, (9, 1, 5, 1, 2), (30, 3, 3), (4,) * 15, (12,)])
def test_metrics_equal_the_oracle(monkeypatch, sizes, gallery, rows):
    """Also with lone classes, one class, classes larger than every K, a K beyond all, and small blocks."""
    monkeypatch.setattr(ranks, "BLOCK_ROWS", rows)
    recall_at = (1, 2, 5, 100)
    for seed in range(3):
        vectors, labels = clusters(seed, sizes)
        is_query = halves(len(labels), seed) if gallery else None
        expected = oracle(
            *(vectors.double().numpy(), labels.numpy(), recall_at),
            None if is_query is None else is_query.numpy(),
        )
        found = measured(vectors, labels, recall_at=recall_at, is_query=is_query)
        assert found == pytest.approx(expected, rel=0, abs=ROUNDING)
        assert list(found) == list(expected)
        assert found["recall_at_100"] == 1


def test_a_hand_made_ranking():
    """Class 0 at 0, 1 and 5.25, class 1 at 3 and 7: R = 2, 2, 2, 1, 1."""
    points = torch.tensor([[0.0], [1.0], [5.25], [3.0], [7.0]])
    found = measured(points, torch.tensor([0, 0, 0, 1, 1]), recall_at=(1, 3, 4))
    assert found == {
        "recall_at_1": 2 / 5,  # 0 and 1 find each other; 5.25 finds 7; 3 finds 1; 7 finds 5.25
        "recall_at_3": 4 / 5,  # 5.25: 7, 3, then 1; 7: 5.25, then 3; but 3: 1, 5.25, 0
        "recall_at_4": 1.0,
        "mean_average_precision_at_r": pytest.approx((1 / 2 + 1 / 2) / 5),
        "r_precision": pytest.approx((1 / 2 + 1 / 2) / 5),
    }


# ------------------------------------------------------------------------------------------ ties


POINTS = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(0, 3), st.booleans()),
    min_size=5,
    max_size=30,
)


@settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(points=POINTS, gallery=st.booleans(), order=st.randoms(use_true_random=False))
def test_ties_count_against_the_model(points, gallery, order):
    """Points of a grid, many of them equal or equally far: as the oracle says, in whatever order they come."""
    recall_at = (1, 2, 3, 5, 40)
    table = torch.tensor(points)
    is_query = table[:, 3].bool() if gallery else None
    if gallery and bool(is_query.all() | ~is_query.any()):
        return
    found = measured(table[:, :2].float(), table[:, 2], recall_at=recall_at, is_query=is_query)
    recalls = [found[f"recall_at_{k}"] for k in recall_at]
    if math.isnan(recalls[0]):
        return
    expected = oracle(
        *(table[:, :2].double().numpy(), table[:, 2].numpy(), recall_at),
        None if is_query is None else is_query.numpy(),
    )
    assert found == pytest.approx(expected, rel=0, abs=ROUNDING)
    assert recalls == sorted(recalls) and recalls[-1] == 1
    assert 0 <= found["mean_average_precision_at_r"] <= found["r_precision"] <= 1
    order.shuffle(points)
    table = torch.tensor(points)
    is_query = table[:, 3].bool() if gallery else None
    again = measured(table[:, :2].float(), table[:, 2], recall_at=recall_at, is_query=is_query)
    assert again == pytest.approx(found, rel=0, abs=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("unit", [False, True])
def test_a_model_that_maps_everything_to_one_point_retrieves_nothing(dtype, unit):
    vectors = torch.randn(32).to(dtype).repeat(40, 1)
    labels = torch.arange(40) // 4
    found = measured(vectors, labels, recall_at=(1, 36, 37), unit=unit)
    assert found.pop("recall_at_37") == 1
    assert len(found) == 4 and not any(found.values())


# ---------------------------------------------------------------------------------------- numbers


def half(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda points: points.to(dtype)


@pytest.mark.parametrize(
    "change",
    [
        half(torch.float16),
        half(torch.bfloat16),
        half(torch.float64),
        lambda points: points.double() + 1e9,
        lambda points: points + 2**14,
        lambda points: points * 2.0**110,
        lambda points: points * 2.0**-110,
        lambda points: points[:, :1],
    ],
    ids=["float16", "bfloat16", "float64", "offset64", "offset32", "huge", "tiny", "width1"],
)
def test_ranks_survive_the_limits_of_numbers(change):
    """Differences lie on a grid of 1/64: they are exact in every case, unlike the squares of the numbers."""
    points, labels = clusters(3, (6,) * 20)
    points = change((points * 64).round().clamp(-120, 120) / 64)
    exact = points.double()
    # In powers of two, so that the loops do not overflow either.
    exact = exact * 2.0 ** -math.frexp(exact.abs().max().item())[1]
    expected = oracle(exact.numpy(), labels.numpy(), (1, 5), None)
    found = measured(points, labels, recall_at=(1, 5))
    assert found == pytest.approx(expected, rel=0, abs=ROUNDING)
    assert 0 < found["recall_at_1"] < 1


def test_products_have_full_precision_whatever_the_training_uses(monkeypatch):
    product, seen = torch.addmm, []

    def watched(*args, **options):
        seen.append(torch.get_float32_matmul_precision())
        if len(seen) == 2:
            raise RuntimeError("stop")
        return product(*args, **options)

    monkeypatch.setattr(torch, "addmm", watched)
    vectors, labels = clusters(0, (4, 4))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        measured(vectors, labels)
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(RuntimeError, match="stop"):
            measured(vectors, labels)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest", "highest"]


# ----------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("sizes", [(3,) * 400, (600, *(3,) * 200), (1200,)])
@pytest.mark.parametrize("gallery", [False, True])
def test_no_tensor_exceeds_the_budget(monkeypatch, sizes, gallery):
    """1,200 images of 2 numbers: all distances are 5.8 MB, and the ranks of the right ones as much again."""
    budget = 256 * 2**10
    monkeypatch.setattr(ranks, "BLOCK_BYTES", budget)
    vectors, labels = clusters(0, sizes, width=2)
    is_query = halves(len(labels)) if gallery else None
    with Peak() as peak:
        measured(vectors, labels, is_query=is_query)
    assert budget / 16 < peak.largest() <= budget


@pytest.mark.parametrize("row", [0, 17, -1])
@pytest.mark.parametrize("factor", [1e4, 1e6])
def test_a_vector_far_away_changes_no_others_rank(row, factor):
    vectors, labels = clusters(3, (5,) * 8)
    vectors[labels.argsort(stable=True)[row]] *= factor
    exact = measured(vectors, labels, recall_at=(1, 2, 4))
    assert 0 < exact["recall_at_1"] < 1
    assert measured(vectors.float(), labels, recall_at=(1, 2, 4)) == exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_are_compared_however_long_the_vectors(dtype):
    vectors, labels = clusters(4, (5,) * 8)
    vectors = normalize(vectors).to(dtype)
    expected = measured(vectors, labels, unit=True)
    lengths = torch.ones(len(vectors), 1, dtype=dtype)
    largest = torch.finfo(dtype).max / 4
    for index, length in enumerate((1e14, 1e-14, largest, 1 / largest)):
        lengths[index * 7] = length
    assert measured(vectors * lengths, labels, unit=True) == expected
