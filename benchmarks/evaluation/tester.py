"""PML's tester on the embeddings of all processes, and its metrics on given vectors.

Every image is a query, for which all other images are ranked by the distance of the L2-normalised embeddings. If
a dataset has queries and a gallery (In-Shop), both are rows of one matrix, which is embedded in one pass and not
copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from pytorch_metric_learning.testers import GlobalEmbeddingSpaceTester
from pytorch_metric_learning.utils.inference import FaissKMeans
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import Dataset

from benchmarks.console import progress_bar
from benchmarks.evaluation.embedding import embed, evaluation_mode
from pml_regularizers import RankAccuracyCalculator
from pml_regularizers._ranks import Ranks

CPU = torch.device("cpu")
RESTARTS = 5  # of k-means: the clustering with the least squared distances counts


@dataclass(frozen=True)
class Measured:
    """Results on a tested dataset: the same on every process, all tensors on the CPU in dataset order.

    Attributes:
        metrics: Such as `{"recall_at_1": 0.47, ...}`, in the calculator's order.
        embeddings: (n, E), as the model gave them.
        labels: (n,).
        ranks: Results of each query that has something to find.
        descriptors: (n, D), the results of `extract`; None without it.
    """

    metrics: dict[str, float]
    embeddings: Tensor
    labels: Tensor
    ranks: Ranks
    descriptors: Tensor | None = None


class RanksCalculator(RankAccuracyCalculator):
    """Calculator that gives the ranks beside the metrics that are made of them."""

    def calculate_ranks(self, ranks: Ranks, **_: Any) -> Ranks:
        """The results of each query."""
        return ranks


class SharedTester(GlobalEmbeddingSpaceTester):
    """PML's tester for several processes, which share the images.

    Its `dataset_dict` holds one dataset, `{"test": dataset}`.

    Args:
        accelerator: The processes.
        calculator: Computes the metrics; it shares the queries among the processes.
        is_query: (n,) bool; the other rows are the gallery. None: each row is both.
        embedding: The keyword arguments of `embed`: `batch_size`, `num_workers`, `extract`, ...
    """

    def __init__(
        self,
        accelerator: Accelerator,
        calculator: RanksCalculator,
        is_query: Tensor | None,
        **embedding: Any,
    ) -> None:
        super().__init__(
            accuracy_calculator=calculator,
            data_device=accelerator.device,
            end_of_testing_hook=lambda tester: None,  # PML's default hook logs the metrics
        )
        self.accelerator = accelerator
        self.is_query = is_query
        self.embedding = embedding
        self.descriptors: Tensor | None = None

    def get_all_embeddings(
        self, dataset: Any, trunk_model: nn.Module, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (embeddings (n, E), labels (n, 1)); the results of `extract` are kept in `descriptors`."""
        embeddings, labels, *more = embed(self.accelerator, trunk_model, dataset, **self.embedding)
        self.descriptors = more[0] if more else None
        return embeddings, labels[:, None]

    def do_knn_and_accuracies(
        self, accuracies: dict[str, float], embeddings_and_labels: Any, *splits: Any
    ) -> None:
        """The metrics under the calculator's own names."""
        [(embeddings, labels)] = embeddings_and_labels.values()
        self.embeddings, self.labels = embeddings, labels[:, 0]
        found, self.ranks = _accuracy(
            self.accuracy_calculator, embeddings, self.labels, self.is_query
        )
        accuracies |= found


def _accuracy(
    calculator: RanksCalculator, vectors: Tensor, labels: Tensor, is_query: Tensor | None
) -> tuple[dict[str, float], Ranks]:
    """Metrics and ranks of vectors (n, D), L2-normalised before comparison; call it on all processes."""
    references = None if is_query is None else ~is_query
    found = calculator.get_accuracy_within(
        vectors, labels, queries=is_query, references=references, normalize=True
    )
    ranks: Ranks = found.pop("ranks")
    return found, ranks


