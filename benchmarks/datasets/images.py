"""A dataset of image files for the runner."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from PIL import Image

from benchmarks.datasets.contents import ImageDigests, content_digest, listed_digests
from benchmarks.datasets.image_files import read_image
from benchmarks.datasets.listing import DatasetError, Listing
from benchmarks.datasets.queries import Ranking
from benchmarks.datasets.splits import Split, limited, shuffled, validation_fold
from benchmarks.datasets.transforms import Cut, ImageViews, Size

Key = int | tuple[int, int]
"""Request of a test view, by the image's index, or of a training view: (index, seed)."""


class ImageSet(torch.utils.data.Dataset[tuple[torch.Tensor, int, int]]):
    """One split of a `Listing`; its classes are disjoint between splits, except in a table of known classes.

    `dataset[i]` is the test view of an image, `dataset[i, seed]` a training view: a pure function of (i, seed). No
    global random state is changed.

    Args:
        split: "train" or "test", or "all" classes, or the two parts of the training classes, "development" and
            "validation", to choose settings without the test classes.
        views: Makes training and test views of an image. Without them, images can be counted.
        fold, folds: Which part of the training classes is "validation", and of how many.
        max_classes: Keep only the first classes of the split, by name; default: all.
        draw_seed: Keep as many classes, drawn by this seed, in place of the first ones.

    Shape:
        An item is (image, label, index): image (3, S, S), float32; label in 0..num_classes-1, in the order of the
        classes' names; index, in the order of the listing, as asked for.

    Attributes:
        labels: (len,) int64.
        ranking: Queries and gallery; None if each image is ranked against all others.
        view: How a test view is cut out of an image: "image_size", "resize", "keep_aspect".

    Raises:
        DatasetError: if a listed file is missing; when an item is read, if it cannot be decoded, also in a
            data-loader worker.
        ValueError: for an impossible fold.
    """

    views: ImageViews

    def __init__(
        self,
        listing: Listing,
        split: Split = "train",
        *,
        views: ImageViews | None = None,
        fold: int = 0,
        folds: int = 4,
        max_classes: int | None = None,
        draw_seed: int | None = None,
    ) -> None:
        self.listing = listing
        if views is not None:
            self.views = views
        self.layout, self.fingerprint = listing.layout, listing.fingerprint
        parts, classes = np.array(listing.parts), np.array(listing.classes)
        rows = np.flatnonzero(((parts == "train") != (split == "test")) | (split == "all"))
        names = np.unique(classes[rows]).tolist()
        if split in ("development", "validation"):
            names = validation_fold(names, fold, folds)[split == "validation"]
        names = limited(names, max_classes, draw_seed)
        rows = rows[np.isin(classes[rows], names)]
        self.class_names: list[str] = names
        self.num_classes = len(names)
        self.labels = torch.from_numpy(np.searchsorted(names, classes[rows]))
        self._rows: list[int] = rows.tolist()
        self.ranking = self._ranking(split)

    @property
    def content(self) -> str:
        """That of all listed images, the same for every split; it reads all files."""
        return content_digest(self.listing)

    def copies(self) -> int:
        """Number of images with the same pixels as another of their class, and not of their group."""
        pixels = [file.pixels for file in self.digests]
        groups: Iterable[int] = range(len(self))
        if self.ranking is not None and self.ranking.groups is not None:
            groups = self.ranking.groups.tolist()
        alike = defaultdict(list)
        for *key, group in zip(pixels, self.labels.tolist(), groups, strict=True):
            alike[tuple(key)].append(group)
        return sum(len(copies) for copies in alike.values() if len({*copies}) > 1)

    @property
    def digests(self) -> list[ImageDigests]:
        """Those of the split's images; it reads all listed files."""
        digests = listed_digests(self.listing)
        return [digests[row] for row in self._rows]

    @property
    def view(self) -> dict[str, object]:
        kept = {name: getattr(self.views, name) for name in ("image_size", "resize", "keep_aspect")}
        return {**kept, "crop_to_box": False}  # as older records have it, which stay comparable

    def _ranking(self, split: Split) -> Ranking | None:
        parts = None if split == "test" else ["test"] * len(self)
        if split == "validation" and "query" in self.listing.parts:
            parts = np.where(self._held_out_queries(), "query", "gallery").tolist()
        return Ranking.listed(self.listing, self._rows, parts)

    def _held_out_queries(self) -> torch.Tensor:
        """Make queries of about half of an item's images, as in the test part; a single image is in the gallery.

        The choice depends on the item's name and the order of its paths, which are the same in every layout.
        """
        is_query = torch.zeros(len(self), dtype=torch.bool)
        for label, item in enumerate(self.class_names):
            images = sorted((self.labels == label).nonzero().flatten().tolist(), key=self.name)
            places = shuffled(range(len(images)), salt=f"{item} ")
            is_query[[images[place] for place in places[: len(places) // 2]]] = True
        return is_query

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int, int]:
        [item] = self.__getitems__([key])
        return item

    def __getitems__(self, keys: Sequence[Key]) -> list[tuple[torch.Tensor, int, int]]:
        """The items of a batch; an image is decoded once for views that follow each other."""
        items, last = [], None
        for key in keys:
            index = key[0] if isinstance(key, tuple) else key
            if index != last:
                image, last = self.image(index), index
            view = self.views.cut(image, self.cut(key, image.size))
            items.append((view, int(self.labels[index]), index))
        return items

    def cut(self, key: Key, size: Size) -> Cut:
        """Where a view is cut out of an image of this size."""
        if not isinstance(key, tuple):
            return self.views.middle(size)
        state = np.random.SeedSequence(key).generate_state(1, np.uint64)
        with torch.random.fork_rng(devices=[]):  # torchvision's transforms draw from no other
            torch.random.default_generator.manual_seed(int(state[0]))
            return self.views.draw(size)

    def image(self, index: int) -> Image.Image:
        """An image as RGB, upright and cut to its box where listed so, before any view."""
        listing, row = self.listing, self._rows[index]
        box = None if listing.boxes is None else listing.boxes[row]
        try:
            return read_image(listing.root / listing.paths[row], upright=listing.upright, box=box)
        except DatasetError as error:
            raise listing.wrong(row, error) from error

    def name(self, index: int) -> str:
        """The path of an image, below the folder of the dataset."""
        return self.listing.paths[self._rows[index]]

    def to_picture(self, image: torch.Tensor) -> np.ndarray:
        """Undo the normalisation of an item's image: (3, S, S) float -> (S, S, 3) uint8."""
        return self.views.to_picture(image)
