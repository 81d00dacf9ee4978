"""PML's `AccuracyCalculator`, but counting ranks: the same metrics and Recall@K, in bounded memory."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf, isfinite
from typing import Any, Literal

import torch
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from .ranks import QuerySharding, Ranks, count_ranks, count_right, largest_entry, taken_rows


class RankAccuracyCalculator(AccuracyCalculator):
    """PML's `AccuracyCalculator` for large test sets: counts ranks, in bounded memory, with Recall@K for any K.

    Use it wherever PML takes an `accuracy_calculator`. As in PML, vectors are not normalised, a query without a
    right reference is left out (metrics are NaN if none is left), and NMI and AMI cluster the queries. Unlike PML,
    it keeps all digits of float64 and integer labels, and a tie counts against the model. PML's
    `label_comparison_fn` and `knn_func` are refused: ranks are counted by equal labels and Euclidean distances, and
    without a search. The distances lose digits if float32 vectors form clouds that lie a hundred times farther
    apart than the points in a cloud: normalise such vectors, or pass float64.

    `left_out` is the number of such queries in the last call, or None if no metric needed ranks.

    In re-identification (Market-1501, VeRi), the references of a query's class and camera leave its ranking, and
    those of other classes stay: pass the cameras as `groups`. With `group_rule="all"`, all references of its group
    leave, as of a sequence of near copies. A query whose right references all leave is one without.

    Metrics: `recall_at_K` for each K, `precision_at_1`, `mean_reciprocal_rank`, `mean_average_precision_at_r`,
    `r_precision`, `NMI` and `AMI` (with faiss). A subclass's method `calculate_NAME` gets `ranks`, a `Ranks`.

    Args:
        include, exclude, avg_of_avgs, return_per_class, kmeans_func: See PML's class.
        k: As in PML, how many neighbours count: a number, "max_bin_count", or None, all. The mean reciprocal rank
            alone depends on it; a k below the size of a class is refused for metrics at R.
        device: Device to rank on. Default: the accelerator's device, else a GPU if there is one.
        recall_at: The K of each Recall@K; a K above the number of references means all of them. Default: the K of
            the papers on CUB-200-2011 and Cars-196.
        accelerator: An `accelerate.Accelerator`, whose processes share the queries; all must have the same
            vectors and make the same calls. Default: this process works alone.
        progress: Function that wraps the blocks of queries that this process ranks, such as `tqdm.tqdm`.
        group_rule: The references of a query's group that leave its ranking: those of its "class", or "all".

    Raises:
        ValueError: if `recall_at` is empty or holds anything but integers >= 1; for another `group_rule`, for
            `label_comparison_fn` and `knn_func`.

    Example:
        >>> calculator = RankAccuracyCalculator(include=("recall_at_1", "recall_at_2"), recall_at=(1, 2))
        >>> points = torch.tensor([[0.0], [1.0], [5.0], [3.0]])
        >>> calculator.get_accuracy(points, torch.tensor([0, 0, 1, 1]))
        {'recall_at_1': 0.75, 'recall_at_2': 1.0}
        >>> cameras = torch.tensor([1, 1, 1, 2])  # the first two points leave each other's rankings
        >>> calculator.get_accuracy(points, torch.tensor([0, 0, 1, 1]), query_groups=cameras)
        {'recall_at_1': 0.5, 'recall_at_2': 1.0}
        >>> calculator.left_out
        2
    """

    original_function_dict: dict[str, Callable[..., Any]]
    left_out: int | None = None

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        avg_of_avgs: bool = False,
        return_per_class: bool = False,
        k: int | Literal["max_bin_count"] | None = None,
        label_comparison_fn: None = None,
        device: torch.device | None = None,
        knn_func: None = None,
        kmeans_func: Callable[[Tensor, int], Tensor] | None = None,
        *,
        recall_at: Sequence[int] = (1, 2, 4, 8),
        accelerator: Any = None,
        progress: Callable[[Sequence[Tensor]], Iterable[Tensor]] = iter,
        group_rule: Literal["class", "all"] = "class",
    ) -> None:
        if group_rule not in ("class", "all"):
            raise ValueError(f"group_rule: expected 'class' or 'all', got {group_rule!r}")
        if not recall_at or not all(type(K) is int and K >= 1 for K in recall_at):
            raise ValueError(f"recall_at: expected integers >= 1, got {recall_at!r}")
        for name, given, reason in (
            ("label_comparison_fn", label_comparison_fn, "ranks are counted by equal labels"),
            ("knn_func", knn_func, "ranks are counted by Euclidean distances, without a search"),
        ):
            if given is not None:
                raise ValueError(
                    f"{name}: {reason}; leave it out, or take PML's AccuracyCalculator"
                )
        if device is None and accelerator is not None:
            device = accelerator.device
        super().__init__(
            avg_of_avgs=avg_of_avgs,
            return_per_class=return_per_class,
            k=k,
            device=device,
            knn_func=False,  # PML's own default needs faiss
            kmeans_func=kmeans_func,
        )
        del self.original_function_dict["mean_average_precision"]
        recalls = {f"recall_at_{K}": partial(self._recall, K) for K in recall_at}
        self.original_function_dict = recalls | self.original_function_dict
        self.check_primary_metrics(include, exclude)
        self.original_function_dict = self.get_function_dict(include, exclude)
        self.curr_function_dict = self.get_function_dict()
        self.max_rank = max(recall_at)
        self.group_rule = group_rule
        self.sharing = QuerySharding(self.device, accelerator, progress)

    @torch.no_grad()
    def get_accuracy(
        self,
        query: Any,
        query_labels: Any,
        reference: Any = None,
        reference_labels: Any = None,
        ref_includes_query: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        *,
        query_groups: Any = None,
        reference_groups: Any = None,
    ) -> dict[str, Any]:
        """Return the metrics of queries (q, D) against references (n, D), tensors or arrays: PML's method.

        Args:
            query, query_labels, include, exclude: As in PML.
            reference, reference_labels: Default: the queries, each ranked against the others.
            ref_includes_query: True if the first q references are the queries, which is not checked.
            query_groups, reference_groups: (q,) and (n,) integers, such as cameras: see the class. Default: none.

        Raises:
            ValueError: as `get_accuracy_within`.
        """
        if reference is None:
            reference, reference_labels, ref_includes_query = query, query_labels, True
            reference_groups = query_groups if reference_groups is None else reference_groups
        query, query_labels, reference, labels, query_groups, groups = map(
            c_f.numpy_to_torch,
            (query, query_labels, reference, reference_labels, query_groups, reference_groups),
        )
        query_labels = _checked_labels("query", query, query_labels)
        labels = _checked_labels("reference", reference, labels)
        if (query_groups is None) != (groups is None):
            raise ValueError("query_groups, reference_groups: expected both or none, got one")
        query_groups = _checked_groups("query_groups", query_groups, len(query))
        groups = _checked_groups("reference_groups", groups, len(reference))
        parts = [reference]
        if not ref_includes_query:
            parts, labels = [reference, query], torch.cat([labels, query_labels])
            groups = None if groups is None else torch.cat([groups, query_groups])
        rows = torch.arange(len(labels))
        is_reference = rows < len(reference)
        is_query = rows < len(query) if ref_includes_query else ~is_reference
        return self._accuracy(parts, labels, is_query, is_reference, groups, include, exclude)

    @torch.no_grad()
    def get_accuracy_within(
        self,
        vectors: Tensor,
        labels: Tensor,
        *,
        queries: Tensor | None = None,
        references: Tensor | None = None,
        groups: Tensor | None = None,
        normalize: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the metrics if queries and references are rows of one matrix, which is not copied.

        Args:
            vectors: (n, D), on any device.
            labels: (n,).
            queries: (n,) bool. Default: all.
            references: (n,) bool. Default: all. A query among them is ranked against the others.
            groups: (n,) integers, such as cameras: see the class. Default: none.
            normalize: Compare the L2-normalised vectors, of any length.
            include, exclude: A choice from the constructor's metrics.

        Raises:
            ValueError: if there are no vectors, or one is not finite; if labels, queries, references or groups do
                not have n entries.
        """
        labels = _checked_labels("vectors", vectors, labels)
        is_query = _mask("queries", queries, len(vectors))
        is_reference = _mask("references", references, len(vectors))
        groups = _checked_groups("groups", groups, len(vectors))
        return self._accuracy(
            [vectors], labels, is_query, is_reference, groups, include, exclude, normalize
        )

    def _accuracy(
        self,
        parts: list[Tensor],
        labels: Tensor,
        is_query: Tensor,
        is_reference: Tensor,
        groups: Tensor | None,
        include: Sequence[str],
        exclude: Sequence[str],
        normalize: bool = False,
    ) -> dict[str, Any]:
        """Metrics of the rows of `parts`, stacked."""
        self.curr_function_dict = self.get_function_dict(include, exclude)
        asked, clustering = set(self.curr_function_dict), set(self.requires_clustering())
        given: dict[str, Any] = {"query_labels": labels[is_query]}
        self.left_out = None
        if asked - clustering:
            exact = "mean_reciprocal_rank" in asked
            right = count_right(labels, is_reference, groups)[is_query]
            given["k"] = self._neighbours(int(right.max()) if len(right) else 0)
            given["ranks"] = count_ranks(
                *(parts, labels, is_query, is_reference),
                normalize=normalize,
                max_rank=len(labels) if exact else self.max_rank,
                sharing=self.sharing,
                groups=groups,
                whole_groups=groups is not None and self.group_rule == "all",
            )
            self.left_out = int(is_query.sum()) - len(given["ranks"].labels)
            if len(given["ranks"].labels) == 0:
                c_f.LOGGER.warning("None of the query labels are in the reference set.")
        if asked & clustering:
            query = torch.cat(taken_rows(parts, is_query.nonzero().flatten()))
            query = unit_rows(query) if normalize else query
            clusters = torch.zeros(len(query), dtype=torch.long)
            # By the main process alone, since k-means keeps all cores busy.
            if self.sharing.accelerator is None or self.sharing.accelerator.is_main_process:
                query_labels = given["query_labels"]
                clusters = self.get_cluster_labels(query=query, query_labels=query_labels).cpu()
            given["cluster_labels"] = self.sharing.sum(clusters)
        return dict(self._get_accuracy(self.curr_function_dict, **given))

    def _neighbours(self, largest: int) -> float:
        """How many neighbours count, if a query has at most so many right references."""
        if self.k is None:
            return inf
        if self.k == "max_bin_count":
            return largest
        at_r = {"r_precision", "mean_average_precision_at_r"} & self.curr_function_dict.keys()
        if at_r and self.k < largest:
            raise ValueError(
                f"k: expected at least {largest}, the right references of a query, for "
                f"{' and '.join(sorted(at_r))}, "
                f'got {self.k}; pass k="max_bin_count", or leave it out'
            )
        return int(self.k)

    # Under PML's names. A mean over no query needs the labels of all.

    def _recall(self, K: int, ranks: Ranks, query_labels: Tensor, **_: Any) -> Any:
        return self._mean(ranks.nearest <= K, ranks, query_labels)

    def calculate_precision_at_1(self, **given: Any) -> Any:
        return self._recall(1, **given)

    def calculate_mean_reciprocal_rank(
        self, ranks: Ranks, query_labels: Tensor, k: float, **_: Any
    ) -> Any:
        return self._mean((ranks.nearest <= k) / ranks.nearest, ranks, query_labels)

    def calculate_mean_average_precision_at_r(
        self, ranks: Ranks, query_labels: Tensor, **_: Any
    ) -> Any:
        return self._mean(ranks.average_precision, ranks, query_labels)

    def calculate_r_precision(self, ranks: Ranks, query_labels: Tensor, **_: Any) -> Any:
        return self._mean(ranks.r_precision, ranks, query_labels)

    def _mean(self, values: Tensor, ranks: Ranks, query_labels: Tensor) -> Any:
        """Mean over queries, or the means over each class's queries, in order, or the mean of these."""
        values = values.double()
        if not (self.avg_of_avgs or self.return_per_class) or len(values) == 0:
            mean = values.mean().item()
            return [mean] * len(torch.unique(query_labels)) if self.return_per_class else mean
        classes, index = torch.unique(ranks.labels, return_inverse=True)
        sums = values.new_zeros(len(classes)).index_add_(0, index, values)
        means = sums / index.bincount()
        return means.tolist() if self.return_per_class else means.mean().item()


