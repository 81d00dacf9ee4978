"""PML's tester for one process or many: embeddings of a dataset, and the metrics on them or on given vectors.

Recall@K, R-precision and MAP@R are those of `pml_regularizers.RankAccuracyCalculator`. Every image is a query,
for which all other images are ranked by the distance of the L2-normalised embeddings. An image that is alone in
its class is ranked for others but is no query; without queries, every metric is NaN. If a dataset has queries and
a gallery (In-Shop), each query is ranked against the gallery alone; R is then the number of gallery images of its
class. Both are rows of one matrix, which is embedded in one pass and not copied. A table may have images that are
both, and groups of images, such as those of a camera, that leave the rankings of their queries.

Process i modulo the number of processes embeds batch i, so batches are composed as on one process and the
embeddings are equal to the bit; every process gets all of them. Blocks of queries are shared in the same way.
"""

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from pytorch_metric_learning.testers import GlobalEmbeddingSpaceTester
from pytorch_metric_learning.utils.inference import FaissKMeans
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset

from benchmarks.console.printing import progress_bar
from benchmarks.console.stopping import ignore_signals
from benchmarks.datasets.queries import Ranking
from benchmarks.records.results import NonFiniteError
from pml_regularizers import RankAccuracyCalculator
from pml_regularizers.metrics.ranks import Ranks

RESTARTS = 5  # of k-means: the clustering with the least squared distances counts


def _bar(work: Any, accelerator: Accelerator | None, **words: str) -> Any:
    """A bar for what takes more than a second, on the main process."""
    shown = accelerator is None or accelerator.is_main_process
    return progress_bar(work, shown=shown, delay=1, leave=False, **words)


class _Calculator(RankAccuracyCalculator):
    """Metrics within one matrix, by a ranking; the ranks are one of them.

    The processes of the accelerator share the queries; without one, this process ranks, on the CPU.
    """

    def __init__(
        self, recall_at: Sequence[int], ranking: Ranking, accelerator: Accelerator | None
    ) -> None:
        names = ("mean_average_precision_at_r", "r_precision", "ranks")
        super().__init__(
            include=[*(f"recall_at_{K}" for K in recall_at), *names],
            recall_at=recall_at,
            device=torch.device("cpu") if accelerator is None else None,
            accelerator=accelerator,
            progress=partial(_bar, accelerator=accelerator, desc="ranking", unit="block"),
            group_rule="all" if ranking.whole_groups else "class",
        )
        self.ranking = ranking

    def get_accuracy(self, query: Tensor, query_labels: Tensor, *_: Any, **__: Any) -> Any:
        """The metrics of the matrix that PML's tester hands over as queries, and as references."""
        return self.get_accuracy_within(
            *(query, query_labels),
            queries=self.ranking.queries,
            references=self.ranking.gallery,
            groups=self.ranking.groups,
            normalize=True,
        )

    def calculate_ranks(self, ranks: Ranks, **_: Any) -> Ranks:
        return ranks


def rank(
    vectors: Tensor,
    labels: Tensor,
    recall_at: Sequence[int],
    ranking: Ranking | None = None,
    accelerator: Accelerator | None = None,
) -> tuple[dict[str, float], Ranks]:
    """Recall@K, MAP@R and R-precision of vectors (n, D), L2-normalised here, and the ranks.

    Args:
        ranking: Default: each image is ranked against all others.
        accelerator: Processes that share the queries; all call this. None: this one alone, on the CPU.
    """
    ranking = ranking or Ranking.of_all(len(vectors))
    metrics = _Calculator(recall_at, ranking, accelerator).get_accuracy(vectors, labels)
    return metrics, metrics.pop("ranks")


def measure(
    vectors: Tensor,
    labels: Tensor,
    recall_at: Sequence[int],
    ranking: Ranking | None = None,
) -> dict[str, float]:
    """The metrics of `rank` alone, by this process."""
    metrics, _ = rank(vectors, labels, recall_at, ranking)
    return metrics


@dataclass(frozen=True)
class Measured:
    """Results on a tested dataset: the same on every process, all tensors on the CPU in dataset order."""

    metrics: dict[str, float]  # such as {"recall_at_1": 0.47, ...}, in the calculator's order
    ranks: Ranks  # of each query that has something to find
    embeddings: Tensor  # (n, E), as the model gave them
    labels: Tensor  # (n,)
    ranking: Ranking
    descriptors: Tensor | None = None  # (n, D), of `extract`


