"""The loss, its miner and the optimizer."""

import torch
from pytorch_metric_learning.losses import MultipleLosses
from torch import nn

from benchmarks.building.network import EmbeddingModel
from benchmarks.settings.class_paths import build
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment, Optimization
from pml_regularizers import DistributedLoss, attach_all, parameter_groups


def build_loss(experiment: Experiment, model: EmbeddingModel, num_classes: int) -> DistributedLoss:
    """Build the objective, attached to the stages of the model that it reads."""
    sizes = {
        "num_classes": num_classes,
        "in_channels": getattr(model.head, "map_channels", None) or model.head.in_channels,
        "embedding_size": model.head.embedding_size,
    }
    losses: dict[str, nn.Module] = {}
    weights: dict[str, float] = {}
    for index, term in enumerate(experiment.losses):
        part = build(term.loss.description, f"losses[{index}].loss", **sizes)
        name = type(part).__name__ + (f"_{index}" if type(part).__name__ in losses else "")
        losses[name] = part
        weights[name] = term.weight
    if list(weights.values()) == [1.0]:
        (loss,) = losses.values()
    else:
        loss = MultipleLosses(losses, weights=weights)
    attach_all(loss, model.head)
    miner = build(experiment.miner.description, "miner", **sizes) if experiment.miner else None
    return DistributedLoss(loss, miner)


def build_optimizer(
    optimization: Optimization, model: nn.Module, loss: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    """Build the optimizer, with groups for the network, the loss's own parameters and modules with own settings."""
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
    for path, settings in optimization.overrides.items():
        if unknown := settings.keys() - optimizer.defaults.keys():
            raise ConfigError(
                f"optimization.overrides.{path}.{min(unknown)}: {type(optimizer).__name__} has no such setting; it "
                f"has {', '.join(optimizer.defaults)}"
            )
    if optimization.scheduler is None:
        return optimizer, None
    return optimizer, build(
        optimization.scheduler.description,
        "optimization.scheduler",
        optimizer=optimizer,
        total_steps=max(1, optimization.steps),
        max_lr=[group["lr"] for group in groups],
    )
