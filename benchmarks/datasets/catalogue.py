"""The datasets of the four papers: what is known of them before they are there, and readers of their lists.

Imports nothing heavy, since every start reads the names in it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.datasets import cars
from benchmarks.datasets.listing import (
    DatasetError,
    Listing,
    NotFoundError,
    counts_text,
    find,
    read_lines,
    reading,
)
from benchmarks.datasets.pml_datasets import download, pml_images

DatasetName = Literal["glyphs", "cub", "cars", "sop", "inshop", "folder", "table"]
Augmentation = Literal["multi_resolution", "random_crop", "random_resized_crop", "none"]
Interpolation = Literal["bilinear", "bicubic", "lanczos"]

SETTINGS = ("root", "table", "test_classes", "class_level", "known_classes", "camera", "sequence")
"""Settings of `data` that decide what is listed."""


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset, whether it is there or not."""

    name: str  # in `data.dataset`
    read: Callable[[Path], Listing]  # finds it in a folder, in any layout
    counts: Mapping[str, tuple[int, int]]  # the published images and classes of each part
    pml: str | None = None  # the class of `pytorch_metric_learning.datasets`, which downloads it

    def listing(self, root: Path, *, fetch: bool = False) -> Listing:
        """Its images in a folder, or a DatasetError; with `fetch`, PML may download them."""
        try:
            return self.read(root)
        except NotFoundError as error:
            if self.pml is None:
                raise
            if not fetch:
                raise DatasetError(f"{error}, or set data.download to true") from error
        from filelock import FileLock

        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".download.lock"):  # of several processes, one downloads
            with suppress(NotFoundError):
                return self.read(root)
            download(self.pml, root)
        return self.read(root)

    def load(self, root: Path, *, fetch: bool = False) -> Listing:
        """As `listing` does; raises a DatasetError if they are not as published, too."""
        listing = self.listing(root, fetch=fetch)
        if (counts := listing.counts()) != self.counts:
            raise DatasetError(
                f"{listing.root}: lists {counts_text(counts) or 'no images'}, but {self.name} has "
                f"{counts_text(self.counts)} (images / classes); the index files are incomplete or of another split"
            )
        return listing


def read_cub(root: Path) -> Listing:
    """Caltech-UCSD Birds-200-2011: 11,788 photographs of 200 species of birds.

    The first 100 species train and the others test, as since Oh Song et al. (CVPR 2016). A folder of `images` names
    its class: 001.Black_footed_Albatross.
    """
    folder, _ = find(root, ["images.txt"])
    lists = "images.txt", "image_class_labels.txt"
    images = pml_images("CUB", folder, *lists, archive="CUB_200_2011")
    paths = [path for path, _ in images]
    classes = [path.split("/")[1] for path in paths]
    parts = ["train" if label <= 100 else "test" for _, label in images]
    return Listing("cub", folder, "CUB_200_2011", paths, classes, parts)


def read_sop(root: Path) -> Listing:
    """Stanford Online Products: 120,053 photographs of 22,634 products from eBay offers."""
    folder, _ = find(root, ["Ebay_train.txt"])
    lists = "Ebay_train.txt", "Ebay_test.txt"
    images = pml_images("StanfordOnlineProducts", folder, *lists, archive=SOP)
    paths = [path for path, _ in images]
    classes = [f"{label:05}" for _, label in images]  # also sorted by number when sorted as text
    parts = ["train" if label <= 11_318 else "test" for _, label in images]
    return Listing("sop", folder, SOP, paths, classes, parts)


SOP = "Stanford_Online_Products"


def read_inshop(root: Path) -> Listing:
    """In-Shop Clothes Retrieval of DeepFashion: 52,712 images of 7,982 items.

    `list_eval_partition.txt` gives for every image the item that it shows, and its part: train, query or gallery.

    The images come in two sizes with the same names below `img` and `img_highres`; the choice changes results. The
    benchmark's README describes `img`, centred and resized to 256 x 256, so `img` is read if both are there.
    """
    partition = "list_eval_partition.txt"
    folder, index = find(root, [f"Eval/{partition}", partition])
    above, images = find(folder, ["Img/img", "img", "Img/img_highres", "img_highres"])
    layout = (above / images).name
    with reading(folder / index):
        rows = map(str.split, read_lines(folder / index)[2:])
        names, items, parts = zip(*rows, strict=True)
    paths = [f"{layout}{name.removeprefix('img')}" for name in names]
    return Listing("inshop", (above / images).parent, layout, paths, items, parts)


_CUB = {"train": (5_864, 100), "test": (5_924, 100)}
_CARS = {"train": (8_054, 98), "test": (8_131, 98)}
_SOP = {"train": (59_551, 11_318), "test": (60_502, 11_316)}
_INSHOP = {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)}
_PUBLISHED = (
    DatasetInfo("cub", read_cub, _CUB, "CUB"),
    DatasetInfo("cars", cars.read, _CARS, "Cars196"),
    DatasetInfo("sop", read_sop, _SOP, "StanfordOnlineProducts"),
    DatasetInfo("inshop", read_inshop, _INSHOP),
)
IMAGE_DATASETS = {info.name: info for info in _PUBLISHED}
