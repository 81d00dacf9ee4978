"""Builds the network of an experiment."""

from contextlib import nullcontext
from dataclasses import asdict
from typing import Self

import timm
import torch
from torch import Tensor, nn

from benchmarks.backbones import register
from benchmarks.backbones.weights import fetching, load_weights
from benchmarks.building.frozen_stages import FrozenStages
from benchmarks.building.images import image_size
from benchmarks.console.printing import reason
from benchmarks.settings.class_paths import build
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.model import BatchNorm, Model
from pml_regularizers import AttentionEnsemble, EmbeddingHead

STARTING_WEIGHTS = ("pretrained", "checkpoint_path")
"""Arguments of `timm.create_model` that load weights."""


class EmbeddingModel(nn.Sequential):
    """Image -> timm trunk -> `EmbeddingHead` -> embedding; for an ensemble, its stem and then the rest."""

    def __init__(
        self,
        trunk: nn.Module,
        head: EmbeddingHead | AttentionEnsemble,
        batch_norm: BatchNorm = "train",
        frozen_stages: FrozenStages | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.frozen_stages = frozen_stages
        self.batch_norm = batch_norm
        if batch_norm == "frozen":
            for module in self._frozen():
                module.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.batch_norm != "train":
            for module in self._frozen():
                module.eval()
        if self.frozen_stages is not None:
            self.frozen_stages.frozen.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Embed images, or the outputs that the frozen stages gave for them."""
        if self.frozen_stages is None:
            features = self.trunk(images)
        else:
            features = self.frozen_stages.upper(self.frozen_stages.lower(images))
        embeddings: Tensor = self.head(features)
        return embeddings

    def _frozen(self) -> list[nn.Module]:
        pretrained = [self.trunk]
        if isinstance(self.head, AttentionEnsemble):
            pretrained += [self.head.body, self.head.attention]
        return [norm for part in pretrained for norm in batch_norms(part)]


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """All batch-norm layers, including timm's."""
    kind = nn.modules.batchnorm._BatchNorm
    return [inner for inner in module.modules() if isinstance(inner, kind)]


def build_model(model: Model, data: Data) -> EmbeddingModel:
    """Build the network of an experiment; weights from no file are drawn from torch's global generator."""
    for name in ("num_classes", "global_pool", "in_chans"):
        if name in model.trunk_args:
            raise ConfigError(f"model.trunk_args.{name}: follows from the data; leave it out")
    register()
    if not timm.is_model(model.trunk):
        raise ConfigError(f"model.trunk: {_unknown_trunk(model.trunk)}")
    trunk_args = model.trunk_args | ({} if model.weights is None else {"pretrained": False})
    fetched = fetching() if trunk_args.get("pretrained") else nullcontext()
    try:
        with fetched:
            trunk = timm.create_model(
                model.trunk, num_classes=0, global_pool="", in_chans=data.in_chans, **trunk_args
            )
        if model.weights is not None:
            load_weights(trunk, model.weights)
        side = image_size(data, trunk)
        image = torch.rand(1, data.in_chans, side, side, generator=torch.Generator())
        make = _cut if model.ensemble else _head
        trunk, head = make(model, trunk, image)
        frozen = None
        if model.frozen_stages:
            frozen = FrozenStages(trunk, model.frozen_stages, image)
        network = EmbeddingModel(trunk, head, model.batch_norm, frozen).eval()
        if model.channels_last:
            network = network.to(memory_format=torch.channels_last)
        with torch.no_grad():
            network(image)
    except ConfigError:
        raise
    except Exception as error:
        said = f"model: {model.trunk}: {reason(error).rstrip('.')}"
        if trunk_args.get("pretrained"):
            said += (
                "; --model.weights FILE loads them from a file, --model.trunk_args '{}' with --model.batch_norm "
                "train begins with random ones"
            )
        raise ConfigError(said) from error
    return network.train()


def _unknown_trunk(trunk: str) -> str:
    """What to write in place of a name that timm does not list."""
    scheme, _, place = trunk.partition(":")
    if scheme not in ("local-dir", "hf_hub", "hf-hub"):
        near = timm.list_models(f"*{trunk.strip().lower().split('.')[0][:8]}*")[:5]
        return f"timm has no {trunk!r}" + (f"; near: {', '.join(near)}" if near else "")
    if scheme != "local-dir" and timm.is_model(of_timm := place.removeprefix("timm/")):
        return (
            f"{trunk!r} is a place, not a name; write --model.trunk {of_timm} "
            "--model.trunk_args '{pretrained: true}', which fetches these weights"
        )
    words = "--model.trunk NAME --model.weights FILE"
    return f"{trunk!r} is a place, not a name; write {words}, the architecture and a file of its weights"


def _head(model: Model, trunk: nn.Module, image: Tensor) -> tuple[nn.Module, EmbeddingHead]:
    settings = {name: getattr(model, name) for name in ("pool", "bias", "normalize", "init")}
    settings["bias"] |= model.head in ("pca", "whitened")
    if model.attention is not None:
        description = model.attention.description
        settings["attention"] = lambda C: build(description, "model.attention", num_features=C)
    size = None if model.head == "none" else model.embedding_size
    return trunk, EmbeddingHead.for_trunk(trunk, size, image=image, **settings)


def _cut(model: Model, trunk: nn.Module, image: Tensor) -> tuple[nn.Module, AttentionEnsemble]:
    assert model.ensemble is not None
    settings = {name: value for name, value in asdict(model.ensemble).items() if value is not None}
    ensemble = AttentionEnsemble.for_trunk(
        trunk,
        settings.pop("stage"),
        embedding_size=model.embedding_size,
        image=image,
        **settings,
    )
    stem, ensemble.stem = ensemble.stem, nn.Identity()
    stem.pretrained_cfg = trunk.pretrained_cfg  # for the normalisation of images
    return stem, ensemble
