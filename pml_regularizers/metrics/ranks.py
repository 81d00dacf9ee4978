r"""Ranks of the right references of each query, without lists of neighbours, in bounded memory.

With t_1 <= ... <= t_R the distances from a query to the references of its class, and w_j the number of
other references that are at most t_j away,

    r_j         = j + w_j                                                rank of the j-th right one
    Recall@K    = mean over queries of [r_1 <= K]
    MRR         = mean over queries of 1 / r_1
    R-precision = mean over queries of 1/R sum_j [r_j <= R]
    MAP@R       = mean over queries of 1/R sum_j [r_j <= R] j / r_j

(Musgrave, Belongie and Lim, "A Metric Learning Reality Check", ECCV 2020, section 3.2.) Only w_1 needs a count
over all references; r_j <= R needs only the R nearest wrong ones.

Distances are squared Euclidean, without the terms that are constant for a query: |x|^2 / 2 - q x, one matrix
product for a block of queries and all references, in float32, or in float64 for vectors in float64. Before that,
the median of some vectors is subtracted from all, so that a common offset costs no digits.

A tie counts against the model: a wrong reference as near as a right one comes before it. So the metrics do not
depend on the order of the images, and a model that maps all images to one point retrieves nothing. (At the edges of
its tiles, a matrix product may round equal columns differently.)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from math import frexp
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from ..functional.precision import device_for, in_float64

# Working memory of a process: large enough for a matrix product at full speed, the same for any data set.
BLOCK_BYTES = 64 * 2**20
BLOCK_ROWS = 448
PER_RIGHT = 64  # bytes that the ranks of a query take for each right reference
GROUP = 8  # columns of a group in the search for the nearest, which first looks at the nearest of each group
SAMPLE = 512  # vectors that the subtracted median is computed from
PART = 1024  # rows prepared at a time


class Ranks(NamedTuple):
    """Results of the queries that have right references, (q,) each; in float64, except for labels and rows.

    `nearest` is the rank of the nearest right reference: exact up to `max_rank`, else some larger rank. `rows` are
    the places of the queries among all rows.
    """

    nearest: Tensor
    average_precision: Tensor
    r_precision: Tensor
    labels: Tensor
    rows: Tensor


@dataclass
class QuerySharding:
    """The processes and the device that compute ranks; `RankAccuracyCalculator` explains the arguments."""

    device: torch.device
    accelerator: Any = None
    progress: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the processes, on the CPU."""
        if self.accelerator is not None and self.accelerator.num_processes > 1:
            values = self.accelerator.reduce(values.to(self.accelerator.device), "sum")
        return values.cpu()

    def share(self, blocks: Sequence[Tensor]) -> Iterable[Tensor]:
        """The blocks that this process ranks."""
        if self.accelerator is not None:
            blocks = blocks[self.accelerator.process_index :: self.accelerator.num_processes]
        return self.progress(blocks)


