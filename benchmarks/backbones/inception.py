r"""GoogLeNet and BN-Inception as the metric-learning papers train them, as timm models.

GoogLeNet: Szegedy et al., "Going Deeper with Convolutions", CVPR 2015; the papers use its Caffe training
`bvlc_googlenet` (github.com/BVLC/caffe, models/bvlc_googlenet/train_val.prototxt), with response
normalisation y_c = x_c / (1 + alpha / 5 * sum of x_j^2 over j = c-2..c+2)^0.75, alpha = 1e-4.

Convolutions have biases and no batch norm; max pooling rounds sizes up. The two auxiliary classifiers help only
when training from scratch and are left out. torchvision's `googlenet` is another network: it has batch norm, no
response normalisation, and 3x3 convolutions where the paper has 5x5 (github.com/pytorch/vision/issues/906).

BN-Inception: Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 4.2.1, as it was trained with Caffe:
layer widths, biases before the batch norms and poolings in ceil mode are that training's own. Sizes of images are
multiples of 32, or others whose maps have even sizes before each block of stride 2, such as 227: otherwise the
branches of such a block do not fit together.

Caffe read BGR with values of 0 to 255 minus a mean. Here the models take RGB like any timm model: the
`pretrained_cfg` has these means and a std of 1/255, which keeps the range, and `checkpoint_filter_fn` reverses the
input channels of the first convolution.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, ConvNormAct
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

HALF = partial(nn.MaxPool2d, 3, stride=2, ceil_mode=True)
LARGEST = partial(nn.MaxPool2d, 3, stride=1, padding=1)
MEAN = partial(nn.AvgPool2d, 3, stride=1, padding=1)

ONE, THREE, POOLED = ("1x1",), ("3x3_reduce", "3x3"), ("pool", "pool_proj")
FIVE = ("5x5_reduce", "5x5")
DOUBLE = ("double_3x3_reduce", "double_3x3_1", "double_3x3_2")
KERNELS = {"3x3": 3, "5x5": 5, "double_3x3_1": 3, "double_3x3_2": 3}
"""Sizes of the convolutions that are not 1x1."""

Row = tuple[Callable[[], nn.Module], Sequence[Sequence[str]], Sequence[int]]
"""A block: its pooling, its branches, and the output channels of their convolutions in this order."""

WITH_FIVE = (ONE, THREE, FIVE, POOLED)
GOOGLENET: dict[str, Row | None] = {  # Table 1 of the paper; None: a pooling between blocks
    "inception_3a": (LARGEST, WITH_FIVE, (64, 96, 128, 16, 32, 32)),
    "inception_3b": (LARGEST, WITH_FIVE, (128, 128, 192, 32, 96, 64)),
    "pool3": None,
    "inception_4a": (LARGEST, WITH_FIVE, (192, 96, 208, 16, 48, 64)),
    "inception_4b": (LARGEST, WITH_FIVE, (160, 112, 224, 24, 64, 64)),
    "inception_4c": (LARGEST, WITH_FIVE, (128, 128, 256, 24, 64, 64)),
    "inception_4d": (LARGEST, WITH_FIVE, (112, 144, 288, 32, 64, 64)),
    "inception_4e": (LARGEST, WITH_FIVE, (256, 160, 320, 32, 128, 128)),
    "pool4": None,
    "inception_5a": (LARGEST, WITH_FIVE, (256, 160, 320, 32, 128, 128)),
    "inception_5b": (LARGEST, WITH_FIVE, (384, 192, 384, 48, 128, 128)),
}
WITH_DOUBLE = (ONE, THREE, DOUBLE, POOLED)
HALVING = (THREE, DOUBLE, ("pool",))
BN_INCEPTION: dict[str, Row | None] = {
    "inception_3a": (MEAN, WITH_DOUBLE, (64, 64, 64, 64, 96, 96, 32)),
    "inception_3b": (MEAN, WITH_DOUBLE, (64, 64, 96, 64, 96, 96, 64)),
    "inception_3c": (HALF, HALVING, (128, 160, 64, 96, 96)),
    "inception_4a": (MEAN, WITH_DOUBLE, (224, 64, 96, 96, 128, 128, 128)),
    "inception_4b": (MEAN, WITH_DOUBLE, (192, 96, 128, 96, 128, 128, 128)),
    "inception_4c": (MEAN, WITH_DOUBLE, (160, 128, 160, 128, 160, 160, 128)),
    "inception_4d": (MEAN, WITH_DOUBLE, (96, 128, 192, 160, 192, 192, 128)),
    "inception_4e": (HALF, HALVING, (128, 192, 192, 256, 256)),
    "inception_5a": (MEAN, WITH_DOUBLE, (352, 192, 320, 160, 224, 224, 128)),
    "inception_5b": (LARGEST, WITH_DOUBLE, (352, 192, 320, 192, 224, 224, 128)),
}


class Inception(nn.ModuleDict):
    """Branches side by side: (N, in_chans, H, W) -> (N, out_chans, H, W); all have the pooling's stride."""

    def __init__(self, conv: Callable[..., nn.Module], in_chans: int, row: Row) -> None:
        make_pool, branches, widths = row
        super().__init__({"pool": make_pool()})
        self.branches = branches
        self.out_chans = 0
        following = iter(widths)
        for branch in self.branches:
            chans = in_chans
            for name in branch:
                if name != "pool":
                    inputs, chans = chans, next(following)
                    stride = self["pool"].stride if name == branch[-1] else 1
                    self[name] = conv(inputs, chans, KERNELS.get(name, 1), stride=stride)
            self.out_chans += chans

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for branch in self.branches:
            y = x
            for name in branch:
                y = self[name](y)
            outputs.append(y)
        return torch.cat(outputs, dim=1)


