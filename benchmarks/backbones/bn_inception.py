"""BN-Inception (Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 4.2.1) as a timm model.

    bn_inception.caffe_in1k    11,295,240 parameters, of which 1,025,000 in the classifier

This is the network that was trained with Caffe, whose ImageNet weights circulate; the papers on metric learning
mean this one. Layer widths, biases before the batch norms and poolings in ceil mode are its own. Its input was
BGR in 0..255 minus (104, 117, 128). Here the model takes RGB: `resolve_model_data_config` scales the input, and
`checkpoint_filter_fn` reverses the first convolution's channels.

It differs from the published network where that one fails. If the map before a block of stride 2 has an odd size
(images of 80 pixels, say), the pooling branch repeats its lower and right edge, so that all branches have the
same size. Nothing changes for sizes that the published network takes, such as 224 and 256.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn.functional import pad

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


class ConvBnRelu(nn.Sequential):
    """A convolution that only its stride makes smaller, batch norm and ReLU."""

    def __init__(self, in_chans: int, out_chans: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(
            OrderedDict(
                conv=nn.Conv2d(in_chans, out_chans, kernel_size, stride, kernel_size // 2),
                bn=nn.BatchNorm2d(out_chans),
                relu=nn.ReLU(inplace=True),
            )
        )


class HalvingMaxPool(nn.MaxPool2d):
    """Caffe's 3x3 max pooling of stride 2, which gives ceil(size / 2) as a convolution does."""

    def __init__(self) -> None:
        super().__init__(3, stride=2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        odd_rows, odd_columns = x.shape[-2] % 2, x.shape[-1] % 2
        if odd_rows or odd_columns:
            x = pad(x, (0, odd_columns, 0, odd_rows), mode="replicate")
        return super().forward(x)


class InceptionBlock(nn.ModuleDict):
    """Branches side by side, their channels concatenated.

    Shape:
        (N, in_chans, H, W) -> (N, out_chans, H, W), or ceil(H / 2), ceil(W / 2) at stride 2.
    """

    def __init__(self, in_chans: int, widths: Widths, pool: nn.Module) -> None:
        stride = 1 if widths.pool else 2
        super().__init__()
        if widths.one:
            self["1x1"] = _sequence({"1": ConvBnRelu(in_chans, widths.one, 1)})
        self["3x3"] = _sequence(
            {
                "reduce": ConvBnRelu(in_chans, widths.three_reduce, 1),
                "1": ConvBnRelu(widths.three_reduce, widths.three, 3, stride),
            }
        )
        self["double_3x3"] = _sequence(
            {
                "reduce": ConvBnRelu(in_chans, widths.double_reduce, 1),
                "1": ConvBnRelu(widths.double_reduce, widths.double, 3),
                "2": ConvBnRelu(widths.double, widths.double, 3, stride),
            }
        )
        self["pool"] = _sequence({"pool": pool})
        if widths.pool:
            self["pool"].add_module("proj", ConvBnRelu(in_chans, widths.pool, 1))
        self.out_chans = widths.one + widths.three + widths.double + (widths.pool or in_chans)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.values()], dim=1)


def _sequence(layers: dict[str, nn.Module]) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def _pool(name: str) -> nn.Module:
    """The pooling of a block: means, except in the last block of stride 1, which takes maxima."""
    if not BLOCKS[name].pool:
        return HalvingMaxPool()
    layer = nn.MaxPool2d if name == "5b" else nn.AvgPool2d
    return layer(3, stride=1, padding=1)


class BNInception(Network):
    """BN-Inception with timm's interface.

    Shape:
        images (N, in_chans, H, W), H and W at least 7; features (N, 1024, H / 32, W / 32), where a part of 32
        pixels may count as a whole: 7 x 7 for 224 and for 227, 3 x 3 for 80.
    """

    def __init__(self, in_chans: int = 3, drop_rate: float = 0.0, **kwargs: Any) -> None:
        features = {
            "conv1": ConvBnRelu(in_chans, 64, 7, stride=2),
            "pool1": nn.MaxPool2d(3, stride=2, ceil_mode=True),
            "conv2_reduce": ConvBnRelu(64, 64, 1),
            "conv2": ConvBnRelu(64, 192, 3),
            "pool2": nn.MaxPool2d(3, stride=2, ceil_mode=True),
        }
        chans = 192
        for name, widths in BLOCKS.items():
            features[f"inception_{name}"] = block = InceptionBlock(chans, widths, _pool(name))
            chans = block.out_chans
        super().__init__({"features": _sequence(features)}, TAPS, drop_rate=drop_rate, **kwargs)


BRANCHES = {
    "1x1": "1x1.1",
    "3x3_reduce": "3x3.reduce",
    "3x3": "3x3.1",
    "double_3x3_reduce": "double_3x3.reduce",
    "double_3x3_1": "double_3x3.1",
    "double_3x3_2": "double_3x3.2",
    "pool_proj": "pool.proj",
}
LAYERS = {
    "conv1_7x7_s2": "conv1",
    "conv2_3x3_reduce": "conv2_reduce",
    "conv2_3x3": "conv2",
    **{
        f"inception_{block}_{published}": f"inception_{block}.{branch}"
        for block in BLOCKS
        for published, branch in BRANCHES.items()
    },
}


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
    """inception_3a_double_3x3_1_bn.weight: features.inception_3a.double_3x3.1.bn.weight."""
    layer, _, tensor = published.rpartition(".")
    if layer in ("last_linear", "fc"):
        return f"head.fc.{tensor}"
    own = LAYERS.get(layer.removesuffix("_bn"))
    kind = "bn" if layer.endswith("_bn") else "conv"
    return f"features.{own}.{kind}.{tensor}" if own else published


default_cfgs = generate_default_cfgs(
    {
        "bn_inception.caffe_in1k": {
            "url": "",  # the published link is plain HTTP: see benchmarks.backbones.weights
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
