"""Accuracies by ranks: against loops, against PML, at the limits of numbers and of memory, on many processes."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor
from torch.nn.functional import normalize

from pml_regularizers import RankAccuracyCalculator
from pml_regularizers.metrics import ranks
from tests.support.counting import Count
from tests.support.pool import Processes

CPU = torch.device("cpu")
ROUNDING = 1e-12  # float64 means of at most some thousands of queries
METRICS = ("mean_average_precision_at_r", "r_precision")
NOT_MAP = tuple(sorted({*METRICS, "precision_at_1", "mean_reciprocal_rank"}))


def measured(
    vectors: Tensor,
    labels: Tensor,
    *,
    recall_at: tuple[int, ...] = (1, 2, 4, 8),
    is_query: Tensor | None = None,
    unit: bool = False,
    groups: Tensor | None = None,
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
        groups=groups,
        normalize=unit,
    )


def oracle(
    vectors: Tensor,
    labels: Tensor,
    recall_at: tuple[int, ...],
    is_query: Tensor | None = None,
    groups: Tensor | None = None,
    rule: str = "class",
) -> Any:
    """The metrics by their definitions, in float64 loops; of equally near images, right ones come last."""
    x, y, own = vectors.double().numpy(), labels.numpy(), rule == "class"
    recalls: dict[int, list[bool]] = {k: [] for k in recall_at}
    average_precisions, r_precisions = [], []
    for q in range(len(y)) if is_query is None else np.flatnonzero(is_query):
        others = [i for i in range(len(y)) if i != q and (is_query is None or not is_query[i])]
        if groups is not None:
            others = [i for i in others if groups[i] != groups[q] or (own and y[i] != y[q])]
        others.sort(key=lambda i: (sum((x[q] - x[i]) ** 2), y[i] == y[q]))
        right = [y[i] == y[q] for i in others]
        R = sum(right)
        if R == 0:
            continue
        for k in recall_at:
            recalls[k].append(any(right[:k]))
        r_precisions.append(sum(right[:R]) / R)
        average_precisions.append(
            sum(sum(right[: i + 1]) / (i + 1) for i in range(R) if right[i]) / R
        )
    exact = {
        **{f"recall_at_{k}": np.mean(hits) for k, hits in recalls.items()},
        "mean_average_precision_at_r": np.mean(average_precisions),
        "r_precision": np.mean(r_precisions),
    }
    return pytest.approx(exact, rel=0, abs=ROUNDING)


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


@pytest.mark.parametrize("rows", [2, 512])
@pytest.mark.parametrize("gallery", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", [(2,) * 8, (9, 1, 5, 1, 2), (30, 3, 3), (4,) * 15, (12,)])
def test_metrics_equal_the_oracle(monkeypatch, sizes, ties, gallery, rows):
    """Also with lone classes, one class, classes larger than every K, a K beyond all, and small blocks.

    Ties count against the model: on a grid, many points are equal or equally far.
    """
    monkeypatch.setattr(ranks, "BLOCK_ROWS", rows)
    recall_at = (1, 2, 5, 100)
    for seed in range(2):
        vectors, labels = clusters(seed, sizes, width=2 if ties else 5)
        vectors = vectors.round() if ties else vectors
        is_query = halves(len(labels), seed) if gallery else None
        found = measured(vectors, labels, recall_at=recall_at, is_query=is_query)
        assert found == oracle(vectors, labels, recall_at, is_query)
        assert found["recall_at_100"] == 1


@pytest.mark.parametrize("rule", ["class", "all"])
@pytest.mark.parametrize("gallery", [False, True])
def test_groups_leave_the_rankings_of_their_queries(monkeypatch, gallery, rule):
    """Groups are as near as classes; some classes are of one group, and ties are many."""
    monkeypatch.setattr(ranks, "BLOCK_ROWS", 7)
    for seed, sizes in enumerate([(9, 2, 5, 1, 2, 3, 2), (30, 3, 3), (4,) * 9]):
        vectors, labels = clusters(seed, sizes, width=2)
        groups = torch.from_numpy(np.random.default_rng(seed).integers(-1, 2, len(labels)))
        vectors = (vectors + groups[:, None]).round()
        is_query = halves(len(labels), seed) if gallery else None
        call = ((1, 2, 5, 100), is_query, groups, rule)
        found = measured(
            vectors, labels, recall_at=call[0], is_query=is_query, groups=groups, group_rule=rule
        )
        assert found == oracle(vectors, labels, *call)
        assert found != measured(vectors, labels, recall_at=call[0], is_query=is_query)


def test_groups_of_queries_and_references_apart():
    """As of rows of one matrix; queries without a right reference are counted."""
    vectors, labels = clusters(1, (5, 9, 2, 4))
    groups, some = torch.arange(20) % 3, 6
    is_query = torch.arange(20) < some
    calculator = RankAccuracyCalculator((*NOT_MAP, "recall_at_1"), device=CPU)
    found = calculator.get_accuracy(
        *(vectors[:some], labels[:some], vectors[some:], labels[some:].numpy()),
        query_groups=groups[:some].numpy(),
        reference_groups=groups[some:],
    )
    assert found == calculator.get_accuracy_within(
        vectors, labels, queries=is_query, references=~is_query, groups=groups
    )
    one = calculator.get_accuracy(vectors, labels, query_groups=groups)
    assert one == calculator.get_accuracy_within(vectors, labels, groups=groups)
    assert one["r_precision"] == measured(vectors, labels, groups=groups)["r_precision"]
    calculator.get_accuracy(vectors, labels, query_groups=labels)  # every class is of one group
    assert calculator.left_out == 20


LIMITS = {
    "float16": lambda points: points.half(),
    "bfloat16": lambda points: points.bfloat16(),
    "offset64": lambda points: points.double() + 1e9,
    "offset32": lambda points: points + 2**14,
    "huge": lambda points: points * 2.0**110,
    "tiny": lambda points: points * 2.0**-110,
    "width1": lambda points: points[:, :1],
}


@pytest.mark.parametrize("limit", LIMITS)
def test_ranks_survive_the_limits_of_numbers(limit):
    """Differences lie on a grid of 1/64: they are exact in every case, unlike the squares of the numbers."""
    points, labels = clusters(3, (6,) * 12)
    points = LIMITS[limit]((points * 64).round().clamp(-120, 120) / 64)
    exact = points.double()
    # In powers of two, so that the loops do not overflow either.
    exact = exact * 2.0 ** -math.frexp(exact.abs().max().item())[1]
    found = measured(points, labels, recall_at=(1, 5))
    assert found == oracle(exact, labels, (1, 5))
    assert 0 < found["recall_at_1"] < 1


def test_products_have_full_precision_whatever_the_training_uses(monkeypatch):
    """The training has its own back, also after an error."""
    seen = []
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    monkeypatch.setattr(torch, "addmm", lambda *_, **__: seen.append("product") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measured(*clusters(0, (4, 4)))
    assert seen == ["highest", "product", "medium"]


@pytest.mark.parametrize("sizes", [(150, *(3,) * 50), (300,)])
@pytest.mark.parametrize("gallery", [False, True])
def test_no_tensor_exceeds_the_budget(monkeypatch, sizes, gallery):
    """300 images of 2 numbers: all distances are 360 kB, and the ranks of the right ones as much again."""
    budget = 64 * 2**10
    monkeypatch.setattr(ranks, "BLOCK_BYTES", budget)
    vectors, labels = clusters(0, sizes, width=2)
    is_query = halves(len(labels)) if gallery else None
    with Count() as count:
        measured(vectors, labels, is_query=is_query, avg_of_avgs=True)
    assert budget / 16 < max(count.storages) <= budget


@pytest.mark.parametrize("row", [0, -1])
def test_a_vector_far_away_changes_no_others_rank(row):
    vectors, labels = clusters(3, (5,) * 8)
    vectors[labels.argsort(stable=True)[row]] *= 1e6
    exact = measured(vectors.double(), labels)
    assert 0 < exact["recall_at_1"] < 1
    assert measured(vectors, labels) == exact


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


class PML(AccuracyCalculator):
    """PML's, which runs its search for neighbours for MRR only beside another metric."""

    def requires_knn(self):
        return [*super().requires_knn(), "mean_reciprocal_rank"]


