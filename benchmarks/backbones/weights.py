"""Pretrained weights of a timm model: from a file in any of the layouts in circulation, or timm's own."""

import hashlib
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.models import load_state_dict
from torch import Tensor

from benchmarks.console.printing import reason
from benchmarks.settings.errors import ConfigError

PATIENCE = 10  # seconds

PUBLISHED = {
    # The checksum's beginning, in the file's name, is the only published part of it.
    "bn_inception-52deb4733.pth": "sha256:52deb4733",
}
"""Checksums of published files, "ALGORITHM:DIGEST": docs/backbones.md has their addresses and licences."""


def load_weights(model: Any, path: Path) -> None:
    """Fill a timm model from a file, strictly.

    The file's layout is converted by the model's own `checkpoint_filter_fn`, and the classifier is dropped if the
    model has none, as timm does.

    Args:
        path: .pth or .pt (read without running any code in it) or .safetensors. From a training checkpoint, the
            first of the entries `state_dict_ema`, `model_ema`, `state_dict` and `model` is taken.

    Raises:
        ConfigError: if the file cannot be read or has a wrong checksum, or if a tensor is missing, unknown to the
            model or of another shape.
    """
    state_dict = _read(path)
    for checksum in _checksums(path):
        algorithm, _, expected = checksum.partition(":")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, algorithm).hexdigest()[: len(expected)]
        if digest != expected:
            raise ConfigError(
                f"model.weights: {path}: has the name of a published file, but expected {checksum}, got {digest}; "
                "fetch it again, or give other weights another name"
            )
    try:
        model.load_state_dict(_convert(state_dict, model))
    except Exception as error:  # a converter may fail in any way on another model's file
        name = model.pretrained_cfg["architecture"]
        raise ConfigError(f"model.weights: {path}: does not fit {name}: {reason(error)}") from error


def _checksums(path: Path) -> Iterator[str]:
    """Checksums that the file must have: the published one for its name, and that in its folder's SHA256SUMS."""
    if path.name in PUBLISHED:
        yield PUBLISHED[path.name]
    sums = path.with_name("SHA256SUMS")
    for line in sums.read_text(errors="replace").splitlines() if sums.exists() else []:
        digest, _, name = line.partition(" ")
        if name.lstrip(" *") == path.name:
            yield f"sha256:{digest}"


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix not in (".pth", ".pt", ".safetensors"):
        raise ConfigError(
            f"model.weights: {path}: expected a file of weights named .pth, .pt or .safetensors, got "
            f"{path.suffix!r}; python tools/caffe.py converts a .caffemodel"
        )
    try:
        with path.open("rb"):  # timm would not say why it cannot
            state_dict = load_state_dict(str(path), weights_only=True)
        if not all(isinstance(value, Tensor) for value in state_dict.values()):
            raise ValueError("it holds something other than tensors by name")
    except OSError as error:
        raise ConfigError(
            f"model.weights: {path}: cannot be read ({error.strerror or error})"
        ) from error
    except Exception as error:  # each library has its own
        why = reason(error)
        if isinstance(error.__cause__, pickle.UnpicklingError):  # says how to run the code in it
            why = "it holds objects other than tensors, or is damaged"
        raise ConfigError(
            f"model.weights: {path}: not a complete {path.suffix} file of weights ({why}); download it again, or "
            "save the model's state_dict() alone"
        ) from error
    return state_dict


def _convert(state_dict: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """A file's tensors, converted as `timm.create_model(pretrained=True)` does before it loads them."""
    module = sys.modules[type(model).__module__]
    if hasattr(module, "checkpoint_filter_fn"):
        state_dict = module.checkpoint_filter_fn(state_dict, model)
    layers = model.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{layer}." for layer in ([layers] if isinstance(layers, str) else layers))
    return {
        name: value
        for name, value in state_dict.items()
        if model.num_classes or not name.startswith(heads)
    }


@contextmanager
def fetching() -> Iterator[None]:
    """Weights of timm's own: the hub is asked once; if it does not answer, only its cache counts.

    Raises:
        ConnectionError: if the hub does not answer, and its cache lacks the weights.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers()
    try:
        yield
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if before else f"{constants.ENDPOINT} does not answer"
        raise ConnectionError(f"its weights are not in the hub's cache, and {why}") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers() -> bool:
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
    except HTTPError:  # is an answer
        return True
    except (OSError, ValueError):
        return False
    return True
