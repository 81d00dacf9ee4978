from collections import namedtuple
from functools import partial

import torch

from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils.accuracy_calculator import (
    AccuracyCalculator,
    nan_accuracy,
)

# The number of distances that are in memory at once
BLOCK_SIZE = 2**24

# One value for each query that has right references
Ranks = namedtuple(
    "Ranks",
    ["labels", "nearest", "reciprocal_rank", "average_precision", "r_precision"],
)


def get_block_ranks(mat, is_right, num_right):
    """
    Args:
        mat: distances of size (num_queries, num_references). Infinite distances
                belong to references that are left out
        is_right: same size, True for references with the label of the query
        num_right: tensor of size (num_queries), how many of them there are
    Returns: the rank of the nearest right reference of each query, MAP@R, R-precision
    """
    most_right = torch.max(num_right).item()
    right, _ = torch.sort(mat.masked_fill(~is_right, float("inf")), dim=1)
    right = right[:, :most_right].contiguous()
    wrong = mat.masked_fill(is_right, float("inf"))
    # A wrong reference that is as near as a right one comes before it
    nearest = 1 + torch.sum(wrong <= right[:, :1], dim=1)

    # Only ranks up to R are needed, and thus only the R nearest wrong references
    wrong, _ = torch.topk(wrong, most_right, dim=1, largest=False)
    nth = torch.arange(1, most_right + 1, device=mat.device)
    ranks = nth + torch.searchsorted(wrong.contiguous(), right, right=True)
    num_right = num_right.unsqueeze(1)
    is_found = (ranks <= num_right) & (nth <= num_right)
    precision = is_found * nth.type(torch.float64) / ranks
    map_at_r = torch.sum(precision / num_right, dim=1)
    r_precision = torch.sum(is_found, dim=1).type(torch.float64) / num_right.squeeze(1)
    return nearest, map_at_r, r_precision


class RankAccuracyCalculator(AccuracyCalculator):
    def __init__(
        self,
        recall_at=(1, 2, 4, 8),
        include=(),
        exclude=(),
        avg_of_avgs=False,
        return_per_class=False,
        device=None,
        kmeans_func=None,
    ):
        super().__init__(
            avg_of_avgs=avg_of_avgs,
            return_per_class=return_per_class,
            device=device,
            knn_func=False,
            kmeans_func=kmeans_func,
        )
        # The only metric which needs all ranks
        del self.original_function_dict["mean_average_precision"]
        recalls = {
            "recall_at_{}".format(k): partial(self.recall_at_k, k) for k in recall_at
        }
        self.original_function_dict = {**recalls, **self.original_function_dict}
        self.check_primary_metrics(include, exclude)
        self.original_function_dict = self.get_function_dict(include, exclude)
        self.curr_function_dict = self.get_function_dict()

    def requires_knn(self):
        return []

    def _get_accuracy(self, function_dict, **kwargs):
        if any(x not in self.requires_clustering() for x in function_dict):
            kwargs["ranks"] = self.get_ranks(**kwargs)
            if len(kwargs["ranks"].labels) == 0:
                c_f.LOGGER.warning("None of the query labels are in the reference set.")
        return super()._get_accuracy(function_dict, **kwargs)

    def get_ranks(
        self,
        query,
        reference,
        query_labels,
        reference_labels,
        ref_includes_query,
        **kwargs,
    ):
        """
        Returns: the Ranks of the queries which have right references
        """
        empty = torch.zeros(0, dtype=torch.float64, device=query.device)
        output = [(query_labels[:0], empty, empty, empty)]
        block_size = max(1, BLOCK_SIZE // len(reference))
        for start in range(0, len(query), block_size):
            block = slice(start, start + block_size)
            labels = query_labels[block]
            is_right = labels.unsqueeze(1) == reference_labels.unsqueeze(0)
            mat = torch.cdist(query[block], reference)
            if ref_includes_query:
                rows = c_f.torch_arange_from_size(labels)
                is_right[rows, rows + start] = False
                mat[rows, rows + start] = float("inf")
            num_right = torch.sum(is_right, dim=1)
            keep = num_right > 0
            if torch.any(keep):
                ranks = get_block_ranks(mat[keep], is_right[keep], num_right[keep])
                output.append((labels[keep],) + ranks)
        labels, nearest, map_at_r, r_precision = [torch.cat(x) for x in zip(*output)]
        return Ranks(labels, nearest, 1 / nearest, map_at_r, r_precision)

    def average(self, values, ranks, query_labels):
        if len(values) == 0:
            return nan_accuracy(torch.unique(query_labels), self.return_per_class)
        values = values.type(torch.float64)
        if self.avg_of_avgs or self.return_per_class:
            _, classes, counts = torch.unique(
                ranks.labels, return_inverse=True, return_counts=True
            )
            sums = torch.zeros_like(values[: len(counts)])
            values = sums.index_add(0, classes, values) / counts
        return values.tolist() if self.return_per_class else torch.mean(values).item()

    def recall_at_k(self, k, ranks, query_labels, **kwargs):
        return self.average(ranks.nearest <= k, ranks, query_labels)

    def calculate_precision_at_1(self, **kwargs):
        return self.recall_at_k(1, **kwargs)

    def calculate_mean_reciprocal_rank(self, ranks, query_labels, **kwargs):
        return self.average(ranks.reciprocal_rank, ranks, query_labels)

    def calculate_mean_average_precision_at_r(self, ranks, query_labels, **kwargs):
        return self.average(ranks.average_precision, ranks, query_labels)

    def calculate_r_precision(self, ranks, query_labels, **kwargs):
        return self.average(ranks.r_precision, ranks, query_labels)
