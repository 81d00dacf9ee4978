"""Queries and their nearest neighbours, which a run saves for its report: for inspection, never for a choice."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_metric_learning.utils.inference import FaissKNN
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.datasets import Glyphs, ImageSet

SPREAD, EXTREMES, NEIGHBOURS = 8, 4, 8  # queries of each kind, and neighbours of each query

RANKED = 2**22  # neighbours held at a time


def neighbours(embeddings: Tensor, k: int, rows: Tensor, gallery: Tensor | None) -> Tensor:
    """Nearest other images (q, k) of the images `rows`, nearest first, ranked as for the metrics.

    They come from the gallery, or without one from all images. The image itself is left out, its exact duplicates
    are not.
    """
    unit = normalize(embeddings)
    if gallery is not None:
        return gallery[FaissKNN()(unit[rows], k, unit[gallery])[1]]
    _, found = FaissKNN()(unit[rows], k + 1, unit)
    itself = found == rows[:, None]
    # If more than k duplicates stand before the image, it is not in its own ranking.
    itself[~itself.any(dim=1), -1] = True
    return found[~itself].view(len(rows), k)


def save_showcase(folder: Path, dataset: Glyphs | ImageSet, embeddings: Tensor) -> None:
    """Write `retrieval.npz` into the run folder; call it on one process.

    Args:
        dataset: The tested dataset; at least one query has an image to find.
        embeddings: (n, E), of the whole dataset.
    """
    precision = average_precision(embeddings, dataset.labels, dataset.is_query)
    np.savez_compressed(folder / "retrieval.npz", **retrieval(dataset, embeddings, precision))


def _queries_and_gallery(n: int, is_query: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if is_query is None:
        return torch.arange(n), None
    return is_query.nonzero()[:, 0], (~is_query).nonzero()[:, 0]


def average_precision(embeddings: Tensor, labels: Tensor, is_query: Tensor | None) -> Tensor:
    """Average precision at R of each image, (n,) float64, whose mean is MAP@R.

    R is the number of images of the query's class to find. The value is NaN if there are none, and for an image
    that is no query. Rankings are as deep as the largest class needs, and are held for some queries at a time.
    """
    rows, gallery = _queries_and_gallery(len(labels), is_query)
    sizes = torch.bincount(
        labels if gallery is None else labels[gallery], minlength=int(labels.max()) + 1
    )
    to_find = sizes[labels[rows]] - (1 if gallery is None else 0)
    rows, to_find = rows[to_find > 0], to_find[to_find > 0]
    depth = int(to_find.max())
    precision = torch.full((len(labels),), torch.nan, dtype=torch.float64)
    places = torch.arange(1, depth + 1)
    some = max(1, RANKED // depth)
    for queries, count in zip(rows.split(some), to_find.split(some), strict=True):
        found = neighbours(embeddings, depth, queries, gallery)
        hits = (labels[found] == labels[queries, None]) & (places <= count[:, None])
        precision[queries] = (hits * hits.cumsum(dim=1) / places.double()).sum(dim=1) / count
    return precision


def retrieval(
    dataset: Glyphs | ImageSet, embeddings: Tensor, precision: Tensor
) -> dict[str, NDArray[Any]]:
    """Queries, evenly spread and extreme, and their results: the rows of each array are queries."""
    rows, gallery = _queries_and_gallery(len(dataset), dataset.is_query)
    groups = {
        "evenly spread": rows[torch.linspace(0, len(rows) - 1, SPREAD).long().unique()],
        "best": _extremes(precision, dataset.labels, best=True),
        "worst": _extremes(precision, dataset.labels, best=False),
    }
    queries = torch.cat(list(groups.values()))
    others = len(dataset) - 1 if gallery is None else len(gallery)
    found = neighbours(embeddings, min(NEIGHBOURS, others), queries, gallery)
    shown = [queries.tolist(), *found.T.tolist()]  # (1 + neighbours) lists of queries
    pictures = np.array([[dataset.to_picture(dataset[i][0]) for i in column] for column in shown])
    names = np.array([[dataset.name(i) for i in column] for column in shown])
    return {
        "query_images": pictures[0],
        "neighbour_images": pictures[1:].swapaxes(0, 1),
        "query_labels": dataset.labels[queries].numpy(),
        "neighbour_labels": dataset.labels[found].numpy(),
        "query_names": names[0],
        "neighbour_names": names[1:].T,
        "query_groups": np.repeat(list(groups), [len(group) for group in groups.values()]),
        "query_precision": precision[queries].numpy(),
    }


def _extremes(precision: Tensor, labels: Tensor, *, best: bool) -> Tensor:
    """The queries of highest or lowest average precision, one per class; of equal ones the first."""
    queries = (~precision.isnan()).nonzero()[:, 0]
    order = queries[precision[queries].argsort(descending=best, stable=True)]
    _, first_of_class = np.unique(labels[order].numpy(), return_index=True)
    return order[np.sort(first_of_class)[:EXTREMES]]
