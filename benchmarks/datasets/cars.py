"""Cars-196: 16,185 photographs of 196 models of cars.

Jonathan Krause, Michael Stark, Jia Deng and Li Fei-Fei, "3D Object Representations for Fine-Grained
Categorization", 3dRR 2013. For classification, the owners split the images of every class into a training and a
test folder. For retrieval, both folders are read and the classes are split: 1-98 train, 99-196 test (Song, Xiang,
Jegelka and Savarese, "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016).

All layouts have the same ids and names of classes. A class is named by both ("014 Audi TTS Coupe 2012"), so that
sorted names follow the ids; the names alone would sort differently.

In the files a box is (x1, y1, x2, y2): its first and last column and row, counted from 1 as in MATLAB. Here it is
(x1 - 1, y1 - 1, x2, y2).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.datasets.listing import (
    Box,
    DatasetError,
    DatasetInfo,
    Listing,
    check_kind,
    folders_below,
    read_lines,
    reading,
)

TRAINING_CLASSES = 98

CORNERS = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
OFFICIAL_PARTS = ("train", "test")  # for classification; both are read


class _Image(NamedTuple):
    path: str
    class_id: int
    box: Box


def read(root: Path) -> Listing:
    """List the images in a folder, or in the first of its folders that has them.

    If a folder has several layouts, the first in the order of `INFO.layouts` is read: the owners' own, if it is
    there.

    Raises:
        DatasetError: if there are no images; or, naming the index file, for one that is missing or wrong.
    """
    for folder in folders_below(root):
        for marker, read_layout in LAYOUTS.items():
            if (folder / marker).exists():
                return read_layout(folder)
    raise DatasetError(
        f"{root}: found no {', '.join(LAYOUTS)}, here or in the folders here; name the folder that "
        "holds one of them"
    )


def _official(layout: str, index: str, image_folders: Sequence[str], folder: Path) -> Listing:
    """Read the owners' annotations, with a file and a folder of images for each of their parts."""
    labelled = folder / "cars_test_annos_withlabels.mat"  # its download was separate
    if not labelled.exists():
        labelled = folder / index / labelled.name
    files = folder / index / "cars_train_annos.mat", labelled
    images = [
        image
        for file, image_folder in zip(files, image_folders, strict=True)
        for image in _annotated(file, "fname", f"{image_folder}/")
    ]
    return _listing(folder, layout, images, _names(folder / index / "cars_meta.mat"))


def _combined(folder: Path) -> Listing:
    file = folder / "cars_annos.mat"
    return _listing(folder, "combined", _annotated(file, "relative_im_path"), _names(file))


def _kaggle(folder: Path) -> Listing:
    """Read rows of FILE,x1,y1,x2,y2,class without a header; images lie in a folder for each class."""
    file = folder / "names.csv"
    names = [name.strip() for name in read_lines(file)]
    images = []
    for part in OFFICIAL_PARTS:
        file = folder / f"anno_{part}.csv"
        with reading(file):
            for line in read_lines(file):
                name, *row = line.split(",")
                image = _image(name, *row)
                class_folder = names[image.class_id - 1].replace("/", "-")
                path = f"car_data/car_data/{part}/{class_folder}/{name}"
                images.append(image._replace(path=path))
    return _listing(folder, "kaggle", images, names)


LAYOUTS: dict[str, Callable[[Path], Listing]] = {
    "cars_train": partial(_official, "devkit", "devkit", ("cars_train", "cars_test")),
    "car_ims": _combined,
    "car_data": _kaggle,
    "labels/cars_train_annos.mat": partial(_official, "horde", "labels", OFFICIAL_PARTS),
}


def _annotated(file: Path, name_field: str, prefix: str = "") -> list[_Image]:
    """The structs `annotations` of a .mat file."""
    annotations = _load(file, "annotations")
    with reading(file):
        rows = zip(*(annotations[field] for field in (name_field, *CORNERS, "class")), strict=True)
        return [_image(f"{prefix}{name}", *row) for name, *row in rows]


def _names(file: Path) -> list[str]:
    return [str(name) for name in _load(file, "class_names")]


def _load(file: Path, variable: str) -> Any:
    """A variable of a .mat file, without the dimensions of length one that MATLAB gives to every scalar.

    Such a file holds only data: SciPy runs no code from it.
    """
    from scipy.io import loadmat  # takes a while to import

    with reading(file):
        check_kind(file)
        with file.open("rb") as content:  # `squeeze_me` turns a single row into a scalar
            return loadmat(content, variable_names=[variable], squeeze_me=True)[variable].reshape(
                -1
            )


def _image(path: str, x1: Any, y1: Any, x2: Any, y2: Any, class_id: Any) -> _Image:
    return _Image(path, int(class_id), (int(x1) - 1, int(y1) - 1, int(x2), int(y2)))


def _listing(folder: Path, layout: str, images: list[_Image], names: Sequence[str]) -> Listing:
    with reading(folder):
        classes = [f"{image.class_id:03d} {names[image.class_id - 1]}" for image in images]
    return Listing(
        name="cars",
        root=folder,
        layout=layout,
        paths=[image.path for image in images],
        classes=classes,
        parts=["train" if image.class_id <= TRAINING_CLASSES else "test" for image in images],
        boxes=[image.box for image in images],
    )


INFO = DatasetInfo(
    name="cars",
    title="Cars-196",
    read=read,
    counts={"train": (8_054, 98), "test": (8_131, 98)},
    layouts=(
        "devkit: devkit/cars_{meta,train_annos,test_annos_withlabels}.mat, cars_{train,test}/00001.jpg",
        "combined: cars_annos.mat, car_ims/000001.jpg",
        "kaggle: names.csv, anno_{train,test}.csv, car_data/car_data/{train,test}/CLASS/00001.jpg",
        "horde: labels/cars_{meta,train_annos,test_annos_withlabels}.mat, {train,test}/00001.jpg",
    ),
    by_hand="""\
The owners' links are dead (https://ai.stanford.edu/~jkrause/cars/car_dataset.html). Put one of these into
data.root:

- car_devkit.tgz, cars_train.tgz and cars_test.tgz, all unpacked, and cars_test_annos_withlabels.mat beside the
  folder devkit: the owners' archives, from somebody who has them;
- car_ims.tgz, unpacked, and cars_annos.mat: the same images in one folder;
- https://www.kaggle.com/datasets/jutrera/stanford-car-dataset-by-classes-folder, unpacked: a copy by others, which
  pytorch-metric-learning reads too.""",
    licence="Not stated by its owners.",
    citation='Jonathan Krause, Michael Stark, Jia Deng and Li Fei-Fei, "3D Object Representations for Fine-Grained '
    'Categorization", 4th IEEE Workshop on 3D Representation and Recognition (3dRR), 2013',
)
