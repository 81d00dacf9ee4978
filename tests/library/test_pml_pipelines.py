"""Attached losses in pytorch-metric-learning's own pipelines, none of which knows of features.

First HORDE alone, then beside the variance, energy confusion and joint similarity.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, miners, samplers, testers, trainers
from pytorch_metric_learning.utils import common_functions as c_f
from pytorch_metric_learning.utils import logging_presets
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pml_regularizers import (
    BinomialDevianceLoss,
    EmbeddingHead,
    EnergyConfusionRegularizer,
    HORDELoss,
    JRSRegularizer,
    ScheduledLosses,
    VarianceRegularizer,
    VEMAttention,
    attach_all,
)
from tests.support.tolerances import assert_close
from tests.support.toys import CHANNELS, WIDTH, Network

CLASSES, BATCH, ITERATIONS = 4, 8, 3

# PML formats the loss for its progress bar; torch says so once, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PML announces every step."""
    level = c_f.LOGGER.level
    c_f.LOGGER.setLevel(logging.ERROR)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    yield
    c_f.LOGGER.setLevel(level)


class Witness(nn.Module):
    """A base loss that keeps what it was called with, and what it returned, on the way to its loss."""

    calls: list[tuple[Tensor, Tensor, Any, Tensor]]

    def __init__(self) -> None:
        super().__init__()
        self.loss = losses.ContrastiveLoss()
        self.calls = []

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
        value: Tensor = self.loss(embeddings, labels, indices_tuple)
        self.calls.append((embeddings.detach(), labels, indices_tuple, value.detach()))
        return value


