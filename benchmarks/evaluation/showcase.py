"""Queries and their nearest neighbours, which a run saves for its report: for inspection, never for a choice."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.datasets.queries import Ranking
from benchmarks.evaluation.tester import Measured

SPREAD, EXTREMES, NEIGHBOURS = 8, 4, 8  # queries of each kind, and neighbours of each query

QUERIES = 200  # of `save_neighbours`


def neighbours(
    embeddings: Tensor, labels: Tensor, k: int, rows: Tensor, ranking: Ranking | None
) -> Tensor:
    """Nearest images (q, at most k) of the images `rows`, nearest first, ranked as for the metrics.

    There are as many for each as the smallest of their rankings has. Exact duplicates are among them.
    """
    unit, ranking = normalize(embeddings), ranking or Ranking.of_all(len(embeddings))
    gallery = ranking.gallery.nonzero()[:, 0]
    similarities = unit[rows] @ unit[gallery].T
    left_out = ranking.left_out(labels, rows, gallery)
    similarities.masked_fill_(left_out, -torch.inf)
    found = similarities.argsort(dim=1, descending=True, stable=True)
    return gallery[found[:, : min(k, int((~left_out).sum(dim=1).min()))]]


def save_showcase(folder: Path, dataset: Glyphs | ImageSet, found: Measured) -> None:
    """Write queries, evenly spread and extreme, with their results into `retrieval.npz`; call it on one process.

    At least one query has an image to find. The rows of each array are queries.
    """
    n, ranking = len(dataset), dataset.ranking
    precision = torch.full((n,), torch.nan, dtype=torch.float64)
    precision[found.ranks.rows] = found.ranks.average_precision
    rows = torch.arange(n) if ranking is None else ranking.queries.nonzero()[:, 0]
    groups = {
        "evenly spread": rows[torch.linspace(0, len(rows) - 1, SPREAD).long().unique()],
        "best": _extremes(precision, dataset.labels, best=True),
        "worst": _extremes(precision, dataset.labels, best=False),
    }
    queries = torch.cat(list(groups.values()))
    near = neighbours(found.embeddings, dataset.labels, NEIGHBOURS, queries, ranking)
    shown = [queries.tolist(), *near.T.tolist()]  # (1 + neighbours) lists of queries
    pictures = np.array([[dataset.to_picture(dataset[i][0]) for i in column] for column in shown])
    names = np.array([[dataset.name(i) for i in column] for column in shown])
    np.savez_compressed(
        folder / "retrieval.npz",
        query_images=pictures[0],
        neighbour_images=pictures[1:].swapaxes(0, 1),
        query_labels=dataset.labels[queries].numpy(),
        neighbour_labels=dataset.labels[near].numpy(),
        query_names=names[0],
        neighbour_names=names[1:].T,
        query_groups=np.repeat(list(groups), [len(group) for group in groups.values()]),
        query_precision=precision[queries].numpy(),
    )


def save_neighbours(folder: Path, dataset: Glyphs | ImageSet, found: Measured) -> None:
    """Write `neighbours.npz` into the run folder: rows of the dataset, no pictures; call it on one process.

    "queries" (q,) are evenly spread over those that have something to find, the same for every network;
    "neighbours" (q, k) are their nearest images.
    """
    rows, ranking = found.ranks.rows, dataset.ranking
    queries = rows[torch.linspace(0, len(rows) - 1, min(QUERIES, len(rows))).long()]
    near = neighbours(found.embeddings, dataset.labels, NEIGHBOURS, queries, ranking)
    arrays = {"queries": queries, "neighbours": near}
    whole: dict[str, Any] = {name: rows.numpy().astype(np.int32) for name, rows in arrays.items()}
    np.savez_compressed(folder / "neighbours.npz", **whole)


def _extremes(precision: Tensor, labels: Tensor, *, best: bool) -> Tensor:
    """The queries of highest or lowest average precision, one per class; of equal ones the first."""
    queries = (~precision.isnan()).nonzero()[:, 0]
    order = queries[precision[queries].argsort(descending=best, stable=True)]
    _, first_of_class = np.unique(labels[order].numpy(), return_index=True)
    return order[np.sort(first_of_class)[:EXTREMES]]
