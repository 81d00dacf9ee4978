"""Published weights of these networks, with their addresses, checksums and licences."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownWeights:
    """A published file of weights.

    Args:
        model: The timm model that it is for; also its name on the command line.
        url: Its address.
        checksum: "ALGORITHM:DIGEST", or the part of the digest's beginning that is published.
        licence: As published.
        note: Other facts, such as how far the file was verified.
        size: Size in bytes.
    """

    model: str
    url: str
    checksum: str
    licence: str
    note: str
    size: int | None = None

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


KNOWN_WEIGHTS = [
    KnownWeights(
        model="bn_inception",
        url="http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
        checksum="sha256:52deb4733",
        licence="not stated",
        note="Trained with Caffe, converted by R. Cadene. The file's name holds the checksum's beginning, "
        "the only published part of it; the server is often out of reach.",
    ),
    KnownWeights(
        model="googlenet",
        url="http://dl.caffe.berkeleyvision.org/bvlc_googlenet.caffemodel",
        checksum="sha1:405fc5acd08a3bb12de8ee5e23a96bec22f08204",
        licence="unrestricted use",
        note="The papers' GoogLeNet, trained with Caffe by S. Guadarrama. The checksum is from the readme "
        "of models/bvlc_googlenet in Caffe's repository.",
        size=53_533_754,
    ),
    KnownWeights(
        model="googlenet_tv",
        url="https://download.pytorch.org/models/googlenet-1378be20.pth",
        checksum="sha256:1378be20",
        licence="BSD-3-Clause",
        note="torchvision's variant with batch norm, not the papers' GoogLeNet. The file's name holds the "
        "checksum's beginning.",
    ),
]
