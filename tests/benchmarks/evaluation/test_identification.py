"""Identification: by brute force on a small set, and on simulated vectors whose rates are known exactly."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.datasets.queries import Ranking
from benchmarks.evaluation import identification
from benchmarks.evaluation.identification import identify
from benchmarks.reporting.identification import judge
from tests.benchmarks.datasets.test_queries import ranked
from tests.benchmarks.evaluation.test_verification import made


def by_hand(vectors: Tensor, labels: Tensor, ranking: Ranking | None) -> list[list[float]]:
    """For each query the similarity to the nearest image of another class and of its own; -inf without one."""
    unit, classes = normalize(vectors.double()), labels.tolist()
    similarities, scores = (unit @ unit.T).tolist(), list[list[float]]()
    for q, others in enumerate(ranked(ranking, labels)):
        if ranking is None or ranking.queries[q]:
            scores.append([-math.inf, -math.inf])
            for g in others:
                own = classes[q] == classes[g]
                scores[-1][own] = max(scores[-1][own], similarities[q][g])
    return scores


IMAGES = torch.arange(230)
BOTH = IMAGES % 7 > 0, IMAGES % 5 > 1, IMAGES // 3 % 3


@pytest.mark.parametrize(
    ("ranking", "classes"),
    [
        (None, (7, 10)),
        (Ranking.apart(IMAGES % 2 == 0), (7, 9)),
        (Ranking(*BOTH), (7, 9)),
        (Ranking(*BOTH, whole_groups=True), (7, 9)),
    ],
    ids=["all", "gallery", "cameras", "sequences"],
)
def test_each_query_by_hand(ranking, classes, monkeypatch):
    """Classes of one image are unknown only; intervals leave a class out of queries and gallery."""
    monkeypatch.setattr(identification, "BLOCK_ROWS", 9)
    vectors, labels = made(7, 230)
    labels[:3] = torch.tensor([7, 8, 9])
    found, scores = identify(vectors, labels, ranking), by_hand(vectors, labels, ranking)
    known = [(other, own) for other, own in scores if own > -math.inf]
    assert found["unknown_queries"] == len(scores) and found["known_queries"] == len(known)
    assert (found["known_classes"], found["unknown_classes"]) == classes
    rows = {row["false_positives"]: row for row in found["rates"]}
    assert rows[0.01]["needs"] == 1000 and rows[0.01]["threshold"] is None
    t = rows[0.1]["threshold"]
    reached, allowed = sorted((other for other, _ in scores), reverse=True), len(scores) // 10
    assert reached[allowed] < t + 1e-6 and t - 1e-6 < reached[allowed - 1]
    right = [own > other and own >= t for other, own in known]
    assert rows[0.1]["true_positives"] == np.mean(right)
    wrong = [own <= other and other >= t for other, own in known]
    assert rows[0.1]["misnamed"] == np.mean(wrong) and any(wrong)
    u = found["unknown"]["threshold"]
    assert sum(max(pair) < u - 1e-6 for pair in known) == len(known) // 10
    rejected = np.mean([other < u - 1e-6 for other, _ in scores])
    assert found["unknown"]["rejected"] == pytest.approx(rejected)
    shares = []
    for left in range(10):
        kept = labels != left
        part = by_hand(vectors[kept], labels[kept], ranking and ranking.taken(kept))
        shares.append(np.mean([other >= t for other, _ in part]))
    half_width = 2.2621571627409915 * math.sqrt(9 * np.var(shares))  # Student's t of 9 degrees
    assert rows[0.1]["false_positives_half_width"] == pytest.approx(half_width)


def test_the_rates_are_the_true_ones_and_limits_in_a_larger_gallery():
    """Cosines of independent directions in space are uniform: the best of n lies below t with ((1 + t) / 2)^n."""
    draw, classes, n, cosine = torch.Generator().manual_seed(0), 4000, 400, 1 - 1e-5
    gallery = normalize(torch.randn(classes, 3, generator=draw).double())
    side = torch.linalg.cross(gallery, torch.randn(classes, 3, generator=draw).double())
    queries = cosine * gallery + math.sqrt(1 - cosine**2) * normalize(side)  # one of each class
    labels = torch.cat([torch.arange(n), torch.arange(classes)])
    sides = Ranking.apart(torch.arange(len(labels)) >= n)
    found = identify(torch.cat([gallery[:n], queries]), labels, sides)
    assert found["known_queries"] == found["gallery_classes"] == found["compared"] + 1 == n
    rates = {row["false_positives"]: row for row in found["rates"] if row["threshold"]}
    assert [*rates] == [0.1, 0.05, 0.02, 0.01, 0.005]
    for rate, row in rates.items():
        true = 1 - ((1 + row["threshold"]) / 2) ** n
        assert abs(true - rate) < 3 * math.sqrt(rate / classes)
        named = ((1 + cosine) / 2) ** n  # no impostor is nearer than one's own class
        assert row["true_positives"] == pytest.approx(named, abs=3 * math.sqrt(1 - named) / 20)
    similarities = queries @ gallery.T
    own, other = similarities.diag().clone(), similarities.fill_diagonal_(-1).amax(dim=1)
    for asked, limit in ((None, 0.05), (0.11, 0.1), (0.25, 0.2)):
        told = judge(found, classes, asked)
        assert told.false_positives == pytest.approx(limit, rel=0.01)
        called, right = other >= told.known, (own > other) & (own >= told.known)
        assert 0 < told.half_width < limit
        assert 0.7 * limit < called.double().mean() < told.false_positives + told.half_width
        assert told.true_positives < right.double().mean()
    with pytest.raises(ValueError, match="no threshold is of use"):
        judge(found, 1000 * n)
    with pytest.raises(ValueError, match="expected queries with other images of their class"):
        identify(queries[:50], torch.arange(50))