def _calculator(
    recall_at: Sequence[int], accelerator: Accelerator | None, *, progress: bool = False
) -> RanksCalculator:
    """Calculator of Recall@K, MAP@R and R-precision, for all processes or for this one alone."""
    shown = progress and (accelerator is None or accelerator.is_main_process)
    recalls = [f"recall_at_{K}" for K in dict.fromkeys(recall_at)]
    return RanksCalculator(
        include=[*recalls, "mean_average_precision_at_r", "r_precision", "ranks"],
        recall_at=recall_at,
        device=CPU if accelerator is None else None,
        accelerator=accelerator,
        progress=partial(progress_bar, shown=shown, desc="ranking", unit="block", leave=False),
    )


def measure(
    vectors: Tensor,
    labels: Tensor,
    recall_at: Sequence[int],
    is_query: Tensor | None = None,
    accelerator: Accelerator | None = None,
) -> dict[str, float]:
    """Recall@K, MAP@R and R-precision of vectors (n, D), by all processes or by this one alone."""
    return _accuracy(_calculator(recall_at, accelerator), vectors, labels, is_query)[0]


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: Dataset[Any],
    recall_at: Sequence[int],
    *,
    is_query: Tensor | None = None,
    progress: bool = True,
    **embedding: Any,
) -> Measured:
    """Test a model with PML's tester; call it on all processes.

    Args:
        recall_at: The K of each Recall@K.
        is_query: (n,) bool; the other images are the gallery. Default: each is both.
        embedding: The keyword arguments of `embed`.

    Raises:
        NonFiniteError: as `embed`.
    """
    calculator = _calculator(recall_at, accelerator, progress=progress)
    tester = SharedTester(accelerator, calculator, is_query, progress=progress, **embedding)
    with evaluation_mode(model):
        [found] = tester.test({"test": dataset}, 0, model).values()
    found.pop("epoch")
    return Measured(found, tester.embeddings, tester.labels, tester.ranks, tester.descriptors)


def per_class(ranks: Ranks, classes: int) -> dict[str, list[int]]:
    """Each class's number of queries, and the means of their Recall@1 and MAP@R, in ten-thousandths.

    Queries without anything to find do not count; a class without queries has 0 everywhere.

    Args:
        classes: Number of classes, whose labels count from zero.
    """
    queries = torch.bincount(ranks.labels, minlength=classes)
    found = {
        "recall_at_1": ranks.nearest <= 1,
        "mean_average_precision_at_r": ranks.average_precision,
    }
    means = {
        name: torch.bincount(ranks.labels, values.double(), classes) / queries.clamp(min=1)
        for name, values in found.items()
    }
    rounded = {name: (1e4 * mean).round().long().tolist() for name, mean in means.items()}
    return {"queries": queries.tolist(), **rounded}


def cluster_metrics(vectors: Tensor, labels: Tensor) -> dict[str, float]:
    """NMI, AMI and F1 of a k-means clustering (faiss, on the CPU) with as many clusters as classes.

    NMI = 2 I(classes, clusters) / (H(classes) + H(clusters)), as in Song et al., "Deep metric learning via
    lifted structured feature embedding" (CVPR 2016), whose protocol the papers follow; F1 is the harmonic mean
    of precision and recall over all pairs of images, a pair being positive if both lie in one cluster.

    Args:
        vectors: (n, D); they are L2-normalised here.
        labels: (n,).
    """
    classes, labels = labels.unique(return_inverse=True)
    k_means = FaissKMeans(
        **{"niter": 100, "nredo": RESTARTS, "seed": 0},
        **{"min_points_per_centroid": 1, "max_points_per_centroid": len(labels)},
    )
    clusters = k_means(normalize(vectors), len(classes))
    return {
        "NMI": float(normalized_mutual_info_score(labels, clusters)),
        "AMI": float(adjusted_mutual_info_score(labels, clusters)),
        "F1": pairwise_f1(labels, clusters),
    }


def pairwise_f1(labels: Tensor, clusters: Tensor) -> float:
    """F1 over all pairs of images, with "same cluster" as the prediction of "same class": (n,), (n,) integers."""
    (_, wrong), (missed, right) = pair_confusion_matrix(labels, clusters)
    return float(2 * right / (2 * right + wrong + missed))
