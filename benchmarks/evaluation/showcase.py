"""Queries and their nearest neighbours, which a run saves for its report: for inspection, never for a choice."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.evaluation.tester import Measured

QUERIES, NEIGHBOURS = 200, 8  # that are saved, and the neighbours of each


def neighbours(found: Measured, rows: Tensor, k: int = NEIGHBOURS) -> Tensor:
    """Nearest images (q, at most k) of the images `rows`, nearest first, ranked as for the metrics.

    There are as many for each as the smallest of their rankings has. Exact duplicates are among them.
    """
    unit, gallery = normalize(found.embeddings), found.ranking.gallery.nonzero()[:, 0]
    similarities = unit[rows] @ unit[gallery].T
    left_out = found.ranking.left_out(found.labels, rows, gallery)
    similarities.masked_fill_(left_out, -torch.inf)
    order = similarities.argsort(dim=1, descending=True, stable=True)
    return gallery[order[:, : min(k, int((~left_out).sum(dim=1).min()))]]


def save_neighbours(folder: Path, found: Measured) -> None:
    """Write `neighbours.npz` into the run folder: rows of the dataset, no pictures; call it on one process.

    "queries" (q,) are evenly spread over those that have something to find, the same for every network;
    "neighbours" (q, k) are their nearest images, and "precision" (q,) is their average precision.
    """
    ranks = found.ranks
    chosen = torch.linspace(0, len(ranks.rows) - 1, min(QUERIES, len(ranks.rows))).long()
    queries = ranks.rows[chosen]
    np.savez_compressed(
        folder / "neighbours.npz",
        queries=queries.numpy().astype(np.int32),
        neighbours=neighbours(found, queries).numpy().astype(np.int32),
        precision=ranks.average_precision[chosen].numpy(),
    )
