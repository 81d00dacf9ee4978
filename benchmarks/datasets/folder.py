"""Your own images: a class is a folder that holds images, at any depth, and you choose the test classes."""

import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from benchmarks.datasets.image_files import suffixes, walk
from benchmarks.datasets.listing import DatasetError, Listing, read_lines, reading
from benchmarks.datasets.splits import shuffled

Level = int | Literal["last"]


def read(
    root: Path, test_classes: Path | float | None, class_level: Level | None = None
) -> Listing:
    """List all images below a folder, as `walk` finds them, sorted by class and path.

    A class is named by its path below `root`, such as "Fruit/Apple/Royal-Gala", in Unicode's composed form (NFC).

    Args:
        test_classes: A file that names the test classes, one per line; or their fraction of all classes. The
            fraction is chosen by the classes' names alone, so it is equal on every machine. None: all of them.
        class_level: Name classes by the first folders of an image's path, at most this many, or by the "last" one
            alone; default: all, so that each folder that holds images is a class.

    Raises:
        DatasetError: if there are fewer than two classes, a folder has no images, a class lies in another one, or
            a name is not UTF-8 or has control characters.
        ValueError: if test_classes names an unknown class, or leaves no class to test or to train on.
    """
    images, left_out = _images(root, class_level)
    testing = {*images} if test_classes is None else held_out(test_classes, list(images))
    paths = [path for name in images for path in sorted(images[name])]
    classes = [name for name in images for _ in images[name]]
    parts = ["test" if name in testing else "train" for name in classes]
    lists = ("folder", root, "root/class/image", paths, classes, parts)
    return Listing(*lists, upright=True, left_out=left_out, level=class_level)


def left_out_text(left_out: Mapping[str, int]) -> str:
    """Files that are no images, by the ends of their names, and what to do if they are."""
    told = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(left_out.items()))
    return f"{told}; convert those that are images to JPEG or PNG"


def _images(root: Path, level: Level | None) -> tuple[dict[str, list[str]], dict[str, int]]:
    """The paths of each class, the classes sorted, and the numbers of other files by the ends of their names."""
    images: dict[str, list[str]] = {}
    empty: dict[str, Counter[str]] = {}
    left_out: Counter[str] = Counter()
    with reading(root):
        for folder, inner, files, others in walk(root):
            inside = folder.relative_to(root)
            parts = inside.parts[-1:] if level == "last" else inside.parts[:level]
            name = unicodedata.normalize("NFC", "/".join(parts)) or "."
            ends = Counter(Path(other).suffix.lower() or other for other in others)
            left_out += ends
            if files:
                images.setdefault(name, []).extend(f"{inside}/{file}" for file in files)
            elif not inner:
                empty[name] = ends
    if len(images) < 2:
        raise DatasetError(
            f"{root}: expected two or more folders of classes, to train and test on, got {len(images)}; lay the "
            f"images out as {root}/CLASS/IMAGE"
        )
    for name in sorted(images.keys() | empty.keys()):
        above = [path for path in map(str, Path(name).parents) if path in images]
        if above and name in images:
            raise DatasetError(
                f"{root / above[0]}: holds images, and so does {name!r} in it, so that the classes are unclear; "
                "move the former into a folder of their own, or, if both are one class, set data.class_level"
            )
        if not above and name not in images:
            holds = f", but {left_out_text(empty[name])}" if empty[name] else ""
            raise DatasetError(
                f"{root / name}: holds no image{holds}; remove the folder, or put images into it "
                f"({', '.join(sorted(suffixes()))})"
            )
    return dict(sorted(images.items())), dict(left_out)


def held_out(chosen: Path | float, classes: list[str]) -> set[str]:
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
        names = set(shuffled(classes)[: round(chosen * len(classes))]) if 0 < chosen < 1 else set()
    if not 0 < len(names) < len(classes):
        raise ValueError(
            f"test_classes: expected a fraction between 0 and 1, or a file of names, that leaves some of "
            f"{len(classes)} classes to train on and some to test on, got {chosen}"
        )
    return names
