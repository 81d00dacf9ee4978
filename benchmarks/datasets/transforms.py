"""Training and test views of an image, as the four papers make them.

Their sizes and augmentations are in docs/datasets.md. HORDE's code filters with Lanczos and resizes to 293 before
the test's crop; the others interpolate bilinearly. What the papers leave open:

* HORDE samples "the resolution" between 80 % and 180 % of the crop. Its code resizes the longer side to this size
  with Lanczos, keeps the aspect, and centres an image that is smaller than the crop on black.
* SEAN resizes "to 256 * 256" and crops; it does not say where, and mentions no mirroring.
* ECAML resizes Cars-196 "directly" and prepares the others as in Oh Song et al. (CVPR 2016), whose code for
  Stanford Online Products cuts off the white margin of a photo, resizes its longer side to 256 and fills up a white
  square. Here nothing is cut off or filled: the shorter side becomes 256.
* JRD says "random crop"; its code calls torchvision's RandomResizedCrop, and resizes the shorter side to 256 before
  the centre crop of the test.

Here Pillow does the resizing for all of them; it smooths before it shrinks.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from benchmarks.datasets.catalogue import Augmentation, Interpolation

RESOLUTIONS = (0.8, 1.8)  # HORDE, section 4: of the crop size
CROP_FRACTION = 0.875  # 224 of 256


@dataclass(frozen=True, kw_only=True)
class ImageViews:
    """Turns an image into the tensor that a network reads, and back.

    A training view is mirrored half of the time. It draws only from torch's default generator: seed that to get
    the same view again.

    Args:
        image_size: Height and width S of a view, in pixels.
        resize: Length of the shorter side before S x S pixels are cut out, in a test view and under
            "random_crop"; default: S for "multi_resolution", else S / 0.875.
        keep_aspect: Keep the aspect then; if False, the image becomes `resize` x `resize`.
        augmentation: The training view: "multi_resolution", the longer side at 0.8 to 1.8 S, black around an
            image smaller than S, a random S x S crop; "random_crop", the resized image and a random crop;
            "random_resized_crop", 8 to 100 % of the image's area at an aspect of 3/4 to 4/3, resized to S x S;
            "none", the test view.
        mean, std: Of the network's training images, red, green, blue in [0, 1], as in timm's `pretrained_cfg`.
        interpolation: Filter for resizing.

    Shape:
        image: a Pillow image in mode RGB, of any size; view: (3, S, S), float32.

    Raises:
        ValueError: for a `resize` below `image_size`.
    """

    image_size: int
    resize: int | None = None
    keep_aspect: bool = True
    augmentation: Augmentation = "random_resized_crop"
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if self.resize is not None and self.resize < self.image_size:
            raise ValueError(
                f"resize: expected at least image_size ({self.image_size}), got {self.resize}"
            )

    def train(self, image: Image.Image) -> torch.Tensor:
        """A random view, (3, S, S)."""
        match self.augmentation:
            case "none":
                return self.test(image)
            case "multi_resolution":
                view = self._random_crop(self._at_random_resolution(image))
            case "random_crop":
                view = self._random_crop(self._resized(image))
            case "random_resized_crop":
                filtered = InterpolationMode(self.interpolation)
                view = v2.RandomResizedCrop(self.image_size, interpolation=filtered)(image)
        if torch.rand(()) < 0.5:
            view = F.horizontal_flip(view)
        return self._normalised(view)

    def test(self, image: Image.Image) -> torch.Tensor:
        """The middle of the resized image, (3, S, S)."""
        return self._normalised(F.center_crop(self._resized(image), [self.image_size]))

    def to_picture(self, view: torch.Tensor) -> npt.NDArray[np.uint8]:
        """Undo the normalisation: (3, S, S) -> (S, S, 3), uint8."""
        mean, std = self._statistics
        picture = view.detach().float().cpu() * std.view(3, 1, 1) + mean.view(3, 1, 1)
        return picture.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()

    @property
    def resized_side(self) -> int:
        """Length of the shorter side before S x S pixels are cut out."""
        if self.resize is not None:
            return self.resize
        shown = 1 if self.augmentation == "multi_resolution" else CROP_FRACTION
        return round(self.image_size / shown)

    def _resized(self, image: Image.Image) -> Image.Image:
        size = [self.resized_side] * (1 if self.keep_aspect else 2)
        return F.resize(image, size, InterpolationMode(self.interpolation))

    def _at_random_resolution(self, image: Image.Image) -> Image.Image:
        longer_side = torch.empty(()).uniform_(*RESOLUTIONS).item() * self.image_size
        scale = longer_side / max(image.size)
        width, height = (math.ceil(side * scale) for side in image.size)
        return F.resize(image, [height, width], InterpolationMode(self.interpolation))

    def _random_crop(self, image: Image.Image) -> Image.Image:
        left, top = (_random_start(side - self.image_size) for side in image.size)
        return F.crop(image, top, left, self.image_size, self.image_size)  # black outside the image

    @cached_property
    def _statistics(self) -> torch.Tensor:
        """Mean and standard deviation (2, 3) in units of a byte, so that bytes need no rescaling."""
        return (torch.tensor([self.mean, self.std], dtype=torch.float64) * 255).float()

    def _normalised(self, image: Image.Image) -> torch.Tensor:
        pixels = F.pil_to_tensor(image)
        view = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return F.normalize(view, *self._statistics, inplace=True)


def _random_start(room: int) -> int:
    """Start of a random crop that leaves `room` pixels; a crop that lacks pixels is centred."""
    return int(torch.randint(room + 1, ())) if room >= 0 else -(-room // 2)
