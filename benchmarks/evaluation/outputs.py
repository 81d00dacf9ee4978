"""Tested outputs of a trained model: its embedding, and the other outputs that a paper's table reports.

docs/benchmarks.md names them. A model with VEM attention also has `variance_correlation`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.evaluation.closed_form import components, reduced
from benchmarks.evaluation.extract import Extract
from benchmarks.evaluation.generalization_bound import (
    confidence_interval,
    h_divergence,
    ideal_joint_error,
    stratified_parts,
)
from benchmarks.evaluation.identification import identify
from benchmarks.evaluation.tester import (
    Evaluator,
    Measured,
    cluster_metrics,
    measure,
    per_class,
    rank,
)
from benchmarks.evaluation.verification import verify
from benchmarks.records.run_folder import EMBEDDINGS, NEIGHBOURS
from benchmarks.records.steps import read_table
from benchmarks.settings.experiment import Evaluation, Experiment
from pml_regularizers import HORDELoss, VEMAttention

Metrics = dict[str, float]

QUERIES, NEAREST = 200, 8  # that are saved for a report, and the neighbours of each

ByClass = dict[str, dict[str, list[int]]]
"""What `per_class` gives, by output."""


def test_outputs(
    evaluator: Evaluator,
    horde: HORDELoss | None,
    train_set: Glyphs | ImageSet | None,
    test_set: Glyphs | ImageSet,
    settings: Evaluation,
    trained: dict[str, Tensor] | None = None,
) -> tuple[Measured, dict[str, Any]]:
    """Test all outputs that the settings ask for, in one pass over the images; call it on all processes.

    Without a training set, none is to be tested that is fitted on it, or compared with it.

    Args:
        trained: `read_features` of the training images, if they were read already.

    Returns:
        The embedding's results, and the record's entries: "metrics" and "per_class" of the embedding, "outputs" and
        "per_class_of_outputs" of the others, and "half_widths" of the 95 % intervals of those that are means. Only
        the main process has all metrics.
    """
    if not (settings.orders or settings.descriptor):
        horde = None
    accelerator, ranking, K = evaluator.accelerator, test_set.ranking, settings.recall_at
    reading = Extract(evaluator.model, horde, features=settings.features is not None)
    extract = reading if reading.wanted else None
    with reading:
        found = evaluator.evaluate(test_set, K, ranking, extract)
    attention = next((m for m in evaluator.model.modules() if isinstance(m, VEMAttention)), None)
    if attention is not None and train_set is not None:
        correlation = variance_correlation(evaluator, attention, train_set)
        found.metrics["variance_correlation"] = correlation
    needed = {
        **{"embeddings": settings.divergence, "features": settings.features is not None},
        "descriptor": horde is not None and settings.descriptor,
    }
    seen = dict(trained or {})
    if any(asked and name not in seen for name, asked in needed.items()):
        assert train_set is not None
        with reading:
            embeddings, labels, *rows = evaluator.embed(train_set, extract)
        seen = {"embeddings": embeddings, "labels": labels}
        seen |= reading.split(rows[0]) if rows else {}
    tested = {} if found.descriptors is None else reading.split(found.descriptors)
    vectors: dict[str, Tensor] = {}
    if horde is not None and settings.orders:
        vectors |= horde.split_orders(tested["descriptor"])
        del vectors["order_1"]
    if needed["descriptor"]:
        assert horde is not None
        both = seen["descriptor"], tested["descriptor"]
        vectors["descriptor"] = components(accelerator, *both, horde.embedding_size)
    if settings.features is not None:
        given = seen["features"], seen["labels"], tested["features"]
        vectors |= feature_outputs(accelerator, *given, settings.features)
    outputs, by_class = rank_all(accelerator, vectors, found.labels, test_set, K)
    half_widths: dict[str, Metrics] = {}
    if accelerator.is_main_process:
        if settings.clustering:
            found.metrics.update(cluster_metrics(found.embeddings, found.labels))
        if settings.parts is not None:
            outputs["parts"], half_widths["parts"] = over_parts(
                found.embeddings, found.labels, seen, settings
            )
    return found, {
        **{"metrics": found.metrics, "per_class": per_class(found.ranks, test_set.num_classes)},
        **{"outputs": outputs, "per_class_of_outputs": by_class, "half_widths": half_widths},
    }


def verified(found: Measured, experiment: Experiment, accelerator: Accelerator) -> dict[str, Any]:
    """The record's entries "verification" and "identification", if asked for; all processes call it.

    The second one is about new classes: it is left out where tested classes may have been trained on, or settings
    chosen on them.
    """
    if not experiment.evaluation.verification:
        return {}
    images = found.embeddings, found.labels, found.ranking, accelerator
    entries = {"verification": verify(*images)}
    if experiment.data.split == "test" and not experiment.data.known_classes:
        entries["identification"] = identify(*images)
    return entries


def variance_correlation(
    evaluator: Evaluator, attention: VEMAttention, dataset: Glyphs | ImageSet
) -> float:
    """Pearson's, over all features, of the variance that VEM attention predicts with that of a dataset's images."""
    seen: list[tuple[Tensor, Tensor]] = []

    def see(module: nn.Module, arguments: Any, pair: tuple[Tensor, Tensor]) -> None:
        seen.append(pair)

    with attention.statistics.register_forward_hook(see):
        _, _, pooled = evaluator.embed(dataset, lambda _: seen.pop()[0].float())
    both = [pooled.var(dim=0), attention.variance.detach().float().cpu()]
    return float(torch.corrcoef(torch.stack(both))[0, 1])


def test_untrained(
    evaluator: Evaluator,
    trained: dict[str, Tensor] | None,
    test_set: Glyphs | ImageSet,
    settings: Evaluation,
    size: int,
) -> tuple[Metrics, dict[str, Metrics], ByClass]:
    """Test the network before its training; call it on all processes.

    Args:
        trained: `read_features` of the training images; None for an ensemble, which has no such outputs.
        size: Width of the components, if `settings.features` gives none.

    Returns:
        The embeddings' metrics, those of the untrained trunk's outputs, and the latter's results by class. The
        outputs are the trunk's pooled features and, if there are enough training images, their components as
        they are and after within-class whitening.
    """
    accelerator, ranking, K = evaluator.accelerator, test_set.ranking, settings.recall_at
    if trained is None:
        return evaluator.evaluate(test_set, K, ranking).metrics, {}, {}
    with (extract := Extract(evaluator.model)):
        found = evaluator.evaluate(test_set, K, ranking, extract)
    assert found.descriptors is not None
    vectors = {"untrained_features": found.descriptors}
    size = settings.features or size
    if size <= min(trained["features"].shape):
        given = trained["features"], trained["labels"], found.descriptors
        fewer = reduced(accelerator, *given, size)
        vectors |= {f"untrained_{name}": rows for name, rows in fewer.items()}
    return found.metrics, *rank_all(accelerator, vectors, found.labels, test_set, K)


def rank_all(
    accelerator: Accelerator,
    vectors: dict[str, Tensor],
    labels: Tensor,
    test_set: Glyphs | ImageSet,
    recall_at: Sequence[int],
) -> tuple[dict[str, Metrics], ByClass]:
    """The metrics of vectors by name, and their results by class."""
    outputs: dict[str, Metrics] = {}
    by_class: ByClass = {}
    for name, rows in vectors.items():
        outputs[name], ranks = rank(rows, labels, recall_at, test_set.ranking, accelerator)
        by_class[name] = per_class(ranks, test_set.num_classes)
    return outputs, by_class


def feature_outputs(
    accelerator: Accelerator, trained: Tensor, labels: Tensor, features: Tensor, size: int
) -> dict[str, Tensor]:
    """The tested images' pooled features (n, C), and what the training images' (N, C) make of them."""
    fewer = reduced(accelerator, trained, labels, features, size)
    outputs = {"features": features, "features_centred": features - trained.mean(dim=0)}
    return outputs | {f"features_{name}": rows for name, rows in fewer.items()}


def over_parts(
    embeddings: Tensor, labels: Tensor, trained: dict[str, Tensor], settings: Evaluation
) -> tuple[Metrics, Metrics]:
    """Means and half-widths of 95 % intervals over class-stratified parts of the test set."""
    assert settings.parts is not None
    parts = stratified_parts(labels, settings.parts)
    rows = [measure(embeddings[part], labels[part], settings.recall_at) for part in parts]
    if settings.divergence:
        seen, seen_labels = trained["embeddings"], trained["labels"]
        # Labels of both sets count from zero.
        unseen_labels = labels + seen_labels.max() + 1
        seen_parts = stratified_parts(seen_labels, settings.parts)
        for row, part, seen_part in zip(rows, parts, seen_parts, strict=True):
            both = seen[seen_part], seen_labels[seen_part], embeddings[part], unseen_labels[part]
            # The mean of the two errors: JRD's printed value is small for a sum.
            row["ideal_joint_error"] = ideal_joint_error(*both) / 2
            row["h_divergence"] = h_divergence(*both)
    means, half_widths = {}, {}
    for name in rows[0]:
        means[name], half_widths[name] = confidence_interval([row[name] for row in rows])
    return means, half_widths


def best_by_the_test(run: Path, recall_at: Sequence[int]) -> Metrics | None:
    """The best row of the table "oracle", by the test set itself; None if no oracle was requested."""
    table = read_table(run / "records", "oracle")
    if not table:
        return None
    values = table[f"recall_at_{recall_at[0]}"]
    best = values.index(max(values))
    return {name: column[best] for name, column in table.items()}


def save_embeddings(run: Path, test_set: Glyphs | ImageSet, embeddings: Tensor) -> None:
    """Save the embeddings of the tested images, with their labels and their ranking."""
    tensors = {"embeddings": embeddings, "labels": test_set.labels}
    tensors |= test_set.ranking.arrays() if test_set.ranking else {}
    arrays: dict[str, Any] = {name: x.numpy() for name, x in tensors.items()}
    np.savez(run / EMBEDDINGS, **arrays)


def neighbours(found: Measured, rows: Tensor, k: int = NEAREST) -> Tensor:
    """Nearest images (q, at most k) of the images `rows`, nearest first, ranked as for the metrics.

    There are as many for each as the smallest of their rankings has. Exact duplicates are among them.
    """
    unit, gallery = normalize(found.embeddings), found.ranking.gallery.nonzero()[:, 0]
    similarities = unit[rows] @ unit[gallery].T
    left_out = found.ranking.left_out(found.labels, rows, gallery)
    similarities.masked_fill_(left_out, -torch.inf)
    order = similarities.argsort(dim=1, descending=True, stable=True)
    return gallery[order[:, : min(k, int((~left_out).sum(dim=1).min()))]]


def save_neighbours(folder: Path, found: Measured) -> None:
    """Write queries and their nearest neighbours into the run folder, for its report; call it on one process.

    They are rows of the dataset, no pictures. "queries" (q,) are evenly spread over those that have something to
    find, the same for every network; "neighbours" (q, k) are their nearest images, and "precision" (q,) is their
    average precision.
    """
    ranks = found.ranks
    chosen = torch.linspace(0, len(ranks.rows) - 1, min(QUERIES, len(ranks.rows))).long()
    queries = ranks.rows[chosen]
    np.savez_compressed(
        folder / NEIGHBOURS,
        queries=queries.numpy().astype(np.int32),
        neighbours=neighbours(found, queries).numpy().astype(np.int32),
        precision=ranks.average_precision[chosen].numpy(),
    )
