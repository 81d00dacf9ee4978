"""Facts that a paper states about a training, read from the classes that the runner builds and their arguments.

The names are those of `references/settings.yaml`. That a class computes its equation is for the tests of the
library, which hold it against an oracle.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.building.images import Datasets
from benchmarks.building.network import EmbeddingModel, batch_norms
from benchmarks.datasets import IMAGE_DATASETS, ImageSet
from benchmarks.evaluation.tester import cluster_metrics
from benchmarks.settings.experiment import Experiment
from pml_regularizers import AttentionEnsemble, DistributedLoss
from tests.end_to_end.paper_losses import Objective, OneOf, start

BACKBONES = {"googlenet": "GoogLeNet", "bn_inception": "BN-Inception", "resnet50": "ResNet-50"}


@dataclass
class Training:
    """An entry as the runner builds it."""

    experiment: Experiment
    network: EmbeddingModel
    loss: DistributedLoss
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    datasets: Datasets
    starts_from_imagenet: bool
    """Initial weights by the settings; the weights themselves are not loaded."""

    def facts(self) -> dict[str, Any]:
        found = Objective(self.network, self.loss).facts()
        for read in (self._network, self._batch, self._views, self._optimization, self._test):
            found |= read()
        return found

    # ------------------------------------------------------------------------------------ network

    def _network(self) -> dict[str, Any]:
        parts: list[nn.Module] = [self.network.trunk]
        if isinstance(self.network.head, AttentionEnsemble):
            parts.append(self.network.head.body)
        objective = Objective(self.network, self.loss)
        fc = objective.head.fc
        found = {
            "backbone": BACKBONES[self.experiment.model.trunk.partition(".")[0]],
            "pretrained": "ImageNet" if self.starts_from_imagenet else "nothing",
            "framework": type(self.optimizer).__module__.partition(".")[0],
            "embedding_size": self.network.head.embedding_size,
            "embedding_norm": objective.length_seen(objective.metric),
            "pooling": {"avg": "average"}.get(objective.head.pool, "another"),
            "head_layers": sum(isinstance(m, nn.Linear) for m in objective.head.modules()),
            "head_bias": fc.bias is not None,
            "head_start": start(fc.weight, fc.in_features, fc.out_features),
        }
        if norms := batch_norms(nn.ModuleList(parts)):
            self.network.train()
            [trained] = {p.requires_grad for norm in norms for p in norm.parameters()}
            [statistics] = {norm.training for norm in norms}
            found["batch_norm"] = {
                (True, True): "trained",
                (False, True): "statistics frozen",
                (False, False): "frozen",
            }[statistics, trained]
        return found

    # -------------------------------------------------------------------------- batches and images

    def _batch(self) -> dict[str, Any]:
        data = self.experiment.data
        layout = "random"
        if data.samples_per_class:
            layout = f"{data.batch_size // data.samples_per_class} x {data.samples_per_class}"
        return {"batch_size": data.batch_size, "batch_layout": layout}

    def _views(self) -> dict[str, Any]:
        train, test = self.datasets.train, self.datasets.test
        assert isinstance(train, ImageSet)
        assert isinstance(test, ImageSet)
        views = train.views
        assert views == test.views
        whole = views.augmentation == "multi_resolution"
        side = views.resize or round(views.image_size / (1 if whole else 0.875))
        resized = f"shorter side {side}" if views.keep_aspect else f"{side} x {side}"
        uncut = side == views.image_size and not views.keep_aspect
        found = {
            "train_size": views.image_size,
            "test_size": views.image_size,
            "train_mirror": views.augmentation != "none",
            "test_resize": resized,
            "test_crop": "none" if uncut else "center",
            "box_crop": False,  # by no recipe
        }
        match views.augmentation:
            case "multi_resolution":
                found |= {"train_resize": "0.8 to 1.8 x crop", "train_resize_side": "longer"}
                found["train_crop"] = "random"
            case "random_crop":
                found |= {"train_resize": resized, "train_crop": "random"}
            case "random_resized_crop":
                found |= {"train_resize": "none", "train_crop": "random resized"}
        return found

    # ------------------------------------------------------------------------------- optimization

    def _optimization(self) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        of_part: dict[str, set[float]] = {}
        network = dict(self.network.named_parameters())
        for name, p in (*network.items(), *self.loss.named_parameters(prefix="loss")):
            if p.requires_grad:
                of_part.setdefault(part_of(name), set()).add(rates[id(p)])
        found: dict[str, Any] = {"optimizer": self._optimizer()}
        for part, values in of_part.items():
            [found[f"lr_{part}"]] = values
        [found["weight_decay"]] = {group["weight_decay"] for group in groups}
        [found["optimizer_eps"]] = {group["eps"] for group in groups}
        if found["weight_decay"] != 0:
            decoupled = self.optimizer.defaults["decoupled_weight_decay"]
            found["weight_decay_form"] = "decoupled" if decoupled else "in the gradient"
        data = self.experiment.data
        images, _ = IMAGE_DATASETS[data.dataset].counts["train"]
        found["length"] = Length(self.experiment.optimization.steps, images, data.batch_size)
        found["schedule"] = self._schedule(images / data.batch_size)
        return found

    def _optimizer(self) -> str:
        """Its name, with the options that are not its own defaults and have no fact of their own."""
        cls, apart = type(self.optimizer), ("lr", "eps", "weight_decay")
        usual = cls([nn.Parameter(torch.zeros(1))]).defaults
        given = {
            f"{name}={value}"
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name in usual and name not in apart and value != usual[name]
        }
        return " ".join([cls.__name__, *sorted(given)])

    def _schedule(self, steps_per_epoch: float) -> str:
        """Constant, or where it falls, in epochs."""
        if self.scheduler is None:
            return "constant"
        assert isinstance(self.scheduler, torch.optim.lr_scheduler.MultiStepLR)
        every = round(min(self.scheduler.milestones) / steps_per_epoch)
        last = self.experiment.optimization.steps
        falls = (math.ceil(epoch * steps_per_epoch) for epoch in itertools.count(every, every))
        expected = itertools.takewhile(lambda step: step < last, falls)
        assert sorted(self.scheduler.milestones) == list(expected)
        return f"x {self.scheduler.gamma:g} every {every} epochs"

    # --------------------------------------------------------------------------------------- test

    def _test(self) -> dict[str, Any]:
        data, evaluation = self.experiment.data, self.experiment.evaluation
        counts = IMAGE_DATASETS[data.dataset].counts
        parts = [counts[name] for name in ("test", "query", "gallery") if name in counts]
        metrics = [f"recall_at_{k}" for k in evaluation.recall_at]
        metrics += ["NMI", "F1"] if evaluation.clustering else []
        metrics += ["ideal_joint_error", "h_divergence"] if evaluation.divergence else []
        whole = (data.split, data.train_classes, data.max_classes) == ("test", None, None)
        found = {
            "train_images": counts["train"][0],
            "train_classes": counts["train"][1],
            "test_images": sum(images for images, _ in parts),
            "test_classes": parts[-1][1],
            "curve_steps": evaluation.every,
            "query_gallery": self.datasets.test.is_query is not None,
            "split": "published" if whole and self.experiment.protocol == "paper" else "another",
            "metrics": Contains(metrics),
            "test_similarity": OneOf(["cosine", "euclidean"]),  # of unit vectors: one ranking
            "selection": "last" if self.experiment.protocol == "paper" else "best on validation",
        }
        if evaluation.parts:
            found["parts"] = evaluation.parts
        if evaluation.clustering:
            found |= _clustering()
        if evaluation.divergence:
            found["ideal_error"] = "mean of these errors"
            found["h_divergence"] = "1 - error"
        return found


# --------------------------------------------------------------------------------------------- helpers


def _clustering() -> dict[str, Any]:
    """Facts from the arguments of k-means for four images of two classes."""
    with patch("benchmarks.evaluation.tester.FaissKMeans") as k_means:
        k_means.return_value.return_value = torch.tensor([0, 0, 1, 1])
        cluster_metrics(torch.eye(4), torch.tensor([3, 3, 5, 5]))
    clusters = k_means.return_value.call_args.args[1]
    restarts: Mapping[str, Any] = k_means.call_args.kwargs
    return {
        "kmeans_clusters": "test classes" if clusters == 2 else clusters,
        "kmeans_restarts": restarts["nredo"],
    }


def part_of(name: str) -> str:
    """The part of the network that a parameter belongs to, or the loss, by its name."""
    if name.startswith("loss"):
        return "loss"
    if name.startswith("head.attention"):
        return "attention"
    return "head" if name.startswith("head") and "fc." in name else "trunk"


@dataclass(frozen=True)
class Length:
    """Length of a training, equal to the words "8000 steps" and "50 epochs"."""

    steps: int
    images: int
    batch_size: int

    def __eq__(self, said: object) -> bool:
        number, unit = str(said).split()
        if unit == "steps":
            return self.steps == int(number)
        exact = self.images * int(number) / self.batch_size
        whole = int(number) * math.ceil(self.images / self.batch_size)
        return self.steps in (math.ceil(exact), whole)


@dataclass(frozen=True)
class Contains:
    """The measured metrics, equal to any selection of it."""

    names: list[str]

    def __eq__(self, said: object) -> bool:
        return isinstance(said, list) and {*said} <= {*self.names}
