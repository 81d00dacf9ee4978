"""Published weights of these networks: docs/backbones.md has their licences."""

from typing import NamedTuple


class KnownWeights(NamedTuple):
    """A published file of weights for a timm model."""

    model: str
    url: str
    checksum: str
    """ "ALGORITHM:DIGEST", or the published beginning of it."""

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


KNOWN_WEIGHTS = [
    KnownWeights(  # the checksum's beginning, in the file's name, is the only published part of it
        "bn_inception",
        "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
        "sha256:52deb4733",
    ),
    KnownWeights(  # the checksum is from the readme of models/bvlc_googlenet in Caffe's repository
        "googlenet",
        "http://dl.caffe.berkeleyvision.org/bvlc_googlenet.caffemodel",
        "sha1:405fc5acd08a3bb12de8ee5e23a96bec22f08204",
    ),
]