class Network(nn.Module):
    """A chain of layers and a classifier, with timm's interface.

    Args:
        parts: Name -> layers, in the order of the chain, which takes images of at least 31 pixels a side.
        taps: (module, channels) of the last feature map of each size, H/2 to H/32.
        drop_rate: Dropout between the pooling and the classifier; none without a classifier.
    """

    def __init__(
        self,
        parts: Mapping[str, Mapping[str, nn.Module]],
        taps: Sequence[tuple[str, int]],
        *,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.drop_rate = drop_rate
        self.feature_info = [
            {"num_chs": channels, "reduction": 2**i, "module": module}
            for i, (module, channels) in enumerate(taps, 1)
        ]
        self.num_features = taps[-1][1]
        for name, layers in parts.items():
            self.add_module(name, nn.Sequential(OrderedDict(layers)))
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate
        )

    def get_classifier(self) -> Any:
        return self.head.fc

    def forward_features(self, x: Tensor) -> Tensor:
        *parts, _ = self.children()
        for part in parts:
            x = part(x)
        return x

    def forward_head(self, x: Tensor) -> Tensor:
        """Feature map -> logits; without a classifier, its input before dropout."""
        logits: Tensor = self.head(x) if self.num_classes else self.head.global_pool(x)
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _blocks(conv: Callable[..., nn.Module], rows: dict[str, Row | None]) -> dict[str, nn.Module]:
    """The layers behind the stem, which has 192 channels."""
    layers: dict[str, nn.Module] = {}
    chans = 192
    for name, row in rows.items():
        if row is None:
            layers[name] = HALF()
        else:
            layers[name] = block = Inception(conv, chans, row)
            chans = block.out_chans
    return layers


