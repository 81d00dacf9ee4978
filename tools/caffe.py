"""Convert the weights of a `.caffemodel` to `.safetensors`, by protobuf and without Caffe.

    python tools/caffe.py weights/bvlc_googlenet.caffemodel    # writes weights/bvlc_googlenet.safetensors

A `.caffemodel` is one `NetParameter` of Caffe's `src/caffe/proto/caffe.proto`. Few of its fields matter here; all
are declared as repeated, which reads single ones as well.
"""

import hashlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from safetensors.torch import save_file
from torch import Tensor

PUBLISHED = {"bvlc_googlenet.caffemodel": "405fc5acd08a3bb12de8ee5e23a96bec22f08204"}
"""SHA-1 of published files, from the readme of models/bvlc_googlenet in Caffe's repository."""

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
        ValueError: if the file is cut off, is no caffemodel or holds no weights, if it has the name of a published
            file and other content, or if a blob's number of values does not match its shape.
    """
    content = path.read_bytes()
    digest = hashlib.sha1(content).hexdigest()
    if (expected := PUBLISHED.get(path.name, digest)) != digest:
        raise ValueError(
            f"expected the published file, SHA-1 {expected}, got {digest}; fetch it again"
        )
    try:
        net = _net().FromString(content)
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


def main(path: Path) -> None:
    """Convert one file; a line and exit status 2 if that fails."""
    converted = path.with_suffix(".safetensors")
    try:
        save_file(read_caffemodel(path), converted)
    except (OSError, ValueError) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(converted)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/caffe.py FILE.caffemodel")
    main(Path(sys.argv[1]))
