"""Reading a .caffemodel: both layouts, every way to write numbers, and other files."""

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.backbones.caffe import read_caffemodel

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes, wire: int | None = None) -> bytes:
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    if wire is not None:
        return varint(number << 3 | wire) + value
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


def one_layer(*blobs: bytes) -> bytes:
    return layer("conv", blobs)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


@pytest.fixture
def read(tmp_path: Path):
    def read(content: bytes) -> dict[str, list[torch.Tensor]]:
        path = tmp_path / "net.caffemodel"
        path.write_bytes(content)
        return read_caffemodel(path)

    return read


@pytest.mark.parametrize("legacy", [False, True], ids=["layer", "V1 layers"])
def test_both_layouts_are_read(read, legacy):
    weights = {
        "conv1/7x7_s2": [random(4, 3, 7, 7), random(4)],
        "loss3/classifier": [random(300, 5), random(300)],
    }
    found = read(caffemodel(weights, legacy=legacy))
    assert list(found) == list(weights)
    for name, blobs in weights.items():
        for tensor, values in zip(found[name], blobs, strict=True):
            shape = (1,) * (4 - values.ndim) + values.shape if legacy else values.shape
            assert tensor.dtype == torch.float32
            assert tensor.shape == shape
            np.testing.assert_array_equal(tensor.numpy().reshape(values.shape), values)


VALUES = random(2, 3)
PACKED = VALUES.tobytes()
SHAPE = field(7, field(1, b"\2\3"))
ONE_BY_ONE = b"".join(field(5, struct.pack("<f", value), FIXED32) for value in VALUES.flat)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(SHAPE + field(5, PACKED), id="packed"),
        pytest.param(field(5, PACKED) + SHAPE, id="shape last"),
        pytest.param(SHAPE + field(5, PACKED[:8]) + field(5, PACKED[8:]), id="packed in parts"),
        pytest.param(SHAPE + ONE_BY_ONE, id="one by one"),
        pytest.param(SHAPE + ONE_BY_ONE[:5] + field(5, PACKED[4:]), id="mixed"),
        pytest.param(field(7, field(1, 2) + field(1, 3)) + field(5, PACKED), id="shape unpacked"),
        pytest.param(
            field(7, field(1, b"\2") + field(1, b"\x83\x00")) + field(5, PACKED),
            id="shape in parts",
        ),
        pytest.param(SHAPE + field(6, bytes(24)) + field(5, PACKED), id="with gradients"),
        pytest.param(
            SHAPE + field(99, 2**63) + field(5, PACKED) + field(98, bytes(8), FIXED64),
            id="with unknown fields",
        ),
    ],
)
def test_numbers_may_be_written_in_every_way_protobuf_allows(read, content):
    (found,) = read(one_layer(content))["conv"]
    np.testing.assert_array_equal(found.numpy(), VALUES)


def test_a_net_in_double_precision_keeps_it(read):
    exact = np.array([0.1, 1e300])
    packed = field(7, field(1, b"\2")) + field(8, exact.tobytes())
    single = field(7, field(1, b"\2")) + b"".join(
        field(8, value.tobytes(), FIXED64) for value in exact
    )
    for found in read(one_layer(packed, single))["conv"]:
        assert found.dtype == torch.float64
        np.testing.assert_array_equal(found.numpy(), exact)


def test_a_blob_without_shape_is_one_number(read):
    (found,) = read(one_layer(field(5, struct.pack("<f", 2.5))))["conv"]
    assert found.shape == ()
    assert found == 2.5


def test_what_is_read_can_be_changed_and_outlives_the_file(tmp_path):
    path = tmp_path / "net.caffemodel"
    path.write_bytes(caffemodel({"conv": [random(2, 3)]}))
    (found,) = read_caffemodel(path)["conv"]
    path.write_bytes(bytes(path.stat().st_size))
    np.testing.assert_array_equal(found.numpy(), random(2, 3))
    found += 1


def test_a_file_cut_off_anywhere_is_an_error_or_has_fewer_layers(read):
    weights = {"one": [random(2, 3), random(2)], "two": [random(3)]}
    whole = caffemodel(weights)
    ends = [len(caffemodel({})), len(caffemodel({"one": weights["one"]})), len(whole)]
    for stop in set(range(len(whole))) - set(ends):
        with pytest.raises(ValueError, match=r"cut off|has \d+ values|no layer in it"):
            read(whole[:stop])
    assert list(read(whole[: ends[1]])) == ["one"]
    assert all(before < after for before, after in pairwise(ends))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "no layer in it holds weights", id="empty"),
        pytest.param(caffemodel({}), r"no layer in it holds weights.*\.prototxt", id="untrained"),
        pytest.param(one_layer(SHAPE + field(5, PACKED[:-4])), r"\(2, 3\) has 5", id="too few"),
        pytest.param(one_layer(field(5, PACKED)), r"\(\) has 6 values", id="no shape"),
        *(
            pytest.param(content, "it is cut off, or no .caffemodel", id=name)
            for name, content in {
                "prototxt": b'name: "GoogleNet"\n',
                "web page": b"<!DOCTYPE html>",
                "zip": b"PK\x03\x04",
                "noise": b"\xff" * 20,
                "cut string": field(1, b"abc")[:-1],
                "half a value": one_layer(SHAPE + field(5, PACKED[:-1])),
                "cut shape": one_layer(field(7, field(1, b"\x82"))),
            }.items()
        ),
    ],
)
def test_other_files_are_told(read, content, message):
    with pytest.raises(ValueError, match=message):
        read(content)
