"""BN-Inception as the published file describes it, layer by layer, for BGR images in 0..255.

Written from the layers of that file alone: names, channels and sizes are listed in its order, poolings and
batch norms are spelt out, and nothing of the project is imported.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, pad

MEAN_BGR = (104, 117, 128)

# Name, input channels, output channels, kernel size.
CONVOLUTIONS = """
conv1_7x7_s2                   3   64 7
conv2_3x3_reduce              64   64 1
conv2_3x3                     64  192 3
inception_3a_1x1             192   64 1
inception_3a_3x3_reduce      192   64 1
inception_3a_3x3              64   64 3
inception_3a_double_3x3_reduce 192 64 1
inception_3a_double_3x3_1     64   96 3
inception_3a_double_3x3_2     96   96 3
inception_3a_pool_proj       192   32 1
inception_3b_1x1             256   64 1
inception_3b_3x3_reduce      256   64 1
inception_3b_3x3              64   96 3
inception_3b_double_3x3_reduce 256 64 1
inception_3b_double_3x3_1     64   96 3
inception_3b_double_3x3_2     96   96 3
inception_3b_pool_proj       256   64 1
inception_3c_3x3_reduce      320  128 1
inception_3c_3x3             128  160 3
inception_3c_double_3x3_reduce 320 64 1
inception_3c_double_3x3_1     64   96 3
inception_3c_double_3x3_2     96   96 3
inception_4a_1x1             576  224 1
inception_4a_3x3_reduce      576   64 1
inception_4a_3x3              64   96 3
inception_4a_double_3x3_reduce 576 96 1
inception_4a_double_3x3_1     96  128 3
inception_4a_double_3x3_2    128  128 3
inception_4a_pool_proj       576  128 1
inception_4b_1x1             576  192 1
inception_4b_3x3_reduce      576   96 1
inception_4b_3x3              96  128 3
inception_4b_double_3x3_reduce 576 96 1
inception_4b_double_3x3_1     96  128 3
inception_4b_double_3x3_2    128  128 3
inception_4b_pool_proj       576  128 1
inception_4c_1x1             576  160 1
inception_4c_3x3_reduce      576  128 1
inception_4c_3x3             128  160 3
inception_4c_double_3x3_reduce 576 128 1
inception_4c_double_3x3_1    128  160 3
inception_4c_double_3x3_2    160  160 3
inception_4c_pool_proj       576  128 1
inception_4d_1x1             608   96 1
inception_4d_3x3_reduce      608  128 1
inception_4d_3x3             128  192 3
inception_4d_double_3x3_reduce 608 160 1
inception_4d_double_3x3_1    160  192 3
inception_4d_double_3x3_2    192  192 3
inception_4d_pool_proj       608  128 1
inception_4e_3x3_reduce      608  128 1
inception_4e_3x3             128  192 3
inception_4e_double_3x3_reduce 608 192 1
inception_4e_double_3x3_1    192  256 3
inception_4e_double_3x3_2    256  256 3
inception_5a_1x1            1056  352 1
inception_5a_3x3_reduce     1056  192 1
inception_5a_3x3             192  320 3
inception_5a_double_3x3_reduce 1056 160 1
inception_5a_double_3x3_1    160  224 3
inception_5a_double_3x3_2    224  224 3
inception_5a_pool_proj      1056  128 1
inception_5b_1x1            1024  352 1
inception_5b_3x3_reduce     1024  192 1
inception_5b_3x3             192  320 3
inception_5b_double_3x3_reduce 1024 192 1
inception_5b_double_3x3_1    192  224 3
inception_5b_double_3x3_2    224  224 3
inception_5b_pool_proj      1024  128 1
"""


def random_weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A state_dict of the published layout: batch-norm vectors are (1, C), and their statistics far from (0, 1)."""
    weights = {}
    for line in CONVOLUTIONS.split("\n")[1:-1]:
        name, in_chans, out_chans, size = line.split()
        i, o, k = int(in_chans), int(out_chans), int(size)
        pixels = 64 if i == 3 else 1  # the images' range is about -128..128
        weights[f"{name}.weight"] = torch.randn(o, i, k, k) * math.sqrt(2 / (i * k * k)) / pixels
        weights[f"{name}.bias"] = torch.randn(o) * 0.2
        weights[f"{name}_bn.weight"] = torch.rand(1, o) + 0.5
        weights[f"{name}_bn.bias"] = torch.randn(1, o) * 0.2
        weights[f"{name}_bn.running_mean"] = torch.randn(1, o) * 0.3
        weights[f"{name}_bn.running_var"] = torch.rand(1, o) * 1.5 + 0.5
    weights["last_linear.weight"] = torch.randn(1000, 1024) / 32
    weights["last_linear.bias"] = torch.randn(1000)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def features(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """(N, 3, H, W) less `MEAN_BGR` -> (N, 1024, H / 32, W / 32), for sizes that are multiples of 32."""

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        x = conv2d(x, weight, bias, stride=stride, padding=(weight.shape[-1] - 1) // 2)
        gamma, beta, mean, var = (
            weights[f"{name}_bn.{entry}"].reshape(-1, 1, 1)
            for entry in ("weight", "bias", "running_mean", "running_var")
        )
        return (gamma * (x - mean) / (var + 1e-5).sqrt() + beta).clamp(min=0)

    def block(x: Tensor, name: str) -> Tensor:
        name = f"inception_{name}_"
        stride = 2 if name in ("inception_3c_", "inception_4e_") else 1
        three = conv(conv(x, name + "3x3_reduce"), name + "3x3", stride)
        double = conv(conv(x, name + "double_3x3_reduce"), name + "double_3x3_1")
        double = conv(double, name + "double_3x3_2", stride)
        if stride == 2:
            return torch.cat([three, double, ceil_max_pool(x)], 1)
        if name == "inception_5b_":
            pooled = windows(pad(x, (1, 1, 1, 1), value=-math.inf), 1).amax((-1, -2))
        else:
            pooled = windows(pad(x, (1, 1, 1, 1)), 1).sum((-1, -2)) / 9
        return torch.cat(
            [conv(x, name + "1x1"), three, double, conv(pooled, name + "pool_proj")], 1
        )

    x = ceil_max_pool(conv(images, "conv1_7x7_s2", 2))
    x = ceil_max_pool(conv(conv(x, "conv2_3x3_reduce"), "conv2_3x3"))
    for name in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        x = block(x, name)
    return x


def logits(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """The classifier behind the mean over all positions."""
    pooled = features(weights, images).mean((2, 3))
    return linear(pooled, weights["last_linear.weight"], weights["last_linear.bias"])


def ceil_max_pool(x: Tensor) -> Tensor:
    """3x3, stride 2, no padding: the last window may reach over the edge, where there is nothing."""
    height, width = (2 * math.ceil((size - 3) / 2) + 3 - size for size in x.shape[2:])
    return windows(pad(x, (0, width, 0, height), value=-math.inf), 2).amax((-1, -2))


def windows(x: Tensor, stride: int) -> Tensor:
    """(N, C, H, W) -> (N, C, H', W', 3, 3)."""
    return x.unfold(2, 3, stride).unfold(3, 3, stride)
