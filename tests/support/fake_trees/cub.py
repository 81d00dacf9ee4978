"""The tree in CUB_200_2011.tgz with lists as their owners published them, of which only one is read."""

from collections.abc import Mapping
from pathlib import Path

from tests.support.fake_trees import spread, write_pictures

SMALL = spread(33, range(1, 9)) | spread(20, range(101, 106))


def write(root: Path, sizes: Mapping[int, int] = SMALL) -> Path:
    """Write CUB_200_2011, with so many images of each class, into a folder; returns the folder CUB_200_2011."""
    folder = root / "CUB_200_2011"
    images = [
        (label, f"{label:03}.Species_{label}/Species_{label}_{number:04}_{label}.jpg")
        for label, count in sizes.items()
        for number in reversed(range(count))  # theirs are in no order within a species
    ]
    write_pictures(folder / "images", [path for _, path in images])
    lists = {
        "images.txt": [path for _, path in images],
        "image_class_labels.txt": [label for label, _ in images],
        "train_test_split.txt": [i % 2 for i in range(len(images))],
    }
    for name, cells in lists.items():
        lines = [f"{i} {cell}\n" for i, cell in enumerate(cells, start=1)]
        (folder / name).write_text("".join(lines))
    return folder
