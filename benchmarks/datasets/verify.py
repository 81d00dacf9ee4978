"""Check of a dataset: decodes every image, and reports all faults at once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

import joblib
from PIL import Image

from benchmarks.console import progress_bar
from benchmarks.datasets.image_files import pixel_digest, read_image
from benchmarks.datasets.listing import Box, DatasetError, Listing, counts_text
from benchmarks.datasets.remarks import BOTH, remarks

RESULTS = {True: "ok", False: "FAILED"}

Check = tuple[str, str, str]
"""The subject, "ok" or "FAILED" (or "": neither right nor wrong), and the finding."""


def verify(
    listing: Listing, published: Mapping[str, tuple[int, int]] | None = None
) -> tuple[list[Check], list[str]]:
    """Check the lists, and every listed file.

    Args:
        published: The published (images, classes) of each part; None for images of one's own.

    Returns:
        All checks, and a line for every listed file that cannot be used.
    """
    Image.init()  # opening an image loads them, which is not thread-safe
    with ThreadPool(joblib.cpu_count()) as pool:  # Pillow decodes without Python's lock
        files = [listing.root / path for path in listing.paths]
        rows = zip(files, listing.boxes or [None] * len(files), strict=True)
        tasks = pool.imap(_examine, rows, chunksize=16)
        bar = progress_bar(tasks, total=len(listing), desc=listing.name, unit="image")
        found = list(bar)
    broken = [*dict.fromkeys(problem for problem in found if isinstance(problem, str))]

    counts = listing.counts()
    if published is None:
        depths = Counter(name.count("/") + 1 for name in set(listing.classes))
        each = [f"{count:,} classes at depth {depth}" for depth, count in sorted(depths.items())]
        checks = [("counts", "", counts_text(counts)), ("classes", "", ", ".join(each))]
    else:
        wrong = "" if counts == published else f"; published: {counts_text(published)}"
        checks = [("counts", RESULTS[not wrong], counts_text(counts) + wrong)]
    checks += [
        _several_images(listing),
        ("images", RESULTS[not broken], f"{len(broken):,} of {len(found):,} cannot be used"),
        _same_content(listing, found),
    ]
    pixels = [result if isinstance(result, bytes) else None for result in found]
    told = remarks(listing, pixels)
    checks += [(subject, "", text) for subject, text in told if subject != BOTH]
    if not broken:
        checks.append(("fingerprint", "", listing.fingerprint))
    return checks, broken


def _examine(row: tuple[Path, Box | None]) -> bytes | str:
    """The digest of an image's pixels, of those in its box; if it cannot be used, the reason as text."""
    path, box = row
    try:
        return pixel_digest(read_image(path, upright=True, box=box)).encode()
    except DatasetError as error:
        return str(error)


def _several_images(listing: Listing) -> Check:
    """Count the classes of one image: in a batch they make no pair, and a search finds none of them."""
    rows = zip(listing.parts, listing.classes, strict=True)
    sizes = Counter(("train on" if part == "train" else "test on", name) for part, name in rows)
    classes = Counter(use for use, _ in sizes)
    alone = Counter(use for (use, _), size in sizes.items() if size == 1)
    enough = all(alone[use] < classes[use] for use in classes)
    counts = [f"{alone[use]:,} of {classes[use]:,} classes to {use}" for use in sorted(classes)]
    why = "" if enough else ": nothing can be trained or retrieved from classes of one image"
    return "one image", RESULTS[enough], f"{', '.join(counts)} have one image{why}"


def _same_content(listing: Listing, found: Sequence[bytes | str]) -> Check:
    """Count the training images with the same pixels as one of the test part."""
    rows = list(zip(found, listing.paths, listing.parts, strict=True))
    tested = {pixels: path for pixels, path, part in rows if part != "train"}
    same = [
        (path, tested[pixels])
        for pixels, path, part in rows
        if part == "train" and pixels in tested
    ]
    first = f", the first is {same[0][0]} = {same[0][1]}" if same else ""
    return "same content", "", f"{len(same):,} images both train and test{first}"
