"""The trained network of a run folder."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.building import STARTING_WEIGHTS, EmbeddingModel, build_model, image_size
from benchmarks.console import reason
from benchmarks.records import Run, RunFolderError, load_best, load_checkpoint, load_run
from benchmarks.settings import ConfigError, Experiment, Model, parse
from pml_regularizers import EmbeddingHead


@dataclass(frozen=True)
class Trained:
    """The network of a run folder, with its facts."""

    run: Run
    experiment: Experiment
    step: int  # of the checkpoint
    network: EmbeddingModel  # in evaluation mode, in float32 on the CPU, its attention folded
    images: Tensor  # (N, C, S, S), noise
    embeddings: Tensor  # (N, E), the checkpoint's of these images

    def difference(self, network: nn.Module) -> float:
        """The largest difference of a coordinate between a network's embeddings and the checkpoint's."""
        return (embed(network, self.images) - self.embeddings).abs().max().item()


def load_trained(folder: Path) -> Trained:
    """Load the network that a run has tested, or that of its last checkpoint so far; no other files are read.

    Raises:
        ConfigError: if the folder is not a run's, has no readable checkpoint, or describes another network than
            the checkpoint holds.
    """
    try:
        run, state = load_run(folder), load_checkpoint(folder)
        settings = run.file("config.yaml")
        if run.info.get("selection"):  # the weights that validation classes chose were tested
            state = load_best(folder, run.info["selection"]["step"])
    except (ValueError, RunFolderError) as error:
        raise ConfigError(str(error)) from error
    if state is None:
        raise ConfigError(f"{folder}: has no checkpoint yet; go on with the run by --resume")
    try:
        # The current contents of a folder of weights do not matter.
        experiment = parse([f"--config={settings}", "--model.weights=null"]).experiment
        network = build_model(without_weights(experiment.model), experiment.data).eval()
    except ConfigError as error:
        raise ConfigError(f"{settings}: {error}") from error
    try:
        network.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ConfigError(
            f"{settings}: describes another network than the checkpoint holds ({reason(error)}); put back the "
            "file that the run wrote"
        ) from error
    if not isinstance(network.head, EmbeddingHead):
        raise ConfigError(
            f"{folder}: expected a network with an EmbeddingHead, got {type(network.head).__name__}, which has "
            "no plain form"
        )

    network.head.normalize = True  # as it was tested
    size = image_size(experiment.data, network.trunk)
    noise = torch.Generator().manual_seed(0)
    images = torch.randn(3, experiment.data.in_chans, size, size, generator=noise)
    embeddings = embed(network, images)
    if not embeddings.isfinite().all():
        raise ConfigError(
            f"{folder}: the network of step {state['step']} gives NaN or inf: it has diverged, train it again"
        )
    if hasattr(network.head.attention, "fold"):
        network.head.fold()
    return Trained(run, experiment, state["step"], network, images, embeddings)


def without_weights(model: Model) -> Model:
    """The settings of a network whose weights the checkpoint has."""
    kept = {name: arg for name, arg in model.trunk_args.items() if name not in STARTING_WEIGHTS}
    return replace(model, weights=None, trunk_args=kept)


def embed(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return normalize(model(images))
