"""Neighbours that a run saves for its report: every number by brute force."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.datasets.queries import Ranking
from benchmarks.evaluation.showcase import EXTREMES, NEIGHBOURS, neighbours, save_showcase
from benchmarks.evaluation.tester import Measured, rank
from tests.benchmarks.datasets.test_queries import ranked as in_ranking


class Images(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """Images of unequal classes, one of which has a single image; all pixels of an image are its number."""

    def __init__(self, kind: str) -> None:
        self.labels = torch.tensor([0, 2, 0, 4, 2, 0, 1, 0, 2, 4, 2, 0, 3, 2, 0, 3, 0, 4, 0])
        n, self.ranking = len(self.labels), None
        if kind != "all":  # the gallery lacks class 3
            self.ranking = Ranking.apart((self.labels == 3) | (torch.arange(n) % 3 == 0))
        if kind == "cameras":
            self.ranking = replace(self.ranking, groups=torch.arange(n) % 2)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return torch.full((3, 2, 2), float(index)), int(self.labels[index]), index

    def name(self, index: int) -> str:
        return f"image {index}"

    def to_picture(self, image: Tensor) -> np.ndarray:
        return image.permute(1, 2, 0).byte().numpy()


def ranked(data: Images, embeddings: Tensor, query: int) -> list[int]:
    """The images that a query is to find, nearest first, in float64."""
    unit = torch.nn.functional.normalize(embeddings.double())
    distances = (unit - unit[query]).norm(dim=1)
    return sorted(in_ranking(data.ranking, data.labels)[query], key=distances.tolist().__getitem__)


def test_among_more_copies_than_neighbours_the_first_ones_are_shown():
    """Also of an image that does not stand in its own ranking."""
    near = neighbours(torch.ones(12, 2), torch.zeros(12), 3, torch.tensor([11, 1]), None)
    assert near.tolist() == [[0, 1, 2], [0, 2, 3]]


@pytest.mark.parametrize("kind", ["all", "gallery", "cameras"])
def test_queries_are_spread_best_and_worst_with_their_neighbours(kind, tmp_path):
    """The best and the worst are of different classes."""
    data = Images(kind)
    embeddings = torch.randn(5, 4)[data.labels] + torch.randn(len(data), 4)
    measured = rank(embeddings, data.labels, [1], data.ranking)
    save_showcase(tmp_path, data, Measured(*measured, embeddings, data.labels))  # type: ignore[arg-type]
    with np.load(tmp_path / "retrieval.npz") as file:
        saved = dict(file)
    ranks = measured[1]
    precision = dict(zip(ranks.rows.tolist(), ranks.average_precision.tolist(), strict=True))
    queries, groups = saved["query_images"][:, 0, 0, 0], saved["query_groups"]
    assert list(dict.fromkeys(groups)) == ["evenly spread", "best", "worst"]
    for group, sign in (("best", -1), ("worst", 1)):
        expected: dict[int, int] = {}
        for i in sorted(precision, key=lambda i: (sign * precision[i], i)):
            expected.setdefault(int(data.labels[i]), i)
        assert queries[groups == group].tolist() == list(expected.values())[:EXTREMES]
    wanted = [precision.get(query, np.nan) for query in queries.tolist()]
    np.testing.assert_equal(saved["query_precision"], wanted)
    spread = queries[groups == "evenly spread"]
    assert len(set(spread.tolist())) == len(spread) > 4
    assert saved["query_names"].tolist() == [f"image {i}" for i in queries]
    near = [ranked(data, embeddings, query) for query in queries.tolist()]
    near = [row[: min(NEIGHBOURS, *map(len, near))] for row in near]
    assert saved["neighbour_images"][..., 0, 0, 0].tolist() == near
    assert saved["neighbour_labels"].tolist() == [data.labels[row].tolist() for row in near]
