"""Caltech-UCSD Birds-200-2011: 11,788 photographs of 200 species of birds.

The first 100 species train and the others test, as in the papers on metric learning since Oh Song et al. (CVPR
2016). The archive's own `train_test_split.txt` divides the images of every species and is not used here.
"""

import math
from pathlib import Path

from benchmarks.datasets.listing import (
    Archive,
    Box,
    DatasetInfo,
    Listing,
    find_folder,
    read_rows,
    reading,
)

FOLDER = "CUB_200_2011"
LAST_TRAINING_CLASS = 100


def read(root: Path) -> Listing:
    """List the images in the order of their ids, whatever the order of the lines.

    Args:
        root: The folder `CUB_200_2011`, or one that holds it.

    Raises:
        DatasetError: if an index file is missing, damaged, or inconsistent with the others.
    """
    folder = find_folder(root, FOLDER, "images.txt")
    images = _by_id(folder / "images.txt", 1)
    labels = _by_id(folder / "image_class_labels.txt", 1)
    corners = _by_id(folder / "bounding_boxes.txt", 4)
    names = _by_id(folder / "classes.txt", 1)
    ids = sorted(images)
    with reading(folder / "image_class_labels.txt"):
        classes = [int(labels[image][0]) for image in ids]
        class_names = [names[label][0] for label in classes]
    with reading(folder / "bounding_boxes.txt"):
        boxes = [_box(*map(float, corners[image])) for image in ids]
    return Listing(
        name="cub",
        root=folder,
        layout=FOLDER,
        paths=[f"images/{images[image][0]}" for image in ids],
        classes=class_names,
        parts=["train" if label <= LAST_TRAINING_CLASS else "test" for label in classes],
        boxes=boxes,
    )


def _by_id(path: Path, values: int) -> dict[int, list[str]]:
    """The values of each id, from lines `id value ... value`."""
    with reading(path):
        return {int(row[0]): row[1:] for row in read_rows(path, 1 + values)}


def _box(left: float, top: float, width: float, height: float) -> Box:
    if not math.isfinite(left + top + width + height):
        raise ValueError("a box that is not finite")
    return left, top, left + width, top + height


INFO = DatasetInfo(
    name="cub",
    title="Caltech-UCSD Birds-200-2011",
    read=read,
    counts={"train": (5_864, 100), "test": (5_924, 100)},
    layouts=["CUB_200_2011/images.txt, CUB_200_2011/images/001.Black_footed_Albatross/*.jpg"],
    archive=Archive(
        url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
        name="CUB_200_2011.tgz",
        size=1_150_585_339,
        sha256="0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
    ),
    licence="Not stated by its owners; the photographs were found on Flickr and belong to their authors.",
    citation=(
        "C. Wah, S. Branson, P. Welinder, P. Perona, S. Belongie: The Caltech-UCSD Birds-200-2011 Dataset. "
        "Technical report CNS-TR-2011-001, California Institute of Technology, 2011."
    ),
)
