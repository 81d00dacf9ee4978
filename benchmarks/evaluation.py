r"""Retrieval metrics of a model on a dataset, by one process or many.

    Recall@K    = mean over queries of [one of the K nearest others is of the query's class]
    R-precision = mean over queries of (right ones among the R nearest others) / R
    MAP@R       = mean over queries of 1/R sum_{i<=R} P(i),  P(i) = precision of the i nearest
                  others where the i-th is right, else 0

(Musgrave, Belongie and Lim, "A Metric Learning Reality Check", ECCV 2020, section 3.2; R is the
number of other images of the query's class.) Every image is a query and all others are ranked for
it by the distance of the L2-normalised embeddings. Images without another of their class are
ranked for others but are no queries; where there are no queries, every metric is NaN.

Batch i is embedded by process i modulo the number of processes, so batches are composed as on one
process and the embeddings are equal to the bit. PML's tester computes the metrics from them on the
main process, by faiss on the CPU in float32 whatever the embeddings' type.

Where a dataset has queries and a gallery (In-Shop), every query is ranked against the gallery alone; R is
then the number of gallery images of its class.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from pytorch_metric_learning.testers import GlobalEmbeddingSpaceTester
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import FaissKMeans, FaissKNN
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset

from benchmarks.progress import progress_bar
from benchmarks.workers import ignore_signals


class NonFiniteEmbeddingsError(ValueError):
    """The model gives NaN or inf for some images; names them."""


class RetrievalAccuracy(AccuracyCalculator):
    """Recall@K for any K, MAP@R and R-precision, as PML metrics `recall_at_1`,
    `mean_average_precision_at_r`, `r_precision`.

    The ranking is as deep as the largest K and the largest class need. PML takes the query out of
    its own ranking by its index, so exact duplicates count as the other images that they are.

    Args:
        recall_at: The K of each Recall@K. 1, 2, 4, 8: the columns of CUB-200-2011 and Cars-196
            in the papers; a K beyond the number of other images ranks all of them.
    Raises:
        ValueError: if `recall_at` is empty or holds anything but integers >= 1.
    """

    def __init__(self, recall_at: Sequence[int] = (1, 2, 4, 8)) -> None:
        if not recall_at or not all(isinstance(k, int) and k >= 1 for k in recall_at):
            raise ValueError(f"recall_at: expected integers >= 1, got {recall_at!r}")
        self.recall_at = tuple(recall_at)
        # PML finds its metrics by the attributes called calculate_*.
        for k in recall_at:
            setattr(self, f"calculate_recall_at_{k}", partial(self._recall_at, k=k))
        recalls = tuple(f"recall_at_{k}" for k in recall_at)
        self.names = (*recalls, "mean_average_precision_at_r", "r_precision")
        super().__init__(include=self.names, device=torch.device("cpu"))

    def _recall_at(
        self, knn_labels: Tensor, query_labels: Tensor, not_lone_query_mask: Tensor, *, k: int, **_
    ) -> float:
        hits = (knn_labels[:, :k] == query_labels[:, None]).any(dim=1)
        return hits[not_lone_query_mask].double().mean().item()

    def requires_knn(self) -> list[str]:
        return [*super().requires_knn(), *(f"recall_at_{k}" for k in self.recall_at)]

    def determine_k(self, bin_counts: Tensor, n_references: int, ref_includes_query: bool) -> int:
        itself = int(ref_includes_query)
        deepest = max(*self.recall_at, int(bin_counts.max()) - itself)
        return min(deepest, n_references - itself)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` inside; afterwards every submodule is in the mode that it had before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _bare(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """`model` out of DDP and torch.compile.

    DDP's forward synchronises buffers, which hangs where processes have unequal numbers of batches;
    and `unwrap_model` that keeps the compilation takes DDP out of the caller's model for good.
    """
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def embed(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    batch_size: int,
    num_workers: int = 0,
    extract: Callable[[Tensor], Tensor] | None = None,
    progress: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The embeddings and labels of all images, in dataset order, on the CPU of every process.

    The model runs in evaluation mode, without gradients, out of its DDP or torch.compile wrapper.
    Its modes are restored at the end; the global random state is not touched.

    Args:
        dataset: `dataset[i]` is (image, label, ...); a `Subset` of such a dataset will do.
        extract: Called with the embeddings of a batch right after each forward, gives one more
            vector per image, such as `HORDELoss.descriptor`. A module of its own behind it is
            used in the mode that it is in.
        progress: A progress bar on the main process.
        dtype: What the images are cast to, such as `torch.float64` for a model in float64.
    Returns:
        (embeddings (n, E), labels (n,)), and with `extract` the descriptors (n, D) as a third.
    Raises:
        ValueError: if the dataset is empty, if the model or `extract` does not give one vector
            per image, or if it gives NaN or inf.
    """
    if len(dataset) == 0:
        raise ValueError("dataset: expected at least one image, got none")
    model = _bare(accelerator, model)
    batches = list(BatchSampler(range(len(dataset)), batch_size, drop_last=False))
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    # Without a generator of its own, a DataLoader draws its workers' seed from the global one.
    loader = DataLoader(
        dataset,
        batch_sampler=mine,
        num_workers=num_workers,
        generator=torch.Generator(),
        worker_init_fn=ignore_signals,
    )
    shown = progress and accelerator.is_main_process
    bar = progress_bar(loader, shown=shown, desc="embedding", unit="batch", leave=False)
    done = []
    with evaluation_mode(model), torch.no_grad():
        for positions, (images, labels, *_) in zip(mine, bar, strict=True):
            embeddings = model(images.to(accelerator.device, dtype))
            vectors = [embeddings] if extract is None else [embeddings, extract(embeddings)]
            for name, rows in zip(("model", "extract"), vectors, strict=False):
                if rows.ndim != 2 or len(rows) != len(positions):
                    raise ValueError(
                        f"{name}: expected one vector for each of {len(positions)} images, "
                        f"got shape {tuple(rows.shape)}"
                    )
            # Labels made by a worker lie in shared memory: a copy lets go of its file handle.
            vectors.insert(1, labels.clone())
            done.append((torch.tensor(positions), *(rows.cpu() for rows in vectors)))
    embeddings, labels, *descriptors = _in_dataset_order(gather_object(done), len(dataset))
    _check_finite("model", embeddings)
    for rows in descriptors:
        _check_finite("extract", rows)
    return embeddings, labels, *descriptors


