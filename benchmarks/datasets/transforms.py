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

Here Pillow does the resizing for all of them; it smooths before it shrinks. `ImageViews.cut_batch` computes
the same on a GPU.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from benchmarks.datasets.catalogue import Augmentation, Interpolation

RESOLUTIONS = (0.8, 1.8)  # HORDE, section 4: of the crop size
CROP_FRACTION = 0.875  # 224 of 256

Size = tuple[int, int]
"""Width and height, as Pillow orders them, and as those of corners here."""


class Cut(NamedTuple):
    """How a view is cut from an image: a part of it is resized, and S x S pixels of the result are the view."""

    corner: Size  # of the part of the image
    size: Size
    resized: Size  # the size that this part gets
    window: Size = (0, 0)  # corner of the view in the resized part; what lies outside is black
    mirrored: bool = False  # left and right are exchanged at the end


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

    def draw(self, size: Size) -> Cut:
        """Where a random view, for training, is cut out of an image of this size."""
        side = self.image_size
        match self.augmentation:
            case "none":
                return self.middle(size)
            case "multi_resolution":
                longer_side = torch.empty(()).uniform_(*RESOLUTIONS).item() * side
                scale = longer_side / max(size)
                resized = _both(size, lambda x: math.ceil(x * scale))
                cut = _random_window(Cut((0, 0), size, resized), side)
            case "random_crop":
                cut = _random_window(Cut((0, 0), size, self._resized(size)), side)
            case "random_resized_crop":  # torchvision asks for the size alone
                image = torch.empty(3, size[1], size[0], device="meta")
                part = self._random_part.make_params([image])
                corner, of_part = (part["left"], part["top"]), (part["width"], part["height"])
                cut = Cut(corner, of_part, (side, side))
        return cut._replace(mirrored=bool(torch.rand(()) < 0.5))

    def middle(self, size: Size) -> Cut:
        """Where the test view is cut out of an image of this size: the middle, once it is resized."""
        resized = self._resized(size)
        window = _both(resized, lambda x: round((x - self.image_size) / 2))
        return Cut((0, 0), size, resized, window)

    def cut(self, image: Image.Image, cut: Cut) -> Tensor:
        """The view of an image, (3, S, S)."""
        (left, top), (width, height), side = cut.corner, cut.size, self.image_size
        if cut.size != image.size:
            image = F.crop(image, top, left, height, width)
        image = F.resize(image, [*cut.resized[::-1]], InterpolationMode(self.interpolation))
        if cut.resized != (side, side):  # black outside the image
            image = F.crop(image, cut.window[1], cut.window[0], side, side)
        if cut.mirrored:
            image = F.horizontal_flip(image)
        view = F.pil_to_tensor(image).to(torch.float32, memory_format=torch.contiguous_format)
        normalized: Tensor = F.normalize(view, *self._statistics, inplace=True)
        return normalized

    def cut_batch(self, images: Sequence[Tensor], cuts: Sequence[Cut]) -> Tensor:
        """The views of images (H, W, 3), uint8, of any sizes, on their device: (N, 3, S, S).

        They are those of `cut` but for Pillow's rounding between the axes: a few values differ by 1 or 2 of 256.
        Bicubic and Lanczos filters overshoot, and Pillow clips that after its first axis, which depends on the
        sizes: at sharp edges they differ by some levels more.
        """
        device = images[0].device
        height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
        pixels = torch.zeros(len(images), height, width, 3, dtype=torch.uint8, device=device)
        for place, image in zip(pixels, images, strict=True):
            place[: image.shape[0], : image.shape[1]] = image
        numbers = torch.tensor([[*cut[0], *cut[1], *cut[2], *cut[3], cut[4]] for cut in cuts])
        columns = numbers.to(device, non_blocking=True).unbind(1)
        across = self._weights(width, *columns[:8:2], columns[8])
        down = self._weights(height, *columns[1:8:2], torch.zeros_like(columns[8]))
        rows = pixels.permute(0, 3, 1, 2).float() @ across.mT[:, None]
        # As Pillow does after each pass; torch's `round` would turn halves into even numbers.
        rows = rows.add_(0.5).floor_().clamp_(0, 255)
        views = (down[:, None] @ rows).add_(0.5).floor_().clamp_(0, 255)
        mean, std = self._statistics.to(device, non_blocking=True)
        return views.sub_(mean.view(3, 1, 1)).div_(std.view(3, 1, 1))

    def _weights(self, length: int, *numbers: Tensor) -> Tensor:
        """Weights (N, S, length) of an image's pixels in those of its view, along one axis; each number is (N,)."""
        start, size, resized, window, mirrored = numbers
        place = torch.arange(self.image_size, device=start.device)
        place = torch.where(mirrored[:, None] > 0, place.flip(0), place) + window[:, None]  # (N, S)
        scale = (size / resized)[:, None]
        centre = ((place + 0.5) * scale + start[:, None])[..., None]
        source = torch.arange(length, device=start.device)
        # Pillow widens its filters where it shrinks.
        distance = (source + 0.5 - centre) / scale.clamp(min=1)[..., None]
        inside = (source >= start[:, None]) & (source < (start + size)[:, None])  # (N, length)
        shown = (place >= 0) & (place < resized[:, None])
        weights = _filter(distance.abs(), self.interpolation) * inside[:, None]
        total = weights.sum(dim=2, keepdim=True).clamp(min=1e-3)  # 0 outside the image
        return weights / total * shown[..., None]

    def to_picture(self, view: Tensor) -> npt.NDArray[np.uint8]:
        """Undo the normalisation: (3, S, S) -> (S, S, 3), uint8."""
        mean, std = self._statistics
        picture = view.detach().float().cpu() * std.view(3, 1, 1) + mean.view(3, 1, 1)
        picture = picture.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
        return np.asarray(picture)

    @property
    def resized_side(self) -> int:
        """Length of the shorter side before S x S pixels are cut out."""
        if self.resize is not None:
            return self.resize
        shown = 1 if self.augmentation == "multi_resolution" else CROP_FRACTION
        return round(self.image_size / shown)

    def _resized(self, size: Size) -> Size:
        """The size of the whole image before S x S pixels are cut out."""
        side = self.resized_side
        if not self.keep_aspect:
            return side, side
        return _both(size, lambda x: side if x == min(size) else int(side * x / min(size)))

    @cached_property
    def _random_part(self) -> v2.RandomResizedCrop:
        return v2.RandomResizedCrop(self.image_size)

    @cached_property
    def _statistics(self) -> Tensor:
        """Mean and standard deviation (2, 3) in units of a byte, so that bytes need no rescaling."""
        return (torch.tensor([self.mean, self.std], dtype=torch.float64) * 255).float()


def _both(size: Size, change: Callable[[int], int]) -> Size:
    return change(size[0]), change(size[1])


def _random_window(cut: Cut, side: int) -> Cut:
    """A random place for the view in the resized part; where that is smaller, it is centred."""

    def start(length: int) -> int:
        room = length - side
        return int(torch.randint(room + 1, ())) if room >= 0 else -(-room // 2)

    return cut._replace(window=_both(cut.resized, start))


def _filter(x: Tensor, interpolation: Interpolation) -> Tensor:
    """Pillow's filters at distances x >= 0, in pixels."""
    match interpolation:
        case "bilinear":
            return (1 - x).clamp(min=0)
        case "bicubic":  # a = -0.5, zero from 2 on
            near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
            return torch.where(x < 1, near, far) * (x < 2)
        case "lanczos":
            return torch.sinc(x) * torch.sinc(x / 3) * (x < 3)
