r"""GoogLeNet as the metric-learning papers train it, as a timm model.

Szegedy et al., "Going Deeper with Convolutions", CVPR 2015; the papers use its Caffe training `bvlc_googlenet`
(github.com/BVLC/caffe, models/bvlc_googlenet/train_val.prototxt):

    image -> conv1 7x7/2 -> pool1 -> norm1 -> conv2 1x1, 3x3 -> norm2 -> pool2
          -> inception 3a, 3b -> pool3 -> 4a .. 4e -> pool4 -> 5a, 5b -> average -> dropout 0.4 -> classifier

    norm: y_c = x_c / (1 + alpha / 5 * sum of x_j^2 over j = c-2..c+2)^0.75,  alpha = 1e-4

Convolutions have biases and no batch norm; max pooling rounds sizes up. The two auxiliary classifiers help only
when training from scratch and are left out; files that hold them load as well.

`googlenet.bvlc_in1k` takes RGB images like any timm model. Caffe read BGR with values of 0 to 255, minus the
means 104, 117, 123. Here the `pretrained_cfg` has these means, its std of 1/255 keeps the range, and loading
Caffe's weights reverses the input channels of the first convolution.

torchvision's `googlenet` is another network: it has batch norm, no response normalisation, and 3x3 convolutions
where the paper has 5x5 (github.com/pytorch/vision/issues/906).
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from benchmarks.backbones.network import Network, create

# Channels after each convolution of a block, in the order of BRANCHES: Table 1 of the paper.
BRANCHES = ("1x1", "3x3_reduce", "3x3", "5x5_reduce", "5x5", "pool_proj")
INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
POOLS = {"3b": "pool3", "4e": "pool4"}  # after these blocks
TAPS = [
    (64, 2, "stem.conv1"),
    (192, 4, "stem.norm2"),
    (480, 8, "blocks.inception_3b"),
    (832, 16, "blocks.inception_4e"),
    (1024, 32, "blocks.inception_5b"),
]

CAFFE_LAYERS = {
    "conv1/7x7_s2": "stem.conv1",
    "conv2/3x3_reduce": "stem.conv2_reduce",
    "conv2/3x3": "stem.conv2",
    **{
        f"inception_{block}/{branch}": f"blocks.inception_{block}.{branch}"
        for block in INCEPTIONS
        for branch in BRANCHES
    },
    "loss3/classifier": "head.fc",
}
AUXILIARY = ("loss1/", "loss2/")

default_cfgs = generate_default_cfgs(
    {
        "googlenet.bvlc_in1k": {
            "input_size": (3, 224, 224),
            "pool_size": (7, 7),
            "crop_pct": 224 / 256,
            "crop_mode": "squash",  # Caffe's ImageNet database holds images of 256x256, whatever their shape
            "interpolation": "bilinear",
            "mean": (123 / 255, 117 / 255, 104 / 255),
            "std": (1 / 255, 1 / 255, 1 / 255),
            "first_conv": "stem.conv1",
            "classifier": "head.fc",
            "origin_url": "https://github.com/BVLC/caffe/tree/master/models/bvlc_googlenet",
            "paper_ids": "arXiv:1409.4842",
        },
    }
)


class Conv(nn.Conv2d):
    """Convolution with bias that only its stride makes smaller, and ReLU."""

    def __init__(self, in_chans: int, out_chans: int, size: int, stride: int = 1) -> None:
        super().__init__(in_chans, out_chans, size, stride, padding=size // 2)
        nn.init.kaiming_uniform_(self.weight, nonlinearity="linear")  # what Caffe calls xavier
        nn.init.constant_(self.bias, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x), inplace=True)


class ResponseNorm(nn.LocalResponseNorm):
    """Response normalisation across channels, at least in float32: squares of 0 to 255 overflow float16."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return super().forward(wide).to(x.dtype)


class Inception(nn.ModuleDict):
    """Four branches side by side, (N, C, H, W) -> (N, sum of their widths, H, W)."""

    def __init__(self, in_chans: int, widths: tuple[int, int, int, int, int, int]) -> None:
        one, three_reduce, three, five_reduce, five, pool = widths
        shapes = (in_chans, one, 1), (in_chans, three_reduce, 1), (three_reduce, three, 3)
        shapes += (in_chans, five_reduce, 1), (five_reduce, five, 5), (in_chans, pool, 1)
        super().__init__(zip(BRANCHES, (Conv(*shape) for shape in shapes), strict=True))
        self.out_chans = one + three + five + pool

    def forward(self, x: Tensor) -> Tensor:
        branches = [
            self["1x1"](x),
            self["3x3"](self["3x3_reduce"](x)),
            self["5x5"](self["5x5_reduce"](x)),
            self["pool_proj"](F.max_pool2d(x, 3, stride=1, padding=1)),
        ]
        return torch.cat(branches, dim=1)


_pool = partial(nn.MaxPool2d, 3, stride=2, ceil_mode=True)
_norm = partial(ResponseNorm, 5, alpha=1e-4, beta=0.75, k=1.0)


class GoogLeNet(Network):
    """GoogLeNet with timm's interface.

    Shape:
        Images (N, in_chans, H, W), H and W at least 31, to features (N, 1024, about H/32, about W/32).
    """

    def __init__(self, in_chans: int = 3, drop_rate: float = 0.4, **kwargs: Any) -> None:
        stem = OrderedDict(
            conv1=Conv(in_chans, 64, 7, stride=2),
            pool1=_pool(),
            norm1=_norm(),
            conv2_reduce=Conv(64, 64, 1),
            conv2=Conv(64, 192, 3),
            norm2=_norm(),
            pool2=_pool(),
        )
        blocks = OrderedDict[str, nn.Module]()
        channels = 192
        for name, widths in INCEPTIONS.items():
            blocks[f"inception_{name}"] = block = Inception(channels, widths)
            channels = block.out_chans
            if name in POOLS:
                blocks[POOLS[name]] = _pool()
        parts = {"stem": nn.Sequential(stem), "blocks": nn.Sequential(blocks)}
        super().__init__(parts, TAPS, drop_rate=drop_rate, **kwargs)
        if self.num_classes:
            nn.init.kaiming_uniform_(self.get_classifier().weight, nonlinearity="linear")
            nn.init.zeros_(self.get_classifier().bias)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename Caffe's tensors (`conv1/7x7_s2.weight`), taken to be for BGR, to this module's names.

    It drops the auxiliary classifiers, and hands on all other tensors, so that the loader can name them.
    """
    converted = {}
    for key, tensor in state_dict.items():
        layer, _, blob = key.rpartition(".")
        if layer in CAFFE_LAYERS:
            own = f"{CAFFE_LAYERS[layer]}.{blob}"
            converted[own] = _from_caffe(own, tensor)
        elif not key.startswith(AUXILIARY):
            converted[key] = tensor
    return converted


def _from_caffe(key: str, tensor: Tensor) -> Tensor:
    """Remove the leading dimensions of 1 that old files have, and convert from BGR to RGB."""
    dims = 1 if key.endswith(".bias") else 2 if key == "head.fc.weight" else 4
    while tensor.ndim > dims and len(tensor) == 1:
        tensor = tensor[0]
    return tensor.flip(1) if key == "stem.conv1.weight" and tensor.ndim == 4 else tensor


@register_model
def googlenet(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """The papers' GoogLeNet: 6,998,552 parameters with its classifier."""
    return create(GoogLeNet, "googlenet", checkpoint_filter_fn, pretrained, **kwargs)
