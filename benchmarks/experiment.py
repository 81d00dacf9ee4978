"""What a run is: typed settings, read from a recipe, YAML files and the command line, and built.

Classes are named as `{class_path: ..., init_args: {...}}`; sizes that follow from the data and the trunk
(`num_classes`, `in_channels`, `embedding_size`) are filled in by the builder and may not be set. Whatever
is wrong is a `ConfigError` of one line that names the key, raised before anything is written.
"""

import argparse
import hashlib
import importlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import jsonargparse
import timm
import torch
import yaml
from jsonargparse.typing import register_type
from torch import nn

from benchmarks.backbones import WeightsError, load_weights
from benchmarks.data import Data, image_size
from benchmarks.data import check as check_data
from benchmarks.errors import ConfigError
from benchmarks.training import gradient_ratios
from pml_regularizers import (
    DistributedLoss,
    EmbeddingHead,
    ScheduledLosses,
    attach_all,
    parameter_groups,
)

RECIPES = Path(__file__).parent / "recipes"

DEFAULT_RECIPE = "glyphs/demo/binomial"


class ClassSpec:
    """{class_path: dotted.path.of.a.Class, init_args: {its arguments}}, as it was written.

    Opaque to the parser: what becomes of it is `build`'s to say, once the sizes are known.
    """

    def __init__(self, description: Any) -> None:
        if isinstance(description, str):
            description = yaml.load(description, StrictLoader)
        if not isinstance(description, dict):
            raise ValueError(f"expected {{class_path: ..., init_args: ...}}, got {description!r}")
        self.description: dict[str, Any] = description

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassSpec) and self.description == other.description

    def __repr__(self) -> str:
        return repr(self.description)


register_type(ClassSpec, serializer=lambda spec: spec.description, deserializer=ClassSpec)


BatchNorm = Literal["train", "frozen_statistics", "frozen"]


@dataclass
class Model:
    """A timm trunk and an embedding head.

    Args:
        trunk: Name of a timm model.
        trunk_args: More arguments for `timm.create_model`, such as `pretrained` or `output_stride`.
        weights: File of pretrained weights for the trunk, in place of timm's; default: as `trunk_args` say, else
            drawn from the seed.
        batch_norm: "train" the trunk's batch norm, keep its statistics and train scale and shift alone
            ("frozen_statistics"), or keep it as it is ("frozen").
        embedding_size: Width of the embeddings.
        pool: How the head pools the feature map.
        bias: Whether the head's linear layer has a bias.
        attention: Class of a module between the pooling and the linear layer, such as
            `pml_regularizers.VEMAttention`.
        channels_last: Lay out convolutions channels-last, which is faster on most processors.
    """

    trunk: str = "test_resnet"
    trunk_args: dict[str, Any] = field(default_factory=dict)
    weights: Path | None = None
    batch_norm: BatchNorm = "train"
    embedding_size: int = 64
    pool: Literal["avg", "max", "token"] = "avg"
    bias: bool = False
    attention: ClassSpec | None = None
    channels_last: bool = False


@dataclass
class WeightedLoss:
    """One term of the objective.

    Args:
        loss: The class of a loss.
        weight: What it is multiplied by: a number, or the class of a schedule such as
            `pml_regularizers.LinearRamp`.
    """

    loss: ClassSpec
    weight: float | ClassSpec = 1.0


@dataclass
class Optimization:
    """How the parameters move.

    Args:
        steps: Length of the training.
        optimizer: Class of the optimizer.
        learning_rate: Of the trunk and the head.
        loss_learning_rate: Of the loss's own parameters; default: `learning_rate`.
        overrides: Settings of parts, by their path from "model" or "loss" on, such as
            `{model.head.fc: {lr: 1e-4}}`; see `pml_regularizers.parameter_groups`.
        scheduler: Class of a learning-rate scheduler that steps with every batch; default: constant.
        max_gradient_norm: Clip the gradient of network and loss to this norm; default: no clipping.
    """

    steps: int = 1500
    optimizer: ClassSpec = field(
        default_factory=lambda: ClassSpec({"class_path": "torch.optim.Adam"})
    )
    learning_rate: float = 1e-3
    loss_learning_rate: float | None = None
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: ClassSpec | None = None
    max_gradient_norm: float | None = None


