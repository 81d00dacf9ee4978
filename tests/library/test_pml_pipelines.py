"""Attached losses in pytorch-metric-learning's own pipelines, none of which knows of features."""

import copy
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners, samplers, testers, trainers
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor
from torch.utils.data import TensorDataset

from pml_regularizers import (
    BinomialDevianceLoss,
    CosinePowersLoss,
    EnergyConfusionRegularizer,
    JRSRegularizer,
    RankAccuracyCalculator,
    VarianceRegularizer,
    attach_all,
)
from tests.library.test_parameter_groups import horde
from tests.support.tolerances import assert_close
from tests.support.toys import Attended

CLASSES, BATCH, ITERATIONS = 4, 8, 3

# PML formats the loss for its progress bar; torch says so once, in whichever test comes first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),
    pytest.mark.filterwarnings("ignore:powers. .* even and cannot tell opposite features apart"),
    pytest.mark.filterwarnings("ignore:DistributedLossWrapper is being used in a non-distributed"),
]


class Pipeline:
    """A network, all four systems attached to it, and a PML trainer's arguments from them."""

    weights = {"horde": 1.0, "variance": 0.5, "confusion": 0.2, "joint": 2.0}

    def __init__(self) -> None:
        self.network = Attended()
        parts = {
            "horde": horde(BinomialDevianceLoss()),
            "variance": VarianceRegularizer(),
            "confusion": EnergyConfusionRegularizer(gradient="fc"),
            "joint": JRSRegularizer(),
        }
        self.loss = attach_all(
            losses.MultipleLosses(parts, weights=self.weights), self.network.head
        )
        labels = torch.arange(CLASSES).repeat(6)
        centres = torch.randn(CLASSES, 3, 8, 8)
        self.data = TensorDataset(centres[labels] + torch.randn(len(labels), 3, 8, 8), labels)
        self.start = copy.deepcopy(self.parameters())

    def parameters(self) -> dict[str, Tensor]:
        return {**dict(self.network.named_parameters()), **dict(self.loss.named_parameters())}

    def trainer(self, kind: Any = trainers.MetricLossOnly, **kwargs: Any) -> Any:
        trunk, head = self.network.trunk, self.network.head
        arguments: dict[str, Any] = {
            "models": {"trunk": trunk, "embedder": head},
            "optimizers": {
                "trunk_optimizer": torch.optim.SGD(trunk.parameters(), lr=0.05),
                "embedder_optimizer": torch.optim.SGD(head.parameters(), lr=0.05),
                "metric_loss_optimizer": torch.optim.SGD(self.loss.parameters(), lr=0.05),
            },
            "batch_size": BATCH,
            "loss_funcs": {"metric_loss": self.loss},
            "dataset": self.data,
            "sampler": samplers.MPerClassSampler(
                self.data.tensors[1], m=2, length_before_new_iter=24
            ),
            "dataloader_num_workers": 0,
            "data_device": torch.device("cpu"),
            "iterations_per_epoch": ITERATIONS,
        }
        return kind(**arguments | kwargs)

    def check(self, spy: "Spy", x: Tensor, labels: Tensor, mined: Any = None) -> None:
        """Everything was trained, and the last loss is the sum of its parts, with features that are passed."""
        for name, value in self.parameters().items():
            assert value.isfinite().all()
            assert not torch.equal(value, self.start[name]), f"{name} did not move"
        maps = spy.network.trunk(x)
        embeddings, pooled = spy.network.head(maps), maps.mean(dim=(2, 3))
        features = {
            "horde": maps,
            "variance": (pooled, spy.network.head.attention.variance),
            "confusion": embeddings,
            "joint": {"pooled": pooled},
        }
        expected = sum(
            self.weights[name] * loss(embeddings, labels, mined, features=features[name])
            for name, loss in spy.loss.losses.items()
        )
        assert_close(spy.value, expected)


class Spy:
    """Keeps a trainer's last batch, what was mined of it, the state before its last step, and its last loss."""

    def __init__(self, pipeline: Pipeline, trainer: Any) -> None:
        calculate, mine = trainer.calculate_loss, trainer.maybe_mine_embeddings

        def calculate_loss(batch: Any) -> None:
            self.network, self.loss = copy.deepcopy((pipeline.network, pipeline.loss))
            self.batch = batch
            calculate(batch)
            self.value = trainer.losses["metric_loss"].detach()

        def mine_embeddings(*arguments: Any) -> Any:
            self.mined = mine(*arguments)
            return self.mined

        trainer.calculate_loss, trainer.maybe_mine_embeddings = calculate_loss, mine_embeddings


