"""Queries of a test: the images to search with, of which some may have nothing to find."""

from typing import Any

import torch
from torch import Tensor


def answerable(labels: Tensor, is_query: Tensor | None) -> Tensor:
    """(n,) bool: the queries with another image of their class to find; the others leave every metric.

    Args:
        labels: (n,) integers >= 0.
        is_query: (n,) bool; the others are the gallery. None: every image is both.
    """
    everything = torch.ones(len(labels), dtype=torch.bool)
    queries, gallery = (everything, everything) if is_query is None else (is_query, ~is_query)
    there = torch.bincount(labels[gallery], minlength=int(labels.max()) + 1)
    return queries & (there[labels] > (queries & gallery).long())


def count_queries(images: Any) -> tuple[int, int]:
    """The queries of a dataset with `labels` and `is_query`, and how many of them have nothing to find."""
    asked = len(images) if images.is_query is None else int(images.is_query.sum())
    return asked, asked - int(answerable(images.labels, images.is_query).sum())


def queries_text(asked: int, unanswered: int) -> str:
    """These counts in words.

    >>> queries_text(1200, 4)
    '1,200 queries, of which 4 have nothing to find and do not count'
    """
    left_out = f", of which {unanswered:,} have nothing to find and do not count"
    return f"{asked:,} queries{left_out if unanswered else ''}"
