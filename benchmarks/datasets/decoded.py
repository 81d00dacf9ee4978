"""Photographs that are decoded once, and whose views are cut where the network is."""

import math
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Self

import joblib
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.console.printing import progress_bar
from benchmarks.datasets.images import ImageSet, Key, draws_apart, seed_draws
from benchmarks.datasets.listing import DatasetError, reading


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
        self._bytes = [3 * math.prod(self._size(i)) for i in range(len(images))]
        self.nbytes = sum(self._bytes)

    def open(self) -> Self:
        """Decode the images.

        Raises:
            DatasetError: if one cannot be decoded.
        """
        stored = torch.empty(self.nbytes, dtype=torch.uint8)
        parts = stored.split(self._bytes)
        Image.init()  # opening an image loads them, which is not thread-safe
        with ThreadPool(joblib.cpu_count()) as pool:  # decoding holds no lock
            decode = self.images.image
            tasks = pool.imap(lambda i: np.array(decode(i)), range(len(parts)), chunksize=16)
            bar = progress_bar(tasks, total=len(parts), desc="decode", unit="image", leave=False)
            shapes = []
            for i, (part, pixels) in enumerate(zip(parts, bar, strict=True)):
                if pixels.size != len(part):
                    path = self._path(i)
                    raise DatasetError(f"{path}: has changed while it was decoded; start again")
                part.copy_(torch.from_numpy(pixels).flatten())
                shapes.append(pixels.shape)
        parts = stored.to(self.device).split(self._bytes)
        self._pixels = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return self

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, int]:
        [item] = self.__getitems__([key])
        return item

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple[Tensor, int, int]]:
        """The items of a batch; a data loader asks for them at once."""
        views = self.images.views
        indices = [key[0] if isinstance(key, tuple) else key for key in keys]
        pixels, cuts = [self._pixels[i] for i in indices], []
        with draws_apart():
            for key, image in zip(keys, pixels, strict=True):
                height, width, _ = image.shape
                make = views.middle
                if isinstance(key, tuple):
                    seed_draws(*key)
                    make = views.draw
                cuts.append(make((width, height)))
        if self.device.type == "cpu":
            pictures = [Image.fromarray(image.numpy()) for image in pixels]
            made = [views.cut(*pair) for pair in zip(pictures, cuts, strict=True)]
        else:
            made = [*views.cut_batch(pixels, cuts)]
        return [(view, int(self.labels[i]), i) for view, i in zip(made, indices, strict=True)]

    def _size(self, index: int) -> tuple[int, int]:
        """Width and height, of which a turn by the EXIF orientation may exchange the names."""
        if self.images.listing.boxes is not None:
            return self.images.image(index).size
        with reading(path := self._path(index)), Image.open(path) as file:
            size: tuple[int, int] = file.size
        return size

    def _path(self, index: int) -> Path:
        return self.images.listing.root / self.images.name(index)
