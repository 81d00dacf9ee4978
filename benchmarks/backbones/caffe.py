"""Reader of a `.caffemodel`'s weights, without Caffe and without protobuf.

A `.caffemodel` is one `NetParameter` of Caffe's `src/caffe/proto/caffe.proto` in protobuf's binary wire
format (protobuf.dev, "Encoding"). Few of its fields matter here:

    NetParameter    layer = 100 (LayerParameter), in files of before 2015 layers = 2 (V1LayerParameter)
    layer           name = 1, blobs = 7; of a V1LayerParameter name = 4, blobs = 6
    BlobProto       shape = 7, or num = 1, channels = 2, height = 3, width = 4; data = 5 or double_data = 8
    BlobShape       dim = 1
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # how protobuf encodes a value

# Field of a layer in a NetParameter: the layer's fields (name, blobs).
LAYERS = {100: (1, 7), 2: (4, 6)}
DTYPES = {5: np.dtype("<f4"), 8: np.dtype("<f8")}  # of a BlobProto's data
SHAPE, LEGACY_SHAPE = 7, (1, 2, 3, 4)
DIM = 1

Field = tuple[int, int | memoryview]


def read_caffemodel(path: Path) -> dict[str, list[Tensor]]:
    """The blobs of every layer that has any (usually weight, bias), in float32, or in float64 if Caffe ran in it.

    Shapes are as stored: old files hold a vector of C biases as (1, 1, 1, C), and the (O, I) weights of an
    inner product as (1, 1, O, I).

    Raises:
        ValueError: if the file is cut off, is no caffemodel or holds no weights, or if a blob's number of values
            does not match its shape.
    """
    layers: dict[str, list[Tensor]] = {}
    for number, layer in _fields(memoryview(path.read_bytes())):
        if number in LAYERS and isinstance(layer, memoryview):
            name_field, blobs_field = LAYERS[number]
            fields = list(_fields(layer))
            names = [str(value, "utf-8", "replace") for at, value in fields if at == name_field]
            blobs = [_blob(value) for at, value in fields if at == blobs_field]
            if blobs:
                layers["".join(names)] = blobs
    if not layers:
        raise ValueError(
            "no layer in it holds weights; expected a trained .caffemodel (a .prototxt describes a network, a "
            ".solverstate the solver)"
        )
    return layers


def _fields(message: memoryview) -> Iterator[Field]:
    """Number and value of each field, in the file's order."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == BYTES:
            size, at = _varint(message, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"field {number} of wire type {wire} is not in the format")
        if at + size > len(message):
            raise ValueError(f"field {number} is cut off")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number that starts at a byte, stored in 7 bits a byte, and the position behind it."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):  # 64 bits
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number is cut off")


def _blob(blob: memoryview) -> Tensor:
    """One tensor. Its numbers may come packed, in several parts, or as one field each."""
    fields = list(_fields(blob))
    shape = [dim for number, value in fields if number == SHAPE for dim in _dims(value)]
    if legacy := {number: value for number, value in fields if number in LEGACY_SHAPE}:
        shape = [legacy.get(number, 0) for number in LEGACY_SHAPE]
    number = 8 if any(number == 8 for number, _ in fields) else 5  # as Caffe chooses
    dtype = DTYPES[number]
    stored = bytearray().join(value for field, value in fields if field == number)
    if len(stored) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a blob of shape {tuple(shape)} has {len(stored)} bytes of values")
    native = np.frombuffer(stored, dtype).astype(dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native).reshape(shape)


def _dims(shape: memoryview) -> Iterator[int]:
    for number, value in _fields(shape):
        if number == DIM and isinstance(value, int):
            yield value
        elif number == DIM:
            at = 0
            while at < len(value):
                dim, at = _varint(value, at)
                yield dim
