"""Verification: counted in blocks, the same as scikit-learn's curve of all pairs, on one process and on several."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.datasets.queries import Ranking
from benchmarks.evaluation import identification, verification
from benchmarks.evaluation.identification import identify
from benchmarks.evaluation.verification import BINS, verify
from tests.benchmarks.datasets.test_queries import ranked
from tests.benchmarks.runs import as_accelerator
from tests.support.pool import Processes

RATES = (0.1, 0.01)


def of_all(vectors: Tensor, labels: Any, rates: Any = RATES, accelerator: Any = None) -> Any:
    return verify(vectors, labels, Ranking.of_all(len(labels)), accelerator, rates)


QUERIES = torch.arange(200) % 3 == 0
CAMERAS = Ranking(~QUERIES, torch.arange(200) % 4 > 0, torch.arange(200) % 6)


def made(classes: int, images: int) -> tuple[Tensor, Tensor]:
    """Vectors around a centre of each class, in no order, of any length, and their labels."""
    draw = torch.Generator().manual_seed(classes)
    labels = torch.randperm(images, generator=draw) % classes
    centres = torch.randn(classes, 8, generator=draw)
    noise = torch.randn(images, 8, generator=draw)
    return 3 * (centres[labels] + noise), labels


def all_pairs(vectors: Tensor, labels: Tensor, ranking: Ranking) -> tuple[Any, Any]:
    """Whether each pair is of one class, and its similarity: by hand."""
    unit, others = normalize(vectors.double()), enumerate(ranked(ranking, labels))
    pairs = {(min(i, j), max(i, j)) for i, them in others for j in them}
    i, j = torch.tensor(sorted(pairs)).T
    return (labels[i] == labels[j]).numpy(), (unit[i] * unit[j]).sum(dim=1).numpy()


@pytest.mark.parametrize(
    "ranking",
    [Ranking.of_all(200), Ranking.apart(QUERIES), CAMERAS, replace(CAMERAS, whole_groups=True)],
    ids=["all", "gallery", "cameras", "sequences"],
)
def test_it_is_the_curve_of_all_pairs(ranking, monkeypatch):
    monkeypatch.setattr(verification, "BLOCK_ROWS", 60)
    monkeypatch.setattr(verification, "GROUPS", 8)
    vectors, labels = made(40, 200)
    found = verify(vectors, labels, ranking, rates=RATES)
    same, similarities = all_pairs(vectors, labels, ranking)
    assert found["same_pairs"] == same.sum() and found["other_pairs"] == (~same).sum()
    assert found["classes"] == 40 and found["groups"] == 8
    # Half of the pairs of pairs that share a bin.
    places = ((similarities + 1) * BINS / 2).astype(int)
    shares = [np.bincount(places[of], minlength=BINS) / of.sum() for of in (same, ~same)]
    bound = (shares[0] * shares[1]).sum() / 2
    assert 0 < bound < 1e-4
    assert abs(found["area"] - roc_auc_score(same, similarities)) <= bound + 1e-12
    others = np.sort(similarities[~same])[::-1]
    assert [row["false_accepts"] for row in found["rates"]] == list(RATES)
    for row in found["rates"]:
        limit = others[math.floor(row["false_accepts"] * len(others))]  # the first that is too much
        assert limit < row["threshold"] <= limit + 2 / BINS
        assert row["true_accepts"] == (similarities >= row["threshold"])[same].mean()
        assert row["true_accepts_half_width"] > 0 and row["threshold_half_width"] > 0


def test_the_interval_leaves_out_each_class():
    vectors, labels = made(7, 80)
    found = of_all(vectors, labels, (0.05,))
    parts = (labels != left for left in range(7))
    without = [of_all(vectors[part], labels[part], (0.05,)) for part in parts]
    t = 2.4469118511449692  # 97.5 % of Student's t of 6 degrees of freedom
    rate = found["rates"][0]
    for values, half_width in (
        ([one["area"] for one in without], found["area_half_width"]),
        ([one["rates"][0]["true_accepts"] for one in without], rate["true_accepts_half_width"]),
    ):
        assert half_width == pytest.approx(t * math.sqrt(6 * np.var(values)), rel=1e-9)


def test_a_rate_without_enough_pairs_or_without_a_similarity():
    """Copies of two classes are not kept apart."""
    vectors, labels = made(9, 100)
    first, second = of_all(vectors, labels, (0.01, 0.001))["rates"]
    assert first["threshold"] is not None and "needs" not in first
    assert second["needs"] == 10_000
    assert {second[name] for name in second if name not in ("false_accepts", "needs")} == {None}
    [row] = of_all(torch.ones(100, 4), labels, (0.1,))["rates"]
    assert (row["true_accepts"], row["threshold"]) == (0.0, None)


@pytest.mark.parametrize(
    ("value", "labels", "line"),
    [(1.0, [0, 1, 2], "got 0 and 3"), (math.nan, [0, 0, 1], "got NaN or inf")],
)
def test_pairs_of_both_kinds_and_finite_embeddings_are_needed(value, labels, line):
    with pytest.raises(ValueError, match=line):
        of_all(torch.tensor([[1.0], [value], [1.0]]), torch.tensor(labels))


def verified(processes: Processes) -> list[dict[str, Any]]:
    """Results on a process of a pool."""
    accelerator = as_accelerator(processes)
    images = *made(12, 200), replace(CAMERAS, whole_groups=True), accelerator
    with mock.patch.object(identification, "BLOCK_ROWS", 30):
        known = identify(*images)
    return [verify(*images, rates=RATES), of_all(*images[:2], RATES, accelerator), known]


def test_every_process_finds_what_one_finds(pool):
    [alone] = pool.run(verified, processes=1)
    assert 0.5 < alone[0]["area"] < 1
    for together in pool.run(verified, processes=3):
        assert together == alone
