r"""Open-set identification: is a photograph of a class in the gallery, and of which one?

A query is compared with the whole gallery and gets the class of the nearest image, if that similarity s reaches t:

    FPIR(t) = share of the unknown queries with s >= t
    TPIR(t) = share of the known queries with s >= t whose nearest image is of their class

(false and true positive identification rate, as in NIST's evaluations). Each query is asked twice: as an unknown
one, with all images of its class left out of the gallery, and, if its class has another image there, as a known
one, with only the images left out that leave its ranking
(`datasets.Ranking`), such as itself. An image of another class that is less than `TIE` farther is the nearest.

The best of n impostors grows with n. Whatever the images, with a gallery of r n of them at most r times as many
unknown queries reach t as with its parts of n on average: the nearest image lies in a part with a chance of 1 / r.
So a rate measured with n images is a limit: times r in a larger gallery, as it is in a smaller one.

Queries that share classes are not independent: the 95 % intervals are over classes, by the jackknife of
`verification`, which leaves a group of classes out of queries and gallery.
"""

from collections.abc import Sequence
from math import ceil
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.datasets.queries import Ranking
from benchmarks.evaluation.verification import (
    BLOCK_ROWS,
    EXPECTED,
    by_groups,
    half_width,
    own_share,
)

FALSE_POSITIVES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001)
REPORTED = (0.1, 0.01, 0.001)  # the others are for galleries of other sizes
MISSED = 0.1  # share of the known queries that may be called unknown
TIE = 1e-6

Values = NDArray[np.float64]


class Scores(NamedTuple):
    """Of q queries: similarities to the nearest image of their own class and of others; -inf if there is none."""

    own: Values
    other: Values
    without: Values  # `other` without the images of the group that it is of
    group_of_other: NDArray[np.int64]
    groups: NDArray[np.int64]  # of the queries' own classes

    def leave_out(self, group: int) -> "Scores":
        """The scores without the images of a group of classes."""
        other = np.where(self.group_of_other == group, self.without, self.other)
        return Scores(*(values[self.groups != group] for values in self._replace(other=other)))

    @property
    def impostors(self) -> Values:
        """The similarities of unknown queries: of all that were compared with another class."""
        return self.other[self.other > -np.inf]

    def is_complete(self) -> bool:
        """True if there are known and unknown queries."""
        return bool((self.own > -np.inf).any() and len(self.impostors))

    def false_positives(self, threshold: float) -> float:
        return float((self.impostors >= threshold).mean())

    def named(self, threshold: float) -> tuple[float, float]:
        """The shares of the known queries that are named rightly and wrongly."""
        known = self.own > -np.inf
        own, other = self.own[known], self.other[known]
        right = own > other + TIE
        called = np.maximum(own, other) >= threshold
        return float((right & called).mean()), float((~right & called).mean())

    def threshold(self, rate: float) -> float:
        """The lowest one with at most this share of false positives."""
        above = np.sort(self.impostors)[::-1]
        return float(np.nextafter(above[int(rate * len(above) + TIE)], np.inf))

    def unknown(self) -> float:
        """The highest similarity below which at most `MISSED` of the known queries lie."""
        best = np.sort(np.maximum(self.own, self.other)[self.own > -np.inf])
        return float(best[int(MISSED * len(best) + TIE)])


