"""Your own images: a class is a folder that holds images, at any depth, and you choose the test classes."""

import os
import unicodedata
from pathlib import Path

from PIL import Image

from benchmarks.datasets.images import FORMATS
from benchmarks.datasets.listing import DatasetError, Listing, read_lines, reading
from benchmarks.datasets.splits import shuffled


def read(root: Path, test_classes: Path | float, class_level: int | None = None) -> Listing:
    """List all images below a folder, sorted by class and path.

    A class is named by its path below `root`, such as "Fruit/Apple/Royal-Gala", in Unicode's composed form (NFC).
    Hidden files and folders and files of other kinds are left out; links are followed.

    Args:
        root: The folder that holds the folders of the classes.
        test_classes: A file that names the test classes, one per line; or their fraction of all classes. The
            fraction is chosen by the classes' names alone, so it is equal on every machine.
        class_level: Name classes by the first folders of an image's path, at most this many; default: all, so
            that each folder that holds images is a class.

    Raises:
        DatasetError: if there are fewer than two classes, a folder has no images, a class lies in another one, or
            a name is not UTF-8 or has control characters.
        ValueError: if test_classes names an unknown class, or leaves no class to test or to train on.
    """
    images = _images(root, class_level)
    testing = _held_out(test_classes, list(images))
    paths = [path for of_class in images.values() for path in sorted(of_class)]
    classes = [name for name, of_class in images.items() for _ in of_class]
    parts = ["test" if name in testing else "train" for name in classes]
    return Listing("folder", root, "root/class/image", paths, classes, parts, upright=True)


def _images(root: Path, level: int | None) -> dict[str, list[str]]:
    """The paths of each class, the classes sorted."""

    def stop(error: OSError) -> None:
        raise error

    suffixes = tuple(end for end, kind in Image.registered_extensions().items() if kind in FORMATS)
    found: dict[str, list[str]] = {}
    empty: set[str] = set()
    with reading(root):
        for folder, inner, files in os.walk(root, onerror=stop, followlinks=True):
            inner[:] = [name for name in inner if name[0] != "."]
            inside = Path(folder).relative_to(root)
            name = unicodedata.normalize("NFC", "/".join(inside.parts[:level])) or "."
            images = [file for file in files if file[0] != "." and file.lower().endswith(suffixes)]
            if images:
                found.setdefault(name, []).extend(f"{inside}/{image}" for image in images)
            elif not inner:
                empty.add(name)
    if len(found) < 2:
        raise DatasetError(
            f"{root}: expected two or more folders of classes, to train and test on, got {len(found)}; lay the "
            f"images out as {root}/CLASS/IMAGE"
        )
    for name in sorted(found.keys() | empty):
        above = [path for path in map(str, Path(name).parents) if path in found]
        if above and name in found:
            raise DatasetError(
                f"{root / above[0]}: holds images, and so does {name!r} in it, so that the classes are unclear; "
                "move the former into a folder of their own, or, if both are one class, set data.class_level"
            )
        if not above and name not in found:
            raise DatasetError(
                f"{root / name}: holds no image; remove the folder, or put images into it "
                f"({', '.join(sorted(suffixes))})"
            )
    return dict(sorted(found.items()))


def _held_out(chosen: Path | float, classes: list[str]) -> set[str]:
    """The test classes, by a file of their names or by their fraction."""
    if isinstance(chosen, Path):
        try:  # spaces are part of a name
            names = {unicodedata.normalize("NFC", line) for line in read_lines(chosen)} - {""}
        except DatasetError as error:
            raise ValueError(f"test_classes: {error}") from error
        if unknown := sorted(names.difference(classes)):
            raise ValueError(
                f"test_classes: {chosen}: no class {unknown[0]!r}; name one class per line, by its path, such as "
                f"{classes[0]!r}"
            )
    else:
        count = round(chosen * len(classes)) if 0 < chosen < 1 else 0
        names = set(shuffled(classes)[:count])
    if not 0 < len(names) < len(classes):
        raise ValueError(
            f"test_classes: expected a fraction between 0 and 1, or a file of names, that leaves some of "
            f"{len(classes)} classes to train on and some to test on, got {chosen}"
        )
    return names
