"""The parts of a run; settings that do not suit them fail before the training."""

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import nn

from benchmarks.building.images import Datasets, build_datasets, show_to
from benchmarks.building.network import STARTING_WEIGHTS, EmbeddingModel, batch_norms, build_model
from benchmarks.building.objective import build_loss, build_optimizer
from benchmarks.datasets.decoded import DecodedImages
from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.experiment import Evaluation, Experiment
from benchmarks.training.batches import StepSampler
from benchmarks.training.state import TrainingState
from benchmarks.training.trial import TRIAL_IMAGES, take_trial_step
from pml_regularizers import (
    AttentionEnsemble,
    HORDELoss,
)


def build_parts(
    experiment: Experiment, accelerator: Accelerator
) -> tuple[TrainingState, Datasets, StepSampler]:
    """Read the data, build network, loss and optimizer from the experiment's seed, and take a trial step."""
    data, seed = experiment.data, experiment.seed
    _check_places(experiment)
    # Before the network, whose weights may have to be fetched.
    datasets = build_datasets(data, seed=seed, fair=experiment.protocol == "fair")
    steps = experiment.optimization.steps
    sampler = StepSampler(datasets.train.labels, data, steps=steps, seed=seed)
    torch.manual_seed(seed)
    state = build_state(experiment, datasets.train.num_classes, accelerator)
    show_to(state.model.trunk, datasets, data)
    if steps:
        take_trial_step(experiment, state)
    if (fault := next(_faults(experiment, datasets, state), None)) is not None:
        raise ConfigError(fault)
    check_parts(experiment.evaluation, datasets.test, datasets.train)
    if experiment.precision == "float64":
        state.model.double()
        state.loss.double()
    return state, datasets, sampler


def build_state(
    experiment: Experiment, num_classes: int, accelerator: Accelerator
) -> TrainingState:
    """Build network, loss and optimizer, which are on no device yet."""
    model = build_model(experiment.network, experiment.data)
    loss = build_loss(experiment, model, num_classes)
    _check_batch_norm(experiment, model, accelerator)
    return TrainingState(model, loss, *build_optimizer(experiment.optimization, model, loss))


def try_one_step(experiment: Experiment) -> None:
    """Take a trial step of an experiment without its data, in this process alone."""
    take_trial_step(experiment, build_state(experiment, max(TRIAL_IMAGES), Accelerator()))


def decoded(datasets: Datasets, data: Data, device: torch.device) -> list[DecodedImages | None]:
    """The images of a run, to be decoded once; a DatasetError if a file cannot be read."""
    sources = [
        DecodedImages(images, device) if isinstance(images, ImageSet) else None
        for images in datasets
    ]
    needed = sum(images.nbytes for images in sources if images is not None) / 2**30
    assert data.decoded_gib is not None
    if needed > data.decoded_gib:
        raise ConfigError(
            f"data.decoded_gib: {needed:.3g} GiB are needed, {data.decoded_gib:g} are allowed; raise it, take "
            "smaller images, or leave it out"
        )
    return sources


def find_horde(loss: nn.Module) -> HORDELoss | None:
    """The HORDE loss whose orders and descriptor are tested, if there is one."""
    losses = [module for module in loss.modules() if isinstance(module, HORDELoss)]
    return losses[0] if len(losses) == 1 else None


def _check_places(experiment: Experiment) -> None:
    """Refuse to write among the images of a folder, where each folder is a class."""
    data = experiment.data
    places = {"output": experiment.output, "data.cache": data.cached_views and data.cache}
    for setting, place in places.items() if data.dataset == "folder" else ():
        if place and place.resolve().is_relative_to(data.root.resolve()):
            raise ConfigError(
                f"{setting}: {place} lies in data.root ({data.root}), whose folders are classes; choose a place "
                "beside it"
            )


