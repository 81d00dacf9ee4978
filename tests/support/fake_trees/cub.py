"""The tree in CUB_200_2011.tgz with lists as their owners published them, of which only one is read."""

from collections.abc import Mapping
from pathlib import Path

from tests.support.fake_trees import spread, write_pictures

SMALL = spread(33, range(1, 9)) | spread(20, range(101, 106))
FULL = spread(5_864, range(1, 101)) | spread(5_924, range(101, 201))


def write(root: Path, sizes: Mapping[int, int] = SMALL, *, pictures: bool = True) -> Path:
    """Write CUB_200_2011 into a folder.

    Args:
        sizes: Images of each class, 1..200.
        pictures: Whether to write more than the index files.

    Returns:
        The folder CUB_200_2011.
    """
    folder = root / "CUB_200_2011"
    folder.mkdir(parents=True)
    names = {label: f"{label:03}.Species_{label}" for label in sizes}
    images = [
        (label, f"{names[label]}/Species_{label}_{number:04}_{label}.jpg")
        for label, count in sizes.items()
        for number in reversed(range(count))  # theirs are in no order within a species
    ]
    lists = {
        "images.txt": [f"{i} {path}" for i, (_, path) in enumerate(images, start=1)],
        "classes.txt": [f"{label} {name}" for label, name in names.items()],
        "bounding_boxes.txt": [f"{i} 60.0 27.0 325.0 304.0" for i in range(1, len(images) + 1)],
        "image_class_labels.txt": [f"{i} {label}" for i, (label, _) in enumerate(images, start=1)],
        "train_test_split.txt": [f"{i} {i % 2}" for i in range(1, len(images) + 1)],
    }
    for name, lines in lists.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    if pictures:
        write_pictures(folder / "images", [path for _, path in images])
        _, first = images[0]
        place = folder / "images" / first
        place.with_name(f"._{place.name}").write_bytes(b"\x00\x05\x16\x07")  # AppleDouble
    return folder