def count_ranks(
    parts: Sequence[Tensor],
    labels: Tensor,
    is_query: Tensor,
    is_reference: Tensor,
    *,
    normalize: bool,
    max_rank: int,
    sharing: QuerySharding,
    groups: Tensor | None = None,
    whole_groups: bool = False,
) -> Ranks:
    """Find the ranks of each query's right references among all references.

    Args:
        parts: Finite (n_i, D): the rows of one matrix, which is never made.
        labels: (n,).
        is_query, is_reference: (n,) bool. A query that is also a reference is left out of its own ranking.
        normalize: Compare the L2-normalised rows.
        max_rank: Largest rank of the nearest that must be exact.
        sharing: The processes that call this, all with the same arguments.
        groups: (n,). References of a query's class and group are left out of its ranking.
        whole_groups: Leave out those of its group and of other classes, too.
    """
    plan = _Plan.of(labels, is_query, is_reference, groups)
    rows = _prepared(parts, plan.order, normalize, sharing)
    references = rows[: plan.references]
    blocks = plan.blocks(rows.element_size())
    exact = torch.float64
    results = torch.zeros(3, len(plan.queries), dtype=exact, device=device_for(exact, rows.device))
    halves = torch.cat([part.square().sum(dim=1) / 2 for part in torch.split(references, PART)])
    distances = rows.new_empty(max(map(len, blocks), default=0), len(references))
    groups = plan.groups.to(rows.device)
    with _full_precision():
        for block in sharing.share(blocks):
            queries = plan.queries[block].to(rows.device)
            out = distances[: len(queries)]
            torch.addmm(halves, rows[queries], references.T, alpha=-1, out=out)
            if whole_groups:
                out.masked_fill_(groups[queries, None] == groups[: len(references)], torch.inf)
            places, no_right, R = (part.to(rows.device) for part in plan.right(block))
            results[:, block] = _measured(out, places, no_right, R, max_rank)
    # Exact: all summands except one are zero.
    nearest, average_precision, r_precision = sharing.sum(results)
    queries = plan.order[plan.queries]
    return Ranks(nearest, average_precision, r_precision, labels[queries], queries)


