"""Cars-196: 16,185 photographs of 196 models of cars.

For classification, the owners split the images of every class into a training and a test folder. For retrieval,
both folders are read and the classes are split: 1-98 train, 99-196 test (Oh Song et al., CVPR 2016). A class is
named by its id and name ("014 Audi TTS Coupe 2012"), so that sorted names follow the ids.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.datasets.listing import (
    DatasetError,
    DatasetInfo,
    Listing,
    find,
    read_lines,
    reading,
)

TRAINING_CLASSES = 98
OFFICIAL_PARTS = ("train", "test")  # for classification; both are read

Images = list[tuple[str, int]]
"""Paths and ids of classes."""


def read(root: Path) -> Listing:
    """List the images in a folder. Of several layouts the first of `LAYOUTS` is read: the owners' own.

    Raises:
        DatasetError: if there are no images; or, naming the index file, for one that is missing or wrong.
    """
    folder, marker = find(root, LAYOUTS)
    layout, read_layout = LAYOUTS[marker]
    images, names = read_layout(folder)
    with reading(folder):
        classes = [f"{class_id:03d} {names[class_id - 1]}" for _, class_id in images]
    return Listing(
        name="cars",
        root=folder,
        layout=layout,
        paths=[path for path, _ in images],
        classes=classes,
        parts=["train" if class_id <= TRAINING_CLASSES else "test" for _, class_id in images],
    )


def _devkit(folder: Path) -> tuple[Images, Sequence[str]]:
    """Read the owners' annotations, with a file and a folder of images for each of their parts."""
    labelled = folder / "cars_test_annos_withlabels.mat"  # its download was separate
    if not labelled.exists():
        labelled = folder / "devkit" / labelled.name
    if not labelled.exists():
        raise DatasetError(
            f"{labelled}: is missing, and the devkit's own list of these images has no classes; get this file, "
            f"which was a download of its own, and put it into {folder}"
        )
    files = folder / "devkit" / "cars_train_annos.mat", labelled
    images = [
        (f"cars_{part}/{name}", class_id)
        for file, part in zip(files, OFFICIAL_PARTS, strict=True)
        for name, class_id in _annotated(file, "fname")
    ]
    return images, _names(folder / "devkit" / "cars_meta.mat")


def _combined(folder: Path) -> tuple[Images, Sequence[str]]:
    file = folder / "cars_annos.mat"
    return _annotated(file, "relative_im_path"), _names(file)


def _kaggle(folder: Path) -> tuple[Images, Sequence[str]]:
    """Read rows of FILE,x1,y1,x2,y2,class without a header; images lie in a folder for each class."""
    names = [name.strip() for name in read_lines(folder / "names.csv")]
    images = []
    for part in OFFICIAL_PARTS:
        with reading(file := folder / f"anno_{part}.csv"):
            for line in read_lines(file):
                name, *_, class_id = line.split(",")
                of_class = names[int(class_id) - 1].replace("/", "-")
                images.append((f"car_data/car_data/{part}/{of_class}/{name}", int(class_id)))
    return images, names


LAYOUTS: dict[str, tuple[str, Callable[[Path], tuple[Images, Sequence[str]]]]] = {
    "cars_train": ("devkit", _devkit),
    "car_ims": ("combined", _combined),
    "car_data": ("kaggle", _kaggle),
}


def _annotated(file: Path, name_field: str) -> Images:
    """The paths and classes of the structs `annotations` of a .mat file."""
    annotations = _load(file, "annotations")
    with reading(file):
        rows = zip(annotations[name_field], annotations["class"], strict=True)
        return [(str(name), int(class_id)) for name, class_id in rows]


def _names(file: Path) -> list[str]:
    return [str(name) for name in _load(file, "class_names")]


def _load(file: Path, variable: str) -> Any:
    """A variable of a .mat file, without the dimensions of length one that MATLAB gives to every scalar.

    Such a file holds only data: SciPy runs no code from it.
    """
    from scipy.io import loadmat  # takes a while to import

    # SciPy would not say that a file is missing; `squeeze_me` turns a single row into a scalar.
    with reading(file), file.open("rb") as opened:
        return loadmat(opened, variable_names=[variable], squeeze_me=True)[variable].reshape(-1)


INFO = DatasetInfo(
    name="cars",
    read=read,
    counts={"train": (8_054, 98), "test": (8_131, 98)},
    by_hand="""\
The owners' links are dead (https://ai.stanford.edu/~jkrause/cars/car_dataset.html). Put one of these into
data.root:

- car_devkit.tgz, cars_train.tgz and cars_test.tgz, all unpacked, and cars_test_annos_withlabels.mat beside the
  folder devkit: the owners' archives, from somebody who has them;
- car_ims.tgz, unpacked, and cars_annos.mat: the same images in one folder;
- https://www.kaggle.com/datasets/jutrera/stanford-car-dataset-by-classes-folder, unpacked: a copy by others, which
  pytorch-metric-learning reads too.""",
)
