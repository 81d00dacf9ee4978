"""The papers' networks that timm lacks, as trained with Caffe; `register` makes them timm models.

bn_inception    BN-Inception
googlenet       GoogLeNet
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
