"""A trained network as files for timm."""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import nn

from benchmarks.building import image_size, image_views
from benchmarks.export.trained import SAME, Exported, Trained, embed, without_weights
from benchmarks.settings import ConfigError, Data

HEAD_FILE = "head.safetensors"

NORM_BEFORE_POOLING = ({}, {"fc_norm": False}, {"use_fc_norm": False})
"""Arguments that keep vision transformers from normalising after they pool their patches."""


def write_timm(trained: Trained, folder: Path) -> Exported:
    """Write the files for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    The embedding layer is the model's classifier, or stands in a file of its own where that gives other embeddings.

    Raises:
        ConfigError: for an attention that cannot be folded.
    """
    head = trained.network.head
    if head.attention is not None:
        raise ConfigError(
            f"--formats: timm has no {type(head.attention).__name__}, and it has no fold(linear) to merge it into "
            "the embedding layer; export this network with --formats onnx"
        )
    files = ["model.safetensors", "config.json"]
    if _save_whole(trained, folder):
        return Exported(files, trained.difference(embed(_reload(folder), trained.images)))
    arguments = {"num_classes": 0, "global_pool": ""}
    model = _create(trained, arguments)
    model.load_state_dict(trained.network.trunk.state_dict())
    bias = head.fc.bias is not None
    described = {"embedding_size": head.embedding_size, "pool": head.pool, "bias": bias}
    _save(model, trained, arguments, folder, embedding_head=described)
    save_file(head.state_dict(), folder / HEAD_FILE)
    head.load_state_dict(load_file(folder / HEAD_FILE))
    network = nn.Sequential(_reload(folder), head)
    return Exported([*files, HEAD_FILE], trained.difference(embed(network, trained.images)))


def _save_whole(trained: Trained, folder: Path) -> bool:
    """Save the trunk with the embedding layer as its classifier, unless that gives other embeddings."""
    trunk, head = trained.network
    for norm in NORM_BEFORE_POOLING if hasattr(trunk, "fc_norm") else ({},):
        arguments = {"num_classes": head.embedding_size, "global_pool": head.pool, **norm}
        try:
            model = _create(trained, arguments)
            classifier = model.get_classifier()
            [name] = [name for name, module in model.named_modules() if module is classifier]
            bias = torch.zeros(head.embedding_size) if head.fc.bias is None else head.fc.bias
            linear = {f"{name}.weight": head.fc.weight, f"{name}.bias": bias}
            model.load_state_dict({**trunk.state_dict(), **linear})
            difference = trained.difference(embed(model, trained.images))
        except Exception:  # a trunk without such a pooling or classifier may raise any error
            continue
        if difference <= SAME:
            _save(model, trained, arguments, folder)
            return True
    return False


def _create(trained: Trained, arguments: Mapping[str, Any]) -> nn.Module:
    """The timm model of a run, in another form than its trunk."""
    model = without_weights(trained.experiment.model)
    channels = trained.experiment.data.in_chans
    return timm.create_model(model.trunk, in_chans=channels, **model.trunk_args, **arguments).eval()


def _save(
    model: nn.Module, trained: Trained, arguments: Mapping[str, Any], folder: Path, **more: Any
) -> None:
    """A file of tensors, and what timm needs to build their model."""
    of_timm = signature(timm.create_model).parameters
    trunk_args = trained.experiment.model.trunk_args
    save_for_hf(
        model,
        folder,
        safe_serialization=True,
        model_args={
            **{name: value for name, value in trunk_args.items() if name not in of_timm},
            **arguments,
            "in_chans": trained.experiment.data.in_chans,
        },
        model_config={
            "pretrained_cfg": {
                **preprocessing(trained.experiment.data, trained.network.trunk),
                "custom_load": False,
                # timm's facts about its own weights do not hold for these.
                **dict.fromkeys(("tag", "license", "test_input_size", "test_crop_pct")),
            },
            **more,
        },
    )


def _reload(folder: Path) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def preprocessing(data: Data, trunk: nn.Module) -> dict[str, Any]:
    """The test view of an image, as entries of timm's `pretrained_cfg`."""
    size = image_size(data, trunk)
    if data.dataset == "glyphs":  # rendered in gray, seen in -1..1
        crop = {"interpolation": "bilinear", "crop_mode": "squash", "crop_pct": 1.0}
        return {"input_size": (1, size, size), **crop, "mean": (0.5,), "std": (0.5,)}
    views = image_views(data, trunk)
    return {
        "input_size": (3, size, size),
        "interpolation": views.interpolation,
        "crop_pct": size / (views.resized_side + 1e-6),  # timm rounds size / crop_pct down
        "crop_mode": "center" if views.keep_aspect else "squash",
        "mean": views.mean,
        "std": views.std,
    }
