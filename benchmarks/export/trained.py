"""The network of a run, read for its export."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks.building.images import image_size
from benchmarks.evaluation.networks import RunNetwork, load_network
from benchmarks.records.results import Run, about_as_long, has_thresholds, load_run
from benchmarks.reporting.rows import differing_settings
from benchmarks.settings.errors import ConfigError
from pml_regularizers import EmbeddingHead


@dataclass(frozen=True)
class Trained(RunNetwork):
    """The network of a run folder, its attention folded, with its facts."""

    images: Tensor  # (N, C, S, S), noise
    embeddings: Tensor  # (N, E), the checkpoint's of these images
    thresholds: dict[str, Any] | None = None  # of its own test, or of another network's
    another: Run | None = None  # a tested run of the same method, for a network of all classes

    @property
    def tested(self) -> Run | None:
        """The run whose results stand for this network: its own or another of the same method, if there is one."""
        return self.run if _is_tested(self.run, self.step) else self.another

    def difference(self, network: nn.Module) -> float:
        """The largest difference of a coordinate between a network's embeddings and the checkpoint's."""
        return (embed(network, self.images) - self.embeddings).abs().max().item()


def _is_tested(run: Run, step: int) -> bool:
    """True if the run's results are those of this checkpoint, on images that it was not trained on."""
    tested = (run.info.get("selection") or {"step": run.info["steps"]})["step"]
    is_new = run.info["data"]["split"] != "all"
    return bool(run.info["status"] == "finished" and tested == step and is_new)


def _thresholds(run: Run) -> dict[str, Any] | None:
    """A run's entries "verification" and "identification", with the network and the images that were tested.

    None if it measured nothing, or had too few images for any threshold.
    """
    if not has_thresholds(run.info):
        return None
    data = run.info["data"]
    return {
        "similarity": "cosine of two embeddings",
        "approximate": False,
        "tested_on": {"data": data["name"], "images": data["test_images"]},
        "tested_network": {"run": run.info["name"], "train_classes": data["train_classes"]},
        **(run.info.get("verification") or {}),
        "identification": run.info.get("identification"),
    }


FREE = {"data.split", "data.fold", "data.folds", "data.test_classes", "protocol"}
"""Settings in which a training on all classes differs from a tested one, with those of `evaluation`."""


def with_thresholds(trained: Trained, folder: Path) -> Trained:
    """A network with the thresholds of another run of the same method, on the same images: approximate ones.

    Raises:
        ConfigError: if there are none, or the network has some of its own.
    """
    run = trained.run
    if trained.thresholds is not None:
        raise ConfigError(f"--thresholds: {run.folder} measured its own; leave the option out")
    try:
        tested = load_run(folder)
    except ValueError as error:
        raise ConfigError(f"--thresholds: {error}") from error
    different = [
        setting
        for setting in differing_settings(tested, run)
        if setting not in FREE and not setting.startswith("evaluation.")
    ]
    if about_as_long(tested.info, run.info["config"]["optimization"]["steps"]):
        different = [setting for setting in different if setting != "optimization.steps"]
    parts = ("name", "fingerprint", "view")
    data, other = run.info["data"], tested.info["data"]
    different += [f"data ({part})" for part in parts if data.get(part) != other.get(part)]
    if different:
        raise ConfigError(
            f"--thresholds: {folder} and {run.folder} differ in {', '.join(different)}; expected a run of the same "
            "method on the same images"
        )
    if (thresholds := _thresholds(tested)) is None:
        raise ConfigError(
            f"--thresholds: {folder} measured none; train it with --evaluation.verification=true, on enough images"
        )
    return replace(trained, thresholds=thresholds | {"approximate": True}, another=tested)


def load_trained(folder: Path) -> Trained:
    """Load the network that a run has tested, or that of its last checkpoint so far; no other files are read.

    Raises:
        ConfigError: if the folder has no such checkpoint, or if timm cannot have such a network.
    """
    restored = load_network(folder)
    experiment, network = restored.experiment, restored.network.float()
    head = network.head
    part = head.attention if isinstance(head, EmbeddingHead) else head
    if part is not None and not hasattr(part, "fold"):
        raise ConfigError(
            f"{folder}: timm has no {type(part).__name__}, and it has no fold(linear) to merge it into the "
            "embedding layer"
        )
    head.normalize = True  # as it was tested
    size = image_size(experiment.data, network.trunk)
    noise = torch.Generator().manual_seed(0)
    images = torch.randn(3, experiment.data.in_chans, size, size, generator=noise)
    embeddings = embed(network, images)
    if isinstance(head, EmbeddingHead) and part is not None:
        head.fold()
    own = _thresholds(restored.run) if _is_tested(restored.run, restored.step) else None
    return Trained(restored.run, experiment, restored.step, network, images, embeddings, own)


def embed(model: nn.Module, images: Tensor) -> Tensor:
    """Unit embeddings (N, E)."""
    with torch.no_grad():
        return normalize(model(images))
