"""Your own images as torchvision's `ImageFolder`, for a training of your own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torchvision import datasets

from benchmarks.datasets import folder
from benchmarks.datasets.image_files import read_image
from benchmarks.datasets.listing import DatasetError


class ImageFolder(datasets.ImageFolder):
    """torchvision's `ImageFolder`, with the classes, files and pixels that a run on `data.dataset folder` has.

    A class is a folder that holds images, at any depth; links are followed, hidden files left out. Photographs are
    turned upright.

    Args:
        root: The folder that holds the folders of the classes.
        transform: View of an image (RGB).
        leave_out_damaged: Decode every image first, and name and leave out those that cannot be decoded.

    Raises:
        DatasetError: if the folder does not hold two classes; when an item is read, if it cannot be decoded; the
            file is named.

    Example:
        ImageFolder("photographs", transforms.ToTensor())
    """

    samples: list[tuple[str, int]]

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Any], Any] | None = None,
        *,
        leave_out_damaged: bool = False,
    ) -> None:
        self._listing = folder.read(Path(root), 0.5)  # both halves of the classes are used
        super().__init__(root, transform, loader=partial(read_image, upright=True))
        if leave_out_damaged:
            self.samples = self.imgs = [row for row in self.samples if self._is_readable(row[0])]
            self.targets = [label for _, label in self.samples]

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        classes = list(dict.fromkeys(self._listing.classes))
        return classes, {name: label for label, name in enumerate(classes)}

    def make_dataset(  # a static method there
        self, directory: str | Path, class_to_idx: dict[str, int], *settings: Any, **others: Any
    ) -> list[tuple[str, int]]:
        rows = zip(self._listing.paths, self._listing.classes, strict=True)
        return [(f"{self._listing.root / path}", class_to_idx[name]) for path, name in rows]

    def _is_readable(self, path: str) -> bool:
        try:
            self.loader(path)
        except DatasetError as error:
            print(f"left out: {error}")
            return False
        return True
