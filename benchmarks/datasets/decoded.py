"""Photographs that are decoded once, and whose views are cut where the network is."""

import math
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.datasets.image_files import for_each
from benchmarks.datasets.images import ImageSet, Key
from benchmarks.datasets.listing import reading


class DecodedImages(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """The images of a set, decoded once, and their views, cut on the device that holds them.

    A view of `(i, seed)` shows what the set's own view of it shows: the same pixels on a CPU, where Pillow makes
    both, and those of `ImageViews.cut_batch` on a GPU.

    Args:
        images: The set.
        device: Where the images are held, and the views made.

    Attributes:
        nbytes: Bytes that the decoded images take.

    Raises:
        DatasetError: if a file cannot be read.
    """

    def __init__(self, images: ImageSet, device: torch.device) -> None:
        self.images, self.device = images, device
        self.labels, self.num_classes = images.labels, images.num_classes
        self.ranking = images.ranking
        self.nbytes = 3 * sum(math.prod(self._size(i)) for i in range(len(images)))

    def open(self) -> Self:
        """Decode the images.

        Raises:
            DatasetError: if one cannot be decoded.
        """

        def decode(index: int) -> Tensor:
            return torch.from_numpy(np.array(self.images.image(index))).to(self.device)

        self._pixels = for_each(len(self), decode, "decode")
        return self

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, int]:
        [item] = self.__getitems__([key])
        return item

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple[Tensor, int, int]]:
        """The items of a batch; a data loader asks for them at once."""
        indices = [key[0] if isinstance(key, tuple) else key for key in keys]
        pixels = [self._pixels[i] for i in indices]
        sizes = ((image.shape[1], image.shape[0]) for image in pixels)
        cuts = [*map(self.images.cut, keys, sizes)]
        if self.device.type == "cpu":
            pictures = (Image.fromarray(image.numpy()) for image in pixels)
            views = [*map(self.images.views.cut, pictures, cuts)]
        else:
            views = [*self.images.views.cut_batch(pixels, cuts)]
        return [(view, int(self.labels[i]), i) for view, i in zip(views, indices, strict=True)]

    def _size(self, index: int) -> tuple[int, int]:
        """Width and height, of which a turn by the EXIF orientation may exchange the names."""
        listing = self.images.listing
        if listing.boxes is not None:
            return self.images.image(index).size
        with reading(path := listing.root / self.images.name(index)), Image.open(path) as file:
            size: tuple[int, int] = file.size
        return size
