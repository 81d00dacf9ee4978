r"""Verification: are two images of one class? By the cosine similarity s of their embeddings, on unseen classes.

    true accepts(t)  = share of the pairs of one class with s >= t
    false accepts(t) = share of the pairs of two classes with s >= t
    area             = chance that a pair of one class has the larger s, a tie counting half: the area under the ROC

Pairs are all of two different images, or each query with each image of the gallery. Similarities are computed in
float64, block by block, and counted in `BINS` bins of -1..1, so that memory does not grow with the pairs. A
threshold is the lower edge of a bin: the lowest with at most the asked share of false accepts, at most 3.1e-5 above
the exact one; the shares are exact for the threshold that is given. The area takes similarities in one bin as ties,
and is off by at most half of its bins' sum of (share of the pairs of one class) x (share of those of two classes).

Pairs that share images or classes are not independent. The 95 % intervals are therefore over classes: a jackknife
that leaves out a group of classes with all its pairs, each class being a group, or `GROUPS` groups of equally many,
drawn with a fixed seed; +- t sqrt((G - 1) / G sum_g (x_g - mean)^2), with Student's t of G - 1 degrees of freedom.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from math import ceil
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from scipy.special import stdtrit
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.datasets.queries import Ranking

BINS = 2**16
BLOCK_ROWS = 2048  # a block of similarities takes 32 MiB in float64
GROUPS = 50
FALSE_ACCEPTS = (0.01, 0.001, 0.0001)
EXPECTED = 10  # false accepts (or misses), at least, for a threshold: fewer would be chance

Counts = NDArray[np.int64]
Block = TypeVar("Block")


def verify(
    vectors: Tensor,
    labels: Tensor,
    ranking: Ranking,
    accelerator: Accelerator | None = None,
    rates: Sequence[float] = FALSE_ACCEPTS,
) -> dict[str, Any]:
    """Measure verification, as run.json holds it: the same on any number of processes.

    Args:
        vectors: (n, D); they are L2-normalised here.
        labels: (n,), from zero.
        ranking: Pairs are of a query and an image that it is ranked against, each once.
        accelerator: Processes that share the blocks; all call this. None: this one alone, on the CPU.
        rates: Shares of false accepts.

    Returns:
        The area, and for each rate the true accepts and the threshold, each with the half-width of its interval:
        null if a group's absence leaves no pairs. With fewer than `EXPECTED` false accepts to expect, the three of
        a rate are null, and `needs` is the number of pairs of two classes that it takes.

    Raises:
        ValueError: if vectors are not finite, or there is no pair of one class or of two.
    """
    labels, group_of, groups = by_groups(vectors, labels)
    same, other, others = _counted(vectors, labels, group_of, groups, ranking, accelerator)
    same_pairs, other_pairs = int(same.sum()), int(others.sum())
    if not (same_pairs and other_pairs):
        raise ValueError(
            f"labels: expected pairs of one class and of two, got {same_pairs} and {other_pairs}"
        )
    # All pairs, then those without each group.
    samples = [(same.sum(axis=0), others)]
    samples += [(samples[0][0] - same[g], others - other[g]) for g in range(groups)]
    complete = groups > 2 and all(a.any() and b.any() for a, b in samples)
    used = samples if complete else samples[:1]

    def estimated(values: Sequence[float], name: str) -> dict[str, Any]:
        whole, *left = values
        known = left and np.isfinite(left).all()
        wide = half_width(left) if known and np.isfinite(whole) else None
        return {name: whole if np.isfinite(whole) else None, f"{name}_half_width": wide}

    rows: list[dict[str, Any]] = []
    for rate in rates:
        accepts, thresholds = zip(*(_at(rate, *sample) for sample in used), strict=True)
        row = estimated(accepts, "true_accepts") | estimated(thresholds, "threshold")
        if rate * other_pairs < EXPECTED:
            row = dict.fromkeys(row) | {"needs": ceil(EXPECTED / rate)}
        rows.append({"false_accepts": rate, **row})
    counts = {"classes": int(labels.max()) + 1, "groups": groups}
    counts |= {"same_pairs": same_pairs, "other_pairs": other_pairs}
    area = estimated([_area(*sample) for sample in used], "area")
    return {**counts, **area, "rates": rows}


def by_groups(vectors: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
    """Labels from zero, and each image's group of classes for the jackknife, with the number of groups.

    Raises:
        ValueError: if vectors are not finite.
    """
    if not vectors.isfinite().all():
        raise ValueError("vectors: expected finite embeddings, got NaN or inf")
    classes, labels = labels.unique(return_inverse=True)
    groups = min(len(classes), GROUPS)
    draw = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    return labels, (draw % groups)[labels], groups


def half_width(left: Sequence[float]) -> float:
    """Half-width of the jackknife's 95 % interval, by the values without each group of classes."""
    t = stdtrit(len(left) - 1, 0.975)
    return float(t * np.sqrt((len(left) - 1) * np.var(left)))


