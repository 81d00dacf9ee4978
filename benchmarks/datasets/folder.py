"""Your own images: a class is a folder that holds images, at any depth, and you choose the test classes."""

import os
import unicodedata
from collections.abc import Iterator
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
    if isinstance(test_classes, Path):
        testing = _named(test_classes, images)
    else:
        testing = _fraction(test_classes, list(images))
    rows = [(name, path) for name, paths in images.items() for path in sorted(paths)]
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
    """The paths of each class, the classes sorted."""
    suffixes = tuple(end for end, kind in Image.registered_extensions().items() if kind in FORMATS)
    found: dict[str, list[str]] = {}
    empty: list[str] = []
    seen: set[str] = set()
    for folder, folders, files in _walk(root):
        if (real := os.path.realpath(folder)) in seen:
            raise DatasetError(f"{folder}: a link leads to {real} again; remove the link")
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = folder[len(str(root)) + 1 :]
        name = unicodedata.normalize("NFC", "/".join(inside.split("/")[:level]))
        names = [
            file for file in files if file.lower().endswith(suffixes) and not file.startswith(".")
        ]
        if names and not inside:
            raise DatasetError(
                f"{root}: {min(names)!r} lies beside the folders of the classes; move it into one of them"
            )
        if names:
            found.setdefault(name, []).extend(f"{inside}/{file}" for file in names)
        elif inside and not folders:
            empty.append(name)
    for folder in empty:
        if not any(f"{folder}/".startswith(f"{name}/") for name in found):
            raise DatasetError(
                f"{root / folder}: holds no image; remove the folder, or put images into it "
                f"({', '.join(sorted(suffixes))})"
            )
    for name in found:
        for above in map(str, Path(name).parents):
            if above in found:
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


def _walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` that follows links, without its limit of a thousand levels before Python 3.12."""
    waiting = [str(root)]
    while waiting:
        for folder, folders, files in os.walk(waiting.pop(), onerror=_unreadable):
            yield folder, folders, files
            waiting += [f"{folder}/{name}" for name in reversed(folders)]
            break


def _unreadable(error: OSError) -> None:
    raise DatasetError(
        f"{error.filename}: cannot be read as a folder ({error.strerror})"
    ) from error


def _named(file: Path, classes: dict[str, list[str]]) -> set[str]:
    try:  # spaces are part of a name
        names = {unicodedata.normalize("NFC", line) for line in read_lines(file)} - {""}
    except DatasetError as error:
        raise ValueError(f"test_classes: {error}") from error
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
    return set(shuffled(classes)[:held_out])
