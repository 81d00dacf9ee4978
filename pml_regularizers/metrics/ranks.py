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
from math import frexp
from typing import NamedTuple

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

    `nearest` is the rank of the nearest right reference: exact as far as a metric needs it, else some larger rank.
    `reciprocal_rank` is 1 / nearest, or 0 beyond the neighbours that count. `rows` are the places of the queries.
    """

    labels: Tensor
    nearest: Tensor
    reciprocal_rank: Tensor
    average_precision: Tensor
    r_precision: Tensor
    rows: Tensor


class Rows(NamedTuple):
    """Queries or references: n rows of a matrix of finite numbers, which is not copied."""

    vectors: Tensor  # (m, D)
    rows: Tensor  # (n,), which of them
    labels: Tensor  # (n,)
    groups: Tensor  # (n,); references of a query's class and group are left out of its ranking


def count_right(labels: Tensor, is_reference: Tensor, groups: Tensor | None = None) -> Tensor:
    """The number (n,) of right references in each row's ranking: of its class, and not of its group.

    By default each row is a group.
    """

    def alike(x: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows are alike, as numbers below n, and how many references each row is like."""
        _, numbers = torch.unique(x, return_inverse=True)
        return numbers, numbers[is_reference].bincount(minlength=len(x))[numbers]

    groups = torch.arange(len(labels)) if groups is None else groups
    (classes, right), (groups, _) = alike(labels), alike(groups)
    return right - alike(classes * len(labels) + groups)[1]


def count_ranks(
    queries: Rows,
    references: Rows,
    right: Tensor,
    *,
    normalize: bool,
    whole_groups: bool,
    max_rank: float,
    device: torch.device,
    share: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
) -> Tensor:
    """Find the ranks of each query's right references among all references.

    Args:
        right: (q,), from `count_right`. Queries without right references are not ranked.
        normalize: Compare the L2-normalised rows.
        whole_groups: Leave out references of a query's group and of other classes, too.
        max_rank: Largest rank of the nearest that must be exact.
        share: The blocks of queries to rank here, of all; the others' results stay zero.

    Returns:
        (3, q), in float64: rank of the nearest right one, average precision and precision among the R nearest.
    """
    asked = right.nonzero().flatten()
    if len(asked) == 0:
        return torch.zeros(3, len(right), dtype=torch.float64)
    compared = _comparison(queries.vectors, references, normalize, device)
    labels, order = references.labels.sort(stable=True)  # class by class
    rows = compared(references.vectors, order[:0]).new_empty(len(order), queries.vectors.shape[1])
    for part, own in zip(torch.split(rows, PART), torch.split(order, PART), strict=True):
        part.copy_(compared(references.vectors, references.rows[own]))
    halves = torch.cat([part.square().sum(dim=1) / 2 for part in torch.split(rows, PART)])
    groups, query_groups = references.groups[order].to(rows.device), queries.groups.to(rows.device)

    labels = labels.to(torch.promote_types(labels.dtype, queries.labels.dtype))
    asked_for = queries.labels.to(labels.dtype)
    first = torch.searchsorted(labels, asked_for)  # where its class begins
    count = torch.searchsorted(labels, asked_for, right=True) - first
    # Queries with classes of a size are alike in a block. The blocks are the same for any number of processes.
    asked = asked[count[asked].argsort(stable=True)]
    size = rows.element_size() * len(rows) + PER_RIGHT * int(count.max())
    blocks = torch.split(asked, min(max(BLOCK_BYTES // size, 1), BLOCK_ROWS))
    results = in_float64(rows.new_zeros(3, len(right)))
    distances = rows.new_empty(len(blocks[0]), len(rows))
    with _full_precision():
        for block in share(blocks):
            query, out = compared(queries.vectors, queries.rows[block]), distances[: len(block)]
            torch.addmm(halves, query, rows.T, alpha=-1, out=out)
            group = query_groups[block.to(rows.device), None]
            if whole_groups:
                out.masked_fill_(group == groups, torch.inf)
            last, nth = (count[block] - 1)[:, None], torch.arange(int(count[block].max()))
            places = (first[block, None] + nth.minimum(last)).to(rows.device)
            no_right = (nth > last).to(rows.device) | (groups[places] == group)
            R = right[block].to(rows.device)
            results[:, block] = _measured(out, places, no_right, R, max_rank)
    return results


def _measured(
    distances: Tensor, places: Tensor, no_right: Tensor, R: Tensor, max_rank: float
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


def _comparison(
    queries: Tensor, references: Rows, normalize: bool, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Function of a matrix and the numbers of some rows: these rows, as they are compared."""
    dtype = torch.promote_types(queries.dtype, references.vectors.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    device = device_for(dtype, device)
    # A power of two, so that nothing is rounded; squares neither overflow nor vanish.
    limit = frexp(torch.finfo(dtype).max)[1] - 2
    largest = max(largest_entry(queries), largest_entry(references.vectors))
    scale = 2.0 ** -min(max(frexp(largest)[1], -limit), limit)

    def scaled(vectors: Tensor, rows: Tensor) -> Tensor:
        x = vectors[rows.to(vectors.device)].to(device, dtype)
        # First each by its own largest entry, or small vectors would vanish beside large ones.
        if normalize:
            entries = x.abs().amax(dim=1, keepdim=True)
            return unit_rows(x / entries.clamp(min=torch.finfo(dtype).tiny))
        return x * scale

    sample = references.rows[:: max(len(references.rows) // SAMPLE, 1)]
    # Which a few vectors far away do not move.
    origin = scaled(references.vectors, sample).median(dim=0).values
    return lambda vectors, rows: scaled(vectors, rows) - origin


def largest_entry(x: Tensor) -> float:
    """The largest magnitude; NaN or inf if there is one."""
    return float(torch.stack([in_float64(end).cpu() for end in torch.aminmax(x)]).abs().max())


@contextmanager
def _full_precision() -> Iterator[None]:
    """Turn off TensorFloat-32 and bfloat16 inside, whatever the training uses: they give other ranks."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