def identify(
    vectors: Tensor,
    labels: Tensor,
    ranking: Ranking | None = None,
    accelerator: Accelerator | None = None,
) -> dict[str, Any]:
    """Measure identification, as run.json holds it: the same on any number of processes, which all call this.

    Args:
        vectors: (n, D); they are L2-normalised here.
        ranking: Queries and gallery. Default: each image is a query among all others.

    Returns:
        For each rate of `FALSE_POSITIVES` a threshold, the shares of known queries that are named rightly and
        wrongly, and half-widths of intervals: null without one. With too few queries for a rate of `REPORTED`, all
        are null, and `needs` says how many it takes. "unknown" has the similarity below which a query is called
        so; "compared", the mean number of images that an unknown query was compared with.

    Raises:
        ValueError: if vectors are not finite, or the gallery has no further image of any query's class, or none of
            another class.
    """
    labels, group_of, count = by_groups(vectors, labels)
    ranking = ranking or Ranking.of_all(len(labels))
    asked, gallery = ranking.queries, ranking.gallery
    scores = best_scores(vectors, labels, group_of, count, ranking, accelerator)
    known, queries = scores.own > -np.inf, len(scores.impostors)
    if not scores.is_complete():
        raise ValueError("labels: expected queries with other images of their class, and of others")
    sizes = torch.bincount(labels[gallery])
    own, compared = ranking.right(labels)[asked], ranking.wrong(labels)[asked]
    found: dict[str, Any] = {
        **{"gallery_images": int(gallery.sum()), "gallery_classes": int((sizes > 0).sum())},
        **{"compared": int(compared.double().mean())},
        **{"unknown_queries": queries, "unknown_classes": len(labels[asked].unique())},
        **{
            "known_queries": int(known.sum()),
            "known_classes": len(labels[asked][own > 0].unique()),
        },
        **{"own_images": int(own[own > 0].median()), "groups": count},
    }
    left = [scores.leave_out(group) for group in range(count)]
    if count < 3 or not all(one.is_complete() for one in left):
        left = []
    rates = [r for r in FALSE_POSITIVES if r in REPORTED or r * queries >= EXPECTED]
    unknown: dict[str, Any] = {"missed": MISSED, "threshold": None, "rejected": None}
    if MISSED * known.sum() < EXPECTED:
        unknown["needs"] = ceil(EXPECTED / MISSED)
    else:
        unknown["threshold"] = scores.unknown()
        unknown["rejected"] = 1 - scores.false_positives(scores.unknown())
    return {**found, "rates": [_row(rate, scores, left) for rate in rates], "unknown": unknown}


def _row(rate: float, scores: Scores, left: Sequence[Scores]) -> dict[str, Any]:
    """The measurements at a rate of false positives; `left`, without each group of classes, gives intervals."""
    names = ("threshold", "true_positives", "true_positives_half_width", "misnamed")
    row = {"false_positives": rate, **dict.fromkeys((*names, "false_positives_half_width"))}
    if rate * len(scores.impostors) < EXPECTED:
        return row | {"needs": ceil(EXPECTED / rate)}
    threshold = scores.threshold(rate)
    row["true_positives"], row["misnamed"] = scores.named(threshold)
    if threshold <= 1 - TIE:  # above, only copies are
        row["threshold"] = threshold
    if left:
        false = [fewer.false_positives(threshold) for fewer in left]
        true = [fewer.named(fewer.threshold(rate))[0] for fewer in left]
        row["false_positives_half_width"] = half_width(false)
        row["true_positives_half_width"] = half_width(true)
    return row


def best_scores(
    vectors: Tensor,
    labels: Tensor,
    groups: Tensor,
    count: int,
    ranking: Ranking,
    accelerator: Accelerator | None,
) -> Scores:
    """The scores of all queries, in their order, block by block; `groups` has each image's group of classes."""
    every, mine = torch.arange(len(labels)), list[tuple[int, list[Tensor]]]()
    queries, gallery = every[ranking.queries], every[ranking.gallery]
    of_groups = ((g, gallery[groups[gallery] == g]) for g in range(count))
    parts = [(g, block) for g, images in of_groups for block in images.split(BLOCK_ROWS)]
    parts = [(g, block) for g, block in parts if len(block)]
    # On the CPU in float32, whose rounding is far below `TIE`: a GPU may round to far fewer digits.
    unit = normalize(vectors.double()).float()
    for block, rows in own_share([*enumerate(queries.split(BLOCK_ROWS))], accelerator):
        own = torch.full((len(rows),), -torch.inf)
        others = torch.full((len(rows), count), -torch.inf)
        for group, columns in parts:
            similarities = unit[rows] @ unit[columns].T
            if ranking.whole_groups:
                left_out = ranking.left_out(labels, rows, columns)
                similarities.masked_fill_(left_out, -torch.inf)
            inside = (groups[rows] == group).nonzero().flatten()  # only these have mates there
            alike = labels[rows[inside]][:, None] == labels[columns]
            mates = alike & ~ranking.left_out(labels, rows[inside], columns)
            near = similarities[inside]
            own[inside] = own[inside].maximum(near.where(mates, -torch.inf).amax(dim=1))
            similarities[inside] = near.masked_fill(alike, -torch.inf)
            others[:, group] = others[:, group].maximum(similarities.amax(dim=1))
        other, place = others.max(dim=1)
        without = others.scatter(1, place[:, None], -torch.inf).amax(dim=1)
        mine.append((block, [own, other, without, place]))
    blocks = sorted(mine if accelerator is None else gather_object(mine), key=itemgetter(0))
    own, other, without, place = map(torch.cat, zip(*(found for _, found in blocks), strict=True))
    own, other, without = (found.double() for found in (own, other, without))
    return Scores(*(x.numpy() for x in (own, other, without, place, groups[queries])))