def _in_dataset_order(batches: list[tuple[Tensor, ...]], n: int) -> list[Tensor]:
    positions, *columns = (torch.cat(column) for column in zip(*batches, strict=True))
    count = torch.bincount(positions, minlength=n)
    if not (count == 1).all():
        raise ValueError(
            f"embeddings gathered from the processes: of {n} images {int((count == 0).sum())} are "
            f"missing and {int((count > 1).sum())} occur more than once; every process must see "
            "the same dataset and batch_size"
        )
    order = positions.argsort()
    return [column[order] for column in columns]


def _check_finite(name: str, rows: Tensor) -> None:
    bad = (~rows.isfinite().all(dim=1)).nonzero().flatten().tolist()
    if bad:
        more = ", ..." if len(bad) > 5 else ""
        raise NonFiniteEmbeddingsError(
            f"{name}: NaN or inf for {len(bad)} of {len(rows)} images, at dataset positions "
            f"{', '.join(map(str, bad[:5]))}{more}; has the training diverged?"
        )


class ShardedTester(GlobalEmbeddingSpaceTester):
    """PML's tester with every process embedding its part and the main process measuring.

    `test` returns no metrics on the other processes. It leaves the models in evaluation mode, as
    PML does; `embedded` then holds what `embed` gave for each split, in the order of their names.

    Args:
        accuracy_calculator: Which metrics; default `RetrievalAccuracy()`.
        embedding: The keyword arguments of `embed`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        accuracy_calculator: AccuracyCalculator | None = None,
        **embedding: Any,
    ) -> None:
        super().__init__(
            data_device=accelerator.device,
            accuracy_calculator=accuracy_calculator or RetrievalAccuracy(),
        )
        self.accelerator = accelerator
        self.embedding = embedding
        self.embedded: list[tuple[Tensor, ...]] = []

    def get_splits_to_compute_embeddings(self, *args: Any) -> tuple[list[Any], list[str]]:
        # PML lists a set of names, whose order differs from process to process.
        splits_to_eval, splits = super().get_splits_to_compute_embeddings(*args)
        return splits_to_eval, sorted(splits)

    def compute_all_embeddings(
        self, dataloader: DataLoader[Any], trunk_model: nn.Module, embedder_model: nn.Module
    ) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(*(_bare(self.accelerator, m) for m in (trunk_model, embedder_model)))
        self.embedded.append(embed(self.accelerator, model, dataloader.dataset, **self.embedding))
        embeddings, labels, *_ = self.embedded[-1]
        return embeddings, labels[:, None]

    def do_knn_and_accuracies(self, *args: Any) -> None:
        if self.accelerator.is_main_process:
            super().do_knn_and_accuracies(*args)


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found: the same on every process, all tensors on the CPU in dataset order.

    Attributes:
        metrics: Such as `{"recall_at_1": 0.47, ...}`, in the order of `RetrievalAccuracy.names`.
        embeddings: (n, E), as the model gave them.
        labels: (n,).
        descriptors: (n, D), what `extract` gave; None without it.
    """

    metrics: dict[str, float]
    embeddings: Tensor
    labels: Tensor
    descriptors: Tensor | None = None


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    dataset: Dataset[Any],
    *,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    is_query: Tensor | None = None,
    **embedding: Any,
) -> Evaluation:
    """Embed `dataset` on all processes and measure the retrieval; to be called on all of them.

    Args:
        recall_at: See `RetrievalAccuracy`.
        is_query: (n,) bool; the other images are the gallery. Default: each is both.
        embedding: The keyword arguments of `embed`: `batch_size`, `num_workers`, `extract`, ...
    Raises:
        ValueError: if the dataset has less than two images, no query or no gallery; what `embed` and
            `RetrievalAccuracy` raise.
    """
    if len(dataset) < 2:
        raise ValueError(f"dataset: retrieval needs at least two images, got {len(dataset)}")
    if is_query is None:
        parts, splits = {"test": torch.arange(len(dataset))}, None
    else:
        _check_queries(is_query, len(dataset))
        parts = {"query": is_query.nonzero()[:, 0], "gallery": (~is_query).nonzero()[:, 0]}
        splits = [("query", ["gallery"])]
    calculator = RetrievalAccuracy(recall_at)
    tester = ShardedTester(accelerator, calculator, **embedding)
    subsets = {name: Subset(dataset, rows.tolist()) for name, rows in parts.items()}
    with evaluation_mode(model):
        found = tester.test(subsets, epoch=0, trunk_model=model, splits_to_eval=splits)
    [found] = found.values()
    metrics = {name: found.get(tester.accuracies_keyname(name)) for name in calculator.names}
    [metrics] = broadcast_object_list([metrics])
    order = torch.cat([parts[name] for name in sorted(parts)]).argsort()
    columns = (torch.cat(column)[order] for column in zip(*tester.embedded, strict=True))
    embeddings, labels, *descriptors = columns
    return Evaluation(metrics, embeddings, labels, *descriptors)