@dataclass(frozen=True)
class _Plan:
    """Order of the rows for ranking: references first, class by class, then the other queries."""

    order: Tensor  # the row at each place, without rows that are neither query nor reference
    references: int  # number of references
    # Places (q,) of the queries that have right references, sorted by the number of these: alike in a block.
    queries: Tensor
    first: Tensor  # (q,), the place where each query's class begins among the references
    count: Tensor  # (q,), the size of that class
    right_count: Tensor  # (q,), how many of it are in the query's ranking
    groups: Tensor  # the group at each place; without groups, each row is one

    @classmethod
    def of(
        cls, labels: Tensor, is_query: Tensor, is_reference: Tensor, groups: Tensor | None
    ) -> "_Plan":
        right = count_right(labels, is_reference, groups)
        classes, index = torch.unique(labels, return_inverse=True)
        order = ((~is_reference).long() * len(classes) + index).argsort(stable=True)
        order = order[(is_query | is_reference)[order]]
        references = int(is_reference.sum())
        index = index[order]
        counts = index[:references].bincount(minlength=len(classes))
        queries = (is_query & (right > 0))[order].nonzero().flatten()
        queries = queries[counts[index[queries]].argsort(stable=True)]
        first, of_query = counts.cumsum(0) - counts, index[queries]
        groups = order if groups is None else groups[order]
        found = first[of_query], counts[of_query], right[order[queries]]
        return cls(order, references, queries, *found, groups)

    def blocks(self, itemsize: int) -> list[Tensor]:
        """Blocks of queries to rank together, the same for any number of processes."""
        if len(self.queries) == 0:
            return []
        size = BLOCK_BYTES // (itemsize * self.references + PER_RIGHT * int(self.count.max()))
        return list(torch.split(torch.arange(len(self.queries)), min(max(size, 1), BLOCK_ROWS)))

    def right(self, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Places (b, C) of each query's class, a mask of places that do not count, and the number (b,) that do."""
        queries, first, count = (x[block, None] for x in (self.queries, self.first, self.count))
        nth = torch.arange(int(count.max()))
        places = first + nth.minimum(count - 1)
        no_right = (nth >= count) | (self.groups[places] == self.groups[queries])
        return places, no_right, self.right_count[block]


def count_right(labels: Tensor, is_reference: Tensor, groups: Tensor | None = None) -> Tensor:
    """The number (n,) of right references in each row's ranking: of its class, and not of its group.

    Without groups, only the row itself is left out.
    """
    classes, index = torch.unique(labels, return_inverse=True)
    right: Tensor = index[is_reference].bincount(minlength=len(classes))[index]
    if groups is None:
        return right - is_reference.long()
    both, index = torch.unique(torch.stack([index, groups], dim=1), dim=0, return_inverse=True)
    left: Tensor = index[is_reference].bincount(minlength=len(both))[index]
    return right - left


def _measured(
    distances: Tensor, places: Tensor, no_right: Tensor, R: Tensor, max_rank: int
) -> Tensor:
    """(3, b): rank of the nearest right reference, average precision and precision among the R nearest.

    `distances` (b, n) between queries and references are overwritten.
    """
    right = distances.gather(1, places).masked_fill_(no_right, torch.inf).sort(dim=1).values
    distances.scatter_(1, places, torch.inf)  # leaves only the wrong ones
    deepest = places.shape[1]
    wrong = _smallest(distances, deepest)
    nth = torch.arange(1, deepest + 1, device=R.device)
    # If more wrong ones than these are nearer, the rank is too small, but still larger than R.
    ranks = nth + torch.searchsorted(wrong, right, right=True)
    nearest = ranks[:, 0]
    if max_rank > deepest:
        # In place: a mask of booleans is summed at a tenth of the speed. Exact up to 2^24 references.
        nearest = 1 + distances.le_(right[:, :1]).sum(dim=1)
    nearest, nth, ranks, R = map(in_float64, (nearest, nth, ranks, R))
    found = ranks <= R[:, None]
    precision = torch.where(found, nth / ranks, 0)
    return torch.stack([nearest, precision.sum(dim=1) / R, found.sum(dim=1) / R])


def _smallest(rows: Tensor, k: int) -> Tensor:
    """The k smallest entries of each row, in order: they lie in the k groups with the smallest minima."""
    width = rows.shape[1] // GROUP
    if width <= k:
        return rows.topk(k, largest=False).values
    groups = rows[:, : GROUP * width].view(len(rows), GROUP, width)
    chosen = groups.amin(dim=1, keepdim=True).topk(k, largest=False).indices
    candidates = groups.gather(2, chosen.expand(-1, GROUP, -1)).flatten(1)
    rest = rows[:, GROUP * width :]
    return torch.cat([candidates, rest], dim=1).topk(k, largest=False).values


def taken_rows(parts: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """Rows of the parts, indexed as in one matrix; one tensor for each part."""
    taken, start = [], 0
    for part in parts:
        inside = index[(index >= start) & (index < start + len(part))] - start
        taken.append(part[inside.to(part.device)])
        start += len(part)
    return taken


def _prepared(
    parts: Sequence[Tensor], order: Tensor, normalize: bool, sharing: QuerySharding
) -> Tensor:
    """The vectors to compare, in the plan's order."""
    dtype = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
    device = device_for(dtype, sharing.device)
    out = torch.empty(len(order), parts[0].shape[1], dtype=dtype, device=device)
    # A power of two, so that nothing is rounded; squares neither overflow nor vanish.
    limit = frexp(torch.finfo(out.dtype).max)[1] - 2
    scale = 2.0 ** -min(max(frexp(largest_entry(*parts))[1], -limit), limit)

    def compared(index: Tensor) -> Tensor:
        rows = torch.cat([part.to(out) for part in taken_rows(parts, index)])
        # First each by its own largest entry, or small vectors would vanish beside large ones.
        if normalize:
            entries = rows.abs().amax(dim=1, keepdim=True)
            return unit_rows(rows / entries.clamp(min=torch.finfo(out.dtype).tiny))
        return rows * scale

    sample = order[:: max(len(order) // SAMPLE, 1)]
    origin = compared(sample).median(dim=0).values  # which a few vectors far away do not move
    for index, part in zip(torch.split(order, PART), torch.split(out, PART), strict=True):
        part.copy_(compared(index) - origin)
    return out


def largest_entry(*parts: Tensor) -> float:
    """The largest magnitude; NaN or inf if there is one."""
    ends = torch.stack([in_float64(end).cpu() for part in parts for end in torch.aminmax(part)])
    return float(ends.abs().max())


@contextmanager
def _full_precision() -> Iterator[None]:
    """Turn off TensorFloat-32 and bfloat16 inside, whatever the training uses: they give other ranks."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
