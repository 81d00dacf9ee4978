"""Caltech-UCSD Birds-200-2011: 11,788 photographs of 200 species of birds.

The first 100 species train and the others test, as in the papers on metric learning since Oh Song et al. (CVPR
2016). The archive's own `train_test_split.txt` divides the images of every species and is not used here.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.datasets.listing import (
    Archive,
    Box,
    DatasetInfo,
    Listing,
    below,
    damaged,
    find_folder,
    read_rows,
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
    images = _by_id(folder / "images.txt", 1, str)
    labels = _by_id(folder / "image_class_labels.txt", 1, int)
    boxes = _by_id(folder / "bounding_boxes.txt", 4, float)
    names = _by_id(folder / "classes.txt", 1, str)
    for file, others in ("image_class_labels.txt", labels), ("bounding_boxes.txt", boxes):
        if differing := sorted(images.keys() ^ others.keys()):
            has, lacks = ("images.txt", file) if differing[0] in images else (file, "images.txt")
            raise damaged(folder / lacks, f"image {differing[0]} of {has} is missing")
    for image, (label,) in labels.items():
        if label not in names:
            what = f"image {image} is of class {label}, which classes.txt does not name"
            raise damaged(folder / "image_class_labels.txt", what)
    ids = sorted(images)
    classes = [names[labels[image][0]][0] for image in ids]
    for image, name in zip(ids, classes, strict=True):
        _check_path(folder / "images.txt", image, images[image][0], name)
    return Listing(
        name="cub",
        root=folder,
        layout=FOLDER,
        paths=[f"images/{images[image][0]}" for image in ids],
        classes=classes,
        parts=["train" if labels[image][0] <= LAST_TRAINING_CLASS else "test" for image in ids],
        boxes=[_box(folder / "bounding_boxes.txt", image, *boxes[image]) for image in ids],
    )


def _by_id(path: Path, values: int, kind: Callable[[str], Any]) -> dict[int, list[Any]]:
    """The values of each id, from lines `id value ... value`."""
    table: dict[int, list[Any]] = {}
    for number, row in enumerate(read_rows(path, 1 + values), start=1):
        try:
            key, cells = int(row[0]), [kind(word) for word in row[1:]]
        except ValueError as error:
            got = f"line {number}: expected numbers, got {' '.join(row)!r}"
            raise damaged(path, got) from error
        if key in table:
            raise damaged(path, f"line {number}: id {key} appears twice")
        table[key] = cells
    return table


def _check_path(path: Path, image: int, listed: str, class_name: str) -> None:
    """Refuse all except JPEGs in their class's folder, such as the `._*` files that macOS adds."""
    folder, _, name = below(f"{path}: image {image}", listed).rpartition("/")
    if folder != class_name or name.startswith(".") or not name.lower().endswith(".jpg"):
        expected = f"of class {class_name}, expected {class_name}/NAME.jpg"
        raise damaged(path, f"image {image} is {expected}, got {listed}")


def _box(path: Path, image: int, left: float, top: float, width: float, height: float) -> Box:
    if not (width > 0 and height > 0 and math.isfinite(left + top + width + height)):
        raise damaged(path, f"the box of image {image} is {width} wide and {height} high")
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
    by_hand=(
        "Get CUB_200_2011.tgz from https://data.caltech.edu/records/65de6-vp158 and unpack it in data.root, so "
        "that data.root/CUB_200_2011/images.txt is there."
    ),
    licence="Not stated by its owners; the photographs were found on Flickr and belong to their authors.",
    citation=(
        "C. Wah, S. Branson, P. Welinder, P. Perona, S. Belongie: The Caltech-UCSD Birds-200-2011 Dataset. "
        "Technical report CNS-TR-2011-001, California Institute of Technology, 2011."
    ),
)
