"""Files of weights: every format and wrapping fills a model, and errors name what does not fit."""

import hashlib
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.backbones import load_weights, weights
from benchmarks.settings import ConfigError
from tests.benchmarks.backbones.test_caffe import caffemodel


class Network(nn.Sequential):
    """Network of an unknown module: no conversion, no classifier to drop."""

    num_classes = 4
    pretrained_cfg = {"architecture": "Network"}

    def __init__(self) -> None:
        super().__init__(OrderedDict(conv=nn.Conv2d(3, 2, 1), fc=nn.Linear(2, 4)))


def values(model: nn.Module) -> dict[str, Tensor]:
    """A state_dict for the model, with numbers of its own."""
    return {
        name: torch.rand_like(value) if value.is_floating_point() else value + 3
        for name, value in model.state_dict().items()
    }


def save_caffemodel(state_dict: dict[str, Tensor], path: Path) -> None:
    layers = {name.rpartition(".")[0]: [] for name in state_dict}
    for name, value in state_dict.items():
        layers[name.rpartition(".")[0]].append(value.numpy())
    path.write_bytes(caffemodel(layers))


SAVE = {
    "pth": torch.save,
    "pt": torch.save,
    "legacy.pth": partial(torch.save, _use_new_zipfile_serialization=False),
    "safetensors": save_file,
    "caffemodel": save_caffemodel,
}


def assert_holds(model: nn.Module, expected: dict[str, Tensor]) -> None:
    own = model.state_dict()
    assert own.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(own[name], value), name


# --------------------------------------------------------------------------------------- what loads


@pytest.mark.parametrize("suffix", SAVE)
def test_every_format_fills_the_model(tmp_path, suffix):
    model = Network()
    expected = values(model)
    SAVE[suffix](expected, tmp_path / f"file.{suffix}")
    load_weights(model, tmp_path / f"file.{suffix}")
    assert_holds(model, expected)


def test_wrappings_are_taken_off_and_a_trunk_without_classifier_drops_the_files(tmp_path):
    whole = timm.create_model("test_resnet")
    expected = values(whole)
    wrapped = {f"module.{name}": value for name, value in expected.items()}
    torch.save({"state_dict": wrapped, "optimizer": {"step": 1}}, tmp_path / "file.pth")
    load_weights(whole, tmp_path / "file.pth")
    assert_holds(whole, expected)
    trunk = timm.create_model("test_resnet", num_classes=0, global_pool="")
    load_weights(trunk, tmp_path / "file.pth")
    assert_holds(trunk, {name: value for name, value in expected.items() if name[:3] != "fc."})


def test_timms_own_conversion_is_used(tmp_path):
    large = timm.create_model("test_vit")
    torch.save(values(large), tmp_path / "file.pth")
    small = timm.create_model("test_vit", img_size=80, num_classes=0, global_pool="")
    load_weights(small, tmp_path / "file.pth")
    overlay = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(tmp_path / "file.pth")}}
    expected = timm.create_model("test_vit", img_size=80, num_classes=0, global_pool="", **overlay)
    assert small.pos_embed.shape != large.pos_embed.shape
    assert_holds(small, expected.state_dict())


# ------------------------------------------------------------------------------------ what does not


WRONG = {
    "missing": (
        lambda right: {name: value for name, value in right.items() if name != "fc.bias"},
        r"does not fit Network: .*fc.bias",
    ),
    "extra": (lambda right: right | {"x": torch.ones(1)}, 'Unexpected .* "x"'),
    "no tensors": (
        lambda right: {"epoch": 3, "net": right},
        "something other than tensors by name",
    ),
    "a module": (
        lambda right: Network(),
        r"\(it holds objects other than tensors, or is damaged\); .* save the model's state_dict\(\) alone",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_in_one_line(tmp_path, case):
    change, message = WRONG[case]
    model = Network()
    path = tmp_path / "file.pth"
    torch.save(change(values(model)), path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_weights(model, path)
    assert str(caught.value).startswith(f"model.weights: {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", SAVE)
def test_a_damaged_file_is_named(tmp_path, suffix):
    path = tmp_path / f"file.{suffix}"
    SAVE[suffix](values(Network()), path)
    whole = path.read_bytes()
    for content in (b"", whole[: int(0.6 * len(whole))], b"<html>404: not found</html>\n" * 20):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"file.{suffix}: not a complete .* \(.+\)"):
            load_weights(Network(), path)


def test_a_missing_file_a_folder_and_an_unknown_suffix_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.pth: cannot be read \(No such file"):
        load_weights(Network(), tmp_path / "none.pth")
    (tmp_path / "folder.pth").mkdir()
    with pytest.raises(ConfigError, match=r"folder.pth: cannot be read \(Is a directory\)"):
        load_weights(Network(), tmp_path / "folder.pth")
    (tmp_path / "w.h5").touch()
    with pytest.raises(
        ConfigError, match=r"w.h5: expected .* \.safetensors or \.caffemodel, got '\.h5'"
    ):
        load_weights(Network(), tmp_path / "w.h5")


class Payload:
    ran = False

    def __reduce__(self):
        return setattr, (Payload, "ran", True)


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    torch.save(values(Network()) | {"x": Payload()}, tmp_path / "file.pth")
    with pytest.raises(ConfigError, match="holds objects other than tensors"):
        load_weights(Network(), tmp_path / "file.pth")
    assert not Payload.ran


# ------------------------------------------------------------------------------------- known files


@pytest.mark.parametrize("known", ["sha256", "sha1", "SHA256SUMS"])
def test_a_known_name_promises_the_known_content(tmp_path, monkeypatch, known):
    path, model = tmp_path / "net-1234.pth", Network()
    expected = values(model)
    torch.save(expected, path)
    if known == "SHA256SUMS":
        line = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        (tmp_path / known).write_text(line)
    else:
        digest = hashlib.new(known, path.read_bytes()).hexdigest()[:9]
        monkeypatch.setitem(weights.PUBLISHED, path.name, f"{known}:{digest}")
    load_weights(model, path)
    assert_holds(model, expected)

    torch.save(values(Network()), path)
    with pytest.raises(ConfigError, match=r"net-1234.pth: .* expected sha\d+:\w+, got "):
        load_weights(Network(), path)
    load_weights(model, path.rename(tmp_path / "own.pth"))