class Conv(nn.Conv2d):
    """Convolution with bias that only its stride makes smaller, and ReLU."""

    def __init__(self, in_chans: int, out_chans: int, size: int, stride: int = 1) -> None:
        super().__init__(in_chans, out_chans, size, stride, padding=size // 2)
        nn.init.kaiming_uniform_(self.weight, nonlinearity="linear")  # what Caffe calls xavier
        assert self.bias is not None
        nn.init.constant_(self.bias, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class ResponseNorm(nn.LocalResponseNorm):
    """Response normalisation across channels, at least in float32: squares of 0 to 255 overflow float16."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return super().forward(wide).to(x.dtype)


class GoogLeNet(Network):
    """GoogLeNet, with 6,998,552 parameters of which 1,025,000 are the classifier's."""

    def __init__(self, in_chans: int = 3, drop_rate: float = 0.4, **kwargs: Any) -> None:
        stem = {
            "conv1": Conv(in_chans, 64, 7, stride=2),
            "pool1": HALF(),
            "norm1": ResponseNorm(5),
            "conv2_reduce": Conv(64, 64, 1),
            "conv2": Conv(64, 192, 3),
            "norm2": ResponseNorm(5),
            "pool2": HALF(),
        }
        taps = [
            *(("stem.conv1", 64), ("stem.norm2", 192), ("blocks.inception_3b", 480)),
            *(("blocks.inception_4e", 832), ("blocks.inception_5b", 1024)),
        ]
        blocks = _blocks(Conv, GOOGLENET)
        super().__init__({"stem": stem, "blocks": blocks}, taps, drop_rate=drop_rate, **kwargs)
        if self.num_classes:
            nn.init.kaiming_uniform_(self.head.fc.weight, nonlinearity="linear")
            nn.init.zeros_(self.head.fc.bias)


class BNInception(Network):
    """BN-Inception, with 11,295,240 parameters of which 1,025,000 are the classifier's."""

    def __init__(self, in_chans: int = 3, drop_rate: float = 0.0, **kwargs: Any) -> None:
        conv = partial(ConvNormAct, bias=True)
        stem = {
            "conv1": conv(in_chans, 64, 7, stride=2),
            "pool1": HALF(),
            "conv2_reduce": conv(64, 64, 1),
            "conv2": conv(64, 192, 3),
            "pool2": HALF(),
        }
        taps = [
            *(("features.conv1", 64), ("features.conv2", 192), ("features.inception_3b", 320)),
            *(("features.inception_4d", 608), ("features.inception_5b", 1024)),
        ]
        parts = {"features": stem | _blocks(conv, BN_INCEPTION)}
        super().__init__(parts, taps, drop_rate=drop_rate, **kwargs)


PUBLISHED = {"conv1": "conv1_7x7_s2", "conv2_reduce": "conv2_3x3_reduce", "conv2": "conv2_3x3"}
"""Names of the stem's convolutions in the published files."""


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert tensors with published names, which are for BGR; leave others for the loader to name.

    Published names are Caffe's, such as inception_3a/5x5.weight; the file of BN-Inception has "_" for "/". Leading
    dimensions of 1, which some files have, and GoogLeNet's auxiliary classifiers are dropped.
    """
    own = model.state_dict()
    layers = dict.fromkeys(("loss3_classifier", "last_linear", "fc"), "head.fc")
    for layer in (name.rpartition(".")[0] for name in own):
        _, place, *inner = layer.split(".")
        layers["_".join([PUBLISHED.get(place, place), *inner]).removesuffix("_conv")] = layer
    converted = {}
    for name, tensor in state_dict.items():
        if name.startswith(("loss1/", "loss2/")):
            continue
        published, _, kind = name.replace("/", "_").rpartition(".")
        if published in layers:
            name = f"{layers[published]}.{kind}"
            while tensor.ndim > own.get(name, tensor).ndim and len(tensor) == 1:
                tensor = tensor[0]
            if published == PUBLISHED["conv1"] and tensor.ndim == 4:
                tensor = tensor.flip(1)
        converted[name] = tensor
    return converted


CAFFE = {
    "input_size": (3, 224, 224),
    "pool_size": (7, 7),
    "crop_pct": 224 / 256,
    "interpolation": "bilinear",
    "std": (1 / 255, 1 / 255, 1 / 255),
    "classifier": "head.fc",
}
default_cfgs = generate_default_cfgs(
    {
        "googlenet.bvlc_in1k": CAFFE
        | {
            "crop_mode": "squash",  # Caffe's ImageNet database holds images of 256x256, whatever their shape
            "mean": (123 / 255, 117 / 255, 104 / 255),
            "first_conv": "stem.conv1",
        },
        "bn_inception.caffe_in1k": CAFFE
        | {"mean": (128 / 255, 117 / 255, 104 / 255), "first_conv": "features.conv1.conv"},
    }
)


def _create(network: type[Network], name: str, pretrained: bool, **kwargs: Any) -> Any:
    kwargs["feature_cfg"] = {"flatten_sequential": True}
    return build_model_with_cfg(
        network, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, **kwargs
    )


@register_model
def googlenet(pretrained: bool = False, **kwargs: Any) -> Any:
    """The papers' GoogLeNet."""
    return _create(GoogLeNet, "googlenet", pretrained, **kwargs)


@register_model
def bn_inception(pretrained: bool = False, **kwargs: Any) -> Any:
    """BN-Inception with the layer widths of the published Caffe model."""
    return _create(BNInception, "bn_inception", pretrained, **kwargs)