@dataclass
class Evaluation:
    """What is measured, and when.

    Args:
        every: Steps between two points of the curves; 0 draws none.
        curve_classes: Seen and unseen classes, this many each, that the curves are measured on.
        batch_size: Images per forward pass.
        recall_at: The K of Recall@K.
        descriptor: Also test HORDE's descriptor (all orders, PCA fitted on training images).
    """

    every: int = 250
    curve_classes: int = 200
    batch_size: int = 256
    recall_at: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    descriptor: bool = True


@dataclass
class Experiment:
    """One training, its test and its records.

    Args:
        losses: Terms of the objective, added up.
        label: Name of the method in tables.
        output: Run folder; default: runs/RECIPE-seedN.
        seed: Of the initial weights, the batches and the augmentation.
        precision: "float32", "float64", or mixed precision "bf16" or "fp16"; losses are in float32
            under the latter two.
        data: Images and batches.
        model: Trunk and head.
        miner: Class of a PML miner that chooses the pairs or triplets.
        optimization: How the parameters move.
        evaluation: What is measured.
        checkpoint_every: Steps between two checkpoints.
        diagnose_every: Steps between two records of the gradient norms of all losses but the first, as ratios
            to the first's, at the embeddings, the head and the trunk (table "gradient_ratios"); 0 measures none.
        trace_steps: Write the image ids, the loss and all gradients of the first steps to trace.pt.
    """

    losses: list[WeightedLoss]
    label: str
    output: Path | None = None
    seed: int = 0
    precision: Literal["float32", "float64", "bf16", "fp16"] = "float32"
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    miner: ClassSpec | None = None
    optimization: Optimization = field(default_factory=Optimization)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint_every: int = 250
    diagnose_every: int = 0
    trace_steps: int = 0


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    experiment: Experiment
    config: dict[str, Any]
    recipe: str | None
    resume: bool


# ---------------------------------------------------------------------------------------------- parse


