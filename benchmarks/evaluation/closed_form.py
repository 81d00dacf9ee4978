"""Layers in closed form on a trunk's features: the head of a run, and the untrained trunk beside every test."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.nn.utils import skip_init

from benchmarks.datasets.glyphs import Glyphs
from benchmarks.datasets.images import ImageSet
from benchmarks.evaluation.extract import Extract
from benchmarks.evaluation.tester import Evaluator
from benchmarks.records.run_folder import HEAD
from pml_regularizers import EmbeddingHead, pca_init_, whitening_init_


def head_of(evaluator: Evaluator) -> EmbeddingHead | None:
    """The head of the tested network; None for an ensemble."""
    network = evaluator.accelerator.unwrap_model(evaluator.model, keep_torch_compile=False)
    return network.head if isinstance(network.head, EmbeddingHead) else None


def read_features(evaluator: Evaluator, images: Glyphs | ImageSet) -> dict[str, Tensor]:
    """The images' "labels" (n,), pooled "features" (n, C), and those that the head's "layer" takes, in one pass.

    All processes call this.
    """
    with (extract := Extract(evaluator.model, layer=True)):
        _, labels, rows = evaluator.embed(images, extract)
    features = extract.split(rows)
    return {"labels": labels, "layer": features["features"], **features}


def set_head(evaluator: Evaluator, trained: dict[str, Tensor], kind: str, size: int) -> nn.Linear:
    """Set the head's layer in closed form; all processes call this.

    A layer of the same shape keeps its parameters, which get the values; else the head gets another one.

    Args:
        trained: `read_features` of the training images.
        kind: As in `fit_layer`.
        size: Number of components.
    """
    head = head_of(evaluator)
    assert head is not None  # the settings refuse an ensemble
    shape = (head.in_channels if kind == "features" else size, head.in_channels)
    layer = head.fc
    if not isinstance(layer, nn.Linear) or layer.weight.shape != shape or layer.bias is None:
        layer = nn.Linear(*shape[::-1])
    fit_layer(layer, trained["layer"], trained["labels"], kind)
    own = next(evaluator.model.parameters())
    layer.to(evaluator.accelerator.device, own.dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(broadcast(parameter.detach().clone()))
    head.fc = layer
    return layer


@torch.no_grad()
def fit_layer(layer: nn.Linear, features: Tensor, labels: Tensor | None, kind: str) -> nn.Linear:
    """Fit a layer with a bias to features (N, C) in closed form, and return it.

    Args:
        kind: "pca", to their principal components; "whitened", to these after within-class whitening; or
            "features", to all features, centred, for a layer of C outputs.
    """
    if kind == "pca":
        return pca_init_(layer, features)
    if kind == "whitened":
        assert labels is not None
        return whitening_init_(layer, features, labels)
    nn.init.eye_(layer.weight)
    layer.bias.copy_(-features.double().mean(dim=0))
    return layer


def save_head(run: Path, layer: nn.Linear) -> None:
    """Save a layer that no checkpoint holds."""
    np.savez(run / HEAD, **{name: x.cpu().numpy() for name, x in layer.state_dict().items()})


def load_head(file: Path) -> nn.Linear:
    """The layer that `save_head` has saved."""
    with np.load(file) as arrays:
        weight, bias = (torch.from_numpy(arrays[name]) for name in ("weight", "bias"))
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def layer_outputs(
    trained: Tensor, labels: Tensor | None, features: Tensor, kind: str, size: int
) -> Tensor:
    """The outputs for features (n, C) of a layer that is fitted to others (N, C), as in `fit_layer`."""
    layer = skip_init(nn.Linear, trained.shape[1], size, dtype=torch.float64)
    with torch.no_grad():
        outputs: Tensor = fit_layer(layer, trained, labels, kind)(features.double())
    return outputs.to(features.dtype)


def components(
    accelerator: Accelerator,
    trained: Tensor,
    features: Tensor,
    size: int,
    labels: Tensor | None = None,
    kind: str = "pca",
) -> Tensor:
    """`layer_outputs` of the main process, since others may round in another way."""
    rows = layer_outputs(trained, labels, features, kind, size)
    result: Tensor = broadcast(rows.to(accelerator.device))
    return result.cpu()


def reduced(
    accelerator: Accelerator, trained: Tensor, labels: Tensor, features: Tensor, size: int
) -> dict[str, Tensor]:
    """The "pca" of features (n, C), and the same "whitened" within the classes of the training images' labels (N,).

    The latter is missing if no two images of a class differ, so that there is nothing to whiten by.
    """
    found = {"pca": components(accelerator, trained, features, size)}
    with suppress(ValueError):
        found["whitened"] = components(accelerator, trained, features, size, labels, "whitened")
    return found