def _check_queries(is_query: Tensor, n: int) -> None:
    queries = int(is_query.sum())
    if is_query.shape != (n,) or is_query.dtype != torch.bool or not 0 < queries < n:
        raise ValueError(
            f"is_query: expected {n} booleans, some true and some false, got {is_query.dtype} of shape "
            f"{tuple(is_query.shape)}, {queries} true"
        )


def measure(
    vectors: Tensor,
    labels: Tensor,
    *,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    is_query: Tensor | None = None,
) -> dict[str, float]:
    """The metrics of vectors (n, D) that are at hand, compared as they are; see `evaluate`."""
    calculator = RetrievalAccuracy(recall_at)
    if is_query is None:
        return calculator.get_accuracy(vectors, labels)
    _check_queries(is_query, len(vectors))
    return calculator.get_accuracy(
        vectors[is_query], labels[is_query], vectors[~is_query], labels[~is_query]
    )


def cluster_metrics(
    vectors: Tensor, labels: Tensor, *, restarts: int = 5, seed: int = 0
) -> dict[str, float]:
    """NMI, AMI and F1 of a k-means clustering (faiss, on the CPU) with as many clusters as classes.

    NMI = 2 I(classes, clusters) / (H(classes) + H(clusters)), as in Song et al., "Deep metric learning via
    lifted structured feature embedding" (CVPR 2016), whose protocol the papers follow; F1 is the harmonic mean
    of precision and recall over all pairs of images, a pair being positive if both lie in one cluster.

    Args:
        vectors: (n, D); they are L2-normalised here.
        labels: (n,).
        restarts: Of k-means; the clustering with the least squared distances counts.
        seed: Of its starts.
    """
    classes, labels = labels.unique(return_inverse=True)
    k_means = FaissKMeans(
        **{"niter": 100, "nredo": restarts, "seed": seed},
        **{"min_points_per_centroid": 1, "max_points_per_centroid": len(labels)},
    )
    clusters = k_means(normalize(vectors), len(classes))
    return {
        "NMI": float(normalized_mutual_info_score(labels, clusters)),
        "AMI": float(adjusted_mutual_info_score(labels, clusters)),
        "F1": pairwise_f1(labels, clusters),
    }


def pairwise_f1(labels: Tensor, clusters: Tensor) -> float:
    """F1 of all pairs of images, "same cluster" taken for "same class": (n,), (n,) integers."""
    (_, wrong), (missed, right) = pair_confusion_matrix(labels, clusters)
    return float(2 * right / (2 * right + wrong + missed))


def neighbours(
    embeddings: Tensor, k: int, rows: Tensor | None = None, gallery: Tensor | None = None
) -> Tensor:
    """The `k` nearest others of each image, nearest first, ranked as for the metrics.

    Args:
        embeddings: (n, E); they are L2-normalised here.
        rows: (q,), the images to look for; default all of them.
        gallery: (g,), the images to look among, none of `rows`; default all of them.
    Returns:
        (q, k) integers; an image is never its own neighbour, but its exact duplicates are.
    Raises:
        ValueError: if there are no `k` others.
    """
    others = len(embeddings) - 1 if gallery is None else len(gallery)
    if not 1 <= k <= others:
        raise ValueError(f"k: expected 1 to {others}, the number of other images, got {k}")
    if rows is None:
        rows = torch.arange(len(embeddings))
    unit = normalize(embeddings)
    if gallery is not None:
        _, found = FaissKNN()(unit[rows], k, unit[gallery])
        return gallery[found]
    _, found = FaissKNN()(unit[rows], k + 1, unit)
    itself = found == rows[:, None]
    # Where more than k duplicates stand before the image, it is not in its own ranking.
    itself[~itself.any(dim=1), -1] = True
    return found[~itself].view(len(rows), k)
