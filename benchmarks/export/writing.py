"""Writes a run as files for timm, with a model card: all of them, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from math import floor
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import model_entrypoint, save_for_hf, split_model_name_tag
from torch import nn

from benchmarks.building import image_size, image_views
from benchmarks.console import InUseError, alone, let_others_read, reason
from benchmarks.export.trained import Trained, load_trained, without_weights
from benchmarks.reporting import compare, fill
from benchmarks.settings import ConfigError, Data, dump
from pml_regularizers import EmbeddingHead

HEAD_FILE = "head.safetensors"

SAME = 1e-4
"""Largest allowed difference of a coordinate of a unit embedding. Other kernels differ by rounding, 1e-7 to 1e-5
in a deep network; a normalisation on the other side of the pooling differs by 1e-2."""

NORM_BEFORE_POOLING = ({}, {"fc_norm": False}, {"use_fc_norm": False})
"""Arguments that keep vision transformers from normalising after they pool their patches."""


def export(run: Path, output: Path) -> tuple[list[str], float]:
    """Export a run folder into a new or empty one, completely or not at all.

    Returns:
        The names of the files, and the largest difference between their embeddings and the checkpoint's.

    Raises:
        ConfigError: if the run cannot be read, the output is in use, or timm would give other embeddings than the
            checkpoint.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output: {output} is not an empty folder; choose a new one")
    trained = load_trained(run)
    try:
        with alone(output.absolute()) as folder:
            files, difference = write_timm(trained, folder)
            text = card(trained, files, difference)
            (folder / "README.md").write_text(text, encoding="utf-8")
            for file in folder.iterdir():
                let_others_read(file)
            folder.rename(output.absolute())
    except (InUseError, OSError) as error:
        raise ConfigError(f"--output: {output}: {reason(error)}") from error
    return files, difference


def write_timm(trained: Trained, folder: Path) -> tuple[list[str], float]:
    """Write the files for `timm.create_model("local-dir:FOLDER", pretrained=True)`; return as `export` does.

    The embedding layer is the model's classifier, or stands in a file of its own where that gives other embeddings.
    """
    head, files = trained.network.head, ["model.safetensors", "config.json"]
    if head.attention is not None:
        raise ConfigError(
            f"{trained.run.folder}: timm has no {type(head.attention).__name__}, and it has no fold(linear) to "
            "merge it into the embedding layer"
        )
    if _save_whole(trained, folder):
        network = _reload(folder)
    else:
        arguments = {"num_classes": 0, "global_pool": ""}
        model = _create(trained, arguments)
        model.load_state_dict(trained.network.trunk.state_dict())
        bias = head.fc.bias is not None
        described = {"embedding_size": head.embedding_size, "pool": head.pool, "bias": bias}
        _save(model, trained, arguments, folder, embedding_head=described)
        save_file(head.state_dict(), folder / HEAD_FILE)
        head.load_state_dict(load_file(folder / HEAD_FILE))
        network, files = nn.Sequential(_reload(folder), head), [*files, HEAD_FILE]
    difference = trained.difference(network)
    if not difference <= SAME:
        raise ConfigError(
            f"{trained.run.folder}: the embeddings of what was written differ by {difference:.1e} from the "
            f"checkpoint's, expected at most {SAME:.0e}"
        )
    return files, difference


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
            same = trained.difference(model) <= SAME
        except Exception:  # a trunk without such a pooling or classifier may raise any error
            continue
        if same:
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


def card(trained: Trained, files: Sequence[str], difference: float) -> str:
    """The model card, README.md: how to use the files, results, and the training's settings."""
    info, trunk = trained.run.info, trained.experiment.model.trunk
    view = preprocessing(trained.experiment.data, trained.network.trunk)
    tested = (info.get("selection") or {"step": info["steps"]})["step"]
    results = None
    if info["status"] == "finished" and tested == trained.step:
        # The descriptor is HORDE's, which is not exported.
        results = compare([replace(trained.run, info={**info, "outputs": {}})]).markdown()
    entrypoint = model_entrypoint(split_model_name_tag(trunk)[0])
    return fill(
        Path(__file__).with_name("card.md"),
        **{"info": info, "trunk": trunk, "head": trained.network.head, "difference": difference},
        **{"view": view, "results": results, "step": trained.step, "config": dump(info["config"])},
        # timm knows such a trunk only once `benchmarks.backbones` has registered it.
        ours=entrypoint.__module__.startswith("benchmarks."),
        parts=HEAD_FILE if HEAD_FILE in files else None,
        pooled=pooling(trained.network.head, trained.network.trunk(trained.images).ndim),
        shown=floor(view["input_size"][1] / view["crop_pct"]),
    )


def pooling(head: EmbeddingHead, ndim: int) -> str:
    """Code of the head's pooling, before its linear layer, in torch."""
    if head.pool == "token":
        return "features[:, 0]"
    reduce = {"avg": "mean", "max": "amax"}[head.pool]
    if ndim == 3:
        return f"features[:, {head.num_prefix_tokens}:].{reduce}(dim=1)"
    return f"features.{reduce}(dim={(1, 2) if head.data_format == 'NHWC' else (2, 3)})"
