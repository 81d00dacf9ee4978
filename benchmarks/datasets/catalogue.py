"""The datasets of the four papers: what is known of them before they are there, and readers of their lists.

Imports nothing heavy, since every start reads the names in it.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks.console.printing import reason
from benchmarks.datasets.listing import (
    DatasetError,
    Listing,
    NotFoundError,
    counts_text,
    find,
    read_lines,
    reading,
)

DatasetName = Literal["glyphs", "cub", "cars", "sop", "inshop", "folder", "table"]
Augmentation = Literal["multi_resolution", "random_crop", "random_resized_crop", "none"]
Interpolation = Literal["bilinear", "bicubic", "lanczos"]

SETTINGS = ("root", "table", "test_classes", "class_level", "known_classes", "camera", "sequence")
"""Settings of `data` that decide what is listed."""

Images = list[tuple[str, int]]
"""Paths below a dataset's folder, and numbers of classes, from 1."""


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
            _download(self.pml, root)
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
    images = _pml_images("CUB", folder, *lists, archive="CUB_200_2011")
    paths = [path for path, _ in images]
    classes = [path.split("/")[1] for path in paths]
    parts = ["train" if label <= 100 else "test" for _, label in images]
    return Listing("cub", folder, "CUB_200_2011", paths, classes, parts)


def read_sop(root: Path) -> Listing:
    """Stanford Online Products: 120,053 photographs of 22,634 products from eBay offers."""
    folder, _ = find(root, ["Ebay_train.txt"])
    lists = "Ebay_train.txt", "Ebay_test.txt"
    images = _pml_images("StanfordOnlineProducts", folder, *lists, archive=SOP)
    paths = [path for path, _ in images]
    classes = [f"{label:05}" for _, label in images]  # also sorted by number when sorted as text
    parts = ["train" if label <= 11_318 else "test" for _, label in images]
    return Listing("sop", folder, SOP, paths, classes, parts)


SOP = "Stanford_Online_Products"


def read_cars(root: Path) -> Listing:
    """Cars-196: 16,185 photographs of 196 models of cars, in the owners' two layouts or that of PML's download.

    For classification, the owners split the images of every class into a training and a test folder. For retrieval,
    both folders are read and the classes are split: 1-98 train, 99-196 test (Oh Song et al., CVPR 2016). A class is
    named by its id and name ("014 Audi TTS Coupe 2012"), so that sorted names follow the ids.
    """
    folder, marker = find(root, ["cars_train", "car_ims", "car_data"])  # each layout has its own
    if marker == "cars_train":
        layout, index = "devkit", folder / "devkit"
        images = _annotated(index / "cars_train_annos.mat", "fname", "cars_train/")
        # A download of its own: the devkit's list of these images has no classes.
        images += _annotated(folder / "cars_test_annos_withlabels.mat", "fname", "cars_test/")
        names = [*_variable(index / "cars_meta.mat", "class_names")]
    elif marker == "car_ims":
        layout, file = "combined", folder / "cars_annos.mat"
        images, names = _annotated(file, "relative_im_path"), [*_variable(file, "class_names")]
    else:  # by PML from Kaggle; names of folders have no "/"
        layout, names = "kaggle", [name.strip() for name in read_lines(folder / "names.csv")]
        images = _pml_images("Cars196", folder, "anno_train.csv", "anno_test.csv")
    with reading(folder):
        classes = [f"{class_id:03d} {names[class_id - 1]}" for _, class_id in images]
    paths = [path for path, _ in images]
    parts = ["train" if class_id <= 98 else "test" for _, class_id in images]
    return Listing("cars", folder, layout, paths, classes, parts)


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


def _annotated(file: Path, name_field: str, above: str = "") -> Images:
    """Read the paths and classes of a .mat file's structs `annotations`."""
    with reading(file):
        annotations = _variable(file, "annotations")
        rows = zip(annotations[name_field], annotations["class"], strict=True)
        return [(f"{above}{name}", int(class_id)) for name, class_id in rows]


def _variable(file: Path, name: str) -> Any:
    """A variable of a .mat file, without the dimensions of length one that MATLAB gives to every scalar."""
    from scipy.io import loadmat  # takes a while to import

    # SciPy would not say that a file is missing; `squeeze_me` turns a single row into a scalar.
    with reading(file), file.open("rb") as opened:
        return loadmat(opened, variable_names=[name], squeeze_me=True)[name].reshape(-1)


def _pml_images(dataset: str, folder: Path, *lists: str, archive: str | None = None) -> Images:
    """All images of a class of `pytorch_metric_learning.datasets`, in its order.

    Args:
        lists: Files that it reads, for the error.
        archive: The name that it expects of the folder.
    """
    from pytorch_metric_learning import datasets  # imports torch

    place = folder.absolute()
    if archive is not None and place.name != archive:
        place = place.resolve()  # a link may have any name
        if place.name != archive:
            raise DatasetError(f"{folder}: expected the name {archive}, as unpacked; rename it")
    root = place if archive is None else place.parent
    try:
        images = getattr(datasets, dataset)(str(root))
    except Exception as error:  # damaged lists make it raise almost any error
        raise DatasetError(
            f"{folder}: {' or '.join(lists)}: cannot be read ({type(error).__name__}: {reason(error)}); restore it"
        ) from error
    paths = [path.removeprefix(f"{place}/") for path in images.paths]
    return list(zip(paths, images.labels, strict=True))


def _download(dataset: str, root: Path) -> None:
    """Download a dataset of PML into a folder: whole, or not at all."""
    from pytorch_metric_learning import datasets

    print(f"{root}: PML downloads {dataset} into it", file=sys.stderr)
    with TemporaryDirectory(prefix=".download-", dir=root) as folder:
        new = Path(folder, "new")
        try:
            getattr(datasets, dataset)(str(new), download=True)
        except Exception as error:  # of the network, the archive, the disk
            raise DatasetError(
                f"{root}: {dataset} cannot be downloaded ({type(error).__name__}: {reason(error)}); try again, "
                "or unpack the archive there by hand (docs/datasets.md)"
            ) from error
        for path in sorted(new.iterdir()):
            if (place := root / path.name).exists():
                raise DatasetError(f"{place}: is in the way of a download; name another data.root")
            path.rename(place)


_CUB = {"train": (5_864, 100), "test": (5_924, 100)}
_CARS = {"train": (8_054, 98), "test": (8_131, 98)}
_SOP = {"train": (59_551, 11_318), "test": (60_502, 11_316)}
_INSHOP = {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)}
_PUBLISHED = (
    DatasetInfo("cub", read_cub, _CUB, "CUB"),
    DatasetInfo("cars", read_cars, _CARS, "Cars196"),
    DatasetInfo("sop", read_sop, _SOP, "StanfordOnlineProducts"),
    DatasetInfo("inshop", read_inshop, _INSHOP),
)
IMAGE_DATASETS = {info.name: info for info in _PUBLISHED}
