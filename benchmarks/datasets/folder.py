"""Your own images: a folder for each class, and a choice of test classes."""

import os
from pathlib import Path

from PIL import Image

from benchmarks.datasets.images import FORMATS
from benchmarks.datasets.listing import DatasetError, Listing, read_lines
from benchmarks.datasets.splits import shuffled


def image_suffixes() -> set[str]:
    """Suffixes of `FORMATS`, in lower case."""
    return {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}


def read(root: Path, test_classes: Path | float) -> Listing:
    """List all images below `root/class/`, at any depth, sorted by class and path.

    Hidden files and folders and files of other kinds are left out; links are followed.

    Args:
        root: The folder that holds one folder for each class.
        test_classes: A file that names the test classes, one per line; or their fraction of all classes. The
            fraction is chosen by the classes' names alone, so it is equal on every machine.

    Raises:
        DatasetError: if there are fewer than two classes, a class has no images, images lie beside the classes,
            or a name is not UTF-8 or has control characters.
        ValueError: if test_classes names an unknown class, or leaves no class to test or to train on.
    """
    images = _images(root)
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
    )


def _images(root: Path) -> dict[str, list[str]]:
    """The paths of each class, both sorted."""
    suffixes = image_suffixes()
    images: dict[str, list[str]] = {}
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=_unreadable, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            raise DatasetError(f"{folder}: a link leads to {real} again; remove the link")
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(folder).relative_to(root)
        for name in folders if folder == str(root) else ():
            images[name] = []
        for name in files:
            if name.startswith(".") or Path(name).suffix.lower() not in suffixes:
                continue
            path = (inside / name).as_posix()
            if inside == Path():
                raise DatasetError(
                    f"{root}: {name!r} lies beside the folders of the classes; move it into one of them"
                )
            images[inside.parts[0]].append(path)
    for name, paths in images.items():
        paths.sort()
        if not paths:
            raise DatasetError(
                f"{root / name}: holds no image; remove the folder, or put images into it "
                f"({', '.join(sorted(suffixes))})"
            )
    if len(images) < 2:
        raise DatasetError(
            f"{root}: holds {len(images)} folders of classes, expected two or more, to train and test on; lay the "
            f"images out as {root}/CLASS/IMAGE"
        )
    return images


def _unreadable(error: OSError) -> None:
    raise DatasetError(
        f"{error.filename}: cannot be read as a folder ({error.strerror})"
    ) from error


def _named(file: Path, classes: dict[str, list[str]]) -> set[str]:
    try:
        names = {line.strip() for line in read_lines(file, pipes=True)} - {""}
    except DatasetError as error:
        raise ValueError(f"test_classes: {error}") from error
    if unknown := sorted(names - classes.keys()):
        raise ValueError(
            f"test_classes: {file}: no class {unknown[0]!r}; name one folder of images per line"
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