@pytest.mark.parametrize("how", ["alone", "apart", "same", "overlapping"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"avg_of_avgs": True}, {"return_per_class": True}, {"k": "max_bin_count"}, {"k": 63}],
    ids=["mean", "avg", "per", "max", "63"],
)
def test_every_metric_equals_that_of_pml(how, settings):
    """Lone queries, lone references and classes of many sizes; NMI and AMI use the same clusters."""
    pytest.importorskip("faiss")  # PML's default
    vectors, labels = clusters(1, (1, 5, 60, 2, 30, 1, 9), width=6)
    labels = labels * 3 - 5
    some = 40
    call = {
        "alone": (vectors, labels),
        "apart": (vectors[:some], labels[:some], vectors[some:], labels[some:]),
        "same": (vectors, labels, vectors, labels, True),
        "overlapping": (vectors[:some], labels[:some], vectors, labels, True),
    }[how]
    names = (*NOT_MAP, "NMI", "AMI")
    expected = PML(names, device=CPU, **settings).get_accuracy(*call)
    found = RankAccuracyCalculator(names, device=CPU, **settings).get_accuracy(*call)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # PML averages reciprocal ranks in float32.
        bound = 1e-6 if name == "mean_reciprocal_rank" else ROUNDING
        assert found[name] == pytest.approx(value, rel=0, abs=bound), name
    assert found["NMI"] > 0


