"""Published weights of these networks: docs/backbones.md has their addresses and licences."""

from typing import NamedTuple


class KnownWeights(NamedTuple):
    """A published file of weights."""

    file: str
    checksum: str
    """ "ALGORITHM:DIGEST", or the published beginning of it."""


KNOWN_WEIGHTS = [
    # The checksum's beginning, in the file's name, is the only published part of it.
    KnownWeights("bn_inception-52deb4733.pth", "sha256:52deb4733"),
    # The checksum is from the readme of models/bvlc_googlenet in Caffe's repository.
    KnownWeights("bvlc_googlenet.caffemodel", "sha1:405fc5acd08a3bb12de8ee5e23a96bec22f08204"),
]
