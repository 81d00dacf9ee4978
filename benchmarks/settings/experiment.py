"""Description of a run: typed settings, read from a recipe, YAML files and the command line.

Any mistake raises a `ConfigError` of one line that names the key, before anything is written.
`benchmarks.building` makes objects of the settings.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import register_type

from benchmarks.console.printing import printable
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError, idle
from benchmarks.settings.model import Model
from benchmarks.settings.types import (
    AtLeast2,
    ClassSpec,
    Finite,
    NonNegativeInt,
    PositiveInt,
    Rate,
    Seed,
)
from benchmarks.settings.yaml_files import misread


@dataclass
class WeightedLoss:
    """One term of the objective.

    Args:
        loss: The class of a loss.
        weight: Factor of the loss.
    """

    loss: ClassSpec
    weight: Finite = 1.0


def _read_term(described: Any) -> WeightedLoss:
    """A term by itself: the parser would fill its gaps from the term that had its place before."""
    if not isinstance(described, dict) or not {"loss"} <= described.keys() <= {"loss", "weight"}:
        raise ValueError(f"expected {{loss: ..., weight: ...}}, got {described!r}")
    return WeightedLoss(ClassSpec(described["loss"]), Finite(described.get("weight", 1.0)))


register_type(
    WeightedLoss,
    serializer=lambda term: {"loss": term.loss.description, "weight": term.weight},
    deserializer=_read_term,
)


@dataclass
class Optimization:
    """Optimization of the parameters.

    Args:
        steps: Length of the training; 0 tests the network as it starts, without curves.
        optimizer: Class of the optimizer.
        learning_rate: Learning rate of the trunk and the head.
        loss_learning_rate: Learning rate of the loss's own parameters; default: `learning_rate`.
        overrides: Settings of parts, by their path from "model" or "loss", such as `{model.head.fc: {lr: 1e-4}}`;
            see `pml_regularizers.parameter_groups`.
        scheduler: Class of a learning-rate scheduler that steps with every batch; default: constant.
        chunk_size: Images in a pass of the network in each process: the gradients stay those of the whole batch,
            see `pml_regularizers.GradientCache`. Default: one pass.
    """

    steps: NonNegativeInt = 1500
    optimizer: ClassSpec = field(
        default_factory=lambda: ClassSpec({"class_path": "torch.optim.Adam"})
    )
    learning_rate: Rate = 1e-3
    loss_learning_rate: Rate | None = None
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: ClassSpec | None = None
    chunk_size: PositiveInt | None = None


@dataclass
class Evaluation:
    """Measurements during and after the training.

    Args:
        every: Steps between two points of the curves, and under protocol "fair" between two tests of the
            validation classes; 0: no curves.
        curve_classes: Seen and unseen classes, this many each, that the curves are measured on.
        oracle: Test, and cluster, all test classes at every point of the curves and report the best as *oracle
            (test-selected)*: the number that a paper reports if it chose its epoch on the test set.
        batch_size: Images per forward pass.
        recall_at: The K of Recall@K.
        descriptor: Also test HORDE's descriptor (all orders, PCA fitted on training images).
        orders: Also test the inputs of the losses of HORDE's orders.
        features: Also test the pooled features in place of the embeddings: as they are, less their mean over the
            training images, and by this many principal components.
        parts: Also test on this many class-stratified parts of the test set: their mean and its 95 % interval.
        clustering: Also cluster the test images by k-means: NMI, AMI and F1.
        divergence: Also measure the bound of JRD's Table 3 on the parts and on equally many training images: the
            error of the ideal joint classifier, as the mean of its errors on seen and on unseen classes, and the
            H-divergence between them.
        save_embeddings: Save the embeddings of the tested images, with their labels, in test_embeddings.npz.
        verification: Also measure, on the test classes, how well the similarity of two images tells whether they
            are of one class, and how well that of an image and its nearest one in a gallery tells whether its class
            is there; nothing of it with `data.split: validation`.
    """

    every: NonNegativeInt = 250
    curve_classes: AtLeast2 = 200
    oracle: bool = False
    batch_size: PositiveInt = 256
    recall_at: list[PositiveInt] = field(default_factory=lambda: [1, 2, 4, 8])
    descriptor: bool = True
    orders: bool = False
    features: PositiveInt | None = None
    parts: AtLeast2 | None = None
    clustering: bool = False
    divergence: bool = False
    save_embeddings: bool = False
    verification: bool = False


@dataclass
class Experiment:
    """One training, its test and its records.

    Args:
        losses: Terms of the objective, added up.
        label: Name of the method in tables; default: the recipe's, or the classes' names if losses or miner are not
            the recipe's.
        output: Run folder; default: runs/RECIPE-seedN, or runs/DATASET-TRUNK-LABEL-seedN if one of these three is
            not the recipe's.
        seed: Of the initial weights, the batches and the augmentation, and of classes that are drawn.
        protocol: "paper" trains for the given steps and tests the result. "fair" trains on a part of the training
            classes, keeps the weights that are best on the others (MAP@R, at every `evaluation.every` steps), and
            tests once; with `data.split: validation`, never.
        precision: "float32", "float64", or mixed precision "bf16" or "fp16"; with the latter two, losses are in
            float32.
        data: Images and batches.
        model: Trunk and head.
        miner: Class of a PML miner that chooses the pairs or triplets.
        optimization: Optimization of the parameters.
        evaluation: Measurements during and after the training.
        checkpoint_every: Steps between two checkpoints.
        diagnose_every: Steps between two records of the gradient norms of all losses except the first, relative
            to the first's, at the embeddings, the head and the trunk (table "gradient_ratios"); 0: no records.
        trackers: Trackers of Accelerate that get the rows of `records/` too, such as wandb, mlflow or trackio.
        report: Draw report.html at the end; "neighbours" only saves what the page of a study shows of the run.
    """

    losses: list[WeightedLoss]
    label: str
    output: Path | None = None
    seed: Seed = 0
    protocol: Literal["paper", "fair"] = "paper"
    precision: Literal["float32", "float64", "bf16", "fp16"] = "float32"
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    miner: ClassSpec | None = None
    optimization: Optimization = field(default_factory=Optimization)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint_every: PositiveInt = 250
    diagnose_every: NonNegativeInt = 0
    trackers: list[str] = field(default_factory=list)
    report: bool | Literal["neighbours"] = True

    def __post_init__(self) -> None:
        if (fault := next(self._faults(), None)) is not None:
            raise ConfigError(fault)

    @property
    def network(self) -> Model:
        """The model with its file of weights: seeds and folds take turns with those of a folder."""
        folder = self.model.weights
        if folder is None or not (files := sorted(folder.glob("*.safetensors"))):
            return self.model
        return replace(self.model, weights=files[(self.seed + self.data.fold) % len(files)])

    def config(self) -> dict[str, Any]:
        """A copy of all settings as YAML has them; classes as they are described."""
        return asdict(self, dict_factory=_as_yaml)

    def _faults(self) -> Iterator[str]:
        """Lines on settings that do not go together."""
        evaluation, weights = self.evaluation, self.model.weights
        own = ("head", "replace_layer", "pool", "bias", "normalize", "attention", "frozen_stages")
        has, why = self.model.ensemble is not None, "an ensemble has its own head and cut"
        given, no_layer = (
            self.model.head != "random",
            f"model.head {self.model.head} draws no layer",
        )
        yield from self.data.faults()
        if evaluation.oracle and (kind := self.model.replacement):
            yield f"evaluation.oracle: tests without the layer ({kind}) that the last test makes; set it to false"
        trained = bool(self.optimization.steps) or self.model.head == "none"
        if given and self.model.replace_layer and not trained:
            told = f"takes the place of {self.model.head}, and optimization.steps 0 trains nothing"
            yield f"model.replace_layer: {told}; set it to null, or model.head to none"
        yield from idle("model", self.model, (has, own, why), (given, ("bias", "init"), no_layer))
        if (shown := printable(self.label)) != self.label:
            yield f"label: expected one line of printable text, got '{shown}'"
        if re.search(r"^before training$|^untrained trunk|†\s*$|, order \d+\s*$", self.label):
            yield f"label: {self.label!r} is the name of a row of every report; choose another"
        if not self.losses:
            yield "losses: expected at least one loss, got an empty list"
        if not self.label.strip():
            yield f"label: expected a name for the rows of tables, got {self.label!r}"
        if weights is not None and weights.is_dir() and not any(weights.glob("*.safetensors")):
            yield f"model.weights: {weights} holds no .safetensors file"
        if self.data.cached_views is not None and not self.model.frozen_stages:
            yield "data.cached_views: keeps the outputs of frozen stages; set model.frozen_stages, or leave it out"
        yield from misread("model.trunk_args", self.model.trunk_args)
        if self.diagnose_every and self.optimization.chunk_size is not None:
            yield "diagnose_every: with optimization.chunk_size no pass has the graph of a batch; set it to 0"
        for path, settings in self.optimization.overrides.items():
            yield from misread(f"optimization.overrides.{path}", settings)
            rate = settings.get("lr", 1.0)
            is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
            if not settings or not is_number or not 0 < rate < inf:
                yield f"optimization.overrides.{path}: expected settings such as {{lr: 1e-4}}, got {settings}"
        if not evaluation.recall_at or len(set(evaluation.recall_at)) < len(evaluation.recall_at):
            yield f"evaluation.recall_at: expected at least one K, and each K once, got {evaluation.recall_at}"
        test, curves = self.data.split == "test", evaluation.every > 0
        if test and self.data.known_classes:
            if evaluation.divergence:
                yield "evaluation.divergence: compares with unseen classes, not data.known_classes; leave it out"
            if curves and self.protocol == "paper":
                yield "data.known_classes: curves show unseen classes; set evaluation.every to 0, or protocol: fair"
        if evaluation.divergence and (evaluation.parts is None or not test):
            yield "evaluation.divergence: compares with parts of the test; set parts, and data.split: test"
        if self.data.split == "all" and (self.protocol == "fair" or curves):
            yield "data.split: all leaves no unseen classes; set protocol to paper, and evaluation.every to 0"
        if self.protocol == "fair" and not curves:
            yield "evaluation.every: protocol fair chooses the weights at these steps; expected at least 1, got 0"
        if not self.optimization.steps and (self.protocol == "fair" or evaluation.oracle):
            asked = "protocol: fair" if self.protocol == "fair" else "evaluation.oracle"
            yield f"optimization.steps: 0 trains nothing, and {asked} chooses among steps; leave one of them out"
        if self.protocol == "fair" and evaluation.oracle:
            yield "evaluation.oracle: protocol fair reads the test classes once, at the end; leave it out"
        if evaluation.oracle and not (curves and test):
            yield "evaluation.oracle: tests at every evaluation.every steps, not 0; data.split must be test"


def _as_yaml(settings: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(settings)
    for name, value in settings:
        if isinstance(value, ClassSpec):
            mapping[name] = value.description
        elif isinstance(value, Path):
            mapping[name] = str(value)
    return mapping
