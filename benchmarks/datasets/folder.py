"""Your own images: a class is a folder that holds images, at any depth, and you choose the test classes."""

import os
import unicodedata
from itertools import accumulate
from pathlib import Path

from PIL import Image

from benchmarks.datasets.images import FORMATS
from benchmarks.datasets.listing import (
    LONGEST,
    DatasetError,
    Listing,
    check_name,
    read_lines,
    walk,
)
from benchmarks.datasets.splits import shuffled


def image_suffixes() -> set[str]:
    """Suffixes of `FORMATS`, in lower case."""
    return {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}


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
            a class lies in another one, two names are equal in composed form, or a name is not UTF-8 or has
            control characters.
        ValueError: if test_classes names an unknown class, or leaves no class to test or to train on.
    """
    images = _images(root, class_level)
    if isinstance(test_classes, Path):
        testing = _named(test_classes, images)
    else:
        testing = _fraction(test_classes, list(images))
    rows = [(name, path) for name, paths in images.items() for path in paths]
    return Listing(
        name="folder",
        root=root,
        layout="root/class/image",
        paths=[path for _, path in rows],
        classes=[name for name, _ in rows],
        parts=["test" if name in testing else "train" for name, _ in rows],
        upright=True,
    )


def _images(root: Path, level: int | None) -> dict[str, list[str]]:
    """The paths of each class, both sorted."""
    suffixes = image_suffixes()
    found: dict[str, list[str]] = {}
    empty: list[str] = []
    seen: set[str] = set()
    for folder, folders, files in walk(root, _unreadable):
        real = os.path.realpath(folder)
        if real in seen:
            raise DatasetError(f"{folder}: a link leads to {real} again; remove the link")
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = folder[len(str(root)) + 1 :]
        names = [
            name
            for name in files
            if not name.startswith(".") and Path(name).suffix.lower() in suffixes
        ]
        if names and not inside:
            raise DatasetError(
                f"{root}: {min(names)!r} lies beside the folders of the classes; move it into one of them"
            )
        if names:
            paths = found.setdefault("/".join(inside.split("/")[:level]), [])
            paths += [f"{inside}/{name}" for name in names]
        elif inside and not folders:
            empty.append(inside)
    for inside in empty:
        if not found.keys() & set(_and_above(inside)):
            raise DatasetError(
                f"{root / inside}: holds no image; remove the folder, or put images into it "
                f"({', '.join(sorted(suffixes))})"
            )
    return _checked(root, found)


def _and_above(folder: str) -> list[str]:
    """The path of a folder below the root, after those of the folders that it lies in."""
    return list(accumulate(folder.split("/"), "{}/{}".format))


def _checked(root: Path, found: dict[str, list[str]]) -> dict[str, list[str]]:
    """The classes, all distinct and none in another, by their composed names."""
    images: dict[str, list[str]] = {}
    for folder, paths in found.items():
        check_name(root, folder)
        name = unicodedata.normalize("NFC", folder)
        if name in images:
            raise DatasetError(
                f"{root}: two folders are named {name[:LONGEST]!r}, one composed and one decomposed (Unicode's NFC "
                "and NFD); merge or rename them"
            )
        images[name] = sorted(paths)
    for name in images:
        for level, above in enumerate(_and_above(name)[:-1], start=1):
            if above in images:
                raise DatasetError(
                    f"{root}: {above[:LONGEST]!r} holds images, and so does {name[:LONGEST]!r} in it, so that the "
                    f"classes are unclear; move the former into a folder of their own, or set data.class_level to "
                    f"{level} to make them one class"
                )
    if len(images) < 2:
        raise DatasetError(
            f"{root}: holds {len(images)} folders of classes, expected two or more, to train and test on; lay the "
            f"images out as {root}/CLASS/IMAGE"
        )
    return dict(sorted(images.items()))


def _unreadable(error: OSError) -> None:
    raise DatasetError(
        f"{str(error.filename)[:LONGEST]}: cannot be read as a folder ({error.strerror})"
    ) from error


def _named(file: Path, classes: dict[str, list[str]]) -> set[str]:
    try:
        lines = read_lines(file, pipes=True)
    except DatasetError as error:
        raise ValueError(f"test_classes: {error}") from error
    names = {unicodedata.normalize("NFC", line.strip()) for line in lines} - {""}
    if unknown := sorted(names - classes.keys()):
        raise ValueError(
            f"test_classes: {file}: no class {unknown[0]!r}; name one class per line, by its path, such as "
            f"{min(classes)!r}"
        )
    if not 0 < len(names) < len(classes):
        raise ValueError(
            f"test_classes: {file}: names {len(names)} of {len(classes)} classes; name at least one, and leave at "
            "least one for training"
        )
    return names


def _fraction(fraction: float, classes: list[str]) -> set[str]:
    held_out = round(fraction * len(classes)) if 0 < fraction < 1 else 0
    if not 0 < held_out < len(classes):
        raise ValueError(
            f"test_classes: expected a fraction between 0 and 1 that leaves some of {len(classes)} classes "
            f"to train on and some to test on, got {fraction}"
        )
    return {classes[i] for i in shuffled(classes)[:held_out]}
