"""BN-Inception (Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 4.2.1) as a timm model.

    bn_inception.caffe_in1k    11,295,240 parameters, of which 1,025,000 in the classifier

This is the network that was trained with Caffe, whose ImageNet weights circulate; the papers on metric learning
mean this one. Layer widths, biases before the batch norms and poolings in ceil mode are its own. Its input was
BGR in 0..255 minus (104, 117, 128). Here the model takes RGB: `resolve_model_data_config` scales the input, and
`checkpoint_filter_fn` reverses the first convolution's channels.

Sizes of images are multiples of 32, or others whose maps have even sizes before each block of stride 2, such as
227: otherwise the branches of such a block do not fit together.
"""

import re
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import ConvNormAct
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from benchmarks.backbones.network import Network, create


class Widths(NamedTuple):
    """Output channels of a block's convolutions; a block without `one` and `pool` has stride 2."""

    one: int
    three_reduce: int
    three: int
    double_reduce: int
    double: int
    pool: int


BLOCKS = {
    "3a": Widths(64, 64, 64, 64, 96, 32),
    "3b": Widths(64, 64, 96, 64, 96, 64),
    "3c": Widths(0, 128, 160, 64, 96, 0),
    "4a": Widths(224, 64, 96, 96, 128, 128),
    "4b": Widths(192, 96, 128, 96, 128, 128),
    "4c": Widths(160, 128, 160, 128, 160, 128),
    "4d": Widths(96, 128, 192, 160, 192, 128),
    "4e": Widths(0, 128, 192, 192, 256, 0),
    "5a": Widths(352, 192, 320, 160, 224, 128),
    "5b": Widths(352, 192, 320, 192, 224, 128),
}
TAPS = [
    (64, 2, "features.conv1"),
    (192, 4, "features.conv2"),
    (320, 8, "features.inception_3b"),
    (608, 16, "features.inception_4d"),
    (1024, 32, "features.inception_5b"),
]


_conv = partial(ConvNormAct, bias=True)


class InceptionBlock(nn.ModuleDict):
    """Branches side by side, their channels concatenated.

    Shape:
        (N, in_chans, H, W) -> (N, out_chans, H, W), or (N, out_chans, H / 2, W / 2) at stride 2.
    """

    def __init__(self, in_chans: int, widths: Widths, pool: nn.Module) -> None:
        stride = 1 if widths.pool else 2
        layers = {
            "1x1": (in_chans, widths.one, 1),
            "3x3_reduce": (in_chans, widths.three_reduce, 1),
            "3x3": (widths.three_reduce, widths.three, 3, stride),
            "double_3x3_reduce": (in_chans, widths.double_reduce, 1),
            "double_3x3_1": (widths.double_reduce, widths.double, 3),
            "double_3x3_2": (widths.double, widths.double, 3, stride),
            "pool_proj": (in_chans, widths.pool, 1),
        }
        super().__init__({name: _conv(*one) for name, one in layers.items() if one[1]})
        self["pool"] = pool
        self.out_chans = widths.one + widths.three + widths.double + (widths.pool or in_chans)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self["pool"](x)
        branches = [
            self["3x3"](self["3x3_reduce"](x)),
            self["double_3x3_2"](self["double_3x3_1"](self["double_3x3_reduce"](x))),
            self["pool_proj"](pooled) if "pool_proj" in self else pooled,
        ]
        if "1x1" in self:
            branches.insert(0, self["1x1"](x))
        return torch.cat(branches, dim=1)


def _pool(name: str) -> nn.Module:
    """The pooling of a block: means, except in the last block of stride 1, which takes maxima."""
    if not BLOCKS[name].pool:
        return nn.MaxPool2d(3, stride=2, ceil_mode=True)
    layer = nn.MaxPool2d if name == "5b" else nn.AvgPool2d
    return layer(3, stride=1, padding=1)


class BNInception(Network):
    """BN-Inception with timm's interface.

    Shape:
        images (N, in_chans, H, W) -> features (N, 1024, H / 32, W / 32).
    """

    def __init__(self, in_chans: int = 3, drop_rate: float = 0.0, **kwargs: Any) -> None:
        features: dict[str, nn.Module] = {
            "conv1": _conv(in_chans, 64, 7, stride=2),
            "pool1": nn.MaxPool2d(3, stride=2, ceil_mode=True),
            "conv2_reduce": _conv(64, 64, 1),
            "conv2": _conv(64, 192, 3),
            "pool2": nn.MaxPool2d(3, stride=2, ceil_mode=True),
        }
        chans = 192
        for name, widths in BLOCKS.items():
            features[f"inception_{name}"] = block = InceptionBlock(chans, widths, _pool(name))
            chans = block.out_chans
        parts = {"features": nn.Sequential(OrderedDict(features))}
        super().__init__(parts, TAPS, drop_rate=drop_rate, **kwargs)


STEM = {"conv1_7x7_s2": "conv1", "conv2_3x3_reduce": "conv2_reduce", "conv2_3x3": "conv2"}


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert weights in the layout of the published files to this model's; return others as they are.

    That layout (Caffe's names, "/" being "_") is recognised only by the name of its first layer: this shows that
    the weights are for BGR, since the batch-norm vectors circulate both as (1, C) and as (C,). Names that the
    layout does not have stay, for strict loading to refuse.
    """
    if "conv1_7x7_s2.weight" not in state_dict:
        return state_dict
    converted = {
        _name(name): tensor.squeeze(0) if "_bn." in name and tensor.ndim == 2 else tensor
        for name, tensor in state_dict.items()
    }
    converted["features.conv1.conv.weight"] = converted["features.conv1.conv.weight"].flip(1)
    return converted


def _name(published: str) -> str:
    """inception_3a_double_3x3_1_bn.weight: features.inception_3a.double_3x3_1.bn.weight."""
    layer, _, tensor = published.rpartition(".")
    if layer in ("last_linear", "fc"):
        return f"head.fc.{tensor}"
    convolution = layer.removesuffix("_bn")
    block = re.fullmatch(r"(inception_\d[a-e])_(\w+)", convolution)
    own = f"{block[1]}.{block[2]}" if block else STEM.get(convolution)
    kind = "conv" if convolution == layer else "bn"
    return f"features.{own}.{kind}.{tensor}" if own else published


default_cfgs = generate_default_cfgs(
    {
        "bn_inception.caffe_in1k": {
            "url": "",  # the published link is plain HTTP: see benchmarks.backbones.published
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": (7, 7),
            "crop_pct": 0.875,
            "interpolation": "bilinear",
            "mean": (128 / 255, 117 / 255, 104 / 255),
            "std": (1 / 255, 1 / 255, 1 / 255),
            "first_conv": "features.conv1.conv",
            "classifier": "head.fc",
            "origin_url": "https://github.com/Cadene/pretrained-models.pytorch",
            "paper_ids": "arXiv:1502.03167",
        }
    }
)


@register_model
def bn_inception(pretrained: bool = False, **kwargs: Any) -> Any:
    """BN-Inception with the layer widths of the published Caffe model."""
    return create(BNInception, "bn_inception", checkpoint_filter_fn, pretrained, **kwargs)