def parse(argv: Sequence[str]) -> Command:
    """Recipe, then `--config` files in their order, then options; the later one wins.

    Without a recipe they change `DEFAULT_RECIPE`.

    Raises:
        ConfigError: for anything that is not a complete, known and consistent experiment.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--recipe")
    first.add_argument("--config", type=Path, action="append", default=[])
    first.add_argument("--resume", action="store_true")
    try:
        files, options = first.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    recipe = files.recipe or (None if files.config else DEFAULT_RECIPE)
    layers = [read_recipe(recipe or DEFAULT_RECIPE)]
    layers += [read_yaml(path) for path in files.config]
    for layer in layers:
        for name in ("recipe", "resume", "config"):
            if name in layer:
                raise ConfigError(
                    f"{name}: belongs on the command line, not into a file of settings"
                )

    parser = jsonargparse.ArgumentParser(
        prog="benchmarks/run.py",
        description="Train, test and report one experiment.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--recipe", metavar="PAPER/TABLE/ROW", help="an entry of benchmarks/recipes"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--config", action="config", help="a YAML file of settings; repeatable")
    parser.add_class_arguments(Experiment)
    try:
        parsed = parser.parse_args(
            [f"--config={yaml.safe_dump(layer)}" for layer in layers] + list(options)
        )
    except (argparse.ArgumentError, RecursionError) as error:
        raise ConfigError(_one_line(error)) from error
    for name in ("recipe", "resume", "config", "print_config"):
        parsed.pop(name, None)
    config = yaml.safe_load(parser.dump(parsed))
    _refuse_null(Experiment, config)
    built = parser.instantiate(parsed)
    experiment = Experiment(**{name: built[name] for name in Experiment.__dataclass_fields__})
    check(experiment)
    if experiment.output is None:
        stem = recipe.replace("/", "-") if recipe else files.config[-1].stem
        experiment.output = Path("runs") / f"{stem}-seed{experiment.seed}"
    return Command(experiment, config, recipe, files.resume)


def _refuse_null(described: Any, config: Mapping[str, Any], prefix: str = "") -> None:
    for entry in fields(described):
        value, key = config.get(entry.name), prefix + entry.name
        if is_dataclass(entry.type) and isinstance(value, Mapping):
            _refuse_null(entry.type, value, f"{key}.")
        elif value is None and type(None) not in get_args(entry.type):
            raise ConfigError(f"{key}: expected a value, got null; leave it out for the default")


def check(experiment: Experiment) -> None:
    """Refuse sizes that cannot work.

    Raises:
        ConfigError: naming the key.
    """
    data, evaluation = experiment.data, experiment.evaluation
    at_least = {
        "seed": (experiment.seed, 0),
        "checkpoint_every": (experiment.checkpoint_every, 1),
        "diagnose_every": (experiment.diagnose_every, 0),
        "trace_steps": (experiment.trace_steps, 0),
        "data.image_size": (data.image_size, 8),
        "data.samples_per_class": (data.samples_per_class, 1),
        "data.batch_size": (data.batch_size, 2),
        "data.num_workers": (data.num_workers, 0),
        "data.folds": (data.folds, 2),
        "data.train_classes": (data.train_classes, 2),
        "data.max_classes": (data.max_classes, 2),
        "model.embedding_size": (experiment.model.embedding_size, 1),
        "optimization.steps": (experiment.optimization.steps, 1),
        "evaluation.every": (evaluation.every, 0),
        "evaluation.curve_classes": (evaluation.curve_classes, 2),
        "evaluation.batch_size": (evaluation.batch_size, 1),
        "evaluation.recall_at": (min(evaluation.recall_at, default=1), 1),
    }
    for key, (value, least) in at_least.items():
        if value is not None and value < least:
            raise ConfigError(f"{key}: expected at least {least}, got {value}")
    check_data(data)
    if data.batch_size % data.samples_per_class:
        raise ConfigError(
            f"data.batch_size: expected a multiple of data.samples_per_class ({data.samples_per_class}), "
            f"got {data.batch_size}"
        )
    optimization = experiment.optimization
    positive = {
        "optimization.learning_rate": optimization.learning_rate,
        "optimization.loss_learning_rate": optimization.loss_learning_rate,
        "optimization.max_gradient_norm": optimization.max_gradient_norm,
    }
    for path, settings in optimization.overrides.items():
        if not settings:
            raise ConfigError(
                f"optimization.overrides.{path}: expected settings such as {{lr: 1e-4}}, got {settings}"
            )
        if "lr" in settings:
            positive[f"optimization.overrides.{path}.lr"] = settings["lr"]
    for key, rate in positive.items():
        number = isinstance(rate, (int, float)) and math.isfinite(rate) and rate > 0
        if rate is not None and not number:
            raise ConfigError(f"{key}: expected a positive number, got {rate}")
    for index, term in enumerate(experiment.losses):
        if isinstance(term.weight, float) and not math.isfinite(term.weight):
            raise ConfigError(f"losses[{index}].weight: expected a number, got {term.weight}")
    if experiment.seed >= 2**32:
        raise ConfigError(f"seed: expected less than 2**32, got {experiment.seed}")
    if not evaluation.recall_at:
        raise ConfigError("evaluation.recall_at: expected at least one K, got an empty list")
    if experiment.trace_steps > optimization.steps:
        raise ConfigError(
            f"trace_steps: expected at most optimization.steps ({optimization.steps}), got "
            f"{experiment.trace_steps}"
        )
    if not experiment.losses:
        raise ConfigError("losses: expected at least one loss, got an empty list")


def read_recipe(name: str) -> dict[str, Any]:
    """Settings of an entry PAPER/TABLE/ROW: what its file's trainings share, and its own.

    Raises:
        ConfigError: if there is no such entry, saying which there are.
    """
    table, _, row = name.rpartition("/")
    path = RECIPES / f"{table}.yaml"
    if not path.is_file():
        raise ConfigError(f"recipe: no {name!r}; there are {', '.join(recipes())}")
    entry = read_yaml(path)
    trainings = entry.get("trainings") or {}
    if row not in trainings:
        raise ConfigError(f"recipe: no {row!r} in {table}; there are {', '.join(trainings)}")
    return _merge(entry.get("shared") or {}, trainings[row] or {})


def recipes() -> list[str]:
    """Names of all entries, PAPER/TABLE/ROW."""
    return [
        f"{path.relative_to(RECIPES).with_suffix('')}/{row}"
        for path in sorted(RECIPES.glob("*/*.yaml"))
        for row in read_yaml(path)["trainings"]
    ]


class StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key twice, and reads 1e-5 as the number it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands there twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        ConfigError: if it is missing, unreadable, or something else.
    """
    try:
        content = yaml.load(path.read_text(), StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(content).__name__}")
    return content


