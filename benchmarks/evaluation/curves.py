"""Points of the curves during training, and the choice of weights by validation classes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset

from benchmarks.building.images import Datasets
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.evaluation.extract import Extract, class_cosines, effective_rank
from benchmarks.evaluation.tester import Evaluator, cluster_metrics
from benchmarks.settings.experiment import Evaluation

SELECTED_BY = "mean_average_precision_at_r"


@dataclass
class Curves:
    """Measures the model at a step of its training, with all processes, which call the methods."""

    evaluator: Evaluator
    datasets: Datasets
    settings: Evaluation
    best: dict[str, Any] | None = None  # step and value of the best weights, by validation classes

    def point(self, step: int) -> dict[str, float]:
        """Recall@1 of some seen and some unseen classes; under protocol "fair", of all validation classes.

        If the features are tested, also the mean cosines of pooled features of one class and of two classes, and
        the effective ranks of features and embeddings.
        Step 0 shows the network before training, and is never chosen.
        """
        row = self._of_some("seen", self.datasets.train)
        validation = self.datasets.validation
        if validation is None:
            return row | self._of_some("unseen", self.datasets.test)
        found = self.evaluator.evaluate(validation, [1], validation.ranking).metrics
        value = found[SELECTED_BY]
        if step and (self.best is None or value > self.best["value"]):
            self.best = {"step": step, "value": value}
        return row | {"unseen_recall_at_1": found["recall_at_1"], SELECTED_BY: value}

    def oracle(self) -> dict[str, float]:
        """Measure all test classes, for curves and for the column *oracle (test-selected)*."""
        test = self.datasets.test
        found = self.evaluator.evaluate(test, self.settings.recall_at, test.ranking)
        if not (self.settings.clustering and self.evaluator.accelerator.is_main_process):
            return found.metrics
        return found.metrics | cluster_metrics(found.embeddings, found.labels)

    def _of_some(self, name: str, dataset: Glyphs | ImageSet) -> dict[str, float]:
        """Recall@1, and cosines, of some of the classes, for the report's curves and never for a choice."""
        count = min(self.settings.curve_classes, dataset.num_classes)
        chosen = torch.linspace(0, dataset.num_classes - 1, count).long()
        rows = torch.isin(dataset.labels, chosen).nonzero().flatten()
        ranking = dataset.ranking and dataset.ranking.taken(rows)
        reading = Extract(self.evaluator.model, None, features=self.settings.features is not None)
        part = Subset(dataset, rows.tolist())
        with reading:
            extract = reading if reading.wanted else None
            found = self.evaluator.evaluate(part, [1], ranking, extract)
        row = {f"{name}_recall_at_1": found.metrics["recall_at_1"]}
        if found.descriptors is not None:
            same, others = class_cosines(found.descriptors, found.labels)
            row |= {f"{name}_same_class_cosine": same, f"{name}_other_class_cosine": others}
            row[f"{name}_features_rank"] = effective_rank(found.descriptors)
            row[f"{name}_embeddings_rank"] = effective_rank(found.embeddings)
        return row
