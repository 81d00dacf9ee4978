"""PML's `AccuracyCalculator`, but counting ranks: the same metrics and Recall@K, in bounded memory."""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf, isfinite
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from ..functional.checks import one_of
from ..offered.utils import rank_accuracy_calculator as offered
from .ranks import Ranks, Rows, count_ranks, count_right, largest_entry


class RankAccuracyCalculator(offered.RankAccuracyCalculator):
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
    `r_precision`, `NMI` and `AMI` (with faiss). A subclass's method `calculate_NAME` gets `ranks`, a `Ranks`, but
    no `knn_labels`.

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
        ValueError: if `recall_at` is empty or holds anything but integers >= 1; for another `k` or `group_rule`;
            for `label_comparison_fn` and `knn_func`.

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
        one_of("group_rule", group_rule, ("class", "all"))
        several = isinstance(recall_at, Collection) and recall_at
        if not several or not all(type(K) is int and K >= 1 for K in recall_at):
            raise ValueError(f"recall_at: expected integers >= 1, got {recall_at!r}")
        if not (k in (None, "max_bin_count") or (isinstance(k, int) and k >= 1)):
            raise ValueError(f'k: expected an integer >= 1, "max_bin_count" or None, got {k!r}')
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
            recall_at, include, exclude, avg_of_avgs, return_per_class, device, kmeans_func
        )
        self.k = k
        self.max_rank = max(recall_at)
        self.accelerator = accelerator
        self.progress = progress
        self.group_rule = group_rule

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
        if (query_groups is None) != (reference_groups is None):
            raise ValueError("query_groups, reference_groups: expected both or none, got one")
        first = 0 if ref_includes_query else len(reference)
        queries = _checked("query", query, query_labels, query_groups, first)
        references = _checked("reference", reference, reference_labels, reference_groups)
        width, others = queries.vectors.shape[1], references.vectors.shape[1]
        if width != others:
            raise ValueError(
                f"reference: expected vectors as wide as the queries, {width}, got {others}"
            )
        return self._accuracy(queries, references, False, include, exclude)

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
        rows = _checked("vectors", vectors, labels, groups)
        asked, ranked = _chosen("queries", queries, rows), _chosen("references", references, rows)
        return self._accuracy(asked, ranked, normalize, include, exclude)

    def _accuracy(
        self,
        queries: Rows,
        references: Rows,
        normalize: bool,
        include: Sequence[str],
        exclude: Sequence[str],
    ) -> dict[str, Any]:
        self.left_out = None
        self.curr_function_dict = self.get_function_dict(include, exclude)
        given: dict[str, Any] = {"queries": queries, "references": references}
        given |= {"query_labels": queries.labels, "normalize": normalize}
        if not self.curr_function_dict.keys().isdisjoint(self.requires_clustering()):
            given["cluster_labels"] = self.get_cluster_labels(**given)
        return dict(self._get_accuracy(self.curr_function_dict, **given))

    def get_cluster_labels(self, queries: Rows, normalize: bool, **_: Any) -> Tensor:
        """PML's, by the main process alone, since k-means keeps all cores busy."""
        clusters = torch.zeros(len(queries.rows), dtype=torch.long)
        if self.accelerator is None or self.accelerator.is_main_process:
            query = queries.vectors[queries.rows.to(queries.vectors.device)]
            query = unit_rows(query) if normalize else query
            clusters = super().get_cluster_labels(query, queries.labels).cpu()
        return self._sum(clusters)

    def get_ranks(self, queries: Rows, references: Rows, normalize: bool, **_: Any) -> Ranks:
        """The ranks of the queries that have right references, by blocks of queries, shared by the processes."""
        labels = torch.cat([queries.labels, references.labels])
        groups = torch.cat([queries.groups, references.groups])
        is_reference = torch.arange(len(labels)) >= len(queries.rows)
        right = count_right(labels, is_reference, groups)[~is_reference]
        asked = right > 0
        self.left_out = len(right) - int(asked.sum())
        names = self.curr_function_dict.keys()
        most = max(right.tolist(), default=0)
        neighbours: float = inf if self.k is None else most
        neighbours = self.k if isinstance(self.k, int) else neighbours
        if neighbours < most and names & {"r_precision", "mean_average_precision_at_r"}:
            raise ValueError(
                f"k: expected at least {most}, the right references of a query, for metrics at R, got {self.k}; "
                'pass k="max_bin_count", or leave it out'
            )
        ranks = count_ranks(
            *(queries, references, right),
            normalize=normalize,
            whole_groups=self.group_rule == "all",
            max_rank=inf if "mean_reciprocal_rank" in names else self.max_rank,
            device=self.device,
            share=self._share,
        )
        nearest, average_precision, r_precision = self._sum(ranks)[:, asked]
        reciprocal = (nearest <= neighbours) / nearest
        own = queries.labels[asked], nearest, reciprocal, average_precision, r_precision
        return Ranks(*own, queries.rows[asked])

    def _share(self, blocks: Sequence[Tensor]) -> Iterable[Tensor]:
        """The blocks that this process ranks."""
        if self.accelerator is not None:
            blocks = blocks[self.accelerator.process_index :: self.accelerator.num_processes]
        return self.progress(blocks)

    def _sum(self, values: Tensor) -> Tensor:
        """Sum over the processes, on the CPU; exact, since all summands except one are zero."""
        if self.accelerator is not None and self.accelerator.num_processes > 1:
            values = self.accelerator.reduce(values.to(self.accelerator.device), "sum")
        return values.cpu()


def _checked(name: str, vectors: Any, labels: Any, groups: Any, first: int = 0) -> Rows:
    """All rows of a matrix, with labels and groups on the CPU. By default each row is a group, from `first` on."""
    vectors, labels = _tensor(name, vectors), _tensor(f"{name}_labels", labels)
    if vectors.ndim != 2 or vectors.numel() == 0:
        raise ValueError(
            f"{name}: expected (n, D) with at least one row and column, got shape {tuple(vectors.shape)}"
        )
    n, rows = len(vectors), torch.arange(len(vectors))
    if labels.shape != (n,):
        raise ValueError(
            f"{name}: expected {n} labels, one for each row, got shape {tuple(labels.shape)}"
        )
    if not isfinite(largest_entry(vectors)):  # on all processes, or the others would wait
        raise ValueError(f"{name}: expected finite numbers, got NaN or inf")
    groups = rows + first if groups is None else _tensor(f"{name}_groups", groups)
    if groups.shape != (n,) or groups.is_floating_point():
        argument = "groups" if name == "vectors" else f"{name}_groups"
        raise ValueError(
            f"{argument}: expected {n} integers, got {groups.dtype} of shape {tuple(groups.shape)}"
        )
    # With float32, integers beyond 2^24 would lose digits.
    labels = labels.double() if labels.is_floating_point() else labels.long()
    return Rows(vectors, rows, labels.cpu(), groups.cpu().long())


def _tensor(name: str, x: Any) -> Tensor:
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: expected numbers, in a tensor or an array, got {type(x).__name__} ({error})"
        ) from error


def _chosen(name: str, chosen: Any, rows: Rows) -> Rows:
    if chosen is None:
        return rows
    chosen = _tensor(name, chosen)
    if chosen.dtype != torch.bool or chosen.shape != rows.rows.shape:
        raise ValueError(
            f"{name}: expected {len(rows.rows)} booleans, got {chosen.dtype} of shape {tuple(chosen.shape)}"
        )
    chosen = chosen.cpu()
    return Rows(rows.vectors, rows.rows[chosen], rows.labels[chosen], rows.groups[chosen])
