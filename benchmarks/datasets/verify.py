"""Check of a dataset: opens and decodes every file, and reports all faults at once."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import joblib
from PIL import Image

from benchmarks.console import progress_bar
from benchmarks.datasets.images import FORMATS, inside, read_image, turn_of, unusable
from benchmarks.datasets.listing import DatasetError, Listing, counts_text, walk

FILES_PER_TASK = 16


class Check(NamedTuple):
    """A check: its subject, True if all is well (None: neither right nor wrong), and the finding."""

    name: str
    passed: bool | None
    detail: str


class Picture(NamedTuple):
    """The finding on a listed file; without a size, the file cannot be used."""

    size: tuple[int, int] | None = None
    mode: str = ""
    turned: bool = False
    digest: bytes | None = None
    problem: str = ""
    found: bool = True
    """True if there is a readable file, an image or not."""


def verify(
    listing: Listing,
    counts: Mapping[str, tuple[int, int]] | None = None,
    *,
    num_workers: int | None = None,
    fast: bool = False,
) -> tuple[list[Check], list[str]]:
    """Check every listed file, the lists themselves, and other files beside the images.

    Args:
        counts: The published (images, classes) of each part; None if nothing is published.
        num_workers: Number of threads (enough, since Pillow decodes without Python's lock); default: one for each
            core that this process may use.
        fast: Read only the head of each file: this finds missing files and files that are not images, but not
            truncated ones.

    Returns:
        All checks, and a line for every listed file that cannot be used.
    """
    Image.init()  # opening an image loads them, which is not thread-safe
    paths = [listing.root / path for path in listing.paths]
    with ThreadPool(num_workers or joblib.cpu_count()) as pool:
        tasks = pool.imap(partial(_examine, fast=fast), paths, FILES_PER_TASK)
        bar = progress_bar(tasks, total=len(paths), desc=listing.name, unit="image")
        pictures = dict(zip(listing.paths, bar, strict=True))

    found = listing.counts()
    published = "" if counts in (None, found) else f"; published: {counts_text(counts)}"
    missing = sum(not picture.found for picture in pictures.values())
    broken = sum(picture.problem != "" for picture in pictures.values()) - missing
    how = "opened" if fast else "decoded to RGB"
    gray = sum(picture.mode in ("1", "L", "LA") for picture in pictures.values())
    turned = sum(picture.turned for picture in pictures.values())
    shown = "shown upright" if listing.upright else "read as stored"
    checks = [
        Check("listed", None, f"{len(listing):,} images, layout {listing.layout}"),
        *([_depths(listing)] if listing.name == "folder" else []),
        Check("counts", None if counts is None else not published, counts_text(found) + published),
        _none_of("listed once", listing.repeated(), "images are listed more than once"),
        _none_of("disjoint", listing.shared_classes(), "classes both train and test"),
        Check("files", not missing, f"{missing:,} of {len(pictures):,} are missing or unreadable"),
        Check("images", not broken, f"{broken:,} of {len(pictures) - missing:,} cannot be {how}"),
    ]
    sizes = {path: picture.size for path, picture in pictures.items() if picture.size}
    if listing.boxes is not None:
        checks.append(_boxes(listing, sizes))
    for name, extreme in (("smallest", min), ("largest", max)) if sizes else ():
        path, (width, height) = extreme(sizes.items(), key=lambda item: math.prod(item[1]))
        checks.append(Check(name, None, f"{width} x {height}, {path}"))
    checks.append(Check("grayscale", None, f"{gray:,} images"))
    checks.append(Check("rotated", None, f"{turned:,} images by their EXIF orientation, {shown}"))
    if not fast:
        checks.append(_duplicates(listing, pictures))
    checks.append(Check("not listed", None, f"{_unlisted(listing):,} files beside the images"))
    if not missing:
        checks.append(Check("fingerprint", None, listing.fingerprint))
    return checks, [picture.problem for picture in pictures.values() if picture.problem]


def _examine(path: Path, *, fast: bool) -> Picture:
    try:
        if path.exists() and not path.is_file():
            raise OSError(None, "it is a folder, a pipe or a device")
        with path.open("rb") as file:
            digest = None if fast else hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        problem = f"{path}: cannot be read ({error.strerror}); restore the file"
        return Picture(problem=problem, found=False)
    try:
        with Image.open(path, formats=FORMATS) as image:
            size, mode, turned = image.size, image.mode, turn_of(image) is not None
        if not fast:  # EXIF may stand behind the pixels
            turned = turn_of(read_image(path)) is not None or turned
    except DatasetError as error:
        return Picture(problem=str(error))
    except Exception as error:  # damaged bytes make decoders raise almost any error
        return Picture(problem=str(unusable(path, "opened", error)))
    return Picture(size, mode, turned, digest)


def _depths(listing: Listing) -> Check:
    """Count the classes of a folder of one's own at each depth."""
    classes = set(listing.classes)
    first = len({name.partition("/")[0] for name in classes})
    depths = Counter(name.count("/") + 1 for name in classes)
    parts = [f"{count:,} at depth {depth}" for depth, count in sorted(depths.items())]
    said = f"{first:,} first-level folders; classes: {', '.join(parts)}"
    leaves = Counter(name.rpartition("/")[2] for name in classes)
    if several := sorted(leaf for leaf, count in leaves.items() if count > 1):
        said += (
            f"; names that several classes share: {len(several):,}, such as {several[0]!r}; merge folders that "
            "hold the same thing"
        )
    return Check("classes", None, said)


def _none_of(name: str, wrong: Sequence[str], text: str) -> Check:
    first = f", the first is {wrong[0]}" if wrong else ""
    return Check(name, not wrong, f"{len(wrong):,} {text}{first}")


def _boxes(listing: Listing, sizes: Mapping[str, tuple[int, int]]) -> Check:
    """Check the boxes. One that only reaches over the edge is no error: published boxes do, by rounding."""
    rows = zip(listing.paths, listing.boxes or (), strict=True)
    parts = [(path, box, inside(box, *sizes[path])) for path, box in rows if path in sizes]
    outside = [path for path, _, part in parts if part is None]
    over = sum(part not in (None, tuple(map(round, box))) for _, box, part in parts)
    check = _none_of("boxes", outside, "are empty or outside their image")
    return check._replace(detail=f"{check.detail}; {over:,} reach over the edge")


def _duplicates(listing: Listing, pictures: Mapping[str, Picture]) -> Check:
    training, testing = [], {}
    for path, part in zip(listing.paths, listing.parts, strict=True):
        if part == "train":
            training.append(path)
        elif digest := pictures[path].digest:
            testing[digest] = path
    twins = [(path, testing.get(pictures[path].digest)) for path in training]
    same = [f"{path} = {twin}" for path, twin in twins if twin]
    return _none_of("same content", same, "images both train and test")._replace(passed=None)


def _unlisted(listing: Listing) -> int:
    """Number of files in the images' folders that no list names."""
    listed = set(listing.paths)
    found = 0
    for top in {path.partition("/")[0] for path in listed}:
        start = listing.root / top
        for folder, folders, names in walk(start):
            inside = top + folder[len(str(start)) :]
            found += sum(f"{inside}/{name}" not in listed for name in names)
            folders[:] = [name for name in folders if not Path(folder, name).is_symlink()]
    return found
