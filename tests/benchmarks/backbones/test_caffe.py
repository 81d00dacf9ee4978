"""Reading a .caffemodel: both layouts, and other files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.backbones.caffe import read_caffemodel

VARINT, BYTES = 0, 2


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def blob(values: np.ndarray, *, legacy: bool = False) -> bytes:
    """A BlobProto as Caffe writes it: the shape, the packed values."""
    if legacy:
        dims = (1,) * (4 - values.ndim) + values.shape
        shape = b"".join(field(number, dim) for number, dim in enumerate(dims, 1))
    else:
        shape = field(7, field(1, b"".join(map(varint, values.shape))))
    return shape + field(5, values.astype("<f4").tobytes())


def layer(name: str, blobs: Sequence[bytes], *, legacy: bool = False) -> bytes:
    """A field of NetParameter that holds a layer, with some of what else layers have."""
    name_field, blobs_field, layer_field = (4, 6, 2) if legacy else (1, 7, 100)
    other = field(5, 4) if legacy else field(2, b"Convolution")  # its type
    weights = b"".join(field(blobs_field, one) for one in blobs)
    return field(layer_field, field(name_field, name.encode()) + other + weights)


def caffemodel(layers: dict[str, Sequence[np.ndarray]], *, legacy: bool = False) -> bytes:
    """A NetParameter whose first layer, the data, has no weights."""
    written = [
        layer(name, [blob(values, legacy=legacy) for values in blobs], legacy=legacy)
        for name, blobs in layers.items()
    ]
    return field(1, b"GoogleNet") + layer("data", [], legacy=legacy) + b"".join(written)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


@pytest.fixture
def read(tmp_path: Path):
    def read(content: bytes) -> dict[str, torch.Tensor]:
        path = tmp_path / "net.caffemodel"
        path.write_bytes(content)
        return read_caffemodel(path)

    return read


@pytest.mark.parametrize("legacy", [False, True], ids=["layer", "V1 layers"])
def test_both_layouts_are_read(read, legacy):
    weights = {
        "conv1/7x7_s2": [random(4, 3, 7, 7), random(4)],
        "loss3/classifier": [random(300, 5), random(300), random(2)],
    }
    found = read(caffemodel(weights, legacy=legacy))
    blobs = {
        f"{layer}.{name}": values
        for layer, arrays in weights.items()
        for name, values in zip(("weight", "bias", "2"), arrays, strict=False)
    }
    assert list(found) == list(blobs)
    for name, values in blobs.items():
        shape = (1,) * (4 - values.ndim) + values.shape if legacy else values.shape
        assert found[name].dtype == torch.float32
        assert found[name].shape == shape
        np.testing.assert_array_equal(found[name].numpy().reshape(values.shape), values)


def test_a_file_cut_off_anywhere_is_an_error_or_has_fewer_layers(read):
    weights = {"one": [random(2, 3), random(2)], "two": [random(3)]}
    whole = caffemodel(weights)
    ends = [len(caffemodel({})), len(caffemodel({"one": weights["one"]})), len(whole)]
    for stop in set(range(len(whole))) - set(ends):
        with pytest.raises(ValueError, match=r"cut off|has \d+ values|no layer in it"):
            read(whole[:stop])
    assert list(read(whole[: ends[1]])) == ["one.weight", "one.bias"]


SHAPE, VALUES = field(7, field(1, b"\2\3")), random(2, 3).tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(caffemodel({}), r"no layer in it holds weights.*\.prototxt", id="untrained"),
        pytest.param(layer("conv", [SHAPE + field(5, VALUES[4:])]), r"\(2, 3\) has 5", id="few"),
        pytest.param(layer("conv", [field(5, VALUES)]), r"\(\) has 6 values", id="no shape"),
        pytest.param(b'name: "GoogleNet"\n', "cut off, or no .caffemodel", id="prototxt"),
    ],
)
def test_other_files_are_told(read, content, message):
    with pytest.raises(ValueError, match=message):
        read(content)