Extractor = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Evaluator:
    """Tests a model on datasets, with all processes, which all call the methods.

    The model runs, and is left, in evaluation mode, without gradients and without its DDP or torch.compile
    wrapper; images are cast to its parameters' type. The global random state does not change.
    """

    accelerator: Accelerator
    model: nn.Module
    batch_size: int
    num_workers: int = 0

    def embed(self, dataset: Dataset[Any], extract: Extractor | None = None) -> tuple[Tensor, ...]:
        """The embeddings (n, E) and labels (n,) of all images, in dataset order, on the CPU.

        Args:
            dataset: `dataset[i]` is (image, label, ...); a `Subset` of such a dataset works as well.
            extract: Gives one more vector per image, such as `HORDELoss.descriptor`, from the embeddings of a
                batch, right after each forward pass: the descriptors (n, D), which are returned as a third.

        Raises:
            NonFiniteError: if the model or `extract` gives NaN or inf.
        """
        accelerator, n = self.accelerator, len(cast(Sized, dataset))
        # `unwrap_model`, if it keeps the compilation, removes DDP from the caller's model for good.
        model = accelerator.unwrap_model(self.model, keep_torch_compile=False)
        first, processes = accelerator.process_index, accelerator.num_processes
        batches = torch.arange(n).split(self.batch_size)
        # All processes have equally many, or gathering would hang: some do one of the first batches again.
        turns = range(first, len(batches) + -len(batches) % processes, processes)
        mine = [batches[turn % len(batches)] for turn in turns]
        # Without a generator of its own, a DataLoader draws its workers' seed from the global one.
        loader = DataLoader(
            dataset,
            batch_sampler=[positions.tolist() for positions in mine],
            num_workers=self.num_workers,
            generator=torch.Generator(),
            worker_init_fn=ignore_signals,
        )
        bar = _bar(loader, accelerator, desc="embedding", unit="batch")
        columns: list[Tensor] = []
        model.eval()
        with torch.no_grad():
            for (images, labels, *_), positions in zip(bar, mine, strict=True):
                dtype = next(model.parameters(), images).dtype
                embeddings = model(images.to(accelerator.device, dtype))
                more = [] if extract is None else [extract(embeddings).cpu()]
                for places, *parts in gather_object([(positions, embeddings.cpu(), labels, *more)]):
                    columns = columns or [part.new_empty(n, *part.shape[1:]) for part in parts]
                    for column, rows in zip(columns, parts, strict=True):
                        column[places] = rows
        for source, rows in zip(("model", "extract"), columns[::2], strict=False):
            # Least and largest entries, which are NaN if one is: no table of truth values for all entries.
            finite = torch.stack(rows.aminmax(dim=1)).isfinite().all(dim=0)
            if bad := (~finite).nonzero().flatten().tolist():
                raise NonFiniteError(
                    f"{source}: NaN or inf for {len(bad)} of {n} images, at dataset positions "
                    f"{', '.join(map(str, bad[:5]))}{', ...' if len(bad) > 5 else ''}; has the training diverged?"
                )
        return tuple(columns)

    def evaluate(
        self,
        dataset: Dataset[Any],
        recall_at: Sequence[int],
        ranking: Ranking | None = None,
        extract: Extractor | None = None,
    ) -> Measured:
        """Test the model with PML's tester; by default, each image is ranked against all others."""
        ranking = ranking or Ranking.of_all(len(cast(Sized, dataset)))
        tester = _Tester(self, _Calculator(recall_at, ranking, self.accelerator), extract)
        results = tester.test({"test": dataset}, 0, self.model)["test"]
        del results["epoch"]
        metrics = {name.removesuffix("_level0"): value for name, value in results.items()}
        ranks = metrics.pop("ranks")
        embeddings, labels, *descriptors = tester.columns
        return Measured(metrics, ranks, embeddings, labels, ranking, *descriptors)


class _Tester(GlobalEmbeddingSpaceTester):
    """PML's tester, whose images all processes embed; afterwards, `columns` are the results of `embed`."""

    columns: tuple[Tensor, ...]

    def __init__(
        self, evaluator: Evaluator, calculator: _Calculator, extract: Extractor | None
    ) -> None:
        super().__init__(
            normalize_embeddings=False,  # the calculator does it, without a copy
            batch_size=evaluator.batch_size,
            dataloader_num_workers=evaluator.num_workers,
            data_device=evaluator.accelerator.device,
            end_of_testing_hook=lambda tester: None,  # PML's default hook logs the metrics
            accuracy_calculator=calculator,
        )
        self.evaluator, self.extract = evaluator, extract

    def compute_all_embeddings(self, dataloader: Any, *_: Any) -> tuple[Tensor, Tensor]:
        """The embeddings (n, E) and the labels (n, 1)."""
        self.columns = self.evaluator.embed(dataloader.dataset, self.extract)
        return self.columns[0], self.columns[1][:, None]

    def set_reference_and_query(self, embeddings: dict[str, Any], *_: Any) -> Any:
        """All images as queries and as references; PML would copy these."""
        return embeddings["test"] * 2


def per_class(ranks: Ranks, classes: int) -> dict[str, list[int]]:
    """Each class's number of queries, and the means of their Recall@1 and MAP@R, in ten-thousandths.

    Queries without anything to find do not count; a class without queries has 0 everywhere.
    """
    queries = torch.bincount(ranks.labels, minlength=classes)
    hits, precision = ranks.nearest <= 1, ranks.average_precision
    result = {"queries": queries.tolist()}
    for name, values in (("recall_at_1", hits), ("mean_average_precision_at_r", precision)):
        mean = torch.bincount(ranks.labels, values.double(), classes) / queries.clamp(min=1)
        result[name] = (1e4 * mean).round().long().tolist()
    return result


def cluster_metrics(vectors: Tensor, labels: Tensor) -> dict[str, float]:
    """NMI, AMI and F1 of a k-means clustering (faiss, on the CPU) with as many clusters as classes.

    NMI = 2 I(classes, clusters) / (H(classes) + H(clusters)), as in Song et al., "Deep metric learning via
    lifted structured feature embedding" (CVPR 2016), whose protocol the papers follow; F1 is the harmonic mean
    of precision and recall over all pairs of images, a pair being positive if both lie in one cluster. Vectors
    (n, D) are L2-normalised here.
    """
    classes, labels = labels.unique(return_inverse=True)
    k_means = FaissKMeans(
        **{"niter": 100, "nredo": RESTARTS, "seed": 0},
        **{"min_points_per_centroid": 1, "max_points_per_centroid": len(labels)},
    )
    clusters = k_means(normalize(vectors), len(classes))
    (_, wrong), (missed, right) = pair_confusion_matrix(labels, clusters)
    return {
        "NMI": float(normalized_mutual_info_score(labels, clusters)),
        "AMI": float(adjusted_mutual_info_score(labels, clusters)),
        "F1": float(2 * right / (2 * right + wrong + missed)),
    }
