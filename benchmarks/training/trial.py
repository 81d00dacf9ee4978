"""A trial step with copies of the network and the loss: a run that cannot work fails at its start."""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn

from benchmarks.building.images import image_size
from benchmarks.console.printing import reason
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Experiment
from benchmarks.training.loop import captured_terms, gradient_ratios
from benchmarks.training.state import TrainingState
from pml_regularizers import GradientCache

TRIAL_IMAGES = (4, 32, 32)  # at most: a small batch, and larger ones while some loss does not act


def take_trial_step(experiment: Experiment, state: TrainingState) -> None:
    """Take a training step on the CPU with copies of the network, the loss and their optimizer.

    A trial batch has as many images of a class as one of the training, as far as it is that large.
    """
    data, diagnose, several = experiment.data, experiment.diagnose_every, len(experiment.losses) > 1
    side, channels = image_size(data, state.model.trunk), data.in_chans
    try:
        state = deepcopy(state)
    except Exception as error:
        raise ConfigError(
            f"model, losses, optimization: cannot be copied for a trial step: {type(error).__name__}: "
            f"{reason(error)}; keep tensors as parameters or buffers"
        ) from error
    model, loss = state.model, state.loss
    network: nn.Module | GradientCache = model
    idle, part = {*range(len(experiment.losses))}, "losses"
    if experiment.optimization.chunk_size is not None:
        network, part = GradientCache(model, loss, 2), "optimization.chunk_size"
    # The training warns again; and a scheduler does not know the copy of its optimizer, which lacks its mark.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        try:
            for labels in (_trial_labels(data, images) for images in TRIAL_IMAGES):
                state.optimizer.zero_grad()
                embeddings = network(torch.randn(len(labels), channels, side, side))
                part = "diagnose_every" if diagnose else "losses"
                with captured_terms(loss, diagnose > 0 or several) as terms:
                    value = loss(embeddings, labels)
                if diagnose:
                    gradient_ratios(terms, model, embeddings)
                part = "losses"
                if not value.isfinite().all():
                    raise ValueError(f"the loss is {value.item()}, expected a finite number")
                value.backward()
                gradients = (p.grad for p in chain(model.parameters(), loss.parameters()))
                if any(g is not None and bool(g.any()) for g in gradients):
                    idle &= _zeros(experiment, terms)
                if not idle:
                    break
            part = "optimization.optimizer"
            state.optimizer.step()
            part = "optimization.scheduler"
            if state.scheduler is not None:
                state.scheduler.step()
        except Exception as error:
            hint = " (or the miner)" if part == "losses" and experiment.miner else ""
            raise ConfigError(
                f"{part}{hint}: a trial step failed: {type(error).__name__}: {reason(error)}"
            ) from error
    if idle:
        zero = "a loss of 0" if several else "a gradient of 0"
        raise ConfigError(
            f"losses[{min(idle)}]: {zero} in all trial batches, so that it would never act: data.samples_per_class "
            f"is {data.samples_per_class}, of data.batch_size {data.batch_size}; most losses need two images of a "
            "class and two classes in a batch; see its margins, too, and the miner's"
        )


def _trial_labels(data: Data, images: int) -> Tensor:
    """Labels of a batch of at most so many images, composed as the batches of the training."""
    size, of_class = data.batch_size, data.samples_per_class
    if of_class is None:  # any classes
        return torch.arange(min(size, images)) % 2
    classes: int = min(size // of_class, images if of_class == 1 else images // 2)
    return torch.arange(min(size, images) // classes * classes) % classes


def _zeros(experiment: Experiment, terms: Mapping[str, Tensor]) -> set[int]:
    """The losses of several, except those of weight 0, all of whose terms are 0."""
    if len(experiment.losses) == 1:
        return set()
    acting: dict[str, bool] = {}
    for name, term in terms.items():  # "HORDELoss.order_1" is a term of the loss "HORDELoss"
        loss = name.partition(".")[0]
        acting[loss] = acting.get(loss, False) or bool(term.any())
    acts = zip(acting.values(), experiment.losses, strict=True)
    return {i for i, (act, term) in enumerate(acts) if term.weight != 0 and not act}
