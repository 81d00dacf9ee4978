"""Writes a run as files for timm, with a model card: all of them, or none."""

import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from math import floor, inf
from operator import itemgetter
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import model_entrypoint, save_for_hf, split_model_name_tag
from torch import Tensor, nn
from torch.nn.functional import normalize

from benchmarks import building
from benchmarks.console import InUseError, alone, let_others_read, reason
from benchmarks.datasets import IMAGE_DATASETS
from benchmarks.datasets import folder as image_folder
from benchmarks.evaluation import RunNetwork, load_network
from benchmarks.records import Run, has_thresholds, load_run, write_json
from benchmarks.reporting import compare, fill
from benchmarks.settings import ConfigError, Data, dump
from pml_regularizers import EmbeddingHead

THRESHOLDS = "thresholds.json"

SAME = 1e-4
"""Largest allowed difference of a coordinate of a unit embedding. Other kernels differ by rounding, 1e-7 to 1e-5
in a deep network; a normalisation on the other side of the pooling differs by 1e-2."""

NORM_BEFORE_POOLING: tuple[dict[str, bool], ...] = (
    *({}, {"fc_norm": False}, {"use_fc_norm": False}, {"head_norm_first": True}),
)
"""Arguments that make vision transformers and ConvNeXts normalise before they pool, not after it."""


@dataclass(frozen=True)
class Trained(RunNetwork):
    """The network of a run folder, its attention folded, with its facts."""

    images: Tensor  # (N, C, S, S), noise
    embeddings: Tensor  # (N, E), the checkpoint's of these images
    thresholds: dict[str, Any] | None = None  # of its own test, or of another network's

    @property
    def is_tested(self) -> bool:
        """True if the run's results are those of this checkpoint."""
        return _is_tested(self.run, self.step)

    def difference(self, network: nn.Module) -> float:
        """The largest difference of a coordinate between a network's embeddings and the checkpoint's."""
        return (_embed(network, self.images) - self.embeddings).abs().max().item()


def _is_tested(run: Run, step: int) -> bool:
    tested = (run.info.get("selection") or {"step": run.info["steps"]})["step"]
    return bool(run.info["status"] == "finished" and tested == step)


def _thresholds(run: Run) -> dict[str, Any] | None:
    """What a test measured of verification, with the network and the images that it was measured on.

    None if it measured nothing, or had too few images for any threshold.
    """
    if not has_thresholds(run.info):
        return None
    data = run.info["data"]
    return {
        "similarity": "cosine of two embeddings",
        "tested_on": {"data": data["name"], "images": data["test_images"]},
        "tested_network": {"run": run.info["name"], "train_classes": data["train_classes"]},
        **run.info["verification"],
    }


def _thresholds_of_another(folder: Path, run: Run) -> dict[str, Any]:
    try:
        tested = load_run(folder)
    except ValueError as error:
        raise ConfigError(f"--thresholds: {error}") from error
    one, other = tested.info, run.info
    different = [
        part for part in ("model", "losses") if one["config"][part] != other["config"][part]
    ]
    seen = ("name", "fingerprint", "view")
    different += [
        f"data ({part})" for part in seen if one["data"].get(part) != other["data"].get(part)
    ]
    if different:
        raise ConfigError(
            f"--thresholds: {folder} and {run.folder} differ in {', '.join(different)}; expected a run of the same "
            "method on the same images"
        )
    if (thresholds := _thresholds(tested)) is None:
        raise ConfigError(
            f"--thresholds: {folder} measured none; train it with --evaluation.verification=true, on enough images"
        )
    return thresholds


