"""The papers' networks that timm lacks; importing this package makes them timm models.

bn_inception    BN-Inception, as trained with Caffe
googlenet       GoogLeNet, as trained with Caffe
googlenet_tv    torchvision's network of that name, which is another one
"""

from benchmarks.backbones import bn_inception, googlenet
from benchmarks.backbones.weights import KNOWN_WEIGHTS, KnownWeights, WeightsError, load_weights

__all__ = [
    "KNOWN_WEIGHTS",
    "KnownWeights",
    "WeightsError",
    "bn_inception",
    "googlenet",
    "load_weights",
]