def test_without_a_query_that_has_a_right_reference_metrics_are_nan():
    call = (torch.eye(4), torch.tensor([3, 3, 1, 0]), torch.eye(4), torch.tensor([7, 8, 9, 9]))
    found = RankAccuracyCalculator(METRICS, device=CPU).get_accuracy(*call)
    assert all(map(math.isnan, found.values()))


def test_metrics_are_chosen_as_pml_chooses_them(monkeypatch):
    """No neighbours are sought for clusters, and no clusters for ranks."""
    clustered = []

    def k_means(query, count):
        clustered.append((len(query), count))
        return torch.arange(len(query)) % count

    ranked = ["recall_at_1", "recall_at_10", "recall_at_2", *NOT_MAP]
    calculator = RankAccuracyCalculator(
        exclude=("AMI",), recall_at=(1, 10, 2), device=CPU, kmeans_func=k_means
    )
    assert set(calculator.get_curr_metrics()) == {*ranked, "NMI"}
    call = clusters(0, (4, 5))
    assert list(calculator.get_accuracy(*call, exclude=("NMI",))) == ranked
    assert not clustered
    monkeypatch.setattr("pml_regularizers.metrics.rank_accuracy.count_ranks", None)
    assert list(calculator.get_accuracy(*call, include=("NMI",))) == ["NMI"]
    assert clustered == [(9, 2)]
    elsewhere = mock.Mock(device=torch.device("meta"))
    assert RankAccuracyCalculator(accelerator=elsewhere).device == elsewhere.device


def test_arrays_and_floating_labels():
    """PML's two-stream tester gives labels in float32."""
    vectors, labels = clusters(2, (6,) * 8)
    expected = measured(vectors, labels)
    calculator = RankAccuracyCalculator((*expected,), device=CPU)
    assert calculator.get_accuracy(vectors.numpy(), labels.numpy()) == expected
    assert calculator.get_accuracy(vectors, labels.float()) == expected
    apart = measured(vectors, labels, is_query=torch.arange(48) < 30)  # more than references
    large = labels + 2**40  # float32 cannot tell these apart
    mixed = (vectors[:30], large[:30], vectors[30:].numpy(), large[30:].double())
    assert calculator.get_accuracy(*mixed) == apart != expected


def test_rows_that_are_neither_query_nor_reference_are_not_looked_at():
    vectors, labels = clusters(3, (5,) * 8)
    queries, references = halves(40, 1), halves(40, 2)
    assert (queries & references).any() and (~queries & ~references).any()
    calculator = RankAccuracyCalculator(("r_precision",), device=CPU, return_per_class=True)
    found = calculator.get_accuracy_within(vectors, labels, queries=queries, references=references)
    kept = queries | references
    few = calculator.get_accuracy_within(
        vectors[kept], labels[kept], queries=queries[kept], references=references[kept]
    )
    assert found == few


SHARED_CASES = {
    "all": (23, torch.float32, False),
    "two": (2, torch.float64, False),
    "gallery": (60, torch.float64, True),
    "cameras": (60, torch.float32, False),
}


@mock.patch.object(ranks, "BLOCK_ROWS", 7)  # of one call: the processes outlive it
def ranked_together(processes: Processes | None, name: str) -> dict[str, Any]:
    """The accuracies of a case, and how many queries were ranked here; by all processes or alone."""
    n, dtype, gallery = SHARED_CASES[name]
    vectors, labels = clusters(0, (2,) * (n // 2) + (1,) * (n % 2))
    shown = []

    calculator = RankAccuracyCalculator(
        recall_at=(1, 3),
        device=CPU,
        accelerator=processes,
        kmeans_func=lambda query, count: torch.arange(len(query)) % count,
        progress=lambda blocks: shown.extend(map(len, blocks)) or blocks,
        group_rule="all",
    )
    is_query = halves(n) if gallery else None
    found = calculator.get_accuracy_within(
        vectors.to(dtype),
        labels,
        queries=is_query,
        references=None if is_query is None else ~is_query,
        groups=torch.arange(n) % 7 if name == "cameras" else None,
    )
    return {"found": found, "ranked": sum(shown)}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", SHARED_CASES)
def test_many_processes_find_what_one_finds(pool, name, count):
    alone = ranked_together(None, name)
    together = pool.run(ranked_together, name, processes=count)
    assert not any(map(math.isnan, alone["found"].values()))
    assert [of_one["found"] for of_one in together] == [alone["found"]] * count
    assert sum(of_one["ranked"] for of_one in together) == alone["ranked"]
    if name != "two":
        assert max(of_one["ranked"] for of_one in together) < alone["ranked"]


def test_a_model_that_maps_everything_to_one_point_retrieves_nothing():
    vectors, labels = torch.randn(32).half().repeat(40, 1), torch.arange(40) // 4
    found = measured(vectors, labels, recall_at=(1, 36, 37), unit=True)
    assert found.pop("recall_at_37") == 1
    assert len(found) == 4 and not any(found.values())
