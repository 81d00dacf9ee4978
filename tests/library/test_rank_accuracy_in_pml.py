"""Accuracies by ranks where PML takes an accuracy calculator, and on many processes."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from pml_regularizers import RankAccuracyCalculator
from pml_regularizers.metrics import ranks
from tests.library.test_rank_accuracy import CPU, METRICS, ROUNDING, clusters, halves, measured
from tests.support.pool import Processes

NOT_MAP = tuple(sorted({*METRICS, "precision_at_1", "mean_reciprocal_rank"}))


class PML(AccuracyCalculator):
    """PML's, which runs its search for neighbours for MRR only beside another metric."""

    def requires_knn(self):
        return [*super().requires_knn(), "mean_reciprocal_rank"]


@pytest.mark.parametrize("how", ["alone", "apart", "same", "overlapping"])
@pytest.mark.parametrize(
    "settings", [{}, {"avg_of_avgs": True}, {"return_per_class": True}], ids=["mean", "avg", "per"]
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


@pytest.mark.parametrize("settings", [{}, {"avg_of_avgs": True}, {"return_per_class": True}])
def test_lone_queries_alone_are_nan_as_for_pml(settings):
    pytest.importorskip("faiss")  # PML's default
    call = (torch.eye(4), torch.tensor([3, 3, 1, 0]), torch.eye(4), torch.tensor([7, 8, 9, 9]))
    names = ("precision_at_1", *METRICS)
    expected = AccuracyCalculator(names, device=CPU, **settings).get_accuracy(*call)
    found = RankAccuracyCalculator(names, device=CPU, **settings).get_accuracy(*call)
    assert repr(found) == repr(expected)
    assert "nan" in repr(found)


def test_metrics_are_chosen_as_pml_chooses_them():
    calculator = RankAccuracyCalculator(exclude=("AMI", "NMI"), recall_at=(1, 10, 2), device=CPU)
    names = ["recall_at_1", "recall_at_10", "recall_at_2", *NOT_MAP]
    assert calculator.get_curr_metrics() == names
    vectors, labels = clusters(0, (4, 4))
    assert list(calculator.get_accuracy(vectors, labels)) == names
    chosen = calculator.get_accuracy(vectors, labels, include=("recall_at_2", "NMI"))
    assert list(chosen) == ["recall_at_2"]
    left = calculator.get_accuracy(vectors, labels, exclude=("r_precision", "recall_at_1"))
    assert list(left) == [name for name in names if name not in ("r_precision", "recall_at_1")]


def test_no_neighbours_are_sought_for_clusters_and_no_clusters_for_ranks(monkeypatch):
    clustered = []

    def k_means(query, count):
        clustered.append((len(query), count))
        return torch.arange(len(query)) % count

    vectors, labels = clusters(0, (4, 5))
    calculator = RankAccuracyCalculator(device=CPU, kmeans_func=k_means)
    calculator.get_accuracy(vectors, labels, include=("r_precision",))
    assert clustered == []
    monkeypatch.setattr("pml_regularizers.metrics.rank_accuracy.count_ranks", None)
    calculator.get_accuracy(vectors, labels, include=("NMI",))
    assert clustered == [(9, 2)]


def test_arrays_and_floating_labels():
    """PML's two-stream tester gives labels in float32."""
    vectors, labels = clusters(2, (6,) * 8)
    expected = measured(vectors, labels)
    calculator = RankAccuracyCalculator((*expected,), device=CPU)
    assert calculator.get_accuracy(vectors.numpy(), labels.numpy()) == expected
    assert calculator.get_accuracy(vectors, labels.float()) == expected
    apart = calculator.get_accuracy(vectors[:9], labels[:9], vectors[9:], labels[9:])
    large = labels + 2**40  # float32 cannot tell these apart
    mixed = (vectors[:9], large[:9], vectors[9:].numpy(), large[9:].double())
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


# -------------------------------------------------------------------------------- many processes


SHARED_CASES = {
    "all": (23, torch.float32, False),
    "two": (2, torch.float64, False),
    "gallery": (60, torch.float64, True),
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
    )
    is_query = halves(n) if gallery else None
    found = calculator.get_accuracy_within(
        vectors.to(dtype),
        labels,
        queries=is_query,
        references=None if is_query is None else ~is_query,
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