class Pipeline:
    """A network, an attached loss and a PML trainer's arguments from them."""

    def __init__(self, **kwargs: Any) -> None:
        self.network = Network()
        self.loss = HORDELoss(
            Witness(), CHANNELS, WIDTH, order=3, moment_dim=8, collect_stats=True, **kwargs
        ).attach(self.network.head.feature_map)
        labels = torch.arange(CLASSES).repeat_interleave(6)
        centres = torch.randn(CLASSES, 3, 8, 8)
        self.data = TensorDataset(centres[labels] + torch.randn(len(labels), 3, 8, 8), labels)
        self.start = copy.deepcopy(self.parameters())
        self.steps: list[tuple[float, list[Tensor]]] = []

    def parameters(self) -> dict[str, Tensor]:
        return {**self.network.state_dict(), **self.loss.state_dict()}

    def trainer(self, kind: Any = trainers.MetricLossOnly, **kwargs: Any) -> Any:
        arguments: dict[str, Any] = {
            "models": {"trunk": self.network.trunk, "embedder": self.network.head},
            "optimizers": {
                "trunk_optimizer": torch.optim.SGD(self.network.trunk.parameters(), lr=0.05),
                "embedder_optimizer": torch.optim.SGD(self.network.head.parameters(), lr=0.05),
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
        for name, value in kwargs.items():
            known = arguments.get(name)
            arguments[name] = {**known, **value} if isinstance(known, dict) else value
        return kind(**arguments)

    def check_training(self, steps: int) -> None:
        """Every own parameter moved, and orders 2 and 3 were trained on moments at every step."""
        for name, value in self.parameters().items():
            assert not torch.equal(value, self.start[name]), f"{name} did not move"
            assert value.isfinite().all()
        for witness in self.loss.losses.values():
            assert len(witness.calls) == steps


def check_last_step(
    pipeline: Pipeline, before: dict[str, Tensor], x: Tensor, value: Tensor
) -> None:
    """The loss of the last step equals the explicit call with the parameters before that step."""
    network = Network()
    network.load_state_dict({k: v for k, v in before.items() if k in network.state_dict()})
    loss = HORDELoss(losses.ContrastiveLoss(), CHANNELS, WIDTH, order=3, moment_dim=8)
    loss.load_state_dict({k: v for k, v in before.items() if k in loss.state_dict()})
    _, labels, mined, _ = pipeline.loss.losses["order_1"].calls[-1]
    maps = network.trunk(x)
    assert_close(value, loss(network.head(maps), labels, mined, features=maps))


class Spy:
    """Keeps a trainer's last batch, the state before its last step, and that step's losses."""

    def __init__(self, pipeline: Pipeline, trainer: Any) -> None:
        self.pipeline = pipeline
        calculate = trainer.calculate_loss

        def calculate_loss(batch: Any) -> None:
            self.before = copy.deepcopy(pipeline.parameters())
            self.network, self.loss = copy.deepcopy((pipeline.network, pipeline.loss))
            self.batch = batch
            calculate(batch)
            self.losses = {name: torch.as_tensor(v).detach() for name, v in trainer.losses.items()}

        trainer.calculate_loss = calculate_loss


MINERS: dict[str, dict[str, Callable[[], Any]]] = {
    "no miner": {},
    "tuple miner": {"tuple_miner": lambda: miners.TripletMarginMiner(margin=0.5)},
    "pair miner": {"tuple_miner": lambda: miners.MultiSimilarityMiner()},
    "subset miner": {"subset_batch_miner": lambda: FirstOfEach()},
    "both": {
        "tuple_miner": lambda: miners.TripletMarginMiner(margin=0.5),
        "subset_batch_miner": lambda: FirstOfEach(),
    },
}


class FirstOfEach(nn.Module):
    """Keeps six of eight images: the loss's batch is not the one that was embedded for mining."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return torch.tensor([0, 1, 2, 3, 6, 7])


@pytest.mark.parametrize("mining", MINERS)
def test_metric_loss_only(mining: str) -> None:
    pipeline = Pipeline()
    trainer = pipeline.trainer(mining_funcs={k: make() for k, make in MINERS[mining].items()})
    spy = Spy(pipeline, trainer)
    trainer.train(num_epochs=2)
    pipeline.check_training(2 * ITERATIONS)
    rows, _, mined, _ = pipeline.loss.losses["order_2"].calls[-1]
    assert len(rows) == (6 if "subset_batch_miner" in MINERS[mining] else BATCH)
    assert (mined is not None) == ("tuple_miner" in MINERS[mining])
    check_last_step(pipeline, spy.before, spy.batch[0], spy.losses["metric_loss"])


class Pairs(Dataset[tuple[Tensor, Tensor, int]]):
    """Two images of a class and its label, as the two-stream trainer needs them."""

    def __init__(self, data: TensorDataset) -> None:
        self.images, self.labels = data.tensors

    def __len__(self) -> int:
        return len(self.labels) // 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.images[2 * index], self.images[2 * index + 1], int(self.labels[2 * index])


def test_testing_between_epochs_changes_nothing() -> None:
    """The tester runs the network without a loss; training with and without it is the same to the bit."""
    results = []
    for testing in (False, True):
        torch.manual_seed(1)
        pipeline = Pipeline()
        tester = testers.GlobalEmbeddingSpaceTester(
            dataloader_num_workers=0,
            data_device=torch.device("cpu"),
            accuracy_calculator=AccuracyCalculator(include=("precision_at_1",), k=1),
        )
        seen: list[float] = []

        def test(trainer: Any) -> None:
            accuracies = tester.test(  # noqa: B023  called before the loop goes on
                {"val": pipeline.data},  # noqa: B023
                trainer.epoch,
                trainer.models["trunk"],
                trainer.models["embedder"],
            )
            seen.append(accuracies["val"]["precision_at_1_level0"])  # noqa: B023

        sampler = torch.utils.data.SequentialSampler(range(BATCH * ITERATIONS))
        order = torch.arange(24).view(CLASSES, 6).T.flatten().view(-1)
        pipeline.data = TensorDataset(*(t[order] for t in pipeline.data.tensors))
        trainer = pipeline.trainer(sampler=sampler, end_of_epoch_hook=test if testing else None)
        trainer.train(num_epochs=3)
        pipeline.check_training(3 * ITERATIONS)
        assert len(seen) == (3 if testing else 0)
        results.append(pipeline.parameters())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])


# All four systems on one network


class Together(Pipeline):
    weights = {"horde": 1.0, "variance": 0.5, "confusion": 0.2, "joint": 2.0}

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.network.head = EmbeddingHead(CHANNELS, WIDTH, attention=VEMAttention)
        parts = {
            "horde": HORDELoss(base, CHANNELS, WIDTH, order=3, moment_dim=8),
            "variance": VarianceRegularizer(),
            "confusion": EnergyConfusionRegularizer(),
            "joint": JRSRegularizer(),
        }
        total = ScheduledLosses(parts, weights=self.weights)
        self.loss = attach_all(total, self.network.head)
        self.start = copy.deepcopy(dict(self.named_parameters()))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for module in (self.network, self.loss):
            yield from module.named_parameters()

    def check(self, spy: Spy, x: Tensor, labels: Tensor, mined: Any = None) -> None:
        """Everything was trained, and the last loss is the sum of its parts, with features that are passed."""
        for name, value in self.named_parameters():
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
        assert_close(spy.losses["metric_loss"], expected)


def test_all_systems_with_two_streams() -> None:
    """Each tap heard two passes, and the trainer always passes tuples."""
    pipeline = Together(BinomialDevianceLoss())
    trainer = pipeline.trainer(
        trainers.TwoStreamMetricLoss,
        dataset=Pairs(pipeline.data),
        sampler=None,
        batch_size=6,
        iterations_per_epoch=2,
    )
    spy = Spy(pipeline, trainer)
    trainer.train(num_epochs=2)
    (anchors, others), labels = spy.batch
    mined = lmu.get_all_triplets_indices(labels, labels.clone())
    pipeline.check(
        spy,
        torch.cat([anchors, others]),
        torch.cat([labels, labels]),
        c_f.shift_indices_tuple(mined, len(labels)),
    )


def test_record_keeper_logs_all_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_f, "COLLECT_STATS", True)
    pipeline = Together(BinomialDevianceLoss())
    keeper, _, _ = logging_presets.get_record_keeper(
        str(tmp_path / "logs"), str(tmp_path / "board")
    )
    hooks = logging_presets.get_hook_container(keeper, save_models=False, log_freq=1)
    trainer = pipeline.trainer(end_of_iteration_hook=hooks.end_of_iteration_hook)
    spy = Spy(pipeline, trainer)
    trainer.train(num_epochs=1)
    keeper.save_records()
    pipeline.check(spy, *spy.batch)
    for table, statistic in (
        ("metric_loss_ScheduledLosses", "weight_variance"),
        ("losses__modules_horde_HORDELoss", "order_3_loss"),
        ("losses__modules_variance_VarianceRegularizer", "batch_variance"),
        ("losses__modules_confusion_EnergyConfusionRegularizer", "between_class_energy"),
        ("kernels__modules_pooled_GaussianMixtureKernel", "mean_distance"),
    ):
        rows = keeper.query(f"SELECT {statistic} FROM {table}")
        assert len(rows) == ITERATIONS
        assert all(row[statistic] > 0 for row in rows), statistic
