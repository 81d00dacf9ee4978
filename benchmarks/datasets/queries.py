"""Queries of a test, what each is ranked against, and those that have nothing to find."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from benchmarks.datasets.listing import Listing
from pml_regularizers.metrics.ranks import count_right


@dataclass(frozen=True)
class Ranking:
    """Queries and gallery among n images; an image is never ranked against itself.

    Args:
        queries, gallery: (n,) bool. An image may be in both.
        groups: (n,) integers, such as cameras: gallery images of a query's class and group leave its ranking.
        whole_groups: So do those of its group and of other classes.
    """

    queries: Tensor
    gallery: Tensor
    groups: Tensor | None = None
    whole_groups: bool = False

    @classmethod
    def of_all(cls, n: int) -> Self:
        """Every image is a query among all others."""
        return cls(torch.ones(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool))

    @classmethod
    def apart(cls, is_query: Tensor) -> Self:
        """The images that are no queries are the gallery."""
        return cls(is_query, ~is_query)

    @classmethod
    def listed(
        cls, listing: Listing, rows: Sequence[int], parts: Sequence[str] | None = None
    ) -> Self | None:
        """That of tested images, the rows of a listing; None for the usual one.

        Args:
            parts: Of each of the rows; default: as listed.
        """
        parts = [listing.parts[row] for row in rows] if parts is None else parts
        if listing.groups is None and {*parts} <= {"test"}:
            return None
        queries = torch.tensor([part != "gallery" for part in parts])
        gallery = torch.tensor([part != "query" for part in parts])
        groups = None
        if listing.groups is not None:
            _, numbers = np.unique([listing.groups[row] for row in rows], return_inverse=True)
            groups = torch.from_numpy(numbers)
        return cls(queries, gallery, groups, listing.whole_groups)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Tensor]) -> Self | None:
        """The one that `arrays` has written, today or when it wrote queries alone."""
        if "is_query" not in arrays:
            return None
        queries = arrays["is_query"]
        gallery = arrays.get("is_gallery", ~queries)
        return cls(queries, gallery, arrays.get("groups"), bool(arrays.get("whole_groups")))

    def arrays(self) -> dict[str, Tensor]:
        """Its parts, to be saved."""
        parts = {"is_query": self.queries, "is_gallery": self.gallery}
        if self.groups is not None:
            parts |= {"groups": self.groups, "whole_groups": torch.tensor(self.whole_groups)}
        return parts

    def taken(self, rows: Tensor) -> Self:
        """That of some of the images."""
        groups = None if self.groups is None else self.groups[rows]
        return type(self)(self.queries[rows], self.gallery[rows], groups, self.whole_groups)

    def right(self, labels: Tensor) -> Tensor:
        """(n,): how many gallery images of its class each image would be ranked against."""
        return count_right(labels, self.gallery, self.groups)

    def wrong(self, labels: Tensor) -> Tensor:
        """(n,): how many gallery images of other classes each image would be ranked against."""
        others = self.gallery.sum() - count_right(labels, self.gallery) - self.gallery.long()
        if self.groups is not None and self.whole_groups:
            others -= count_right(self.groups, self.gallery, labels)
        return others

    def left_out(self, labels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Mask (r, c) of the images, by their places `columns`, that leave the rankings of the images `rows`."""
        itself = rows[:, None] == columns
        if self.groups is None:
            return itself
        same = self.groups[rows][:, None] == self.groups[columns]
        if not self.whole_groups:
            same &= labels[rows][:, None] == labels[columns]
        return itself | same


def answerable(labels: Tensor, ranking: Ranking | None) -> Tensor:
    """(n,) bool: the queries with another image of their class to find; the others leave every metric."""
    ranking = ranking or Ranking.of_all(len(labels))
    return ranking.queries & (ranking.right(labels) > 0)


def count_queries(labels: Tensor, ranking: Ranking | None) -> tuple[int, int]:
    """The queries, and how many of them have nothing to find."""
    asked = len(labels) if ranking is None else int(ranking.queries.sum())
    return asked, asked - int(answerable(labels, ranking).sum())


def queries_text(asked: int, unanswered: int) -> str:
    """These counts in words.

    >>> queries_text(1200, 4)
    '1,200 queries, of which 4 have nothing to find and do not count'
    """
    left_out = f", of which {unanswered:,} have nothing to find and do not count"
    return f"{asked:,} queries{left_out if unanswered else ''}"


def leaving_text(camera: str | None, sequence: str | None) -> str:
    """The images that leave the rankings, by the columns of `Data`; empty if there are none.

    >>> leaving_text("camera_id", None)
    'images of a query's class and camera (column camera_id) leave its ranking'
    """
    if camera is None and sequence is None:
        return ""
    kind = "class and camera" if sequence is None else "sequence"
    return f"images of a query's {kind} (column {camera or sequence}) leave its ranking"
