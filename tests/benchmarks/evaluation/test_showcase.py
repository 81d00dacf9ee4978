"""Neighbours that a run saves for its report: every number by brute force."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.datasets.queries import Ranking
from benchmarks.evaluation.outputs import NEAREST, neighbours, save_neighbours
from benchmarks.evaluation.tester import Measured, rank
from tests.benchmarks.datasets.test_queries import ranked as in_ranking


class Images:
    """Images of unequal classes, one of which has a single image."""

    def __init__(self, kind: str) -> None:
        self.labels = torch.tensor([0, 2, 0, 4, 2, 0, 1, 0, 2, 4, 2, 0, 3, 2, 0, 3, 0, 4, 0])
        n = len(self.labels)
        self.ranking = Ranking.of_all(n)
        if kind != "all":  # the gallery lacks class 3
            self.ranking = Ranking.apart((self.labels == 3) | (torch.arange(n) % 3 == 0))
        if kind == "cameras":
            self.ranking = replace(self.ranking, groups=torch.arange(n) % 2)

    def __len__(self) -> int:
        return len(self.labels)


def ranked(data: Images, embeddings: Tensor, query: int) -> list[int]:
    """The images that a query is to find, nearest first, in float64."""
    unit = torch.nn.functional.normalize(embeddings.double())
    distances = (unit - unit[query]).norm(dim=1)
    return sorted(in_ranking(data.ranking, data.labels)[query], key=distances.tolist().__getitem__)


def test_among_more_copies_than_neighbours_the_first_ones_are_shown():
    """Also of an image that does not stand in its own ranking."""
    found = Measured({}, None, torch.ones(12, 2), torch.zeros(12), Ranking.of_all(12))  # type: ignore[arg-type]
    near = neighbours(found, torch.tensor([11, 1]), 3)
    assert near.tolist() == [[0, 1, 2], [0, 2, 3]]


@pytest.mark.parametrize("kind", ["all", "gallery", "cameras"])
def test_queries_are_spread_with_their_neighbours_and_precision(kind, tmp_path):
    data = Images(kind)
    embeddings = torch.randn(5, 4)[data.labels] + torch.randn(len(data), 4)
    measured = rank(embeddings, data.labels, [1], data.ranking)
    save_neighbours(tmp_path, Measured(*measured, embeddings, data.labels, data.ranking))
    with np.load(tmp_path / "neighbours.npz") as file:
        saved = dict(file)
    ranks, queries = measured[1], saved["queries"].tolist()
    assert queries == ranks.rows.tolist(), "all: there are fewer than are saved"
    np.testing.assert_array_equal(saved["precision"], ranks.average_precision)
    near = [ranked(data, embeddings, query) for query in queries]
    assert saved["neighbours"].tolist() == [row[: min(NEAREST, *map(len, near))] for row in near]