def export(run: Path, output: Path, thresholds: Path | None = None) -> float:
    """Export a run folder into a new or empty one, completely or not at all.

    Returns the largest difference of a coordinate between the embeddings of the files and the checkpoint's.

    Args:
        thresholds: The folder of another run whose test measured them, for a network of all classes, which has no
            test of its own. Default: the run's own, if it has some.

    Raises:
        ConfigError: if a run cannot be read, the other one has no thresholds, the output is in use, or timm would
            give other embeddings.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output: {output} is not an empty folder; choose a new one")
    trained = load_trained(run)
    if thresholds is not None:
        if trained.thresholds is not None:
            raise ConfigError(f"--thresholds: {run} measured its own; leave the option out")
        trained = replace(trained, thresholds=_thresholds_of_another(thresholds, trained.run))
    try:
        with alone(output.absolute()) as folder:
            difference = _write_timm(trained, folder)
            (folder / "README.md").write_text(card(trained, difference), encoding="utf-8")
            if trained.thresholds is not None:
                write_json(folder / THRESHOLDS, trained.thresholds)
            for file in folder.iterdir():
                let_others_read(file)
            folder.rename(output.absolute())
    except (InUseError, OSError) as error:
        raise ConfigError(f"--output: {output}: {reason(error)}") from error
    return difference


def example_query(run: Path) -> list[str]:
    """The folder of images that a run was made with, and one of them; none if they are not there."""
    config = load_run(run).info["config"]["data"]
    name, root = config["dataset"], Path(config["root"])
    with suppress(KeyError, ValueError, OSError):  # Glyphs are drawn
        if name == "folder":
            listing = image_folder.read(root, 0.5, config.get("class_level"))
        else:
            listing = IMAGE_DATASETS[name].read(root)
        if (query := listing.root / listing.paths[0]).is_file():
            return [str(listing.root), str(query)]
    return []


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
    size = building.image_size(experiment.data, network.trunk)
    noise = torch.Generator().manual_seed(0)
    images = torch.randn(3, experiment.data.in_chans, size, size, generator=noise)
    embeddings = _embed(network, images)
    if isinstance(head, EmbeddingHead) and part is not None:
        head.fold()
    own = _thresholds(restored.run) if _is_tested(restored.run, restored.step) else None
    return Trained(restored.run, experiment, restored.step, network, images, embeddings, own)


def _embed(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return normalize(model(images))


def _write_timm(trained: Trained, folder: Path) -> float:
    """Write the files for `timm.create_model("local-dir:FOLDER", pretrained=True)`; return as `export` does."""
    model, arguments = _for_timm(trained)
    of_timm = signature(timm.create_model).parameters
    own = {name: value for name, value in arguments.items() if name not in of_timm}
    pretrained = {
        **preprocessing(trained.experiment.data, trained.network.trunk),
        "custom_load": False,
        # timm's facts about its own weights do not hold for these.
        **dict.fromkeys(("tag", "license", "test_input_size", "test_crop_pct")),
    }
    config = {"model_args": own, "model_config": {"pretrained_cfg": pretrained}}
    save_for_hf(model, str(folder), safe_serialization=True, **config)
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    difference = trained.difference(network)
    if not difference <= SAME:
        raise ConfigError(
            f"{trained.run.folder}: the embeddings of what was written differ by {difference:.1e} from the "
            f"checkpoint's, expected at most {SAME:.0e}"
        )
    return difference


def _for_timm(trained: Trained) -> tuple[nn.Module, dict[str, Any]]:
    """A model of timm's with the embedding layer as its classifier, and its arguments, the nearest one."""
    trunk, head = trained.network.trunk, trained.network.head
    assert isinstance(head, EmbeddingHead)  # `load_trained` refuses an ensemble
    of_run, in_chans = trained.experiment.model, trained.experiment.data.in_chans
    size, bias = head.embedding_size, head.fc.bias
    of_head = {"in_chans": in_chans, "num_classes": size, "global_pool": head.pool}
    found: list[tuple[float, nn.Module, dict[str, Any]]] = []
    for norm in NORM_BEFORE_POOLING:
        arguments = {**of_run.trunk_args, **of_head, **norm}
        # A trunk without such a pooling or classifier may raise any error.
        with suppress(Exception):
            model: Any = timm.create_model(of_run.trunk, **arguments).eval()
            classifier = model.get_classifier()
            [name] = [name for name, module in model.named_modules() if module is classifier]
            weight = head.fc.weight.view_as(classifier.weight)  # a 1x1 convolution in some
            linear = {"weight": weight, "bias": torch.zeros(size) if bias is None else bias}
            own = {f"{name}.{key}": tensor for key, tensor in linear.items()}
            weights = {**trunk.state_dict(), **own}
            if "head_norm_first" in norm:  # the same layer has another name there
                weights = {k.replace("head.norm.", "norm_pre."): of for k, of in weights.items()}
            model.load_state_dict(weights)
            found.append((trained.difference(model), model, arguments))
    difference, model, arguments = min(found, key=itemgetter(0), default=(inf, trunk, {}))
    if difference <= SAME:
        return model, arguments
    raise ConfigError(
        f"{trained.run.folder}: timm's {of_run.trunk} with model.pool {head.pool} and the embedding layer as its "
        "classifier gives other embeddings, or has no such pooling or classifier; train another pooling or trunk"
    )


