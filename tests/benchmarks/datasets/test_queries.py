"""Queries with nothing to find, counted by loops."""

import pytest
import torch

from benchmarks.datasets.queries import Ranking, answerable
from benchmarks.evaluation.tester import rank

N = 40

SOME, OTHERS, CAMERAS = torch.rand(3, N, generator=torch.Generator().manual_seed(0))

RANKINGS = {
    "all": None,
    "gallery": Ranking.apart(SOME < 0.2),
    "few": Ranking.apart(SOME < 0.9),
    "both": Ranking(SOME < 0.7, OTHERS < 0.7),
    "cameras": Ranking(SOME < 0.7, OTHERS < 0.7, (3 * CAMERAS).long()),
    "sequences": Ranking(SOME < 0.9, OTHERS < 0.9, (3 * CAMERAS).long(), whole_groups=True),
}
"""Also for the tests of what is measured by them."""


def ranked(ranking: Ranking | None, labels: torch.Tensor) -> list[list[int]]:
    """The images in the ranking of each image, none if it is no query: by the rule in words."""
    n, y = len(labels), labels.tolist()
    ranking = ranking or Ranking.of_all(n)
    queries, gallery = ranking.queries.tolist(), ranking.gallery.tolist()
    groups = [*range(n)] if ranking.groups is None else ranking.groups.tolist()

    def leaves(i: int, j: int) -> bool:
        return i == j or (groups[i] == groups[j] and (ranking.whole_groups or y[i] == y[j]))

    every = range(n)
    return [[j for j in every if queries[i] and gallery[j] and not leaves(i, j)] for i in every]


@pytest.mark.parametrize("name", RANKINGS)
def test_queries_with_nothing_to_find_are_those_that_have_no_ranks(name: str) -> None:
    ranking, labels = RANKINGS[name], torch.randint(0, 15, (N,))
    asked = N if ranking is None else int(ranking.queries.sum())
    others = enumerate(ranked(ranking, labels))
    expected = [i for i, them in others if any(labels[i] == labels[j] for j in them)]
    assert answerable(labels, ranking).nonzero()[:, 0].tolist() == expected
    if ranking is not None:  # as folds save it, and as they did when all others were the gallery
        again = Ranking.of_arrays(ranking.arrays())
        assert again is not None and ranked(again, labels) == ranked(ranking, labels)
        older = Ranking.of_arrays({"is_query": ranking.queries})
        assert older is not None and torch.equal(older.gallery, ~ranking.queries)
    _, ranks = rank(torch.randn(N, 3), labels, [1], ranking)
    assert sorted(ranks.rows.tolist()) == expected and len(expected) < asked
