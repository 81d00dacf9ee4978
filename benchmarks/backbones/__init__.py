"""The papers' networks that timm lacks; `register` makes them timm models.

bn_inception    BN-Inception, as trained with Caffe
googlenet       GoogLeNet, as trained with Caffe
googlenet_tv torchvision's network of that name, a different one
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "published": ["KNOWN_WEIGHTS", "KnownWeights"],
        "weights": ["WeightsError", "can_be_fetched", "load_weights"],
    },
)
__all__ += ["register"]


def register() -> None:
    """Register the networks with `timm.create_model`, by importing their modules."""
    from benchmarks.backbones import bn_inception, googlenet  # noqa: F401
