"""Published weights of these networks: docs/backbones.md has their licences."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownWeights:
    """A published file of weights.

    Args:
        model: The timm model that it is for; also its name on the command line.
        url: Its address.
        checksum: "ALGORITHM:DIGEST", or the part of the digest's beginning that is published.
    """

    model: str
    url: str
    checksum: str

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
