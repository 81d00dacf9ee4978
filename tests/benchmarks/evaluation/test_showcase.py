"""Neighbours that a run saves for its report: every number by brute force."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.evaluation import showcase
from benchmarks.evaluation.showcase import neighbours, save_showcase
from benchmarks.evaluation.tester import Measured, rank

CHANNELS, SIZE = 5, 3
ROUNDING = 1e-12  # float64 sums of at most some tens of terms


class Images(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """Random images of classes of the given sizes, in shuffled order; the first of each class may be queries."""

    def __init__(self, *sizes: int, queries: int = 0) -> None:
        rng = np.random.default_rng(sum(sizes))
        self.labels = torch.from_numpy(rng.permutation(np.repeat(np.arange(len(sizes)), sizes)))
        self.images = torch.from_numpy(rng.normal(size=(sum(sizes), CHANNELS, 2, SIZE))).float()
        self.class_names = [f"class {label}" for label in range(len(sizes))]
        self.is_query = None
        if queries:
            self.is_query = torch.zeros(len(self.labels), dtype=torch.bool)
            for label in range(len(sizes)):
                self.is_query[(self.labels == label).nonzero()[:queries, 0]] = True

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self.images[index], int(self.labels[index]), index

    def name(self, index: int) -> str:
        return f"image {index}"

    def to_picture(self, image: Tensor) -> np.ndarray:
        return (image[:3].permute(1, 2, 0) * 30 + 128).clamp(0, 255).byte().numpy()

    def embeddings(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        centres = torch.randn(len(self.class_names), 4, generator=generator)
        return centres[self.labels] + torch.randn(len(self), 4, generator=generator)


def rankings(data: Images, embeddings: Tensor) -> dict[int, list[int]]:
    """For every query with something to find: the other images, nearest first, in float64 loops."""
    unit = embeddings.double().numpy()
    unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    everything = range(len(data))
    rows = [i for i in everything if data.is_query is None or data.is_query[i]]
    gallery = [i for i in everything if data.is_query is None or not data.is_query[i]]
    found = {}
    for q in rows:
        others = sorted(
            (i for i in gallery if i != q), key=lambda i: ((unit[q] - unit[i]) ** 2).sum()
        )
        if any(data.labels[i] == data.labels[q] for i in others):
            found[q] = others
    return found


SETS = {
    "unequal classes, two of one image": Images(9, 1, 5, 1, 2),
    "a gallery that lacks a class": Images(7, 2, 6, 5, queries=2),
}


@pytest.fixture(params=SETS)
def data(request: pytest.FixtureRequest) -> Images:
    return SETS[request.param]


def found_in(data: Images, embeddings: Tensor) -> Measured:
    return Measured(*rank(embeddings, data.labels, [1], data.is_query), embeddings, data.labels)


def test_neighbours_among_duplicates() -> None:
    """More duplicates than k: the query may be missing from its own ranking."""
    embeddings = torch.tensor([[1.0, 0.0]]).repeat(7, 1)
    for k in (1, 6):
        found = neighbours(embeddings, k, torch.arange(7), None)
        assert found.shape == (7, k)
        for query, row in enumerate(found.tolist()):
            assert query not in row and len(set(row)) == k


def test_queries_are_spread_best_and_worst_with_their_neighbours(
    data: Images, tmp_path: Path
) -> None:
    """The best and the worst are of different classes."""
    found = found_in(data, data.embeddings())
    save_showcase(tmp_path, data, found)  # type: ignore[arg-type]
    with np.load(tmp_path / "retrieval.npz") as file:
        saved = dict(file)
    ranks, ranked = found.ranks, rankings(data, data.embeddings())
    precision = dict(zip(ranks.rows.tolist(), ranks.average_precision.tolist(), strict=True))
    queries = np.array([int(name.split()[1]) for name in saved["query_names"]])
    groups = saved["query_groups"]
    assert list(dict.fromkeys(groups)) == ["evenly spread", "best", "worst"]
    for group, sign in (("best", -1), ("worst", 1)):
        order = sorted(precision, key=lambda i: (sign * precision[i], i))
        expected: dict[int, int] = {}
        for i in order:
            expected.setdefault(int(data.labels[i]), i)
        assert queries[groups == group].tolist() == list(expected.values())[: showcase.EXTREMES]
    wanted = [precision.get(query, np.nan) for query in queries]
    np.testing.assert_equal(saved["query_precision"], wanted)
    assert len(set(queries[groups == "evenly spread"])) == (groups == "evenly spread").sum()
    near = {
        query: names.tolist()
        for query, names in zip(queries, saved["neighbour_names"], strict=True)
        if query in ranked
    }
    assert len(near) > 4
    for query, names in near.items():
        assert names == [f"image {i}" for i in ranked[query][: showcase.NEIGHBOURS]]
    assert len(saved["query_images"]) == len(groups)
