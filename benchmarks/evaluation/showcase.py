"""Files that a run saves for the pictures of reports and figures: for inspection, never for a choice.

`retrieval.npz` holds queries and their nearest neighbours. `features.npz` holds deep features of a few training
classes, and their means over all positions and over a sixth of them, as in HORDE's Figure 1.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_metric_learning.utils.inference import FaissKNN
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.datasets import Glyphs, ImageSet
from benchmarks.evaluation.embedding import evaluation_mode

SPREAD, EXTREMES, NEIGHBOURS = 8, 4, 8  # queries of each kind, and neighbours of each query

CLASSES, IMAGES = 6, 12  # classes whose deep features are shown, and images of each

POINTS = 720  # deep features in total: t-SNE takes some seconds for them

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


def save_showcase(
    folder: Path,
    model: nn.Module,
    train_set: Glyphs | ImageSet,
    dataset: Glyphs | ImageSet,
    embeddings: Tensor,
    *,
    batch_size: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the files that the report's pictures are drawn from; call it on one process.

    Args:
        folder: The run folder.
        model: The trained network, without DDP and torch.compile.
        train_set: The images whose deep features are shown.
        dataset: The tested dataset; at least one query has an image to find.
        embeddings: (n, E), of the whole dataset.
        batch_size: Images per forward pass.
        dtype: Type that the images are cast to.
    """
    precision = average_precision(embeddings, dataset.labels, dataset.is_query)
    np.savez_compressed(folder / "retrieval.npz", **retrieval(dataset, embeddings, precision))
    if features := deep_features(model, train_set, batch_size=batch_size, dtype=dtype):
        np.savez_compressed(folder / "features.npz", **features)


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


def deep_features(
    model: nn.Module,
    dataset: Glyphs | ImageSet,
    *,
    batch_size: int,
    dtype: torch.dtype | None = None,
) -> dict[str, NDArray[Any]] | None:
    """The deep features of some images, and their means over all positions and over a sixth of them.

    They are read at the stage `model.head.feature_map`; a network without it gives None. The sixth of positions
    is drawn for each image, from a separate seed.

    Returns:
        "features" (M, C), from about `POINTS` positions, with their "feature_labels" (M,); "means" and "thinned"
        (n, C) with their "labels" (n,), the places of their classes in "class_names"; "positions" and
        "thinned_positions", the numbers of deep features that "means" and "thinned" are means of.
    """
    stage = getattr(getattr(model, "head", None), "feature_map", None)
    if not isinstance(stage, nn.Module):
        return None
    rows = _some_images(dataset.labels)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    parts: list[tuple[Tensor, ...]] = []
    with evaluation_mode(model), torch.no_grad():
        for some in rows.split(batch_size):
            images = torch.stack([dataset[row][0] for row in some.tolist()]).to(device, dtype)
            seen: list[Any] = []
            with stage.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1])):
                model(images)
            if len(seen) != 1 or len(seen[0]) != len(some):  # an ensemble's
                return None
            features = _by_position(seen[0]).float().cpu()
            order = torch.rand(len(some), features.shape[1], generator=generator).argsort(dim=1)
            features = features.take_along_dim(order[:, :, None], dim=1)
            sixth = max(1, round(order.shape[1] / 6))
            shown = features[:, : max(1, POINTS // len(rows))]
            parts.append((shown, features.mean(dim=1), features[:, :sixth].mean(dim=1)))
    shown, means, thinned = (torch.cat(column) for column in zip(*parts, strict=True))
    classes, labels = dataset.labels[rows].unique(return_inverse=True)
    # Divided by the largest, which float16 might not hold: a picture has no scale.
    scale = (
        shown.abs().max().maximum(means.abs().max()).maximum(thinned.abs().max()).clamp_min(1e-30)
    )
    return {
        "features": (shown / scale).flatten(0, 1).half().numpy(),
        "feature_labels": labels.repeat_interleave(shown.shape[1]).numpy(),
        "means": (means / scale).half().numpy(),
        "thinned": (thinned / scale).half().numpy(),
        "labels": labels.numpy(),
        "class_names": np.array([dataset.class_names[label] for label in classes.tolist()]),
        "positions": np.array(order.shape[1]),
        "thinned_positions": np.array(sixth),
    }


def _some_images(labels: Tensor) -> Tensor:
    """Images of some classes that have enough images, or the most, evenly spread over these classes."""
    sizes = torch.bincount(labels).clamp(max=IMAGES)
    largest = sizes.argsort(descending=True, stable=True)
    largest = largest[: max(CLASSES, int((sizes == sizes.max()).sum()))]
    chosen = largest[torch.linspace(0, len(largest) - 1, min(CLASSES, len(largest))).long()]
    return torch.cat([(labels == label).nonzero()[:IMAGES, 0] for label in chosen])


def _by_position(features: Tensor) -> Tensor:
    """(N, C, H, W) or (N, L, C) -> (N, positions, C)."""
    return features.flatten(2).transpose(1, 2) if features.ndim == 4 else features
