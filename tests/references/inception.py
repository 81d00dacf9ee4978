"""GoogLeNet and BN-Inception as Caffe computes them, in float64, for BGR images of 0 to 255 less a mean.

Written from the layers of the published files alone, by their names, channels and sizes; nothing of the project is
imported.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, pad

Weights = dict[str, Tensor]

MEAN_BGR = {"googlenet": (104, 117, 123), "bn_inception": (104, 117, 128)}
CLASSIFIER = {"googlenet": "loss3/classifier", "bn_inception": "last_linear"}

GOOGLENET_LAYERS = ("1x1", "3x3_reduce", "3x3", "5x5_reduce", "5x5", "pool_proj")
GOOGLENET = {  # input channels, then the outputs of these layers
    "inception_3a": (192, 64, 96, 128, 16, 32, 32),
    "inception_3b": (256, 128, 128, 192, 32, 96, 64),
    "inception_4a": (480, 192, 96, 208, 16, 48, 64),
    "inception_4b": (512, 160, 112, 224, 24, 64, 64),
    "inception_4c": (512, 128, 128, 256, 24, 64, 64),
    "inception_4d": (512, 112, 144, 288, 32, 64, 64),
    "inception_4e": (528, 256, 160, 320, 32, 128, 128),
    "inception_5a": (832, 256, 160, 320, 32, 128, 128),
    "inception_5b": (832, 384, 192, 384, 48, 128, 128),
}
BN_INCEPTION_LAYERS = (
    *("1x1", "3x3_reduce", "3x3"),
    *("double_3x3_reduce", "double_3x3_1", "double_3x3_2", "pool_proj"),
)
BN_INCEPTION = {
    "inception_3a": (192, 64, 64, 64, 64, 96, 96, 32),
    "inception_3b": (256, 64, 64, 96, 64, 96, 96, 64),
    "inception_3c": (320, 0, 128, 160, 64, 96, 96, 0),
    "inception_4a": (576, 224, 64, 96, 96, 128, 128, 128),
    "inception_4b": (576, 192, 96, 128, 96, 128, 128, 128),
    "inception_4c": (576, 160, 128, 160, 128, 160, 160, 128),
    "inception_4d": (608, 96, 128, 192, 160, 192, 192, 128),
    "inception_4e": (608, 0, 128, 192, 192, 256, 256, 0),
    "inception_5a": (1056, 352, 192, 320, 160, 224, 224, 128),
    "inception_5b": (1024, 352, 192, 320, 192, 224, 224, 128),
}


def layers(network: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the convolutions."""
    names, rows, mark = GOOGLENET_LAYERS, GOOGLENET, "/"
    if network == "bn_inception":
        names, rows, mark = BN_INCEPTION_LAYERS, BN_INCEPTION, "_"
    yield f"conv1{mark}7x7_s2", (64, 3, 7, 7)
    yield f"conv2{mark}3x3_reduce", (64, 64, 1, 1)
    yield f"conv2{mark}3x3", (192, 64, 3, 3)
    for block, (inputs, *widths) in rows.items():
        chans = inputs
        for name, width in zip(names, widths, strict=True):
            size = {"3x3": 3, "5x5": 5, "double_3x3_1": 3, "double_3x3_2": 3}.get(name, 1)
            chans = inputs if size == 1 else chans  # the larger ones read the one before them
            if width:
                yield f"{block}{mark}{name}", (width, chans, size, size)
            chans = width


def random_weights(network: str) -> Weights:
    """A state_dict of the published layout that keeps the size of activations.

    BN-Inception's vectors of batch norms are (1, C), and their statistics far from (0, 1).
    """
    weights = {}
    for name, shape in layers(network):
        weights[f"{name}.weight"] = torch.randn(shape) * math.sqrt(2 / math.prod(shape[1:]))
        weights[f"{name}.bias"] = torch.randn(shape[0]) * 0.2
        if network == "bn_inception":
            weights[f"{name}_bn.weight"] = torch.rand(1, shape[0]) + 0.5
            weights[f"{name}_bn.bias"] = torch.randn(1, shape[0]) * 0.2
            weights[f"{name}_bn.running_mean"] = torch.randn(1, shape[0]) * 0.3
            weights[f"{name}_bn.running_var"] = torch.rand(1, shape[0]) * 1.5 + 0.5
    weights[f"{CLASSIFIER[network]}.weight"] = torch.randn(1000, 1024) / 32
    weights[f"{CLASSIFIER[network]}.bias"] = torch.randn(1000)
    return {name: tensor.double() for name, tensor in weights.items()}


