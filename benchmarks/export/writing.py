"""Writes a run as files for timm, with a model card: all of them, or none."""

import shlex
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import nn

from benchmarks.building.images import list_images
from benchmarks.console.printing import reason
from benchmarks.console.writing import InUseError, alone, let_others_read
from benchmarks.export.card import THRESHOLDS, card, preprocessing
from benchmarks.export.trained import Trained, load_trained, with_thresholds
from benchmarks.records.files import write_json
from benchmarks.reporting.identification import known_or_unknown
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError
from pml_regularizers import EmbeddingHead

SAME = 1e-4
"""Largest allowed difference of a coordinate of a unit embedding. Other kernels differ by rounding, 1e-7 to 1e-5
in a deep network; a normalisation on the other side of the pooling differs by 1e-2."""

NORM_BEFORE_POOLING: tuple[dict[str, bool], ...] = (
    *({}, {"fc_norm": False}, {"use_fc_norm": False}, {"head_norm_first": True}),
)
"""Arguments that make vision transformers and ConvNeXts normalise before they pool, not after it."""


def export(run: Path, output: Path, thresholds: Path | None = None) -> list[str]:
    """Export a run folder into a new or empty one, completely or not at all; lines on what was written.

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
        trained = with_thresholds(trained, thresholds)
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
        why = reason(error).removeprefix(f"{output.absolute()}: ")
        raise ConfigError(f"--output: {output}: {why}") from error
    told = known_or_unknown(trained.thresholds or {})
    if told and trained.another is not None:
        told.append("This is approximate: a network of fewer classes was tested.")
    first = f"{output}: the checkpoint's embeddings except for at most {difference:.1e}"
    return [first, *told, search_line(trained.experiment.data, output)]


def search_line(data: Data, output: Path) -> str:
    """How to search the images that a run was made with, or, if they are not there, others."""
    with suppress(KeyError, ValueError, OSError):  # Glyphs are drawn
        listing = list_images(replace(data, download=None))
        if (query := listing.root / listing.paths[0]).is_file():
            words = ["python", "examples/search_folder.py", output, listing.root, query]
            return f"Search with it: {shlex.join(map(str, words))}"
    return "docs/export.md shows how to search a folder of images with it."


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
    # `load_trained` refuses an ensemble, and a head without a layer.
    assert isinstance(head, EmbeddingHead) and isinstance(head.fc, nn.Linear)
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
