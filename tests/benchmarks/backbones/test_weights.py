"""Files of weights: every format and wrapping fills a model, and errors name what does not fit."""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.backbones import register, weights
from benchmarks.backbones.weights import load_weights
from benchmarks.building.network import build_model
from benchmarks.settings.data import Data
from benchmarks.settings.errors import ConfigError
from benchmarks.settings.model import Model
from tests.references import inception
from tools import caffe


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


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes) -> bytes:
    """A field of protobuf: an integer, or bytes of any length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def caffemodel(state_dict: Mapping[str, Tensor], *, old: bool = False) -> bytes:
    """A NetParameter as Caffe writes it, of LAYER.weight, LAYER.bias; `old`: as before 2015."""
    layers: dict[str, bytes] = {"data": b""}
    for key, value in state_dict.items():
        name = key.rpartition(".")[0]
        if old:
            dims = (1,) * (4 - value.ndim) + value.shape
            shape = b"".join(field(number, dim) for number, dim in enumerate(dims, 1))
        else:
            shape = field(7, field(1, b"".join(map(varint, value.shape))))
        blob = shape + field(5, value.float().numpy().astype("<f4").tobytes())
        layers[name] = layers.get(name, b"") + field(6 if old else 7, blob)
    return field(1, b"GoogleNet") + b"".join(
        field(2 if old else 100, field(4 if old else 1, name.encode()) + blobs)
        for name, blobs in layers.items()
    )


SAVE = {
    "pth": torch.save,
    "legacy.pth": partial(torch.save, _use_new_zipfile_serialization=False),
    "safetensors": save_file,
}


def assert_holds(model: nn.Module, expected: dict[str, Tensor]) -> None:
    own = model.state_dict()
    assert own.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(own[name], value), name


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


@pytest.mark.parametrize("old", [False, True])
def test_a_file_of_caffe_gives_googlenet_without_its_auxiliary_classifiers(tmp_path, old):
    register()
    published = inception.random_weights("googlenet")
    auxiliary = {f"loss{i}/fc.{of}": torch.zeros(2, 3) for i in (1, 2) for of in ("weight", "bias")}
    path = tmp_path / "net.caffemodel"
    path.write_bytes(caffemodel(published | auxiliary, old=old))
    caffe.main(path)
    model = timm.create_model("googlenet")
    load_weights(model, path.with_suffix(".safetensors"))
    for layer, own in (
        ("conv1/7x7_s2", model.stem.conv1),
        ("inception_4b/5x5", model.blocks.inception_4b["5x5"]),
        ("loss3/classifier", model.head.fc),
    ):
        expected = published[f"{layer}.weight"].float()
        expected = expected.flip(1) if layer.startswith("conv1") else expected  # RGB, not BGR
        assert torch.equal(own.weight, expected)
        assert torch.equal(own.bias, published[f"{layer}.bias"].float())


def test_what_does_not_fit_is_named_in_one_line(tmp_path):
    model, path = Network(), tmp_path / "file.pth"
    for content, message in (
        (values(model.conv), "does not fit Network: .*fc.bias"),
        ({"epoch": 3, "net": values(model)}, "something other than tensors by"),
    ):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=f"^model.weights: {path}: .*{message}") as caught:
            load_weights(model, path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", SAVE)
def test_a_damaged_file_is_named(tmp_path, suffix):
    path = tmp_path / f"file.{suffix}"
    SAVE[suffix](values(Network()), path)
    whole = path.read_bytes()
    for content in (whole[: int(0.6 * len(whole))], b"<html>404: not found</html>\n" * 20):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"file.{suffix}: not a complete .* \(.+\)"):
            load_weights(Network(), path)


BLOB = field(7, field(1, b"\2\3")) + field(5, torch.rand(5).numpy().tobytes())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(caffemodel({}), r"no layer in it holds weights.*\.prototxt", id="untrained"),
        pytest.param(field(100, field(7, BLOB)), r"\(2, 3\) has 5 values", id="few"),
        pytest.param(b'name: "GoogleNet"\n', "cut off, or no .caffemodel", id="prototxt"),
        pytest.param(caffemodel({}), "expected the published file, SHA-1", id="bvlc_googlenet"),
    ],
)
def test_what_is_wrong_with_a_file_of_caffe_is_told(content, message, tmp_path, capsys):
    name = "bvlc_googlenet" if "published" in message else "net"
    (path := tmp_path / f"{name}.caffemodel").write_bytes(content)
    with pytest.raises(SystemExit):
        caffe.main(path)
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert [*tmp_path.iterdir()] == [path]


def test_a_missing_file_and_an_unknown_suffix_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.pth: cannot be read"):
        load_weights(Network(), tmp_path / "none.pth")
    with pytest.raises(ConfigError, match=r"w.h5: expected .*, got '\.h5'"):
        load_weights(Network(), tmp_path / "w.h5")


class Payload:
    ran = False

    def __reduce__(self):
        return setattr, (Payload, "ran", True)


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    torch.save(values(Network()) | {"x": Payload()}, tmp_path / "file.pth")
    line = r"\(it holds objects other than tensors, or is damaged\); .* save the model's state_dict"
    with pytest.raises(ConfigError, match=line):
        load_weights(Network(), tmp_path / "file.pth")
    assert not Payload.ran


@pytest.mark.parametrize("known", ["sha1", "SHA256SUMS"])
def test_a_known_name_promises_the_known_content(tmp_path, monkeypatch, known):
    path, model = tmp_path / "net-1234.pth", Network()
    expected = values(model)
    torch.save(expected, path)
    if known == "SHA256SUMS":
        line = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        (tmp_path / known).write_text(line)
    else:
        digest = hashlib.sha1(path.read_bytes()).hexdigest()[:9]
        monkeypatch.setitem(weights.PUBLISHED, path.name, f"sha1:{digest}")
    load_weights(model, path)
    assert_holds(model, expected)

    torch.save(values(Network()), path)
    with pytest.raises(ConfigError, match=r"net-1234.pth: .* expected sha\d+:\w+, got "):
        load_weights(Network(), path)
    load_weights(model, path.rename(tmp_path / "own.pth"))


def test_a_hub_that_does_not_answer_is_told_with_the_way_out(tmp_path, monkeypatch):
    """Asked once: its library would try for a minute, and say nothing of a file."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r":9 does not answer; --model.weights FILE"):
        build_model(Model(trunk="resnet10t", trunk_args={"pretrained": True}), Data())
