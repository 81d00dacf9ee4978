"""The BVLC GoogLeNet again: layer by layer from its prototxt, on weights as Caffe stores them, in float64."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Input channels, then the outputs of 1x1, 3x3_reduce, 3x3, 5x5_reduce, 5x5 and pool_proj.
INCEPTIONS = {
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


def shapes() -> dict[str, tuple[int, ...]]:
    """The weight of every layer that has one; the biases are as long as its first dimension."""
    found: dict[str, tuple[int, ...]] = {
        "conv1/7x7_s2": (64, 3, 7, 7),
        "conv2/3x3_reduce": (64, 64, 1, 1),
        "conv2/3x3": (192, 64, 3, 3),
    }
    for name, (inputs, one, reduce3, three, reduce5, five, proj) in INCEPTIONS.items():
        found[f"{name}/1x1"] = (one, inputs, 1, 1)
        found[f"{name}/3x3_reduce"] = (reduce3, inputs, 1, 1)
        found[f"{name}/3x3"] = (three, reduce3, 3, 3)
        found[f"{name}/5x5_reduce"] = (reduce5, inputs, 1, 1)
        found[f"{name}/5x5"] = (five, reduce5, 5, 5)
        found[f"{name}/pool_proj"] = (proj, inputs, 1, 1)
    found["loss3/classifier"] = (1000, 1024)
    return found


def random_weights() -> dict[str, list[Tensor]]:
    """Layer -> [weight, bias] that keep the size of the activations."""
    return {
        name: [torch.randn(shape) * math.sqrt(2 / math.prod(shape[1:])), torch.randn(shape[0])]
        for name, shape in shapes().items()
    }


def features(image: Tensor, weights: dict[str, list[Tensor]]) -> Tensor:
    """(N, 3, H, W), BGR of 0 to 255 less the means -> inception_5b/output."""

    def conv(name: str, x: Tensor, **how: int) -> Tensor:
        weight, bias = (blob.double() for blob in weights[name])
        return F.conv2d(x, weight, bias, **how).clamp(min=0)

    def inception(name: str, x: Tensor) -> Tensor:
        one = conv(f"{name}/1x1", x)
        three = conv(f"{name}/3x3", conv(f"{name}/3x3_reduce", x), padding=1)
        five = conv(f"{name}/5x5", conv(f"{name}/5x5_reduce", x), padding=2)
        pool = conv(f"{name}/pool_proj", max_pool(x, 3, 1, 1))
        return torch.cat([one, three, five, pool], dim=1)

    x = conv("conv1/7x7_s2", image.double(), stride=2, padding=3)
    x = response_norm(max_pool(x, 3, 2))
    x = conv("conv2/3x3_reduce", x)
    x = conv("conv2/3x3", x, padding=1)
    x = max_pool(response_norm(x), 3, 2)
    x = inception("inception_3a", x)
    x = inception("inception_3b", x)
    x = max_pool(x, 3, 2)
    x = inception("inception_4a", x)
    x = inception("inception_4b", x)
    x = inception("inception_4c", x)
    x = inception("inception_4d", x)
    x = inception("inception_4e", x)
    x = max_pool(x, 3, 2)
    x = inception("inception_5a", x)
    return inception("inception_5b", x)


def logits(image: Tensor, weights: dict[str, list[Tensor]]) -> Tensor:
    """For 224 pixels, where the 7x7 average pooling has one window."""
    x = features(image, weights)
    assert x.shape[2:] == (7, 7)
    weight, bias = (blob.double() for blob in weights["loss3/classifier"])
    return x.mean(dim=(2, 3)) @ weight.T + bias


def max_pool(x: Tensor, kernel: int, stride: int, pad: int = 0) -> Tensor:
    """Caffe's PoolingLayer: sizes are rounded up, and no window starts beyond the image and its padding."""

    def windows(size: int) -> list[slice]:
        count = math.ceil((size + 2 * pad - kernel) / stride) + 1
        if pad and (count - 1) * stride >= size + pad:
            count -= 1
        starts = [place * stride - pad for place in range(count)]
        return [slice(max(start, 0), min(start + kernel, size)) for start in starts]

    height, width = x.shape[2:]
    rows = [
        torch.stack([x[:, :, row, column].amax(dim=(2, 3)) for column in windows(width)], dim=-1)
        for row in windows(height)
    ]
    return torch.stack(rows, dim=-2)


def response_norm(x: Tensor) -> Tensor:
    """Caffe's LRNLayer across channels, local_size 5, alpha 1e-4, beta 0.75, k 1."""
    channels = x.shape[1]
    normed = []
    for c in range(channels):
        squares = torch.zeros_like(x[:, 0])
        for j in range(max(c - 2, 0), min(c + 3, channels)):
            squares = squares + x[:, j] ** 2
        normed.append(x[:, c] / (1 + 1e-4 / 5 * squares) ** 0.75)
    return torch.stack(normed, dim=1)
