"""Reader of a `.caffemodel`'s weights with protobuf (tensorboard brings it), without Caffe.

A `.caffemodel` is one `NetParameter` of Caffe's `src/caffe/proto/caffe.proto`. Few of its fields matter here; all
are declared as repeated, which reads single ones as well.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from torch import Tensor

SCHEMA = {
    "Shape": {"dim": (1, "INT64")},
    "Blob": {
        **{"num": (1, "INT32"), "channels": (2, "INT32"), "height": (3, "INT32")},
        **{"width": (4, "INT32"), "data": (5, "FLOAT"), "shape": (7, "Shape")},
    },
    "Layer": {"name": (1, "BYTES"), "blobs": (7, "Blob")},
    "OldLayer": {"name": (4, "BYTES"), "blobs": (6, "Blob")},  # in files of before 2015
    "Net": {"layer": (100, "Layer"), "old_layer": (2, "OldLayer")},
}


def read_caffemodel(path: Path) -> dict[str, Tensor]:
    """The weights of all layers, named LAYER.weight, LAYER.bias, LAYER.2 and so on.

    Shapes are as stored: old files hold a vector of C biases as (1, 1, 1, C), and the (O, I) weights of an
    inner product as (1, 1, O, I).

    Raises:
        ValueError: if the file is cut off, is no caffemodel or holds no weights, or if a blob's number of values
            does not match its shape.
    """
    try:
        net = _net().FromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError("it is cut off, or no .caffemodel") from error
    weights = {}
    for layer in (*net.layer, *net.old_layer):
        name = b"".join(layer.name).decode(errors="replace")
        for number, blob in enumerate(layer.blobs):
            kind = {0: "weight", 1: "bias"}.get(number, number)
            weights[f"{name}.{kind}"] = _tensor(blob)
    if not weights:
        raise ValueError(
            "no layer in it holds weights; expected a trained .caffemodel, not a .prototxt"
        )
    return weights


def _net() -> Any:
    """The class of the schema's last message, a whole network."""
    file = FileDescriptorProto(name="caffe.proto")
    for message, fields in SCHEMA.items():
        described = file.message_type.add(name=message)
        for field, (number, kind) in fields.items():
            type_ = {"type_name": kind} if kind in SCHEMA else {"type": f"TYPE_{kind}"}
            described.field.add(name=field, number=number, label="LABEL_REPEATED", **type_)
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("Net"))


def _tensor(blob: Any) -> Tensor:
    shape = [dim for part in blob.shape for dim in part.dim]
    old = blob.num, blob.channels, blob.height, blob.width
    if any(old):
        shape = [dims[-1] if dims else 0 for dims in old]
    values = np.array(blob.data, np.float32)
    if len(values) != math.prod(shape):
        raise ValueError(f"a blob of shape {tuple(shape)} has {len(values)} values")
    return torch.from_numpy(values).reshape(shape)