def own_share(blocks: Sequence[Block], accelerator: Accelerator | None) -> Sequence[Block]:
    """The blocks that this process measures."""
    if accelerator is None:
        return blocks
    return blocks[accelerator.process_index :: accelerator.num_processes]


def _area(same: Counts, other: Counts) -> float:
    (bins,) = np.nonzero(same + other)
    truth, weights = np.repeat([1, 0], len(bins)), np.concatenate([same[bins], other[bins]])
    return float(roc_auc_score(truth, np.tile(bins, 2), sample_weight=weights))


def _at(rate: float, same: Counts, other: Counts) -> tuple[float, float]:
    """The true accepts and the lowest threshold with at most this share of false accepts; inf if there is none."""
    above = other[::-1].cumsum()[::-1]  # pairs of two classes in a bin or a higher one; falls
    place = int((above > rate * above[0]).sum())
    threshold = 2 * place / BINS - 1 if place < BINS else float("inf")
    return float(same[place:].sum() / same.sum()), threshold


def _counted(
    vectors: Tensor,
    labels: Tensor,
    groups: Tensor,
    count: int,
    ranking: Ranking,
    accelerator: Accelerator | None,
) -> tuple[Counts, Counts, Counts]:
    """Pairs by bin: of one class (G, BINS), of two that a group has a part in (G, BINS), and all of two (BINS,)."""
    device = torch.device("cpu")
    if accelerator is not None and accelerator.device.type == "cuda":
        device = accelerator.device
    counts = torch.zeros(2 * count + 1, BINS, dtype=torch.int64, device=device)
    same, other, others = counts[:count], counts[count:-1], counts[-1]
    unit = normalize(vectors.double()).to(device)
    labels, groups = labels.to(device), groups.to(device)
    moved: Any = {k: x.to(device) for k, x in vars(ranking).items() if isinstance(x, Tensor)}
    ranking = replace(ranking, **moved)
    parts = torch.arange(len(unit), device=device).split(BLOCK_ROWS)
    for rows, columns in own_share([*combinations_with_replacement(parts, 2)], accelerator):
        kept = ranking.queries[rows, None] & ranking.gallery[columns]
        kept |= ranking.gallery[rows, None] & ranking.queries[columns]
        kept &= ~ranking.left_out(labels, rows, columns)
        if rows is columns:  # each pair once
            kept = kept.triu(1)
        if not kept.any():
            continue
        bins = (unit[rows] @ unit[columns].T).add_(1).mul_(BINS / 2).long().clamp_(0, BINS - 1)
        alike = labels[rows, None] == labels[columns]
        apart = kept & ~alike
        others += torch.bincount(bins[apart], minlength=BINS)
        for table, group, pairs in (
            (same, groups[rows, None], kept & alike),
            (other, groups[rows, None], apart),
            (other, groups[columns], apart & (groups[rows, None] != groups[columns])),
        ):
            places = (group * BINS + bins)[pairs]
            table += torch.bincount(places, minlength=table.numel()).view_as(table)
    if accelerator is not None:  # exact: of integers
        counts = accelerator.reduce(counts.to(accelerator.device), "sum")
    array = counts.cpu().numpy()
    return array[:count], array[count:-1], array[-1]