def features(network: str, weights: Weights, images: Tensor) -> Tensor:
    """(N, 3, H, W) -> (N, 1024, h, w), before the pooling over positions."""

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        x = conv2d(x, weight, bias, stride=stride, padding=(weight.shape[-1] - 1) // 2)
        if network == "bn_inception":
            gamma, beta, mean, var = (
                weights[f"{name}_bn.{entry}"].reshape(-1, 1, 1)
                for entry in ("weight", "bias", "running_mean", "running_var")
            )
            x = gamma * (x - mean) / (var + 1e-5).sqrt() + beta
        return x.clamp(min=0)

    def block(x: Tensor, name: str) -> Tensor:
        """Of GoogLeNet."""
        one = conv(x, f"{name}/1x1")
        three = conv(conv(x, f"{name}/3x3_reduce"), f"{name}/3x3")
        five = conv(conv(x, f"{name}/5x5_reduce"), f"{name}/5x5")
        return torch.cat([one, three, five, conv(largest(x), f"{name}/pool_proj")], 1)

    def bn_block(x: Tensor, name: str) -> Tensor:
        """Of BN-Inception."""
        stride = 2 if name in ("inception_3c", "inception_4e") else 1
        three = conv(conv(x, f"{name}_3x3_reduce"), f"{name}_3x3", stride)
        double = conv(conv(x, f"{name}_double_3x3_reduce"), f"{name}_double_3x3_1")
        double = conv(double, f"{name}_double_3x3_2", stride)
        if stride == 2:
            return torch.cat([three, double, halved(x)], 1)
        pooled = windows(pad(x, (1, 1, 1, 1)), 1).sum((-1, -2)) / 9
        if name == "inception_5b":
            pooled = largest(x)
        pooled = conv(pooled, f"{name}_pool_proj")
        return torch.cat([conv(x, f"{name}_1x1"), three, double, pooled], 1)

    if network == "googlenet":
        x = response_norm(halved(conv(images, "conv1/7x7_s2", 2)))
        x = halved(response_norm(conv(conv(x, "conv2/3x3_reduce"), "conv2/3x3")))
        for name in GOOGLENET:
            x = block(x, name)
            if name in ("inception_3b", "inception_4e"):
                x = halved(x)
        return x
    x = halved(conv(images, "conv1_7x7_s2", 2))
    x = halved(conv(conv(x, "conv2_3x3_reduce"), "conv2_3x3"))
    for name in BN_INCEPTION:
        x = bn_block(x, name)
    return x


def logits(network: str, weights: Weights, images: Tensor) -> Tensor:
    """The classifier behind the mean over all positions."""
    name, pooled = CLASSIFIER[network], features(network, weights, images).mean((2, 3))
    return linear(pooled, weights[f"{name}.weight"], weights[f"{name}.bias"])


def halved(x: Tensor) -> Tensor:
    """The largest of 3x3, stride 2: the last window may reach over the edge, where there is nothing."""
    height, width = (2 * math.ceil((size - 3) / 2) + 3 - size for size in x.shape[2:])
    return windows(pad(x, (0, width, 0, height), value=-math.inf), 2).amax((-1, -2))


def largest(x: Tensor) -> Tensor:
    """The largest of 3x3, stride 1."""
    return windows(pad(x, (1, 1, 1, 1), value=-math.inf), 1).amax((-1, -2))


def windows(x: Tensor, stride: int) -> Tensor:
    """(N, C, H, W) -> (N, C, H', W', 3, 3)."""
    return x.unfold(2, 3, stride).unfold(3, 3, stride)


def response_norm(x: Tensor) -> Tensor:
    """Caffe's LRNLayer across channels, local_size 5, alpha 1e-4, beta 0.75, k 1."""
    squares = [x[:, max(c - 2, 0) : c + 3].square().sum(dim=1) for c in range(x.shape[1])]
    return x / (1 + 1e-4 / 5 * torch.stack(squares, dim=1)) ** 0.75