def _check_batch_norm(
    experiment: Experiment, model: EmbeddingModel, accelerator: Accelerator
) -> None:
    settings = experiment.model
    started = settings.weights is not None or any(map(settings.trunk_args.get, STARTING_WEIGHTS))
    norms = batch_norms(model.trunk) if settings.batch_norm != "train" else []
    if (settings.frozen_stages or norms) and not started:
        raise ConfigError(
            "model: batch_norm or frozen_stages would keep random weights or their statistics; load weights "
            "(--model.weights FILE, or --model.trunk_args '{pretrained: true}'), or pass --model.batch_norm train "
            "and --model.frozen_stages null"
        )
    if not any(norm.training for norm in batch_norms(model)):
        return
    if experiment.optimization.chunk_size is not None:
        raise ConfigError(
            "optimization.chunk_size: batch norm would take statistics of a chunk; freeze it (model.batch_norm: "
            "frozen or frozen_statistics, with loaded weights), take a trunk without it, or leave chunk_size out"
        )
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        raise ConfigError(
            f"model: has batch norm, whose statistics would differ on {accelerator.num_processes} processes of "
            "the CPU; take one, a trunk and a head without it, or model.batch_norm: frozen, with loaded weights"
        )


def _faults(experiment: Experiment, datasets: Datasets, state: TrainingState) -> Iterator[str]:
    """Lines on tests that would fail at the end."""
    settings, size, head = experiment.evaluation, experiment.model.embedding_size, state.model.head
    images, horde = len(datasets.train), find_horde(state.loss)
    ensemble, kind = isinstance(head, AttentionEnsemble), experiment.model.replacement
    width = head.in_channels if kind == "features" else size
    if kind and horde is not None and width != horde.embedding_size:
        for name in ("descriptor", "orders"):
            if getattr(settings, name):
                yield (
                    f"evaluation.{name}: HORDE trains beside embeddings of {horde.embedding_size} numbers, and the "
                    f"tested ones ({kind} of the trained trunk) have {width}; set it to false"
                )
    if settings.descriptor and horde is not None and images <= horde.embedding_size:
        yield (
            f"evaluation.descriptor: its PCA to {horde.embedding_size} dimensions needs more training images than "
            f"the {images} there are; set it to false, or model.embedding_size to at most {images - 1}"
        )
    if settings.features is not None and ensemble:
        yield "evaluation.features: an ensemble pools none for all heads; leave it out"
    most = images if ensemble else min(images, head.in_channels)
    if settings.features is not None and settings.features > most:
        yield (
            f"evaluation.features: {settings.features} principal components of the {head.in_channels} features of "
            f"{images} training images; expected at most {most}"
        )
    if size > most and experiment.model.has_components:
        yield (
            f"model.embedding_size: {size} principal components of the {head.in_channels} features of {images} "
            f"training images; expected at most {most}"
        )
    where = {experiment.model.head: "head", kind: "replace_layer"}.get("whitened")
    if where is not None and images == datasets.train.num_classes:
        yield (
            f"model.{where}: whitened: each training class has one image, so that there is nothing to whiten by; "
            "add images, or take pca"
        )
    if settings.orders and horde is None:
        yield "evaluation.orders: needs one HORDELoss among the losses; leave it out"


def check_parts(
    settings: Evaluation, test: Glyphs | ImageSet, train: Glyphs | ImageSet | None = None
) -> None:
    """Refuse parts that images cannot be divided into."""
    if settings.parts is None:
        return
    if test.ranking is not None:
        told = (
            "images of a part are ranked among themselves, but this dataset has a gallery or groups"
        )
        raise ConfigError(f"evaluation.parts: {told}; leave it out")
    for images in (test, train) if train is not None and settings.divergence else (test,):
        smallest = int(torch.bincount(images.labels).min())
        if smallest // settings.parts < 2:
            fewer = f"expected at most {smallest // 2}, or " * (smallest >= 4)  # two parts
            raise ConfigError(
                f"evaluation.parts: each of {settings.parts} parts needs two images of every class, but a class "
                f"has {smallest}; {fewer}leave it out"
            )
