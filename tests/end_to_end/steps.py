"""Trainings of two steps, in this process."""

import torch
from torch import nn
from torch.utils.data import default_collate

from benchmarks.building.images import build_datasets, show_to
from benchmarks.building.network import build_model
from benchmarks.building.objective import build_loss, build_optimizer
from benchmarks.settings.experiment import Experiment
from benchmarks.training.batches import StepSampler


def two_steps(experiment: Experiment) -> tuple[nn.Module, nn.Module, set[str]]:
    """A network and its loss after two steps, and the names of their weights and buffers that moved."""
    torch.manual_seed(0)
    model = build_model(experiment.model, experiment.data)
    train = show_to(model.trunk, build_datasets(experiment.data), experiment.data).train
    loss = build_loss(experiment, model, train.num_classes)
    optimizer, scheduler = build_optimizer(experiment.optimization, model, loss)
    both = {**model.state_dict(), **loss.state_dict(prefix="loss.")}
    start = {name: tensor.clone() for name, tensor in both.items()}
    for batch in StepSampler(train.labels, experiment.data, steps=2, seed=experiment.seed):
        images, labels, _ = default_collate([train[key] for key in batch])
        value = loss(model(images), labels)
        assert value.isfinite()
        optimizer.zero_grad()
        value.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in loss.parameters())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, loss, {name for name, now in both.items() if not torch.equal(now, start[name])}
