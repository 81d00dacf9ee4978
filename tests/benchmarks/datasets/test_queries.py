"""Queries with nothing to find, counted by loops."""

import torch

from benchmarks.datasets import answerable
from pml_regularizers import RankAccuracyCalculator


def test_queries_with_nothing_to_find_are_those_that_the_calculator_leaves_out() -> None:
    for is_query in (None, *(torch.rand(40) < share for share in (0.2, 0.5, 0.9))):
        labels = torch.randint(0, 25, (40,))
        gallery = range(40) if is_query is None else (~is_query).nonzero()[:, 0].tolist()
        asked = range(40) if is_query is None else is_query.nonzero()[:, 0].tolist()
        found = [i for i in asked if any(labels[i] == labels[j] and i != j for j in gallery)]
        assert answerable(labels, is_query).nonzero()[:, 0].tolist() == found
        calculator = RankAccuracyCalculator(include=("recall_at_1",))
        references = None if is_query is None else ~is_query
        calculator.get_accuracy_within(
            torch.randn(40, 3), labels, queries=is_query, references=references
        )
        assert calculator.left_out == len(asked) - len(found) > 0