def preprocessing(data: Data, trunk: nn.Module) -> dict[str, Any]:
    """The test view of an image, as entries of timm's `pretrained_cfg`."""
    size = building.image_size(data, trunk)
    if data.dataset == "glyphs":  # rendered in gray, seen in -1..1
        crop = {"interpolation": "bilinear", "crop_mode": "squash", "crop_pct": 1.0}
        return {"input_size": (1, size, size), **crop, "mean": (0.5,), "std": (0.5,)}
    views = building.image_views(data, trunk)
    return {
        "input_size": (3, size, size),
        "interpolation": views.interpolation,
        "crop_pct": size / (views.resized_side + 1e-6),  # timm rounds size / crop_pct down
        "crop_mode": "center" if views.keep_aspect else "squash",
        "mean": views.mean,
        "std": views.std,
    }


def _names_alone(value: Any, names: dict[str, str]) -> Any:
    """Settings with the names of files for their paths, which are private; `names` takes these paths."""
    if isinstance(value, dict):
        return {key: _names_alone(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_names_alone(inner, names) for inner in value]
    if isinstance(value, str) and value.startswith(("/", "~", "../", "file:")):
        return names.setdefault(value, Path(value).name or value)
    return value


def _command(text: str, names: dict[str, str]) -> str:
    """A command with the names of files for their paths."""
    words = []
    for word in shlex.split(text):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        value = _names_alone(value, names)
        for path in sorted(names, key=len, reverse=True):
            value = value.replace(path, names[path])
        words.append(f"{option}{equals}{value}")
    return shlex.join(words)


def card(trained: Trained, difference: float) -> str:
    """The model card, README.md: how to use the files, results, and the training's settings."""
    info, trunk = trained.run.info, trained.experiment.model.trunk
    view = preprocessing(trained.experiment.data, trained.network.trunk)
    results = None
    if trained.is_tested:
        # The descriptor is HORDE's, which is not exported.
        results = compare([replace(trained.run, info={**info, "outputs": {}})]).markdown()
    entrypoint = model_entrypoint(split_model_name_tag(trunk)[0])
    data = trained.experiment.data
    own = data.dataset in ("folder", "table")
    names: dict[str, str] = {}
    config = _names_alone(info["config"], names)
    command = info.get("command") and _command(info["command"], names)
    return fill(
        Path(__file__).with_name("card.md"),
        **{"info": info, "trunk": trunk, "head": trained.network.head, "difference": difference},
        **{"thresholds": trained.thresholds, "file": THRESHOLDS},
        **{"view": view, "results": results, "step": trained.step, "command": command},
        config=dump(config),
        images=(own and data.root.name.strip(".")) or info["data"]["name"],
        # timm knows such a trunk only once `benchmarks.backbones` has registered it.
        ours=entrypoint.__module__.startswith("benchmarks."),
        upright=own,
        shown=floor(view["input_size"][1] / view["crop_pct"]),
    )
