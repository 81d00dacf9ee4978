from functools import partial

import torch

from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils.accuracy_calculator import (
    AccuracyCalculator,
    maybe_get_avg_of_avgs,
    nan_accuracy,
)

# The number of distances that are in memory at once
BLOCK_SIZE = 2**24


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


def get_ranks(query, reference, query_labels, reference_labels, ref_includes_query):
    """
    Returns: the labels of the queries which have right references, and for each of
                them the rank of the nearest one, MAP@R, and R-precision
    """
    output = []
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
    return [torch.cat(x, dim=0) for x in zip(*output)]


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
        for k in recall_at:
            name = "recall_at_{}".format(k)
            self.original_function_dict[name] = partial(self.recall_at_k, k)
        self.check_primary_metrics(include, exclude)
        self.original_function_dict = self.get_function_dict(include, exclude)
        self.curr_function_dict = self.get_function_dict()

    def requires_knn(self):
        return []

    def _get_accuracy(self, function_dict, **kwargs):
        if any(x not in self.requires_clustering() for x in function_dict):
            names = ["query", "reference", "query_labels", "reference_labels"]
            args = [kwargs[x] for x in names]
            kwargs["ranks"] = get_ranks(*args, kwargs["ref_includes_query"])
            if len(kwargs["ranks"]) == 0:
                c_f.LOGGER.warning("None of the query labels are in the reference set.")
        return super()._get_accuracy(function_dict, **kwargs)

    def average(self, get_values, ranks, query_labels):
        if len(ranks) == 0:
            return nan_accuracy(torch.unique(query_labels), self.return_per_class)
        labels, nearest, map_at_r, r_precision = ranks
        values = get_values(nearest, map_at_r, r_precision).type(torch.float64)
        return maybe_get_avg_of_avgs(
            values, labels.unsqueeze(1), self.avg_of_avgs, self.return_per_class
        )

    def recall_at_k(self, k, ranks, query_labels, **kwargs):
        return self.average(lambda nearest, *_: nearest <= k, ranks, query_labels)

    def calculate_precision_at_1(self, ranks, query_labels, **kwargs):
        return self.recall_at_k(1, ranks, query_labels)

    def calculate_mean_reciprocal_rank(self, ranks, query_labels, **kwargs):
        return self.average(
            lambda nearest, *_: 1 / nearest.type(torch.float64), ranks, query_labels
        )

    def calculate_mean_average_precision_at_r(self, ranks, query_labels, **kwargs):
        return self.average(lambda _, map_at_r, __: map_at_r, ranks, query_labels)

    def calculate_r_precision(self, ranks, query_labels, **kwargs):
        return self.average(lambda _, __, r_precision: r_precision, ranks, query_labels)