@pytest.mark.parametrize("miner", [None, miners.TripletMarginMiner(), miners.BatchHardMiner()])
def test_metric_loss_only(miner: Any) -> None:
    pipeline = Pipeline()
    trainer = pipeline.trainer(mining_funcs={"tuple_miner": miner} if miner else {})
    spy = Spy(pipeline, trainer)
    trainer.train(num_epochs=2)
    assert (spy.mined is None) == (miner is None)
    pipeline.check(spy, *spy.batch, spy.mined)


def test_all_systems_with_two_streams() -> None:
    """Each tap heard two passes, and the trainer always passes tuples."""
    pipeline = Pipeline()
    images, classes = pipeline.data.tensors
    pairs = TensorDataset(images[:12], images[12:], classes[:12])  # four classes in turn
    trainer = pipeline.trainer(
        trainers.TwoStreamMetricLoss,
        dataset=pairs,
        sampler=None,
        batch_size=6,
        iterations_per_epoch=2,
    )
    spy = Spy(pipeline, trainer)
    trainer.train(num_epochs=1)
    (anchors, others), labels = spy.batch
    mined = lmu.get_all_triplets_indices(labels, labels.clone())
    pipeline.check(
        spy,
        torch.cat([anchors, others]),
        torch.cat([labels, labels]),
        c_f.shift_indices_tuple(mined, len(labels)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classifier", "memory", "MoCo", "sub-center", "sum", "wrapper"])
def test_the_idioms_of_the_notebooks_of_pml(kind: str) -> None:
    """Each as in PML's documentation, with one line that puts powers around its loss."""
    network, labels = Attended(), torch.arange(CLASSES).repeat(BATCH // CLASSES)
    triplet, width = losses.TripletMarginLoss(), network.head.embedding_size
    memory = losses.CrossBatchMemory(losses.NTXentLoss(), width, memory_size=32)
    arcface = losses.SubCenterArcFaceLoss(num_classes=CLASSES, embedding_size=width)
    own = {"memory": memory, "MoCo": memory, "sub-center": arcface}
    inner: Any = own.get(kind, triplet)
    loss: Any = CosinePowersLoss(inner, feature_loss=triplet, powers=(1, 3)).attach(network.head)
    optimizer = torch.optim.SGD([*network.parameters(), *loss.parameters()], lr=0.05)
    if kind == "sum":
        loss = losses.MultipleLosses([loss, losses.ContrastiveLoss()], weights=[1, 0.5])
    elif kind == "wrapper":
        loss = DistributedLossWrapper(loss)
    elif kind == "classifier":
        pipeline, classifier = Pipeline(), torch.nn.Linear(width, CLASSES)
        loss.attach(pipeline.network.head)
        models = {"trunk": pipeline.network.trunk, "embedder": pipeline.network.head}
        models["classifier"] = classifier
        pipeline.trainer(
            trainers.TrainWithClassifier,
            models=models,
            optimizers={
                f"{name}_optimizer": torch.optim.SGD(model.parameters(), lr=0.05)
                for name, model in models.items()
            },
            loss_funcs={"metric_loss": loss, "classifier_loss": torch.nn.CrossEntropyLoss()},
        ).train(num_epochs=1)
        network = pipeline.network
    for _ in range(3):
        x = torch.randn(BATCH, 3, 8, 8)
        more: dict[str, Any] = {"enqueue_mask": torch.arange(BATCH) >= 4} if kind == "MoCo" else {}
        value = loss(network(x), labels, **more)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        assert value.isfinite() and value > 0
    if kind in ("memory", "MoCo"):
        assert loss.queue_idx == inner.queue_idx == 3 * (4 if more else BATCH)
    if kind == "sub-center":
        assert len(loss.get_outliers(network(x).detach(), labels)[0]) <= BATCH
    tester = testers.GlobalEmbeddingSpaceTester(
        accuracy_calculator=RankAccuracyCalculator(
            ("precision_at_1", "mean_average_precision_at_r"), k="max_bin_count"
        ),
        dataloader_num_workers=0,
    )
    data = {"val": TensorDataset(torch.randn(12, 3, 8, 8), torch.arange(3).repeat(4))}
    found = tester.test(data, 0, network.trunk, network.head)["val"]
    assert 0 <= found["precision_at_1_level0"] <= 1
