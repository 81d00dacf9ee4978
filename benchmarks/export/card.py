"""The model card of an export."""

from dataclasses import replace
from math import floor
from pathlib import Path
from typing import Any

from timm.models import model_entrypoint, split_model_name_tag
from torch import nn

from benchmarks.building.images import image_size, image_views
from benchmarks.export.trained import Trained
from benchmarks.reporting.comparison import compare
from benchmarks.reporting.identification import known_or_unknown
from benchmarks.reporting.names import UNTRAINED
from benchmarks.reporting.templates import fill
from benchmarks.settings.data import Data
from benchmarks.settings.yaml_files import dump

THRESHOLDS = "thresholds.json"


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


def _names_alone(value: Any) -> Any:
    """Settings with the names of files for their paths, which are private."""
    if isinstance(value, dict):
        return {key: _names_alone(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_names_alone(inner) for inner in value]
    if isinstance(value, str) and value.startswith(("/", "~", "../", "file:")):
        return Path(value).name or value
    return value


def card(trained: Trained, difference: float) -> str:
    """The model card, README.md: how to use the files, results, and the training's settings."""
    info, trunk = trained.run.info, trained.experiment.model.trunk
    view = preprocessing(trained.experiment.data, trained.network.trunk)
    results, tested = None, trained.tested
    if tested is not None:
        # HORDE's descriptor and what else training has changed are not exported.
        outputs = tested.info.get("outputs") or {}
        untrained = {name: of for name, of in outputs.items() if name.startswith(UNTRAINED)}
        results = compare([replace(tested, info={**tested.info, "outputs": untrained})]).markdown()
    entrypoint = model_entrypoint(split_model_name_tag(trunk)[0])
    data = trained.experiment.data
    own = data.dataset in ("folder", "table")
    return fill(
        Path(__file__).with_suffix(".md"),
        **{"info": info, "trunk": trunk, "head": trained.network.head, "difference": difference},
        **{"thresholds": trained.thresholds, "file": THRESHOLDS},
        known=known_or_unknown({} if "identification" in info else trained.thresholds or {}),
        **{"view": view, "results": results, "tested": tested and tested.info},
        step=trained.step,
        config=dump(_names_alone(info["config"])),
        images=(own and data.root.name.strip(".")) or info["data"]["name"],
        # timm knows such a trunk only once `benchmarks.backbones` has registered it.
        ours=entrypoint.__module__.startswith("benchmarks."),
        upright=own,
        shown=floor(view["input_size"][1] / view["crop_pct"]),
    )
