"""Your own images: a class is a folder that holds images, at any depth, and you choose the test classes."""

import os
import unicodedata
from pathlib import Path

from PIL import Image

from benchmarks.datasets.images import FORMATS
from benchmarks.datasets.listing import DatasetError, Listing, read_lines
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
        DatasetError: if there are fewer than two classes, a folder has no images, images lie beside the classes,
            a class lies in another one, or a name is not UTF-8 or has control characters.
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
    suffixes = tuple(end for end, kind in Image.registered_extensions().items() if kind in FORMATS)
    found: dict[str, list[str]] = {}
    empty: set[str] = set()
    seen: set[str] = set()
    waiting = [Path()]  # before Python 3.12, os.walk has a limit of a thousand levels
    while waiting:
        inside = waiting.pop()
        if (real := os.path.realpath(root / inside)) in seen:
            raise DatasetError(f"{root / inside}: a link leads to {real} again; remove the link")
        seen.add(real)
        try:
            with os.scandir(root / inside) as every:
                shown = [(entry.name, entry.is_dir()) for entry in every if entry.name[0] != "."]
        except OSError as error:
            why = f"{error.filename}: cannot be read as a folder ({error.strerror})"
            raise DatasetError(why) from error
        folders = [inside / name for name, is_folder in shown if is_folder]
        images = [
            name for name, is_folder in shown if not is_folder and name.lower().endswith(suffixes)
        ]
        waiting += sorted(folders, reverse=True)
        name = unicodedata.normalize("NFC", "/".join(inside.parts[:level]))
        if images and not name:
            raise DatasetError(
                f"{root}: {min(images)!r} lies beside the folders of the classes; move it into one of them"
            )
        if images:
            found.setdefault(name, []).extend(f"{inside}/{image}" for image in images)
        elif name and not folders:
            empty.add(name)
    for name in sorted(empty.union(found)):
        above = next((str(path) for path in Path(name).parents if str(path) in found), None)
        if above is None and name not in found:
            raise DatasetError(
                f"{root / name}: holds no image; remove the folder, or put images into it "
                f"({', '.join(sorted(suffixes))})"
            )
        if above is not None and name in found:
            raise DatasetError(
                f"{root}: {above!r} holds images, and so does {name!r} in it, so that the classes are unclear; "
                "move the former into a folder of their own, or set data.class_level to "
                f"{above.count('/') + 1} to make them one class"
            )
    if len(found) < 2:
        raise DatasetError(
            f"{root}: holds {len(found)} folders of classes, expected two or more, to train and test on; lay the "
            f"images out as {root}/CLASS/IMAGE"
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
