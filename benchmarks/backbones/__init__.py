"""The papers' networks that timm lacks, as trained with Caffe; `register` makes them timm models.

bn_inception    BN-Inception
googlenet       GoogLeNet
"""


def register() -> None:
    """Register the networks with `timm.create_model`, by importing their module."""
    from benchmarks.backbones import inception  # noqa: F401
