"""The papers' networks that timm lacks, as trained with Caffe; `register` makes them timm models.

bn_inception    BN-Inception
googlenet       GoogLeNet
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
__all__ += ["register"]


def register() -> None:
    """Register the networks with `timm.create_model`, by importing their module."""
    from benchmarks.backbones import inception  # noqa: F401