def dump(config: Mapping[str, Any]) -> str:
    """Settings as YAML that `--config` reads."""
    return yaml.safe_dump(dict(config), sort_keys=False)


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both and "class_path" not in value else value
    return merged


def _one_line(error: BaseException) -> str:
    """The telling lines of an error's message, joined."""
    message = str(error) or type(error).__name__
    lines = [line.strip(" -\t") for line in message.splitlines()]
    noise = (
        "Does not validate against",
        "Subtypes:",
        "Errors:",
        "Given value",
        "Expected a <class 'NoneType'>",
    )
    lines = [line for line in lines if line and not line.startswith(noise)]
    text = ": ".join(line.rstrip(":") for line in lines)
    return re.sub(r'Parser key "([^"]*)"', r"\1", re.sub(r"<class '([^']*)'>", r"\1", text))


# ---------------------------------------------------------------------------------------------- build


def build(spec: Any, key: str, **provided: Any) -> Any:
    """The object that a description of a class stands for, and those inside it.

    Args:
        spec: `ClassSpec.description`.
        key: Where it stands, for messages.
        **provided: Arguments that the runner fills in, wherever a class takes them and does not say null.

    Raises:
        ConfigError: for an unknown class or argument, a wrong type, or one the class itself refuses.
    """
    if not isinstance(spec, dict) or set(spec) - {"class_path", "init_args"}:
        raise ConfigError(f"{key}: expected {{class_path: ..., init_args: ...}}, got {spec!r}")
    if "class_path" not in spec:
        raise ConfigError(f"{key}.class_path: missing; got {spec!r}")
    cls = _import(spec["class_path"], f"{key}.class_path")
    given = spec.get("init_args")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f"{key}.init_args: expected a mapping, got {given!r}")

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    defaults = {
        name: parser.get_default(name)
        for name in parser.add_class_arguments(cls, fail_untyped=False)
    }
    for name in given:
        where = f"{key}.init_args.{name}"
        if name in provided and given[name] is not None:
            raise ConfigError(f"{where}: follows from the data and the model; leave it out")
        if name not in defaults:
            raise ConfigError(
                f"{where}: {cls.__name__} takes no such argument; it takes {', '.join(defaults)}"
            )
    arguments = {
        name: _argument(value, f"{key}.init_args.{name}", provided) for name, value in given.items()
    }
    # A null keeps out what would be filled in: MarginLoss(num_classes=None) has one boundary for all classes.
    filled = {
        name: value for name, value in provided.items() if name in defaults and name not in given
    }
    plain = {name for name, value in arguments.items() if value is given[name]}
    _check_types(cls, {name: given[name] for name in plain}, defaults, key)
    try:
        return cls(**filled, **arguments)
    except Exception as error:
        raise ConfigError(f"{key}: {cls.__name__}: {_one_line(error)}") from error