def _checked_labels(name: str, vectors: Tensor, labels: Tensor) -> Tensor:
    """Labels of checked vectors, on the CPU."""
    if vectors.ndim != 2 or vectors.numel() == 0:
        raise ValueError(
            f"{name}: expected (n, D) with at least one row and column, got shape {tuple(vectors.shape)}"
        )
    if labels.shape != (len(vectors),):
        raise ValueError(
            f"{name}: expected {len(vectors)} labels, one for each row, got shape {tuple(labels.shape)}"
        )
    if not isfinite(largest_entry(vectors)):  # on all processes, or the others would wait
        raise ValueError(f"{name}: expected finite numbers, got NaN or inf")
    # With float32, integers beyond 2^24 would lose digits.
    return labels.cpu().double() if labels.is_floating_point() else labels.cpu()


def _checked_groups(name: str, groups: Tensor | None, n: int) -> Tensor | None:
    """Groups on the CPU."""
    if groups is not None and (groups.shape != (n,) or groups.is_floating_point()):
        raise ValueError(
            f"{name}: expected {n} integers, got {groups.dtype} of shape {tuple(groups.shape)}"
        )
    return None if groups is None else groups.cpu().long()


def _mask(name: str, chosen: Tensor | None, n: int) -> Tensor:
    chosen = torch.ones(n, dtype=torch.bool) if chosen is None else chosen
    if chosen.dtype != torch.bool or chosen.shape != (n,):
        raise ValueError(
            f"{name}: expected {n} booleans, got {chosen.dtype} of shape {tuple(chosen.shape)}"
        )
    return chosen.cpu()