def _argument(value: Any, key: str, provided: Mapping[str, Any]) -> Any:
    if isinstance(value, dict) and "class_path" in value:
        return build(value, key, **provided)
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        return {name: _argument(item, f"{key}.{name}", provided) for name, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [_argument(item, f"{key}[{index}]", provided) for index, item in enumerate(value)]
    return value


def _check_types(
    cls: type, given: Mapping[str, Any], defaults: Mapping[str, Any], key: str
) -> None:
    """Typed arguments by their type; untyped scalars by the type of their default."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, fail_untyped=False, skip=set(defaults) - set(given))
    try:
        parser.parse_object(dict(given))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{key}.init_args: {_one_line(error)}") from error
    for name, value in given.items():
        kinds = [
            "number" if isinstance(one, (int, float)) and not isinstance(one, bool) else type(one)
            for one in (value, defaults[name])
        ]
        default = defaults[name]
        scalar = isinstance(default, (bool, int, float, str))
        if scalar and kinds[0] != kinds[1] and not _typed(cls, name):
            raise ConfigError(
                f"{key}.init_args.{name}: expected {type(default).__name__} like the default {default!r}, "
                f"got {value!r}"
            )


def _typed(cls: type, name: str) -> bool:
    return any(name in getattr(base.__init__, "__annotations__", {}) for base in cls.__mro__)


def _import(path: Any, key: str) -> type:
    module, _, name = str(path).rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the module
        raise ConfigError(f"{key}: cannot import {path!r} ({_one_line(error)})") from error
    if not isinstance(cls, type):
        raise ConfigError(f"{key}: expected a class, got {path!r}")
    return cls


class EmbeddingModel(nn.Sequential):
    """Image -> timm trunk -> `EmbeddingHead` -> embedding."""

    def __init__(
        self, trunk: nn.Module, head: EmbeddingHead, batch_norm: BatchNorm = "train"
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.batch_norm = batch_norm
        if batch_norm == "frozen":
            for module in batch_norms(trunk):
                module.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.batch_norm != "train":
            for module in batch_norms(self.trunk):
                module.eval()
        return self


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """All layers of batch norm, timm's included."""
    kind = nn.modules.batchnorm._BatchNorm
    return [inner for inner in module.modules() if isinstance(inner, kind)]


def build_model(model: Model, data: Data) -> EmbeddingModel:
    """The network of an experiment; what no file holds is drawn from torch's global generator.

    Raises:
        ConfigError: if timm has no such model, refuses an argument, the weights do not fit, or the image does not
            suit it.
    """
    for name in ("num_classes", "global_pool", "in_chans"):
        if name in model.trunk_args:
            raise ConfigError(f"model.trunk_args.{name}: follows from the data; leave it out")
    if not timm.is_model(model.trunk):
        near = timm.list_models(f"*{model.trunk.split('.')[0][:8]}*")[:5]
        raise ConfigError(
            f"model.trunk: timm has no {model.trunk!r}"
            + (f"; near: {', '.join(near)}" if near else "")
        )
    trunk_args = model.trunk_args
    if model.weights is not None:
        trunk_args = trunk_args | {"pretrained": False}
    try:
        trunk = timm.create_model(
            model.trunk, num_classes=0, global_pool="", in_chans=data.in_chans, **trunk_args
        )
        if model.weights is not None:
            load_weights(trunk, model.weights)
        attention = model.attention and build(
            model.attention.description, "model.attention", num_features=trunk.num_features
        )
        head = EmbeddingHead.for_trunk(
            trunk, model.embedding_size, pool=model.pool, bias=model.bias, attention=attention
        )
        network = EmbeddingModel(trunk, head, model.batch_norm).eval()
        if model.channels_last:
            network = network.to(memory_format=torch.channels_last)
        with torch.no_grad():
            network(torch.zeros(1, data.in_chans, *[image_size(data, trunk)] * 2))
    except ConfigError:
        raise
    except WeightsError as error:
        raise ConfigError(f"model.weights: {error}") from error
    except Exception as error:
        hint = "; model.weights reads a file" if trunk_args.get("pretrained") else ""
        raise ConfigError(f"model: {model.trunk}: {_one_line(error)}{hint}") from error
    return network.train()


def describe_weights(model: Model) -> dict[str, str] | None:
    """Name and SHA-256 of the file of pretrained weights, if there is one."""
    if model.weights is None:
        return None
    with model.weights.open("rb") as file:
        return {
            "file": model.weights.name,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def build_loss(experiment: Experiment, model: EmbeddingModel, num_classes: int) -> DistributedLoss:
    """The objective, attached to the stages of the model that it reads.

    Raises:
        ConfigError: see `build`.
    """
    sizes = {
        "num_classes": num_classes,
        "in_channels": model.head.in_channels,
        "embedding_size": model.head.embedding_size,
    }
    losses: dict[str, nn.Module] = {}
    weights = {}
    for index, term in enumerate(experiment.losses):
        part = build(term.loss.description, f"losses[{index}].loss", **sizes)
        if not isinstance(part, nn.Module):
            raise ConfigError(f"losses[{index}].loss: expected a loss, got {type(part).__name__}")
        name = type(part).__name__ + (f"_{index}" if type(part).__name__ in losses else "")
        losses[name] = part
        weights[name] = _weight(term.weight, f"losses[{index}].weight")
    if list(weights.values()) == [1.0]:
        (loss,) = losses.values()
    else:
        loss = ScheduledLosses(losses, weights=weights)
    attach_all(loss, model.head)
    miner = build(experiment.miner.description, "miner", **sizes) if experiment.miner else None
    return DistributedLoss(loss, miner)


def _weight(weight: float | ClassSpec, key: str) -> Any:
    if isinstance(weight, (int, float)):
        return float(weight)
    schedule = build(weight.description, key)
    if isinstance(schedule, nn.Module) or not callable(schedule):
        raise ConfigError(f"{key}: expected a schedule, got {type(schedule).__name__}")
    return schedule


def build_optimizer(
    optimization: Optimization, model: nn.Module, loss: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    """The optimizer, with groups for the network, the loss's own parameters and modules with own settings.

    Raises:
        ConfigError: see `build`.
    """
    try:
        groups = parameter_groups(
            model,
            loss,
            lr=optimization.learning_rate,
            loss_lr=optimization.loss_learning_rate,
            overrides=optimization.overrides,
        )
    except ValueError as error:
        raise ConfigError(f"optimization.{error}") from error
    optimizer = build(
        optimization.optimizer.description,
        "optimization.optimizer",
        params=groups,
        lr=optimization.learning_rate,
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimization.optimizer: expected an optimizer, got {type(optimizer).__name__}"
        )
    for path, settings in optimization.overrides.items():
        if unknown := settings.keys() - optimizer.defaults.keys():
            raise ConfigError(
                f"optimization.overrides.{path}.{min(unknown)}: {type(optimizer).__name__} has no such setting; it "
                f"has {', '.join(optimizer.defaults)}"
            )
    if optimization.scheduler is None:
        return optimizer, None
    scheduler = build(
        optimization.scheduler.description,
        "optimization.scheduler",
        optimizer=optimizer,
        total_steps=optimization.steps,
        max_lr=[group["lr"] for group in groups],
    )
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"optimization.scheduler: expected a scheduler, got {type(scheduler).__name__}"
        )
    return optimizer, scheduler


def try_one_step(experiment: Experiment) -> EmbeddingModel:
    """Build everything for two classes and move it once, on the CPU: what cannot work fails here.

    Returns:
        The network, to be thrown away.

    Raises:
        ConfigError: naming the part that failed.
    """
    data = experiment.data
    with torch.random.fork_rng(devices=[]):
        model = build_model(experiment.model, data)
        loss = build_loss(experiment, model, num_classes=2)
        optimizer, scheduler = build_optimizer(experiment.optimization, model, loss)
        part = "losses"
        try:
            embeddings = model(torch.randn(4, data.in_chans, *[image_size(data, model.trunk)] * 2))
            if experiment.diagnose_every:
                part = "diagnose_every"
                value, _ = gradient_ratios(loss, model, embeddings, torch.arange(4) % 2)
            else:
                value = loss(embeddings, torch.arange(4) % 2)
            part = "losses"
            value.backward()
            part = "optimization.optimizer"
            optimizer.step()
            part = "optimization.scheduler"
            if scheduler is not None:
                scheduler.step()
        except Exception as error:
            hint = " (or the miner)" if part == "losses" and experiment.miner else ""
            raise ConfigError(
                f"{part}{hint}: a trial step failed: {type(error).__name__}: {_one_line(error)}"
            ) from error
    return model
